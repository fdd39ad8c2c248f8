"""One worker of a group: what a step needs, and what it records, saves and reports after the step."""

import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray.train
import torch
import torch.distributed as dist

from sunspot.background import CLOSE_TIMEOUT_S, start_thread
from sunspot.checkpoint import CheckpointManager
from sunspot.checkpoint.average import WeightAverage
from sunspot.data.ray_loader import RayLoader
from sunspot.data.source import Batch
from sunspot.data.torch_loader import TorchLoader
from sunspot.elastic.control import CommandPoller
from sunspot.elastic.watchdog import Watchdog
from sunspot.observe.metrics import MetricWindow, RecentMeans
from sunspot.observe.prometheus import Telemetry
from sunspot.parallel.collectives import broadcast_from_rank0, run_on_all_ranks
from sunspot.parallel.decisions import StepActions
from sunspot.plan import Plan
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.tasks import Task
from sunspot.train.reporter import Reporter

REPORT_TO_RAY_EVERY_S = 2
"""Ray takes one report for each poll of its controller, and makes the workers wait for it."""

DRAIN_S = 60
"""Upper bound on the wait for a commit before a voluntary restart; the state is in memory already."""

EXIT_AFTER_S = 5.0
"""Between the end of a worker group and the exit of its processes. Ray keeps them until it has room for a new group,
and with them a node that is to go: Kubernetes replaces a pod only when it is gone."""

DEADLINE_MARGIN_S = 1.0
"""Left of a notice when the workers end, committed or not: the survivors have the state in memory."""


@dataclass
class Worker:
    """What the training loop needs; every worker of the group has one."""

    plan: Plan
    task: Task
    start: int
    "Optimizer steps taken where this group starts."
    evaluated: bool
    "False: an epoch ends at `start`, and its evaluation is to be made up."
    metrics: dict[str, Any]
    "Of the state that this group starts from."
    rank: int
    world_size: int
    device: torch.device
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    loader: TorchLoader | RayLoader
    padding_batch: Batch
    "Two rows for a worker whose share of a step is empty."
    control_group: dist.ProcessGroup
    "Carries decisions and numbers between workers, on the CPU and apart from the gradients."
    checkpoints: CheckpointManager
    commands: CommandPoller
    "Asks on rank 0 only: the workers act together on what it knows."
    watchdog: Watchdog
    telemetry: Telemetry
    reporter: Reporter | None
    "On rank 0 only."
    outputs: ExitStack = field(default_factory=ExitStack)
    "Bring its log, and on rank 0 metrics and status, to storage; the last of them as they are closed."
    _reported: float = 0.0
    _saved: bool = False
    "Whether it has saved as the head is to go."

    def open_window(self) -> MetricWindow:
        """For the metrics of the steps to come."""
        recent = RecentMeans(self.plan.steps.rows, self.metrics)
        return MetricWindow(self.control_group, self.device, recent)

    def due(self, step: int, step_s: float) -> StepActions:
        """What rank 0 wants done after `step`, which took `step_s` seconds; nothing on other ranks."""
        if not self.reporter:
            return StepActions()
        command, due = self.commands.poll(), self.checkpoints.due(step, step_s)
        asked = command.save and not self._saved and not due.busy
        self._saved |= asked
        return due._replace(
            save=due.save or asked, report=self.reporter.due(), stop=command.stop, restart=command.restart
        )

    def took_step(self, step: int, rows: torch.Tensor | None, window: MetricWindow, epoch_ends: bool) -> None:
        """Record that `step` was taken; `rows`, int64 [B], are the ids that this worker consumed in it."""
        self.watchdog.heartbeat(step)
        self.telemetry.took_step(step, window.last_step_s)
        self.checkpoints.took_step(step, rows)
        if self.reporter:
            self.reporter.took_step(step, window, epoch_ends)

    def heartbeat(self) -> None:
        """Record that some rows were evaluated."""
        self.telemetry.evaluated()
        self.waits()

    def waits(self) -> None:
        """Record that this worker is alive, and others evaluate."""
        self.watchdog.heartbeat()
        if self.reporter:
            self.reporter.heartbeat()

    def report(self, record: dict[str, Any], window: MetricWindow) -> None:
        """Add the record of a closed window to the metric history and report it to Ray; all workers do so together."""
        self.telemetry.report(window.own)
        if self.reporter:
            self.reporter.report(record, window.recent.newest, window.ranks or {})
        if abs(record["time"] - self._reported) >= REPORT_TO_RAY_EVERY_S:  # a clock may be set back
            self._reported = record["time"]
            ray.train.report(record)

    def add_evaluation(self, results: dict[str, float]) -> None:
        """Record the evaluation that the group before did not make."""
        metrics = {**self.metrics, **results, "time": time.time()}
        if self.reporter:
            self.reporter.add_evaluation(metrics)
        self.checkpoints.save(self.start, metrics)

    def restart_group(self) -> NoReturn:
        """End this worker group once the newest copy is safe: Ray starts one on the nodes there are then.

        Ray kills all of its processes once the first has raised, so what they printed and measured goes to storage
        before, as far as a notice leaves time for it.
        """
        with self.watchdog.paused():
            limit_s = self._drain_limit_s()
            run_on_all_ranks(self.control_group, lambda: self.reporter.drain(limit_s) if self.reporter else None)
            self.checkpoints.close(finished=False)
            restart = GroupRestartError()
            print(restart)  # how its log ends
            left_s = broadcast_from_rank0(self.control_group, self._drain_limit_s)  # which alone knows of a notice
            run_on_all_ranks(self.control_group, lambda: self._close_outputs(left_s))
        timer = threading.Timer(EXIT_AFTER_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        raise restart

    def _close_outputs(self, limit_s: float | None) -> None:
        """Bring to storage what is not there yet, as far as that takes no longer than a background task may."""
        with suppress(TimeoutError):
            closed = start_thread(self.outputs.pop_all().close, "outputs")
            closed.result(CLOSE_TIMEOUT_S if limit_s is None else min(limit_s, CLOSE_TIMEOUT_S))

    def _drain_limit_s(self) -> float | None:
        """Seconds that the commit of the last checkpoint may take, and then the last output; None: no limit."""
        command = self.commands.poll()
        if command.deadline is not None:
            left_s = max(0.0, command.deadline - time.time() - DEADLINE_MARGIN_S)
            return min(left_s, self.plan.settings.notice_s or left_s)  # a clock that was set back would wait for hours
        return DRAIN_S if self.checkpoints.in_memory and not command.moves else None
