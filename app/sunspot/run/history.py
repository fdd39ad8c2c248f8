"""The journals of a run: its metric history, the metrics of each rank, and its events.

The metrics of each rank have a journal of their own, because they would make up most of the metric history. A
record in this journal has the fields `attempt`, `step`, `time`, `steps` and `seconds`, as in the metric history. It
also has `ranks`, which maps each metric's name to the values of all ranks. Old records are combined
(observe/ranks.py). A combined record has the time and step of the last record that it replaces, and the number of
replaced records in `records`.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

from sunspot.code_archive import CODE, code_in
from sunspot.errors import DamageError, NotFoundError, StorageError
from sunspot.formatting import as_bytes, plural
from sunspot.metric_names import RECORD_NAMES
from sunspot.run import Run, dump_json
from sunspot.run.attempts import Attempt, FatalError, Span, read_attempts
from sunspot.run.incidents import display_event
from sunspot.run.objects import (
    FiniteFloat,
    Int64,
    adapter,
    is_count,
    is_timestamp,
    read_or_default,
    read_verified,
    report_damage,
)
from sunspot.run.owner import Owner
from sunspot.run.size_limits import MAX_DAMAGED_LINES, MAX_JOURNAL_BYTES
from sunspot.run.streams import (
    READ_TRIES,
    LineWriter,
    Segment,
    list_again,
    list_segments,
    new_stream,
    read_segment,
    read_segments,
    tidy_lines,
)

Kind = Literal["metrics", "ranks", "events"]


def model_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the model's metrics in a record or checkpoint, keyed by the names that the task gave them."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {name: numbers[name] for name in sorted(numbers.keys() - RECORD_NAMES)}


def format_metric(value: float) -> str:
    """Return a metric as text with four decimal places, or with four significant digits if it is small."""
    return f"{value:.4f}" if abs(value) >= 0.01 or not value else f"{value:.4g}"


class Journal:
    """Writes the records that one process adds to a journal.

    A record is a JSON object with at least `attempt`, `step` (the number of optimizer steps taken so far) and `time`.
    """

    def __init__(self, run: Run, kind: Kind, attempt: int) -> None:
        self._attempt = attempt
        self._stream = LineWriter(run.storage, run.key(kind, new_stream(attempt)))

    def append(self, record: dict[str, Any]) -> None:
        """Add a record. It is durable after the next `flush`."""
        self._stream.append(dump_json({"attempt": self._attempt, **record}).encode())

    def note(self, event: str, step: int, detail: str, at: float | None = None) -> None:
        """Add an event that happened after `step`, now or at time `at` in seconds since the epoch."""
        self.append({"step": step, "time": time.time() if at is None else at, "event": event, "detail": detail})

    def flush(self) -> None:
        """Write the new records. Can be called again after a `StorageError`."""
        self._stream.flush()


class Journals:
    """Writes the metric history and the events on rank 0."""

    def __init__(self, run: Run, attempt: int) -> None:
        self.metrics = Journal(run, "metrics", attempt)
        self.events = Journal(run, "events", attempt)

    def flush(self) -> None:
        """Write the new metrics and events. Can be called again after a `StorageError`."""
        self.metrics.flush()
        self.events.flush()


def tidy_journals(run: Run, before: int) -> None:
    """Merge the small objects of attempts older than `before`. Raises `StorageError` if storage fails."""
    for kind in FORMS:
        tidy_lines(run.storage, run.key(kind), before)


def read_journal(
    run: Run, kind: Kind, spans: Sequence[Span] | None = None, damaged: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the records of a journal, sorted by attempt.

    If `spans` is given, return only the records of the steps in `spans`. Damaged records are omitted. One message per
    affected segment is added to `damaged`, or logged as a warning if `damaged` is None.
    """
    return list(iter_records(run, kind, spans, damaged=damaged))


def list_journal(run: Run, kind: Kind, spans: Sequence[Span] | None = None) -> list[Segment]:
    """Return the segments of a journal, sorted by attempt.

    If `spans` is given, return only the segments of the attempts in `spans`.
    """
    attempts = None if spans is None else {span.attempt for span in spans}
    segments = list_segments(run.storage, run.key(kind))
    return [segment for segment in segments if attempts is None or segment.attempt in attempts]


