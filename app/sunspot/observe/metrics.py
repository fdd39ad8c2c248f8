"""Reduces all workers' numbers over a window of steps to one record of the metric history."""

import math
import resource
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from sunspot.data.source import Batch
from sunspot.machine.cgroup import memory_left, read_throttling, resident_memory
from sunspot.metric_names import LOSS, MetricRecord
from sunspot.parallel.collectives import gather_on_rank0


class Sums:
    """Sums of per-row values. They stay on the device, because reading a value would have to wait for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}

    @property
    def rows(self) -> int:
        """The largest number of rows that were added under one name."""
        return max(self._rows.values(), default=0)

    def add(self, values: Batch) -> None:
        """Add per-row values. `values` maps each name to a tensor of shape [B] that does not require gradients."""
        for name, rows in values.items():
            total = rows.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name].add_(total) if name in self._sums else total
            self._rows[name] = self._rows.get(name, 0) + rows.shape[0]

    def mean(self, name: str) -> torch.Tensor | None:
        """Return the mean of a name's values, float64 [], on their device, or None if the name has no rows."""
        rows = self._rows.get(name)
        return self._sums[name] / rows if rows else None

    def totals(self) -> dict[str, tuple[float, int]]:
        """Return each name's sum and its number of rows. Waits for the device."""
        return {name: (float(total), self._rows[name]) for name, total in self._sums.items()}


class Combined(NamedTuple):
    """The combined numbers of all workers in a window."""

    rows: int
    "The total number of rows of all workers."
    means: dict[str, float]
    "The means over these rows, keyed by name. Names without rows have no mean."
    maxima: dict[str, float]
    "The maximum of each other number over all workers, keyed by name."


def reduce(
    sums: Sums, numbers: Mapping[str, float], group: dist.ProcessGroup
) -> tuple[Combined, dict[str, np.ndarray]]:
    """Return the combined numbers of all workers, and each worker's `numbers`, float64 [workers], keyed by name.

    All workers must call this together, with the same names. They get the same combined numbers, because only rank 0
    computes them, in rank order. Each worker's numbers are returned only on rank 0. Waits for the device.
    """
    everyone = gather_on_rank0((sums.totals(), [*numbers.values()]), group)
    table = {}
    result: list[Combined | None] = [None]
    if everyone:
        table = dict(zip(numbers, np.array([own for _, own in everyone], float).T, strict=True))
        result = [combine([totals for totals, _ in everyone], table)]
    dist.broadcast_object_list(result, group=group, group_src=0)
    assert result[0]
    return result[0], table


def combine(totals: list[dict[str, tuple[float, int]]], table: Mapping[str, np.ndarray]) -> Combined:
    """Combine the workers' `totals` (`Sums.totals`) and the other numbers in `table`.

    `table` maps each name to the workers' values, float64 [workers].
    """
    rows_of_all = sum(max((rows for _, rows in own.values()), default=0) for own in totals)
    means = {}
    for name in sorted({name for own in totals for name in own}):
        having = [own[name] for own in totals if name in own]
        rows = sum(rows for _, rows in having)
        if rows:
            means[name] = sum(total for total, _ in having) / rows
    maxima = {name: float(values.max()) for name, values in table.items()}
    return Combined(rows_of_all, means, maxima)


class CopyInMemory:
    """A number that is being copied from a GPU to main memory."""

    def __init__(self, number: torch.Tensor) -> None:
        """Start the copy. The GPU makes the copy once it has computed the number."""
        self._copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        self._end = torch.cuda.Event()
        self._end.record()

    def read(self) -> float:
        """Return the number. Waits for the GPU if it has not computed the number yet."""
        self._end.synchronize()
        return float(self._copy)


class Stopwatch:
    """Context manager that sums the time that a device spends on the code inside it.

    A GPU runs asynchronously, so CUDA events measure the time, and nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *error: object) -> None:
        self._spans.append((self._began, self._now()))

    def seconds(self) -> float:
        """Return the total time in seconds. Waits for the last measurement to finish."""
        if not (self._on_gpu and self._spans):
            return float(sum(end - begin for begin, end in self._spans))
        self._spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._spans)) / 1000

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


RECENT_ROWS = 10_000
"""Smallest number of rows over which a checkpoint's metrics are averaged, unless an epoch has fewer rows."""


