"""The metric history of a run as records and as a table, with the numbers of each rank."""

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
"""Key in the metadata of a file that is ours to replace."""


def with_ranks(run: Run) -> list[dict[str, Any]]:
    """Read the records, and add `ranks` to those whose numbers of each rank are kept apart."""
    spans = lineage(read_attempts(run))
    ranks = {
        (record["attempt"], record["step"]): to_rows(record["ranks"])
        for record in iter_rank_records(run, spans)
        if "records" not in record
    }
    records = read_journal(run, "metrics", spans)
    for record in records:
        if found := ranks.pop((record["attempt"], record["step"]), None):
            record["ranks"] = found
    return records


def to_table(records: list[dict[str, Any]]) -> pyarrow.Table:
    """Make a row of each record, nested values (`ranks`) as lists of structs, missing ones as nulls."""
    import pyarrow

    names, more = cut([*dict.fromkeys(name for record in records for name in record)], MAX_NAMES, "columns")
    if more:
        warn(f"{more}; --json has all")
    columns = {}
    for name in names:
        try:
            columns[name] = pyarrow.array([record.get(name) for record in records])
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            warn(f"left out: {name}, whose values are of several types")
    return pyarrow.table(columns, metadata={MARK: ""})