def iter_records(
    run: Run,
    kind: Kind,
    spans: Sequence[Span] | None = None,
    listed: Sequence[Segment] | None = None,
    damaged: list[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the same records as `read_journal`, reading only a few segments at a time to bound memory use.

    If `listed` (a result of `list_journal`) is given, only these segments are read. Raises `StorageError` if a listed
    segment has been merged in the meantime.
    """
    size = 0
    for segment, text, given in read_segments(
        run.storage, run.key(kind), lambda: list_journal(run, kind, spans), listed
    ):
        if isinstance(text, DamageError):
            report_damage(str(text), damaged)
            continue
        size += len(text)
        if size > MAX_JOURNAL_BYTES:
            report_damage(f"{run.storage.locate(run.key(kind))} has more than {as_bytes(MAX_JOURNAL_BYTES)}", damaged)
            return
        place = run.storage.locate(segment.entry.key)
        downsampled = _count_lines(text) != segment.last - segment.first + 1
        known = 0 if downsampled else max(0, given - segment.first)
        own = None if spans is None else [span for span in spans if span.attempt == segment.attempt]
        for record in _parse_lines(kind, islice(io.BytesIO(text), known, None), place, damaged):
            if own is None or any(span.reaches(record["attempt"], record["step"]) for span in own):
                yield record


def newest_record(run: Run, spans: Sequence[Span], listed: Sequence[Segment] | None = None) -> dict[str, Any] | None:
    """Return the newest record of the metric history for the steps in `spans`, or None if there is no record.

    Only the end of the history is read. `listed` is a result of `list_journal`, if the caller has one.
    """
    segments = list_journal(run, "metrics", spans) if listed is None else listed
    for _ in range(READ_TRIES):
        with contextlib.suppress(NotFoundError):  # merged since it was listed
            return _find_newest(run, spans, segments)
        segments = list_again(run.storage, run.key("metrics"), lambda: list_journal(run, "metrics", spans))
    raise StorageError(f"{run.storage.locate(run.key('metrics'))} keeps changing while it is being read; try again")


def _find_newest(run: Run, spans: Sequence[Span], segments: Sequence[Segment]) -> dict[str, Any] | None:
    for span in spans:
        for segment in reversed([each for each in segments if each.attempt == span.attempt]):
            text = read_or_default(partial(read_segment, run.storage, segment), b"")
            for record in _parse_lines("metrics", _lines_backwards(text), run.storage.locate(segment.entry.key)):
                if span.holds(record["attempt"], record["step"]):
                    return record
    return None


def _count_lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n"))


def _lines_backwards(text: bytes) -> Iterator[bytes]:
    """Yield the lines of a text in reverse order, without building a list that could be huge."""
    end = len(text)
    while end:
        begin = text.rfind(b"\n", 0, end - 1) + 1
        yield text[begin:end]
        end = begin


def _parse_lines(
    kind: Kind, lines: Iterable[bytes], place: str, troubles: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the valid records of a segment, and report the number of damaged lines."""
    form, is_usable = FORMS[kind]
    validate = adapter(form).validate_json
    total = damaged = 0
    for total, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = validate(line, strict=True)  # as fast as json.loads
            usable = is_usable(record)
        except ValueError:
            usable = False
        if usable:
            yield record
        damaged += not usable
        if damaged > MAX_DAMAGED_LINES:
            report_damage(
                f"{place}: {damaged} of the first {total} lines cannot be used; the rest is not read", troubles
            )
            return
    if damaged:
        report_damage(f"{place}: {damaged} of {total} lines cannot be used", troubles)


def _is_of_ranks(record: dict[str, Any]) -> bool:
    if any((type(value) is dict) != (name == "ranks") for name, value in record.items()):
        return False
    return _is_placed(record) and len({len(values) for values in record.get("ranks", {}).values()}) == 1


def _is_event(record: dict[str, Any]) -> bool:
    rank = record.get("rank")
    texts = (record.get("event"), record.get("detail", ""), record.get("stacks", ""))
    valid = all(isinstance(text, str) for text in texts) and (rank is None or is_count(rank))
    return valid and _is_placed(record) and "time" in record


def _is_placed(record: dict[str, Any]) -> bool:
    """Return True if the attempt, step and time of a record are valid."""
    counts = (record.get("attempt"), record.get("step"), record.get("steps", 0))
    return all(map(is_count, counts)) and is_timestamp(record.get("time", 0))


FORMS: dict[Kind, tuple[Any, Callable[[dict[str, Any]], bool]]] = {
    "metrics": (dict[str, float | Int64 | str | None], _is_placed),
    "ranks": (dict[str, float | Int64 | dict[str, list[FiniteFloat | Int64 | None]]], _is_of_ranks),
    "events": (dict[str, float | Int64 | bool | str | None], _is_event),
}
"""A mapping from each kind of journal to the schema of its lines and an additional check. Numbers can be NaN or
infinite, except those in `ranks`. (`float` comes first because most numbers are floats.)"""


# ------------------------------------------------------------------------------------------------- numbers of each rank

Columns = dict[str, list[Any]]
"""A mapping from names to the values of all ranks. Unknown values are None."""


def to_rows(ranks: Columns) -> list[dict[str, Any]]:
    """Return a dict of metrics for each rank."""
    return [dict(zip(ranks, values, strict=True)) for values in zip(*ranks.values(), strict=True)]


def iter_rank_records(run: Run, spans: Sequence[Span], damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records with the metrics of each rank for the steps in `spans`."""
    newest: dict[int, int] = {}
    for record in iter_records(run, "ranks", spans, damaged=damaged):
        if record["step"] > newest.get(record["attempt"], -1):  # otherwise, it was combined while the journal was read
            newest[record["attempt"]] = record["step"]
            yield record


def newest_rank_records(run: Run, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the records with the metrics of each rank from the newest attempt that has such records."""
    recorded = {segment.attempt for segment in list_journal(run, "ranks", spans)}
    for span in spans:
        records = list(iter_rank_records(run, [span])) if span.attempt in recorded else []
        if records:
            return records
    return []


# --------------------------------------------------------------------------------------------------------------- events


def read_events(run: Run) -> list[dict[str, Any]]:
    """Return all events, oldest first. Each has `time`, `attempt`, `step`, `event` and, usually, `detail`."""
    attempts = read_attempts(run)
    before = [None, *attempts]
    recorded = map(display_event, read_journal(run, "events"))
    found = [*map(_began, attempts, before), *recorded, *_errors(run, attempts)]
    return sorted(found, key=lambda event: (event["time"], event["attempt"]))


def _began(attempt: Attempt, before: Attempt | None) -> dict[str, Any]:
    workers = attempt.metadata.world_size
    owner = Owner.parse(attempt.owner).describe()
    by = f"{plural(workers, 'worker')} of {owner}" if workers else owner
    where = " in memory" if attempt.metadata.tier == "memory" else ""
    begin = f", from {attempt.starts_from or 'the beginning'}{where}{_other_code(attempt, before)}"
    detail = by + (begin if attempt.chosen else "; its start point has not been chosen yet")
    known = {"time": attempt.time, "attempt": attempt.number, "step": attempt.step}
    return {**known, "event": "attempt began", "detail": detail}


def _other_code(attempt: Attempt, before: Attempt | None) -> str:
    """Return a note if the user code differs from the previous attempt's code, or an empty string if it does not."""
    settings = [each.metadata.settings if each else {} for each in (before, attempt)]
    then, now = (code_in(each.get(CODE, ""))[:12] or "the image's" for each in settings)
    return f", with other code: {then} -> {now}" if before and now != then else ""


def _errors(run: Run, attempts: list[Attempt]) -> Iterator[dict[str, Any]]:
    """Yield a `failed for good` event for each attempt with a fatal error, even if the error's record is damaged."""
    steps = {f"{attempt.number:04d}": attempt.step for attempt in attempts}
    for file, entry in run.entries("attempts"):
        number = file.removesuffix("-error.json")
        if number not in steps:
            continue
        event = {"attempt": int(number), "step": steps[number], "event": "failed for good"}
        try:
            ended = read_verified(run, FatalError, "attempts", file)
            yield {**event, "time": ended.time, "detail": f"{ended.type}: {ended.message}"}
        except (NotFoundError, DamageError):
            yield {**event, "time": entry.modified, "detail": "its message cannot be read"}
