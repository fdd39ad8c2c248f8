"""The metric history of a run, its events, and the rows its steps consumed.

Storage cannot append: a journal is a series of files of at most FILE_RECORDS lines, and only the last is rewritten.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from app.errors import DamageError, NotFoundError, shorten
from app.run import Run, dump_json
from app.run.attempts import Span
from app.run.objects import Measure, Whole, adapter, is_count, is_moment, warn_once
from app.storage.base import READS_IN_FLIGHT, Entry, map_parallel

if TYPE_CHECKING:
    import pyarrow

HELD_OUT = "test_"
"""Metrics of held-out rows have this prefix."""

FILE_RECORDS = 1000
"""Lines of a journal file: a rewrite stays below about half a megabyte."""

Kind = Literal["metrics", "events"]

JOURNAL = re.compile(r"attempt-[0-9]{4,9}(-[a-z0-9-]+)?-[0-9]{5,9}\.jsonl")

AUDIT_DIGITS = 16

AUDIT = re.compile(
    r"(?P<place>(?P<attempt>attempt-[0-9]{4,9}(-[0-9a-f]{8})?)/(?P<first>[0-9]{8,15})-(?P<last>[0-9]{8,15}))"
    rf"(-(?P<digest>[0-9a-f]{{{AUDIT_DIGITS}}}))?\.parquet"
)
"""An audit file below `audit/`; older ones have no digest in their names."""

AUDIT_COLUMNS = {"step": "int32", "rank": "int32", "row": "int64"}


class Journal:
    """The lines that one process adds to an attempt's metric history or events.

    A record is a JSON object with at least `attempt`, `step` (optimizer steps taken at its end) and `time`. Rank 0
    writes the group's journal; any other writer needs a journal of its own, by `rank` or a unique `writer`, because a
    journal rewrites its files from its own lines.
    """

    def __init__(self, run: Run, kind: Kind, attempt: int, rank: int | None = None, writer: str = "") -> None:
        self._run, self._kind, self._attempt = run, kind, attempt
        self._stream = f"attempt-{attempt:04d}" + ("" if rank is None else f"-rank-{rank:04d}")
        self._stream += f"-{writer}" if writer else ""
        self._records: list[str] = []
        self._written = 0
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it is durable after the next `flush`."""
        line = dump_json({"attempt": self._attempt, **record})
        with self._lock:
            self._records.append(line)

    def flush(self) -> None:
        """Write the new records; raises `StorageError`, and can then be called again."""
        with self._flushing:
            with self._lock:
                records = list(self._records)
            while self._written < len(records):
                file = self._written // FILE_RECORDS
                end = min(len(records), (file + 1) * FILE_RECORDS)
                text = "\n".join(records[file * FILE_RECORDS : end]) + "\n"
                self._run.storage.write(self._run.key(self._kind, f"{self._stream}-{file:05d}.jsonl"), text.encode())
                self._written = end


def read_journal(
    run: Run, kind: Kind, spans: list[Span] | None = None, warn: Callable[[str], Any] = warn_once
) -> list[dict[str, Any]]:
    """The records of all attempts, each journal's in order; with `spans`, only those whose steps count.

    Damaged records are left out; `warn` hears of them, once for a file.
    """
    return list(each_record(run, kind, spans, warn=warn))


def list_journal(run: Run, kind: Kind) -> list[Entry]:
    """The journal files, by attempt."""
    folder = run.key(kind) + "/"
    return [entry for entry in run.storage.list(run.key(kind)) if JOURNAL.fullmatch(entry.key.removeprefix(folder))]


def each_record(
    run: Run,
    kind: Kind,
    spans: list[Span] | None = None,
    listed: Sequence[Entry] | None = None,
    warn: Callable[[str], Any] = warn_once,
) -> Iterator[dict[str, Any]]:
    """Like `read_journal`, a few files at a time: a long history need not fit into memory.

    With `listed`, reads only those files of `list_journal`.
    """
    files = [entry.key for entry in (list_journal(run, kind) if listed is None else listed)]
    for first in range(0, len(files), READS_IN_FLIGHT):
        part = files[first : first + READS_IN_FLIGHT]
        for key, text in zip(part, map_parallel(run.storage.read, part), strict=True):
            for record in _parse_lines(kind, text, run.storage.locate(key), warn):
                if spans is None or any(span.reaches(record["attempt"], record["step"]) for span in spans):
                    yield record


