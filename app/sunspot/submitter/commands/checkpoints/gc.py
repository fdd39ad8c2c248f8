"""`sunspot checkpoints gc`: removes checkpoints, uploads and code that are no longer needed."""

import argparse
import time

from sunspot.formatting import as_bytes
from sunspot.submitter.commands.arguments import add_run, count
from sunspot.submitter.garbage import Removal, find_removals
from sunspot.submitter.printing import print_json, print_table, print_text, progress_note
from sunspot.submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--keep",
        metavar="N",
        type=count,
        help="number of best checkpoints to keep; default: SUNSPOT_CHECKPOINTS_TO_KEEP of the run",
    )
    parser.add_argument("--yes", action="store_true", help="remove these checkpoints and uploads")


def run(args: argparse.Namespace) -> None:
    """Print what is no longer needed, or remove it. The newest intact checkpoint is always kept."""
    run = find_run(args.run, args.storage)
    with progress_note("checking every checkpoint"):
        removals = list(find_removals(run, args.keep, time.time()))
    removed: list[Removal] = []
    try:
        if args.yes:
            with progress_note(f"removing {len(removals)}"):
                for removal in removals:
                    removal.remove()
                    removed.append(removal)
    finally:
        _print(removals, removed, args.yes, args.json)


def _print(removals: list[Removal], removed: list[Removal], really: bool, as_json: bool) -> None:
    if as_json:
        print_json([{"name": r.name, "bytes": r.bytes, "why": r.why, "removed": r in removed} for r in removals])
        return
    done = removed if really else removals
    if done:
        print_table(["name", "bytes", "why"], [[r.name, r.bytes, r.why] for r in done])
    size = as_bytes(sum(r.bytes for r in done))
    if not removals:
        print_text("nothing to remove")
    elif really:
        print_text(f"removed {len(removed)} of {len(removals)}: {size} freed")
    else:
        print_text(f"{len(removals)} can be removed: {size}; --yes removes them")
