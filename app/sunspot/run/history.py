"""The metric history of a run, the numbers of each rank, and its events: a journal of each.

The numbers of each rank are apart from the curve, of which they would be most of the bytes. A record of them has the
`attempt`, `step`, `time`, `steps` and `seconds` of its record of the metric history, and `ranks`: by name of a number,
its value of each rank. Old ones are combined (sunspot/observe/ranks.py): a combined one tells of how many `records`,
and has the time and step of the last of them.
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
    Int64,
    Measure,
    adapter,
    is_count,
    is_moment,
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
    """Return the numbers of a record or a checkpoint that measure the model, by the names that the task gave."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {name: numbers[name] for name in sorted(numbers.keys() - RECORD_NAMES)}


def format_metric(value: float) -> str:
    """Return a measured number for people: four places, or of a small one four digits."""
    return f"{value:.4f}" if abs(value) >= 0.01 or not value else f"{value:.4g}"


class Journal:
    """The lines that one process adds to an attempt's metric history or events.

    A record is a JSON object with at least `attempt`, `step` (optimizer steps taken at its end) and `time`.
    """

    def __init__(self, run: Run, kind: Kind, attempt: int) -> None:
        self._attempt = attempt
        self._stream = LineWriter(run.storage, run.key(kind, new_stream(attempt)))

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it is durable after the next `flush`."""
        self._stream.append(dump_json({"attempt": self._attempt, **record}).encode())

    def note(self, event: str, step: int, detail: str, at: float | None = None) -> None:
        """Add an event after `step`, which happened now or `at` a time, in seconds since the epoch."""
        self.append({"step": step, "time": time.time() if at is None else at, "event": event, "detail": detail})

    def flush(self) -> None:
        """Write the new records; raises `StorageError`, and can then be called again."""
        self._stream.flush()


class Journals:
    """The metric history and the events of an attempt, as its rank 0 writes them."""

    def __init__(self, run: Run, attempt: int) -> None:
        self.metrics, self.events = Journal(run, "metrics", attempt), Journal(run, "events", attempt)

    def flush(self) -> None:
        """Write the new records of both; raises `StorageError`, and can then be called again."""
        self.metrics.flush()
        self.events.flush()


def tidy_journals(run: Run, before: int) -> None:
    """Merge the small objects that attempts older than `before` left; raises `StorageError`."""
    for kind in FORMS:
        tidy_lines(run.storage, run.key(kind), before)


def read_journal(
    run: Run, kind: Kind, spans: Sequence[Span] | None = None, damaged: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the records of all attempts, each journal's in order; with `spans`, only those whose steps count.

    Damaged records are left out; `damaged` gets a line on each segment that has some, or else a warning tells.
    """
    return list(iter_records(run, kind, spans, damaged=damaged))


def list_journal(run: Run, kind: Kind, spans: Sequence[Span] | None = None) -> list[Segment]:
    """Return the segments of the journals, by attempt; with `spans`, only of their attempts."""
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
    """Yield the records of `read_journal`, a few segments at a time: a long history need not fit into memory.

    With `listed`, reads only those of `list_journal`; raises `StorageError` when one has been merged since.
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
            report_damage(
                f"{run.storage.locate(run.key(kind))}: it has more than {as_bytes(MAX_JOURNAL_BYTES)}", damaged
            )
            return
        place = run.storage.locate(segment.entry.key)
        whole = _count_lines(text) == segment.last - segment.first + 1  # not downsampled
        missed = max(0, given - segment.first) if whole else 0
        own = None if spans is None else [span for span in spans if span.attempt == segment.attempt]
        for record in _parse_lines(kind, islice(io.BytesIO(text), missed, None), place, damaged):
            if own is None or any(span.reaches(record["attempt"], record["step"]) for span in own):
                yield record


def newest_record(run: Run, spans: Sequence[Span], listed: Sequence[Segment] | None = None) -> dict[str, Any] | None:
    """Return the newest record of the metric history that counts; None when there is none.

    It reads the end of the history only, however long that is. With `listed`, looks first at those of `list_journal`.
    """
    segments = list_journal(run, "metrics", spans) if listed is None else listed
    for _ in range(READ_TRIES):
        with contextlib.suppress(NotFoundError):  # merged since it was listed
            return _find_newest(run, spans, segments)
        segments = list_again(run.storage, run.key("metrics"), lambda: list_journal(run, "metrics", spans))
    raise StorageError(f"{run.storage.locate(run.key('metrics'))}: it changes while it is read; try again")


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
    """Yield the lines of a text in reverse order, without a list of all lines, which may be very many."""
    end = len(text)
    while end:
        begin = text.rfind(b"\n", 0, end - 1) + 1
        yield text[begin:end]
        end = begin


def _parse_lines(
    kind: Kind, lines: Iterable[bytes], place: str, troubles: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a segment that are as they must be."""
    form, is_usable = FORMS[kind]
    validate = adapter(form).validate_json
    total = damaged = 0
    for total, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = validate(line, strict=True)  # takes no longer than json.loads
            usable = is_usable(record)
        except ValueError:
            usable = False
        if usable:
            yield record
        damaged += not usable
        if damaged > MAX_DAMAGED_LINES:
            report_damage(
                f"{place}: {damaged} of its first {total} lines cannot be used, and no more are read", troubles
            )
            return
    if damaged:
        report_damage(f"{place}: {damaged} of {total} lines cannot be used", troubles)


