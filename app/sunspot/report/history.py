"""Collects the metric history of a run for its report."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from sunspot.metric_names import HELD_OUT
from sunspot.run.history import to_rows
from sunspot.run.size_limits import MAX_NAMES

MAX_DRAWN = 1e100
"""Largest absolute value to draw. Differences between larger numbers overflow floats."""


class Series:
    """A sequence of numeric records, stored by column to save memory.

    A record without a value for a column uses no memory in that column.
    """

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        "Record indexes and values, keyed by name."
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, record: Mapping[str, float | None]) -> None:
        """Add a record. Numbers can be None or omitted."""
        for name, value in record.items():
            if value is not None:
                indexes, values = self._columns.setdefault(name, (array("I"), array("d")))
                indexes.append(self._count)
                values.append(value)
        self._count += 1

    def column(self, name: str) -> list[Any]:
        """Return each record's value of `name`, or None if the value is missing or NaN."""
        found: list[Any] = [None] * self._count
        for index, value in self._known(name):
            found[index] = value
        return found

    def indexes_with(self, names: Iterable[str]) -> list[int]:
        """Return the sorted indexes of all records that have a value for at least one of these names."""
        return sorted({index for name in names for index, _ in self._known(name)})

    def values_at(self, name: str, chosen: Sequence[int]) -> list[Any]:
        """Return a column's values at the chosen indexes, without reading the rest of the column."""
        indexes, values = self._columns.get(name, (array("I"), array("d")))
        places = [(bisect_left(indexes, index), index) for index in chosen]
        found = [values[at] if at < len(indexes) and indexes[at] == index else math.nan for at, index in places]
        return [None if math.isnan(value) else value for value in found]

    def _known(self, name: str) -> Iterator[tuple[int, float]]:
        pairs = zip(*self._columns.get(name, ((), ())), strict=True)
        return ((index, value) for index, value in pairs if not math.isnan(value))


def can_draw(value: float | None) -> TypeGuard[float]:
    """Return True if a value exists, is finite, and is not too large to draw."""
    return value is not None and abs(value) < MAX_DRAWN


@dataclass
class RankTotal:
    """One rank's totals over all attempts, in seconds, rows and MiB."""

    rows: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    "Sum over all windows of the number of steps times the median step time."
    p95: float | None = None
    "The highest 95th percentile of the step time of any window."
    data_wait: float = 0.0
    forward: float = 0.0
    "Seconds in forward passes. In the rest of a step, ranks wait for each other."
    memory_mib: float = 0.0

    @property
    def step_time(self) -> float | None:
        """The mean of all windows' median step times, weighted by the number of steps."""
        return self.step_seconds / self.steps if self.steps else None

    def add(self, steps: int, numbers: dict[str, float | None]) -> None:
        """Add this rank's numbers for a window of `steps` steps."""
        self.rows += numbers.get("rows") or 0.0
        self.seconds += numbers.get("seconds") or 0.0
        self.data_wait += numbers.get("data_wait_s") or 0.0
        self.forward += numbers.get("forward_s") or 0.0
        self.memory_mib = max(self.memory_mib, numbers.get("memory_mib") or 0.0)
        median = numbers.get("step_time_median_s")
        if median is not None:
            self.steps += steps
            self.step_seconds += steps * median
            self.p95 = max(self.p95 or 0.0, numbers.get("step_time_p95_s") or median)


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return {}
    return {f"{name}_low": min(known), name: sum(known) / len(known), f"{name}_high": max(known)}


