"""`sunspot checkpoints verify`: checks every byte of a run's checkpoints."""

import argparse

from sunspot.errors import DamageError
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import classify, list_directories, refuse_if_absent, verify
from sunspot.run.seen import find_deleted_checkpoint
from sunspot.run.status import read_status
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.printing import print_json, print_table, progress_note
from sunspot.submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a name from `sunspot checkpoints ls`; default: all checkpoints"
    )


def run(args: argparse.Namespace) -> None:
    """Verify one checkpoint or all of them, and print the results.

    A finished run's last checkpoint counts as damaged if it is missing.
    """
    run = find_run(args.run, args.storage)
    name = args.name
    directories = list_directories(run)
    counted, _, _ = classify(directories, lineage(read_attempts(run)))
    if name is not None:
        refuse_if_absent(run, name, directories)
        counted = [name]
    with progress_note("reading every byte"):
        verified = [(checkpoint.name, faults) for checkpoint, faults in verify(run, counted)]
    gone = find_deleted_checkpoint(read_status(run), counted) if name is None else None
    if gone:
        verified.append((gone, ["missing, although it is the run's last checkpoint"]))
    if args.json:
        print_json([{"name": name, "verified": not faults, "faults": faults} for name, faults in verified])
    else:
        print_table(["name", "verified"], [[name, "; ".join(faults) or "ok"] for name, faults in verified])
    damaged = sum(bool(faults) for _, faults in verified)
    if damaged:
        which = f"{damaged} of {len(verified)} checkpoints in {run.location} are damaged or missing"
        raise DamageError(f"{which}; `sunspot doctor {run.name}` explains what to do")