class RecentMeans:
    """Means over the newest windows. The means of a single window are noisy, because it might cover only one step."""

    def __init__(self, epoch_rows: int, before: Mapping[str, Any]) -> None:
        """Begin with the means in `before`, the metrics of the state from which training continues."""
        self._enough = min(RECENT_ROWS, epoch_rows)
        rows = before.get("recent_rows")
        self._windows = [(rows, before)] if isinstance(rows, int) else []
        self.newest = dict(before)
        "The means over the newest windows, with their number of rows as `recent_rows`. Initially, this is `before`."

    def add(self, rows: int, means: Mapping[str, Any]) -> None:
        """Add a window's means over its `rows`.

        If a name's new mean is finite, older means of this name that are not finite are ignored.
        """
        self._windows.append((rows, means))
        while sum(rows for rows, _ in self._windows[1:]) >= self._enough:
            self._windows.pop(0)
        self.newest = {"recent_rows": sum(rows for rows, _ in self._windows)}
        for name in means:
            having = [(rows, window[name]) for rows, window in self._windows if name in window]
            if math.isfinite(means[name]):
                having = [(rows, mean) for rows, mean in having if math.isfinite(mean)]
            self.newest[name] = sum(rows * mean for rows, mean in having) / sum(rows for rows, _ in having)


NUMBERS = ("seconds", "time", "step_time_median_s", "step_time_p95_s", "data_wait_s", "memory_mib", "gpu_memory_mib")
"""Names of the numbers for which a record contains the maximum over all workers."""


class MetricWindow:
    """A worker's numbers over a window of steps. `close` reduces the numbers of all workers to one record."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, recent: RecentMeans) -> None:
        self._group = group
        self._device = device
        self.recent = recent
        self.own: dict[str, float] = {}
        """This worker's numbers in the last closed window. Unknown numbers are NaN.

        It contains NUMBERS and:

        `steps_s`, `forward_s`: seconds in steps, and in their forward passes (`data_wait_s` is the wait for data);
        `resident_mib`: current memory of this process (`memory_mib` is the peak);
        `memory_left_mib`: memory left until the limit of the container or machine;
        `throttled_s`: seconds, summed over processors, for which the container's CPU quota throttled this worker;
        `throttled_share`: fraction of the quota's periods in which this worker was throttled.
        """
        self.ranks: dict[str, np.ndarray] = {}
        "Each worker's numbers, except for the time: float64 [workers], keyed by name. Empty on all ranks but rank 0."
        self._copied_loss: CopyInMemory | None = None
        "The mean loss at the previous use of `mean_loss` on a GPU."
        self._open()

    def move(self, group: dist.ProcessGroup) -> None:
        """Use `group` to reduce all later windows."""
        self._group = group

    def _open(self) -> None:
        self.forward = Stopwatch(self._device)
        "Measures the forward passes. In the rest of a step, workers wait for each other."
        self._throttling = read_throttling()
        self._sums = Sums()
        self._step_times: list[float] = []
        self._data_waits: list[float] = []
        self._opened = time.perf_counter()

    @property
    def steps(self) -> int:
        return len(self._step_times)

    @property
    def mean_loss(self) -> float | None:
        """The mean loss of this worker's rows so far, or None if there are no rows.

        On a GPU, this is the mean at the previous call, so that nothing waits for the GPU.
        """
        total = self._sums.mean(LOSS)
        if self._device.type != "cuda":
            return None if total is None else float(total)
        before, self._copied_loss = self._copied_loss, None if total is None else CopyInMemory(total)
        return before.read() if before else None

    def add_step(self, values: list[Batch], step_time: float, data_wait: float) -> None:
        """Add an optimizer step with its per-row `values`. Both times are in seconds."""
        for part in values:
            self._sums.add(part)
        self._step_times.append(step_time)
        self._data_waits.append(data_wait)

    def close(self, step: int, epoch: int, learning_rate: float) -> MetricRecord:
        """Reduce all workers' windows to a record, set `own` and `ranks`, and open a new window.

        All workers must call this together, and get the same record. For each name in NUMBERS, the record contains the
        largest of the workers' values.
        """
        throttling = read_throttling().since(self._throttling)
        self.own = {
            "rows": self._sums.rows,
            "seconds": time.perf_counter() - self._opened,
            "time": time.time(),
            "step_time_median_s": float(np.median(self._step_times)),
            "step_time_p95_s": float(np.quantile(self._step_times, 0.95)),
            "data_wait_s": float(np.sum(self._data_waits)),
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "gpu_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
            "steps_s": float(np.sum(self._step_times)),
            "forward_s": self.forward.seconds(),
            "resident_mib": _mib(resident_memory()),
            "memory_left_mib": _mib(memory_left()),
            "throttled_s": _known(throttling.seconds),
            "throttled_share": _known(throttling.share),
        }
        combined, ranks = reduce(self._sums, self.own, self._group)
        self.ranks = {name: values for name, values in ranks.items() if name != "time"}
        self.recent.add(combined.rows, combined.means)
        record = {
            "step": step,
            "epoch": epoch,
            "steps": self.steps,
            "rows": combined.rows,
            **combined.means,
            "learning_rate": learning_rate,
            **{name: combined.maxima[name] for name in NUMBERS},
            "rows_per_s": combined.rows / combined.maxima["seconds"],
            "world_size": dist.get_world_size(self._group),
        }
        self._open()
        return record


def _mib(size: int | None) -> float:
    return math.nan if size is None else round(size / 2**20, 3)


def _known(number: float | None) -> float:
    return math.nan if number is None else number
