"""The numbers of each rank in storage: apart from the run's curve, of which they would be most of the bytes.

A record has the `attempt`, `step`, `time`, `steps` and `seconds` of its record of the metric history, and `ranks`: by
name of a number, its value of each rank. Old ones are combined (sunspot/observe/ranks.py): such a one tells of how many
`records`, and has the time and step of the last of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sunspot.run import Run
from sunspot.run.attempts import Span
from sunspot.run.history import each_record, list_journal

OLDER_FILES = 2
"""Files of an earlier version, of a thousand records each, that are read for the newest ones."""

Columns = dict[str, list[Any]]
"""By name, the number of each rank; None: unknown."""


def to_columns(ranks: Sequence[Mapping[str, Any]]) -> Columns:
    """The numbers by name, as earlier versions wrote them by rank."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [rank.get(name) for rank in ranks] for name in names}


def to_rows(ranks: Columns) -> list[dict[str, Any]]:
    """The numbers by rank."""
    return [dict(zip(ranks, values, strict=True)) for values in zip(*ranks.values(), strict=True)]


def each_rank_record(run: Run, spans: Sequence[Span], damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The records of the steps that count, but for those in the metric history, where an earlier version trained."""
    newest: dict[int, int] = {}
    for record in each_record(run, "ranks", spans, damaged=damaged):
        if record["step"] > newest.get(record["attempt"], -1):  # it was not combined while it was read
            newest[record["attempt"]] = record["step"]
            yield record


def newest_rank_records(run: Run, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The records of the newest attempt that has any; of an attempt of an earlier version, those in its last files."""
    apart = {segment.attempt for segment in list_journal(run, "ranks", spans)}
    together = [segment for segment in list_journal(run, "metrics", spans) if segment.older]
    for span in spans:
        older = [segment for segment in together if segment.attempt == span.attempt][-OLDER_FILES:]
        records = each_rank_record(run, [span]) if span.attempt in apart else each_record(run, "metrics", [span], older)
        if found := [with_columns(record) for record in records if record.get("ranks")]:
            return found
    return []


def with_columns(record: dict[str, Any]) -> dict[str, Any]:
    """A record with its `ranks` by name, also if an earlier version wrote it."""
    return {**record, "ranks": to_columns(record["ranks"])} if isinstance(record["ranks"], list) else record
