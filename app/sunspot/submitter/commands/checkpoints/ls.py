"""`sunspot checkpoints ls`: which checkpoints a run has, and whether they are whole."""

import argparse
import time

from sunspot.formatting import in_words
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
    """Print the newest `limit` (None: all) checkpoints that lead to the newest attempt, by step, each verified."""
    listed = list_checkpoints(run, limit)
    checked, now = listed.checked, time.time()
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
        warn(f"with weights that are NaN or infinite: {', '.join(broken)}; a run goes on from an older one")
    if listed.older:
        warn(f"left out: {listed.older} older; --all lists them")
    if listed.incomplete:
        warn(f"left out: {listed.incomplete} without {MANIFEST}, incomplete")
    if listed.superseded:
        warn(f"left out: {listed.superseded} of superseded attempts, which do not lead to the newest one")
