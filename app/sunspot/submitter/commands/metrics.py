"""`sunspot metrics`: prints a run's metric history, without superseded steps."""

import argparse
import csv
import io
from typing import Any

from sunspot.errors import SettingsError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.history import read_journal
from sunspot.run.size_limits import MAX_NAMES, cut
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.metric_tables import MARK, to_table, with_ranks
from sunspot.submitter.printing import (
    print_document,
    print_json,
    print_table,
    print_text,
    progress_note,
    warn,
    write_file,
)
from sunspot.submitter.runs import find_run

LEFT_OUT_OF_TABLE = {"time", "steps", "rows", "seconds", "step_time_p95_s", "memory_mib", "gpu_memory_mib"}
"""Columns that the table omits to save space. CSV, JSON and Parquet include them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    form.add_argument("--parquet", metavar="FILE", help="write a Parquet file with the metrics of each rank")


def run(args: argparse.Namespace) -> None:
    """Print the records, oldest first, or write them to a Parquet file."""
    if args.json and args.csv:
        raise SettingsError("--json and --csv cannot be combined; choose one")
    with progress_note("reading the metric history"):
        run = find_run(args.run, args.storage)
        if args.json or args.parquet:
            records = with_ranks(run)
        else:
            records = read_journal(run, "metrics", lineage(read_attempts(run)))
    if args.parquet is not None:
        write_parquet(run, records, args.parquet, args.json)
    elif args.json:
        print_json(records)
    elif args.csv:
        lines = io.StringIO()
        writer = csv.DictWriter(lines, _columns(records), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        print_document(lines.getvalue())
    else:
        shown = [name for name in _columns(records) if name not in LEFT_OUT_OF_TABLE]
        print_table(shown, [[record.get(name) for name in shown] for record in records])


def write_parquet(run: Run, records: list[dict[str, Any]], output: str, as_json: bool) -> None:
    """Write the records to a Parquet file. Raises the same errors as `write_file`."""
    import pyarrow.parquet

    table = to_table(records)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, compression="zstd")
    path = write_file(output, buffer.getvalue(), MARK)
    if as_json:
        print_json({"run": run.name, "path": str(path), "records": table.num_rows, "bytes": buffer.tell()})
    else:
        print_text(f"{path}: {plural(table.num_rows, 'record')}, {len(table.column_names)} columns")


def _columns(records: list[dict[str, Any]]) -> list[str]:
    """Return the names of all values that are not nested, in order of appearance."""
    columns: dict[str, bool] = {}
    for record in records:
        for name, value in record.items():
            columns[name] = columns.get(name, True) and not isinstance(value, (list, dict))
    shown, more = cut([name for name, plain in columns.items() if plain], MAX_NAMES, "columns")
    if more:
        warn(f"{more}; --json has all")
    return list(shown)