def _is_of_ranks(record: dict[str, Any]) -> bool:
    if any((type(value) is dict) != (name == "ranks") for name, value in record.items()):
        return False
    return _is_placed(record) and len({len(values) for values in record.get("ranks", {}).values()}) == 1


def _is_event(record: dict[str, Any]) -> bool:
    rank, said = record.get("rank"), (record.get("event"), record.get("detail", ""), record.get("stacks", ""))
    whole = all(isinstance(text, str) for text in said) and (rank is None or is_count(rank))
    return whole and _is_placed(record) and "time" in record


def _is_placed(record: dict[str, Any]) -> bool:
    """Return whether the fields that are reckoned with are what they must be."""
    counts = (record.get("attempt"), record.get("step"), record.get("steps", 0))
    return all(map(is_count, counts)) and is_moment(record.get("time", 0))


FORMS: dict[Kind, tuple[Any, Callable[[dict[str, Any]], bool]]] = {
    "metrics": (dict[str, float | Int64 | str | None], _is_placed),
    "ranks": (dict[str, float | Int64 | dict[str, list[Measure | Int64 | None]]], _is_of_ranks),
    "events": (dict[str, float | Int64 | bool | str | None], _is_event),
}
"""Of a line, and what else holds of it. Numbers may be NaN and infinite, but for those of the `ranks`. (Floats first:
most are.)"""


# ------------------------------------------------------------------------------------------------- numbers of each rank

Columns = dict[str, list[Any]]
"""By name, the number of each rank; None: unknown."""


def to_rows(ranks: Columns) -> list[dict[str, Any]]:
    """Return the numbers by rank."""
    return [dict(zip(ranks, values, strict=True)) for values in zip(*ranks.values(), strict=True)]


def iter_rank_records(run: Run, spans: Sequence[Span], damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of the steps that count."""
    newest: dict[int, int] = {}
    for record in iter_records(run, "ranks", spans, damaged=damaged):
        if record["step"] > newest.get(record["attempt"], -1):  # it was not combined while it was read
            newest[record["attempt"]] = record["step"]
            yield record


def newest_rank_records(run: Run, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the records of the newest attempt that has any."""
    recorded = {segment.attempt for segment in list_journal(run, "ranks", spans)}
    for span in spans:
        if span.attempt in recorded and (found := list(iter_rank_records(run, [span]))):
            return found
    return []


# --------------------------------------------------------------------------------------------------------------- events


def read_events(run: Run) -> list[dict[str, Any]]:
    """Read every event by time, each with `time`, `attempt`, `step`, `event` and mostly `detail`."""
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
    detail = by + (begin if attempt.chosen else "; where it starts has not been chosen")
    known = {"time": attempt.time, "attempt": attempt.number, "step": attempt.step}
    return {**known, "event": "attempt began", "detail": detail}


def _other_code(attempt: Attempt, before: Attempt | None) -> str:
    """Say that an attempt trains with other code of the user's than the one before; empty: with the same."""
    settings = [each.metadata.settings if each else {} for each in (before, attempt)]
    then, now = (code_in(each.get(CODE, ""))[:12] or "the image's" for each in settings)
    return f", with other code: {then} -> {now}" if before and now != then else ""


def _errors(run: Run, attempts: list[Attempt]) -> Iterator[dict[str, Any]]:
    """Read the errors that ended attempts for good, including those whose record cannot be read."""
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
            yield {**event, "time": entry.modified, "detail": "what it said cannot be read"}
