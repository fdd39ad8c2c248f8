"""`sunspot checkpoints ls`: lists and verifies a run's checkpoints."""

import argparse
import time

from sunspot.formatting import in_words, plural
from sunspot.run import Run
from sunspot.run.checkpoints import MANIFEST
from sunspot.submitter.checkpoint_list import list_checkpoints
from sunspot.submitter.commands.arguments import add_limit, add_run
from sunspot.submitter.printing import print_json, print_table, warn
from sunspot.submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_limit(parser)


def run(args: argparse.Namespace) -> None:
    list_all(find_run(args.run, args.storage), args.limit, args.json)


def list_all(run: Run, limit: int | None, as_json: bool) -> None:
    """Verify and print the newest `limit` checkpoints, or all of them if `limit` is None."""
    listed = list_checkpoints(run, limit)
    checked = listed.checked
    now = time.time()
    if as_json:
        print_json(listed.records())
        for checkpoint, faults in checked:
            if faults:
                warn(f"{checkpoint.name}: damaged, {'; '.join(faults)}")
    else:
        metrics = {name for checkpoint, _ in checked for name in checkpoint.metrics}
        names = sorted(name for name in metrics if name.endswith(("loss", "accuracy")))  # no room for the others
        rows = []
        for c, faults in checked:
            age = "" if c.damage else in_words(now - c.time)
            verified = f"no: {'; '.join(faults)}" if faults else "yes"
            rows.append([c.name, c.step, c.epoch, *map(c.metrics.get, names), c.bytes, age, verified])
        print_table(["name", "step", "epoch", *names, "bytes", "age", "verified"], rows)
    broken = [checkpoint.name for checkpoint, _ in checked if not checkpoint.finite]
    if broken:
        warn(f"the weights are NaN or infinite in {', '.join(broken)}; the run resumes from an older checkpoint")
    if listed.older:
        warn(f"--all also lists {plural(listed.older, 'older checkpoint')}")
    if listed.incomplete:
        warn(f"the list omits {plural(listed.incomplete, 'incomplete checkpoint')} without {MANIFEST}")
    if listed.superseded:
        warn(f"the list omits {plural(listed.superseded, 'checkpoint')} of superseded attempts")
