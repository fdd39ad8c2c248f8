"""The metric history of a run, its events, and the rows its steps consumed.

Storage cannot append: a journal is a series of files of at most FILE_RECORDS lines, and only the last is rewritten.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from app.errors import DamageError, shorten
from app.run import Run
from app.run.attempts import Span
from app.storage.base import READS_IN_FLIGHT, Entry, map_parallel

if TYPE_CHECKING:
    import pyarrow

HELD_OUT = "test_"
"""Metrics of held-out rows have this prefix."""

FILE_RECORDS = 1000
"""Lines of a journal file: a rewrite stays below about half a megabyte."""

Kind = Literal["metrics", "events"]


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
        with self._lock:
            self._records.append(json.dumps({"attempt": self._attempt, **record}))

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


def read_journal(run: Run, kind: Kind, spans: list[Span] | None = None) -> list[dict[str, Any]]:
    """The records of all attempts, each journal's in order; with `spans`, only those whose steps count."""
    return list(each_record(run, kind, spans))


def list_journal(run: Run, kind: Kind) -> list[Entry]:
    """The journal files, by attempt."""
    return [entry for entry in run.storage.list(run.key(kind)) if entry.key.endswith(".jsonl")]


def each_record(
    run: Run, kind: Kind, spans: list[Span] | None = None, listed: Sequence[Entry] | None = None
) -> Iterator[dict[str, Any]]:
    """Like `read_journal`, a few files at a time: a long history need not fit into memory.

    With `listed`, reads only those files of `list_journal`.
    """
    files = [entry.key for entry in (list_journal(run, kind) if listed is None else listed)]
    for first in range(0, len(files), READS_IN_FLIGHT):
        for text in map_parallel(run.storage.read, files[first : first + READS_IN_FLIGHT]):
            for line in text.splitlines():
                record = json.loads(line)
                if spans is None or any(span.reaches(record["attempt"], record["step"]) for span in spans):
                    yield record


def write_audit(run: Run, attempt: int, first: int, last: int, consumed: pyarrow.Table) -> None:
    """Record which rows the steps `first`..`last` consumed; columns `step`, `rank` (int32) and `row` (int64)."""
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(consumed, buffer, compression="zstd")
    run.storage.write(run.key("audit", f"attempt-{attempt:04d}", f"{first:08d}-{last:08d}.parquet"), buffer.getvalue())


def read_audit(run: Run, spans: list[Span]) -> list[pyarrow.Table]:
    """The rows that the steps in `spans` consumed, as tables of `step`, `rank` and `row`; raises `DamageError`.

    Each step counts once: a file may reach past its span, since a commit also writes the windows closed by then, and
    may repeat the start of the file before, when storage reported a write as failed that it had taken.
    """
    import pyarrow.compute
    import pyarrow.parquet

    found = []
    bounds = {span.attempt: (span.after, span.upto) for span in spans}
    for entry in run.storage.list(run.key("audit")):
        folder, _, file = entry.key.removeprefix(run.key("audit") + "/").partition("/")
        attempt = int(folder.rpartition("-")[2])
        first, last = (int(step) for step in file.removesuffix(".parquet").split("-"))
        if attempt not in bounds:
            continue
        after, upto = bounds[attempt]
        end = last if upto is None else min(last, upto)
        if end <= after or end < first:
            continue
        try:
            table = pyarrow.parquet.read_table(io.BytesIO(run.storage.read(entry.key)))
        except (pyarrow.ArrowException, OSError) as error:
            raise DamageError(f"{run.storage.locate(entry.key)}: cannot be read: {shorten(error)}") from error
        if first <= after or last > end:
            steps = table["step"]
            table = table.filter(
                pyarrow.compute.and_(pyarrow.compute.greater(steps, after), pyarrow.compute.less_equal(steps, end))
            )
        found.append(table)
        bounds[attempt] = (end, upto)
    return found