class History:
    """The metric history, without superseded steps."""

    def __init__(self) -> None:
        self.series = Series()
        "Columns `attempt`, `step`, `epoch`, `time`, `rows_per_s` (of all ranks together), and each of the `results`."
        self.speeds = Series()
        """Columns `attempt` and `time`, and the lowest, mean and highest `rows_per_s` and `step_time` (a median in
        seconds) of the ranks."""
        self.ranks: dict[int, RankTotal] = {}
        "The totals of each rank."
        self.attempts: set[int] = set()
        "The attempts that have records."
        self.results: dict[str, None] = {}
        "Names of the metrics that measure the model, in the order of their first records."
        self.left_out: set[str] = set()
        "Names of the results that are not kept, because there are more than MAX_NAMES."
        self.undrawable: dict[str, tuple[int, int]] = {}
        "Number of records whose value is NaN, infinite or huge, and the step of the first such record, keyed by name."
        self.newest_record: dict[str, Any] = {}
        "The newest record's step and time, or an empty dict before the first record."
        self.newest_values: dict[str, tuple[float, int]] = {}
        "The newest value and its step, keyed by name."
        self._usual_rows = 0.0
        "The usual number of rows per window in the newest attempt."
        self._few = set[int]()
        "Indexes in `series` of records that contain means over few rows."

    def drawn(self, name: str) -> list[Any]:
        """Return a metric's values for a curve. Means over few training rows are replaced by None.

        A window of steps is cut short if a checkpoint is written. The mean over its few rows is noisy, and would look
        like a spike in the curve.
        """
        values = self.series.column(name)
        if name.startswith(HELD_OUT):
            return values
        return [None if index in self._few else value for index, value in enumerate(values)]

    def add(self, record: dict[str, Any], best_by: str) -> None:
        """Add a record from `iter_records`."""
        step = record["step"]
        numbers = {name: value for name in record if (value := _number(record, name)) is not None}
        results = [name for name in numbers if name in self.results or self._keeps_new_result(name, record, best_by)]
        kept = {name: numbers.get(name) for name in (*results, "time", "rows_per_s")}
        if record.get("steps") == 0:  # an evaluation without a step, after a restart
            del kept["rows_per_s"]
        if record["attempt"] not in self.attempts:
            self._usual_rows = 0.0
        rows = numbers.get("rows") or self._usual_rows
        few = rows < self._usual_rows / 2
        self._usual_rows = self._usual_rows / 2 if few else rows  # the next windows might be as short
        if few:
            self._few.add(len(self.series))
        placed = {"attempt": record["attempt"], "step": step, "epoch": numbers.get("epoch")}
        self.series.add(placed | kept)
        self.attempts.add(record["attempt"])
        self.newest_record = {"step": step, "time": kept["time"]}
        for name, value in kept.items():
            if value is not None:
                self.newest_values[name] = value, step
                if name in self.results and not can_draw(value):
                    times, first = self.undrawable.get(name, (0, step))
                    self.undrawable[name] = times + 1, first

    def _keeps_new_result(self, name: str, record: dict[str, Any], best_by: str) -> bool:
        """Return True if the new metric `name` is a result (`is_result`), and its name could be added to `results`.

        If `results` already contains MAX_NAMES names, the name of a result is added to `left_out` instead.
        """
        if not is_result(name, record, best_by):
            return False
        kept = len(self.results) < MAX_NAMES
        if kept:
            self.results[name] = None
        else:
            self.left_out.add(name)
        return kept

    def add_ranks(self, record: dict[str, Any]) -> None:
        """Add a record with each rank's numbers, keyed by name (`sunspot.run.history`)."""
        ranks, steps = record["ranks"], record.get("steps") or 1
        rows, seconds = ranks.get("rows", []), ranks.get("seconds", [])
        speeds = [done / took for done, took in zip(rows, seconds, strict=False) if done is not None and took]
        spreads = _spread("rows_per_s", speeds) | _spread("step_time", ranks.get("step_time_median_s", []))
        self.speeds.add({"attempt": record["attempt"], "time": record.get("time"), **spreads})
        for rank, numbers in enumerate(to_rows(ranks)):
            self.ranks.setdefault(rank, RankTotal()).add(steps, numbers)


def is_result(name: str, record: dict[str, Any], best_by: str) -> bool:
    """Return True if a metric measures the model, and not the training speed."""
    return (
        name.endswith(("loss", "accuracy")) or name.startswith(HELD_OUT) or HELD_OUT + name in record or name == best_by
    )


def _number(record: dict[str, Any], name: str) -> float | None:
    """Return a value if it is a number, otherwise None. NaN and infinities count as numbers."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
