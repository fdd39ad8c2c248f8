"""Reads a run's metric history with each rank's metrics, and turns it into a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sunspot.run import Run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.history import iter_rank_records, read_journal, to_rows
from sunspot.run.size_limits import MAX_NAMES, cut
from sunspot.submitter.printing import warn

if TYPE_CHECKING:
    import pyarrow

MARK = b"sunspot metrics"
"""Metadata key of a Parquet file that `sunspot` wrote and can therefore replace."""


def with_ranks(run: Run) -> list[dict[str, Any]]:
    """Return the run's metric records, with each rank's metrics under `ranks` if they were recorded."""
    spans = lineage(read_attempts(run))
    ranks = {
        (record["attempt"], record["step"]): to_rows(record["ranks"])
        for record in iter_rank_records(run, spans)
        if "records" not in record
    }
    records = read_journal(run, "metrics", spans)
    for record in records:
        found = ranks.pop((record["attempt"], record["step"]), None)
        if found:
            record["ranks"] = found
    return records


def to_table(records: list[dict[str, Any]]) -> pyarrow.Table:
    """Return a table with one row per record. Nested values become lists of structs, and missing values are null."""
    import pyarrow

    names, more = cut([*dict.fromkeys(name for record in records for name in record)], MAX_NAMES, "columns")
    if more:
        warn(f"{more}; --json has all")
    columns = {}
    for name in names:
        try:
            columns[name] = pyarrow.array([record.get(name) for record in records])
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            warn(f"column {name} is omitted because its values have different types")
    return pyarrow.table(columns, metadata={MARK: ""})
