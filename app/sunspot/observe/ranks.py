"""Writes each rank's numbers, and combines old records, so that the files of long attempts stay small."""

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import numpy as np
from pydantic_core import from_json, to_json

from sunspot.background import TokenBucket
from sunspot.run import Run
from sunspot.run.streams import SIZES, LineWriter, new_stream

MIN_RECORDS = 64
"""Smallest number of the newest records that are never combined.

Older records are combined into at most the same number of records, and at least half that number.
"""

MIN_BYTES = SIZES[-1] // 4
"""Smallest size in bytes of the newest records that are never combined."""

FLUSH_BURST = 60
"""Number of flushes that write immediately, at the beginning of an attempt or after a pause."""

FLUSH_EVERY_S = 60.0
"""Seconds between writes after the burst."""

SUMS = {"rows", "seconds", "steps_s", "forward_s", "data_wait_s", "throttled_s"}
"""Names of numbers that are combined by summing."""

MAXIMA = {"step_time_p95_s", "memory_mib", "gpu_memory_mib"}
"""Names of numbers that are combined by taking the maximum."""

MEANS = {"step_time_median_s": "steps", "throttled_share": "seconds"}
"""Names of numbers that are combined into a weighted mean, and the names of their weights.

Of any other number, the last value is kept.
"""

RankTable: TypeAlias = Mapping[str, np.ndarray]
"""A mapping from names to the values of all ranks, float64 [ranks]. Unknown values are NaN."""


class RankHistory:
    """Writes all ranks' numbers during one attempt."""

    def __init__(self, run: Run, attempt: int) -> None:
        self._attempt = attempt
        self._stream = LineWriter(run.storage, run.key("ranks", new_stream(attempt)), downsample)
        self._waiting: list[tuple[dict[str, Any], RankTable]] = []
        self._lock = threading.Lock()
        self._ends = False
        self._pace = TokenBucket(FLUSH_BURST, FLUSH_EVERY_S)

    def append(self, record: Mapping[str, Any], ranks: RankTable) -> None:
        """Add the ranks' numbers for a record of the metric history."""
        kept = {name: record[name] for name in ("step", "time", "steps", "seconds") if name in record}
        with self._lock:
            self._waiting.append(({"attempt": self._attempt, **kept}, ranks))

    def end(self) -> None:
        """Make all later calls of `flush` write immediately."""
        self._ends = True

    def flush(self) -> None:
        """Write the added numbers, unless the last write was too recent. Can be called again after a `StorageError`."""
        with self._lock:
            due = bool(self._waiting) and (self._ends or self._pace.take())
            waiting, self._waiting = (self._waiting, []) if due else ([], self._waiting)
        for record, ranks in waiting:  # not in `append`, because encoding a thousand ranks takes milliseconds
            columns = {name: to_column(name, values) for name, values in ranks.items()}
            self._stream.append(to_json({**record, "ranks": columns}))
        self._stream.flush()


def downsample(text: bytes) -> bytes:
    """Combine older records in groups. Group sizes are powers of two, so that a later call can combine whole groups."""
    lines = text.splitlines()
    newest = size = 0
    while newest < len(lines) and (newest < MIN_RECORDS or size < MIN_BYTES):
        newest += 1
        size += len(lines[-newest])
    if newest == len(lines):
        return text
    older = [from_json(line) for line in lines[:-newest]]
    counts = [record.get("records", 1) for record in older]
    room, width = max(MIN_RECORDS, MIN_BYTES * len(lines) // len(text)), 1
    while sum(counts) > room * width:
        width *= 2
    begins = accumulate(counts, initial=0)
    groups = groupby(zip(begins, older, strict=False), lambda each: each[0] // width)
    combined = [to_json(combine([record for _, record in group])) for _, group in groups]
    return b"\n".join([*combined, *lines[-newest:]]) + b"\n"


def combine(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine adjacent records of one attempt into a single record."""
    totals = {name: round(sum(record.get(name, 0) for record in records), 6) for name in ("steps", "seconds")}
    names = [name for name in records[-1]["ranks"] if all(name in record["ranks"] for record in records)]
    ranks = {name: _combine(name, records) for name in names}
    return {**records[-1], **totals, "records": sum(record.get("records", 1) for record in records), "ranks": ranks}


def _combine(name: str, records: Sequence[dict[str, Any]]) -> list[float | None]:
    values = np.array([record["ranks"][name] for record in records], float)  # [record, rank]
    known = ~np.isnan(values)
    found = values[-1]
    if name in SUMS:
        found = np.where(known, values, 0).sum(0)
    elif name in MAXIMA:
        found = np.where(known, values, -np.inf).max(0)
    elif name in MEANS:
        weights = np.array([[record.get(MEANS[name], 0)] for record in records]) * known
        found = (np.where(known, values, 0) * weights).sum(0) / np.maximum(weights.sum(0), 1e-9)
    return to_column(name, np.where(known.any(0), found, np.nan))


def to_column(name: str, values: np.ndarray) -> list[float | None]:
    """Return an array, float64 [ranks], as JSON values: rounded to microseconds, with None for NaN."""
    if name == "rows":
        return [int(value) for value in values.tolist()]
    return [None if value != value else value for value in values.round(6).tolist()]
