"""`sunspot list`: lists all runs below a storage path with their states."""

import argparse
import time
from typing import Any

from sunspot.formatting import in_words, plural
from sunspot.run.attempts import step_of
from sunspot.run.owner import Owner
from sunspot.storage.base import Storage
from sunspot.submitter.cluster.api import Cluster, try_connect
from sunspot.submitter.cluster.records import describe_runs
from sunspot.submitter.commands.arguments import add_cluster, add_limit
from sunspot.submitter.printing import print_json, print_table, warn
from sunspot.submitter.runs import find_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_limit(parser)
    add_cluster(parser)


def run(args: argparse.Namespace) -> None:
    cluster, _ = try_connect(args.context, args.namespace)
    list_all(find_storage(args.storage), args.limit, args.json, cluster)


def list_all(storage: Storage, limit: int | None, as_json: bool, cluster: Cluster | None = None) -> None:
    """Print the `limit` most recently modified runs, or all runs if `limit` is None."""
    rows, left_out = describe_runs(storage, limit, cluster)
    now = time.time()
    if as_json:
        print_json(rows)
    else:
        columns = ["run", "state", "step", "epoch", "loss", "test loss", "checkpoint", "where", "last change"]
        print_table(columns, [_cells(row, now) for row in rows])
    if left_out:
        warn(f"left out: {plural(left_out, 'older run')}; --all lists them")


def _cells(row: dict[str, Any], now: float) -> list[Any]:
    checkpoint = ""
    if row["checkpoint"]:
        checkpoint = f"{step_of(row['checkpoint'])}, {in_words(now - row['checkpoint_time'])} ago"
    return [
        row["run"],
        row["state"],
        f"{row['step']}/{row['total_steps'] or '?'}",
        row["epoch"] or None,
        row["loss"],
        row["test_loss"],
        checkpoint,
        Owner(**row["where"]).place if row["where"] else None,
        f"{in_words(now - row['modified'])} ago",
    ]
