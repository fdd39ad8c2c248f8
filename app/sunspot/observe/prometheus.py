"""Exports a run's metrics to Prometheus through Ray's exporter. Each node exposes the metrics of its own processes.

Ray prefixes the names below with `ray_` and adds labels, including `WorkerId`, so each worker process has its own time
series. A process's counters keep their last value after the process exits. Ray's agent drops gauges that have not been
set for 20 s, so a thread sets all gauges repeatedly.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from ray.util.metrics import Counter, Gauge, Histogram

from sunspot.background import Background
from sunspot.machine.cgroup import memory_left, resident_memory
from sunspot.run import Run
from sunspot.run.forecast import forecast
from sunspot.run.seen import look, read_details

EXPORT_EVERY_S = 5.0
"""Seconds between exports.

Ray's processes report to the node's agent every 10 s (`metrics_report_interval_ms`, Ray 2.60). The agent drops gauges
that are missing from two reports.
"""

STEP_BUCKETS_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
"""Histogram buckets, from steps of the smallest model on a CPU to steps of many micro-batches."""

COUNTERS = {
    "steps_total": "Optimizer steps taken by this rank, including steps repeated after a restart.",
    "rows_total": "Rows that this rank has trained on.",
    "step_seconds_total": "Seconds that this rank spent in steps, including waits for other ranks.",
    "data_wait_seconds_total": "Seconds that this rank waited for rows during its steps.",
    "forward_seconds_total": "Seconds that this rank spent in forward passes, which do not wait for other ranks.",
    "checkpoint_stall_seconds_total": "Seconds for which copying the state delayed training.",
    "evaluated_batches_total": "Batches of held-out rows that this rank has evaluated.",
}
"""Counters of each rank. A counter appears with its first increment."""

GAUGES = {
    "step": "Optimizer steps of the run that this rank has reached.",
    "resident_memory_bytes": "Memory that this process does not share with other processes.",
    "memory_available_bytes": "Memory left until the limit of the container or the machine.",
    "gpu_memory_peak_bytes": "Peak memory of this process's tensors on its GPU, or 0 without a GPU.",
    "gpu_memory_limit_bytes": "Memory of this process's GPU, or 0 without a GPU.",
}
"""Gauges of each rank."""

RUN_GAUGES = {
    "planned_steps": "Optimizer steps at which the run ends.",
    "workers": "Number of training workers in the current worker group.",
    "attempt": "Number of the current attempt. Each start of a worker group is an attempt.",
    "attempt_timestamp_seconds": "Unix time at which the current worker group began, in seconds.",
    "loss": "Mean loss of the last 10,000 training rows of all workers, or of a shorter epoch.",
    "nan_windows": "Number of consecutive metric windows, up to the newest, with a NaN or infinite loss.",
    "goodput_ratio": "Useful fraction of all worker-seconds of the run so far.",
    "checkpoint_timestamp_seconds": "Unix time at which the newest checkpoint was committed, in seconds. Before the "
    "first checkpoint, it is the time at which the run began.",
    "checkpoint_interval_seconds": "Longest time that should pass between two checkpoints, at the current pace.",
    "checkpoint_commit_seconds": "Seconds from the beginning of the newest save until its commit.",
}
"""Gauges of the whole run, exported by rank 0 (`Reporter.gauges`)."""

INCIDENTS = "incidents"
"""Name of the gauge with the number of incidents.

