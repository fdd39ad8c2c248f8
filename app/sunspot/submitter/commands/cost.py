"""`sunspot cost`: prints the cost of each run or label value, and the total."""

import argparse
from collections.abc import Sequence
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import DamageError, NotFoundError
from sunspot.run.cost import Spending
from sunspot.run.overview import list_runs
from sunspot.run.seen import RunDetails, RunSeen, read_details, read_listed
from sunspot.storage.base import Storage
from sunspot.submitter.printing import print_json, print_table, progress_note, warn
from sunspot.submitter.runs import find_storage

AT_ONCE = 4
"""Number of runs that are read in parallel. Each run is read with several requests at once."""

COLUMNS = ("node hours", "cost", "lost", "saved")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", metavar="LABEL", help="add up the costs by this label, such as team or search")


def run(args: argparse.Namespace) -> None:
    """Print the cost of each run or label value, and the total. Raises `NotFoundError` if no run exists."""
    storage = find_storage(args.storage)
    runs = _read(storage)
    if not runs:
        raise NotFoundError(f"no run in {storage.locate('').rstrip('/')}")
    groups: dict[str, list[RunDetails]] = {}
    for seen in sorted(runs, key=lambda seen: seen.spending.cost or 0.0, reverse=True):
        groups.setdefault(seen.labels.get(args.by or "", ""), []).append(seen)
    if args.json:
        record = {"runs": [_record(seen) for seen in runs], "total": _total(runs).record()}
        if args.by:
            record["by"] = {value: {"runs": len(own), **_total(own).record()} for value, own in groups.items()}
        print_json(record)
    elif args.by:
        rows = [[value or f"without {args.by}", len(own), *_cells(_total(own))] for value, own in groups.items()]
        print_table([args.by, "runs", *COLUMNS], [*rows, ["all", len(runs), *_cells(_total(runs))]])
    else:
        each = [[v.run.name, v.state.value, *_cells(v.spending), _record(v)["cost_per_step"]] for v in runs]
        print_table(["run", "state", *COLUMNS, "a step"], [*each, ["all", None, *_cells(_total(runs)), None]])


def _read(storage: Storage) -> list[RunDetails]:
    """Return all runs, with the most recently modified run first.

    Runs that cannot be read are omitted with a warning.
    """

    def read(seen: RunSeen) -> RunDetails | None:
        try:
            return read_details(seen)
        except (DamageError, NotFoundError) as error:
            warn(f"left out: {seen.run.name}: {error}")
            return None

    with progress_note("reading the runs"):
        listed = read_listed(storage, list_runs(storage))
        return [seen for seen in map_parallel(read, listed, AT_ONCE) if seen]


def _total(runs: Sequence[RunDetails]) -> Spending:
    return sum((seen.spending for seen in runs), Spending())


def _record(seen: RunDetails) -> dict[str, Any]:
    return {"run": seen.run.name, "state": seen.state, "labels": seen.labels, **seen.spending.record(seen.step)}


def _cells(spending: Spending) -> list[Any]:
    return [spending.node_hours, spending.cost, spending.lost, spending.saved]
