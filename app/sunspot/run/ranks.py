"""The numbers of each rank in storage: apart from the run's curve, of which they would be most of the bytes.

A record has the `attempt`, `step`, `time`, `steps` and `seconds` of its record of the metric history, and `ranks`: by
name of a number, its value of each rank. Old ones are combined (sunspot/observe/ranks.py): such a one tells of how many
`records`, and has the time and step of the last of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from sunspot.run import Run
from sunspot.run.attempts import Span
from sunspot.run.history import each_record, list_journal

Columns = dict[str, list[Any]]
"""By name, the number of each rank; None: unknown."""


def to_rows(ranks: Columns) -> list[dict[str, Any]]:
    """The numbers by rank."""
    return [dict(zip(ranks, values, strict=True)) for values in zip(*ranks.values(), strict=True)]


def each_rank_record(run: Run, spans: Sequence[Span], damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The records of the steps that count."""
    newest: dict[int, int] = {}
    for record in each_record(run, "ranks", spans, damaged=damaged):
        if record["step"] > newest.get(record["attempt"], -1):  # it was not combined while it was read
            newest[record["attempt"]] = record["step"]
            yield record


def newest_rank_records(run: Run, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The records of the newest attempt that has any."""
    recorded = {segment.attempt for segment in list_journal(run, "ranks", spans)}
    for span in spans:
        if span.attempt in recorded and (found := list(each_rank_record(run, [span]))):
            return found
    return []