It is computed from storage, because an incident ends the process that would count it.
"""

RUN_ACTIVE = "run_active"
"""Name of the gauge that every driver exports."""

LIMIT_GAUGES = {
    "deadline_missed_seconds": "Seconds by which the run will miss its SUNSPOT_DEADLINE at its current speed, or 0.",
    "budget_excess_ratio": "Expected cost beyond SUNSPOT_BUDGET, divided by the budget, or 0.",
}
"""Gauges of a run with DEADLINE or BUDGET, exported by the driver."""

FORECAST_EVERY_S = 20.0
"""Seconds between two forecasts. Each of them reads the run from storage."""


class RunGauges(NamedTuple):
    """The metrics of the whole run, which rank 0 exports."""

    values: Mapping[str, float]
    "Known values, keyed by name in RUN_GAUGES."
    incidents: Mapping[str, int]
    "The number of incidents in the run, keyed by cause."


class Telemetry:
    """Exports one rank's metrics, and on rank 0 those of the whole run.

    The training thread only adds numbers. Another thread passes the sums to Ray every EXPORT_EVERY_S, because each
    call to Ray takes 2 to 3 microseconds.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        device: torch.device,
        stall_s: Callable[[], float],
        read_run: Callable[[], RunGauges] | None,
    ) -> None:
        """Create the metrics for one rank.

        `stall_s` returns the seconds for which copying the state delayed training. On rank 0, `read_run` returns the
        metrics of the whole run.
        """
        self._device = device
        self._stall_s = stall_s
        self._read_run = read_run or (lambda: RunGauges({}, {}))
        of_rank = {"run": run, "rank": str(rank)}
        self._counters = {name: _make(Counter, name, text, of_rank) for name, text in COUNTERS.items()}
        self._gauges = {name: _make(Gauge, name, text, of_rank) for name, text in GAUGES.items()}
        text = "Duration of optimizer steps. Ray keeps only the buckets, so the sum is an estimate."
        self._duration = Histogram("sunspot_step_duration_seconds", text, STEP_BUCKETS_S, tuple(of_rank))
        self._duration.set_default_tags(of_rank)
        of_run = {"run": run}
        self._run_gauges = {name: _make(Gauge, name, text, of_run) for name, text in RUN_GAUGES.items()}
        text = "Incidents that have interrupted the run so far, by cause."
        self._incidents = Gauge(f"sunspot_{INCIDENTS}", text, ("run", "cause")).set_default_tags(of_run)
        self._step: int | None = None
        self._durations: deque[float] = deque()
        self._sums = dict.fromkeys(COUNTERS, 0.0)
        self._exported = dict.fromkeys(COUNTERS, 0.0)

    # ---------------------------------------------------------------------------- training thread

    def took_step(self, step: int, seconds: float) -> None:
        """Count a step. `step` is the number of steps so far, and `seconds` is the duration of this step."""
        self._step = step
        self._sums["steps_total"] += 1
        self._durations.append(seconds)

    def evaluated(self) -> None:
        """Count a batch of held-out rows."""
        self._sums["evaluated_batches_total"] += 1

    def report(self, mine: Mapping[str, float]) -> None:
        """Add this rank's numbers for a window (`MetricWindow.own`)."""
        self._sums["rows_total"] += mine["rows"]
        self._sums["step_seconds_total"] += mine["steps_s"]
        self._sums["data_wait_seconds_total"] += mine["data_wait_s"]
        self._sums["forward_seconds_total"] += mine["forward_s"]

    # ------------------------------------------------------------------------------ exporting thread

    def export(self) -> None:
        """Pass all metrics to Ray."""
        while self._durations:
            self._duration.observe(self._durations.popleft())
        self._sums["checkpoint_stall_seconds_total"] = self._stall_s()
        for name, total in self._sums.items():
            if total > self._exported[name]:  # Ray rejects an increment of 0
                self._counters[name].inc(total - self._exported[name])
                self._exported[name] = total
        for name, value in {**self._memory(), "step": self._step}.items():
            if value is not None:
                self._gauges[name].set(value)
        of_run, incidents = self._read_run()
        for name, number in of_run.items():
            self._run_gauges[name].set(number)
        for cause, times in incidents.items():
            self._incidents.set(times, {"cause": cause})

    def _memory(self) -> dict[str, int | None]:
        on_gpu = self._device.type == "cuda"
        return {
            "resident_memory_bytes": resident_memory(),
            "memory_available_bytes": memory_left(),
            "gpu_memory_peak_bytes": torch.cuda.max_memory_allocated(self._device) if on_gpu else 0,
            "gpu_memory_limit_bytes": torch.cuda.get_device_properties(self._device).total_memory if on_gpu else 0,
        }


@contextmanager
def exported_run(run: Run, has_limits: bool = False) -> Iterator[None]:
    """Context manager that makes the driver export the run as active, even while the driver waits for workers.

    With `has_limits`, the driver also exports by how much the run will exceed its deadline and its budget.
    """
    text = "1 while a driver trains the run, even if it has no workers yet."
    of_run = {"run": run.name}
    gauges = {RUN_ACTIVE: _make(Gauge, RUN_ACTIVE, text, of_run)}
    values = {RUN_ACTIVE: 1.0}

    def predict() -> None:
        expected = forecast(read_details(look(run)))
        excess = expected.excess / expected.budget if expected.budget else 0.0
        values.update(zip(LIMIT_GAUGES, (expected.late_s, excess), strict=True))

    def export() -> None:
        for name, value in list(values.items()):
            gauges[name].set(value)

    export()
    with ExitStack() as stack:
        if has_limits:
            gauges |= {name: _make(Gauge, name, text, of_run) for name, text in LIMIT_GAUGES.items()}
            stack.enter_context(Background(FORECAST_EVERY_S, predict))
        stack.enter_context(Background(EXPORT_EVERY_S, export))
        yield


def _make(kind: type[Any], name: str, text: str, tags: dict[str, str]) -> Any:
    return kind(f"sunspot_{name}", text, tuple(tags)).set_default_tags(tags)
