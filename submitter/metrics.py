"""`sunspot metrics`: how a run's numbers went, along the steps that made its model."""

from __future__ import annotations

import csv
import sys
from typing import Any, Literal

from app.layout import Run
from app.layout.attempts import lineage, read_attempts
from app.layout.history import read_journal
from submitter.output import print_json, print_table

LEFT_OUT_OF_TABLE = {"time", "steps", "rows", "seconds", "step_time_p95_s", "memory_mib", "gpu_memory_mib"}
"""What a terminal has no room for; CSV and JSON have it."""


def show(run: Run, form: Literal["table", "csv", "json"]) -> None:
    """Print the records of the metric history that count, oldest first."""
    records = read_journal(run, "metrics", lineage(read_attempts(run)))
    columns = _columns(records)
    if form == "json":
        print_json(records)
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    else:
        shown = [name for name in columns if name not in LEFT_OUT_OF_TABLE]
        print_table(shown, [[record.get(name) for name in shown] for record in records])


def _columns(records: list[dict[str, Any]]) -> list[str]:
    """The names of all plain values, each where it first appears; a nested value has no place in a row."""
    columns: dict[str, bool] = {}
    for record in records:
        for name, value in record.items():
            columns[name] = columns.get(name, True) and not isinstance(value, (list, dict))
    return [name for name, plain in columns.items() if plain]
