"""`sunspot list`: lists all runs below a storage path with their states."""

import argparse
import time
from typing import Any

from sunspot.formatting import in_words, plural
from sunspot.run.attempts import step_of
from sunspot.run.owner import Owner
from sunspot.storage.base import Storage
from sunspot.submitter.cluster.api import Cluster, try_connect
from sunspot.submitter.cluster.records import ListRecord, describe_runs
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
    records, left_out = describe_runs(storage, limit, cluster)
    now = time.time()
    if as_json:
        print_json([record.document() for record in records])
    else:
        columns = ["run", "state", "step", "epoch", "loss", "test loss", "checkpoint", "where", "last change"]
        print_table(columns, [_cells(record, now) for record in records])
    if left_out:
        warn(f"--all also lists {plural(left_out, 'older run')}")


def _cells(record: ListRecord, now: float) -> list[Any]:
    checkpoint = ""
    if record.checkpoint:
        checkpoint = f"{step_of(record.checkpoint)}, {in_words(now - (record.checkpoint_time or 0.0))} ago"
    return [
        record.run,
        record.state,
        f"{record.step}/{record.total_steps or '?'}",
        record.epoch or None,
        record.loss,
        record.test_loss,
        checkpoint,
        Owner(**record.where).location if record.where else None,
        f"{in_words(now - record.modified)} ago",
    ]
