"""`sunspot checkpoints ls`: which checkpoints a run has, and whether they are whole."""

import argparse
import time
from typing import Any

from sunspot.formatting import in_words
from sunspot.run import Run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import MANIFEST, Checkpoint, classify, list_directories, verify
from sunspot.submitter.commands.arguments import add_limit, add_run
from sunspot.submitter.printing import print_json, print_table, progress_note, warn
from sunspot.submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_limit(parser)


def run(args: argparse.Namespace) -> None:
    list_all(find_run(args.run, args.storage), args.limit, args.json)


def list_all(run: Run, limit: int | None, as_json: bool) -> None:
    """Print the newest `limit` (None: all) checkpoints that lead to the newest attempt, by step, each verified.

    Costs the pages of a listing and one small read for each checkpoint shown; whole files are read again only where
    the listing does not prove them unchanged.
    """
    with progress_note("listing the checkpoints"):
        directories = list_directories(run)
        counted, superseded, incomplete = classify(directories, lineage(read_attempts(run)))
        shown = counted[-limit:] if limit else counted
        checked = verify(run, shown, directories)
    now = time.time()
    if as_json:
        print_json([_as_record(checkpoint, faults, now) for checkpoint, faults in checked])
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
    if len(counted) > len(shown):
        warn(f"left out: {len(counted) - len(shown)} older; --all lists them")
    if incomplete:
        warn(f"left out: {len(incomplete)} without {MANIFEST}, incomplete")
    if superseded:
        warn(f"left out: {len(superseded)} of superseded attempts, which do not lead to the newest one")


def _as_record(checkpoint: Checkpoint, faults: list[str], now: float) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "metrics": checkpoint.metrics,
        "bytes": checkpoint.bytes,
        "age_s": None if checkpoint.damage else now - checkpoint.time,
        "verified": not faults,
        "faults": faults,
    }
