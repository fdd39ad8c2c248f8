"""The workers' numbers, gathered over a window of steps and reduced to one record of the metric history."""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from app.data.batch import Batch


class Sums:
    """Sums of per-row values, kept on the device: reading a number there would wait for it."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, values: Batch) -> None:
        """Add the values of some rows, by name, each [B]."""
        self.rows += len(next(iter(values.values())))
        for name, rows in values.items():
            total = rows.detach().double().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def totals(self) -> dict[str, float]:
        """The sums so far, and the number of `rows`; waits for the device."""
        return {"rows": self.rows, **{name: float(total) for name, total in self._sums.items()}}


def mean_over_workers(sums: Sums, group: dist.ProcessGroup) -> dict[str, float]:
    """The mean over the rows of all workers, for each name; every worker gets it."""
    return _means(_gather(sums.totals(), group))


class Window:
    """What this worker did since the window opened; `close` reduces all workers' windows to one record."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._open()

    def _open(self) -> None:
        self._sums = Sums()
        self._step_times: list[float] = []
        self._data_waits: list[float] = []
        self._opened = time.perf_counter()

    @property
    def steps(self) -> int:
        return len(self._step_times)

    @property
    def mean_loss(self) -> float:
        """Mean loss of this worker's rows so far; waits for the device."""
        totals = self._sums.totals()
        return totals.get("loss", float("nan")) / max(1, totals["rows"])

    def add_step(self, values: list[Batch], step_time: float, data_wait: float) -> None:
        """Count one optimizer step: its per-row `values`, and seconds."""
        for part in values:
            self._sums.add(part)
        self._step_times.append(step_time)
        self._data_waits.append(data_wait)

    def close(self, step: int, epoch: int, learning_rate: float) -> dict[str, Any]:
        """Reduce the windows of all workers, which call this together, to a record, and open a new one."""
        numbers = {
            "seconds": time.perf_counter() - self._opened,
            "time": time.time(),
            "step_time_median_s": float(np.median(self._step_times)),
            "step_time_p95_s": float(np.quantile(self._step_times, 0.95)),
            "data_wait_s": float(np.sum(self._data_waits)),
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "gpu_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        }
        everyone = _gather((self._sums.totals(), numbers), self._group)
        totals = [sums for sums, _ in everyone]
        ranks = [{"rows": sums["rows"], **numbers} for sums, numbers in everyone]
        slowest = {name: max(numbers[name] for _, numbers in everyone) for name in numbers}
        rows = int(sum(sums["rows"] for sums in totals))
        record = {
            "step": step,
            "epoch": epoch,
            "steps": self.steps,
            "rows": rows,
            **_means(totals),
            "learning_rate": learning_rate,
            **slowest,
            "rows_per_s": rows / slowest["seconds"],
            "world_size": len(ranks),
            "ranks": ranks,
        }
        self._open()
        return record


def scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Those values of a record that are not made of others."""
    return {name: value for name, value in record.items() if not isinstance(value, (list, dict))}


def _gather(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _means(totals: list[dict[str, float]]) -> dict[str, float]:
    rows = sum(sums["rows"] for sums in totals)
    names = sorted({name for sums in totals for name in sums} - {"rows"})
    return {name: sum(sums.get(name, 0.0) for sums in totals) / rows for name in names}