def _parse_lines(kind: Kind, text: bytes, place: str, warn: Callable[[str], Any]) -> Iterator[dict[str, Any]]:
    """The records of a journal file that are as they must be."""
    validate, is_usable = adapter(FORMS[kind]).validate_json, _is_metric if kind == "metrics" else _is_event
    lines, damaged = text.splitlines(), 0
    for line in lines:
        try:
            record: dict[str, Any] = validate(line, strict=True)  # takes no longer than json.loads
            usable = is_usable(record)
        except ValueError:
            usable = False
        if usable:
            yield record
        damaged += not usable
    if damaged:
        warn(f"{place}: {damaged} of {len(lines)} lines cannot be used")


def write_audit(run: Run, attempt: str, first: int, last: int, consumed: pyarrow.Table) -> None:
    """Record which rows the steps `first`..`last` consumed; columns `step`, `rank` (int32) and `row` (int64).

    `attempt` is its label (`Attempt.label`).
    """
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(consumed, buffer, compression="zstd")
    place, content = f"{attempt}/{first:08d}-{last:08d}", buffer.getvalue()
    run.storage.write(run.key("audit", f"{place}-{_audit_digest(place, content)}.parquet"), content)


def read_audit(run: Run, spans: list[Span]) -> list[pyarrow.Table]:
    """The rows that the steps in `spans` consumed, as tables of `step`, `rank` and `row`; raises `DamageError`.

    Each step counts once: a file may reach past its span, since a commit also writes the windows closed by then, and
    may repeat the start of the file before, when storage reported a write as failed that it had taken.
    """
    import pyarrow.compute

    found = []
    bounds = {span.label: (span.after, span.upto) for span in spans}
    for entry in run.storage.list(run.key("audit")):
        name = AUDIT.fullmatch(entry.key.removeprefix(run.key("audit") + "/"))
        if name is None or name["attempt"] not in bounds:
            continue
        attempt, first, last = name["attempt"], int(name["first"]), int(name["last"])
        after, upto = bounds[attempt]
        end = last if upto is None else min(last, upto)
        if end <= after or end < first:
            continue
        table = _read_audit_file(run, entry.key, name)
        steps = table["step"]
        if first <= after or last > end:
            table = table.filter(
                pyarrow.compute.and_(pyarrow.compute.greater(steps, after), pyarrow.compute.less_equal(steps, end))
            )
        found.append(table)
        bounds[attempt] = (end, upto)
    return found


def _read_audit_file(run: Run, key: str, name: re.Match[str]) -> pyarrow.Table:
    """The rows of one file, which must be what was written under its name."""
    import pyarrow.compute
    import pyarrow.parquet

    place = run.storage.locate(key)
    try:
        content = run.storage.read(key)
        if name["digest"] and name["digest"] != _audit_digest(name["place"], content):
            raise DamageError(f"{place} cannot be used: it was changed after it was written")
        table = pyarrow.parquet.read_table(io.BytesIO(content), columns=[*AUDIT_COLUMNS])
        table = table.cast(pyarrow.schema([(column, kind) for column, kind in AUDIT_COLUMNS.items()]))
    except NotFoundError:
        raise DamageError(f"{place} is missing") from None
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise DamageError(f"{place} cannot be read: {shorten(error)}") from error
    steps = pyarrow.compute.min_max(table["step"]).as_py()
    if any(column.null_count for column in table.columns):
        raise DamageError(f"{place} cannot be used: it has nulls")
    if len(table) and not int(name["first"]) <= steps["min"] <= steps["max"] <= int(name["last"]):
        raise DamageError(f"{place} cannot be used: it has the steps {steps['min']} to {steps['max']}")
    return table


def _audit_digest(place: str, content: bytes) -> str:
    """Ties the content of an audit file to its place: the attempt and the steps in its name."""
    return hashlib.sha256(place.encode() + b"\n" + content).hexdigest()[:AUDIT_DIGITS]


FORMS: dict[Kind, Any] = {
    "metrics": dict[str, float | Whole | str | list[dict[str, Measure | Whole | None]] | None],
    "events": dict[str, float | Whole | bool | str | None],
}
"""Of a line. Numbers may be NaN and infinite, but for those of the `ranks`. (Floats first: most are.)"""


def _is_metric(record: dict[str, Any]) -> bool:
    """Whether the fields that are reckoned with are what they must be."""
    steps, time = record.get("steps", 0), record.get("time", 0)
    if any((type(value) is list) != (name == "ranks") for name, value in record.items()):
        return False
    return is_count(record.get("attempt")) and is_count(record.get("step")) and is_count(steps) and is_moment(time)


def _is_event(record: dict[str, Any]) -> bool:
    rank, said = record.get("rank"), (record.get("event"), record.get("detail", ""), record.get("stacks", ""))
    whole = all(isinstance(text, str) for text in said) and (rank is None or is_count(rank))
    return whole and _is_metric(record) and "time" in record
