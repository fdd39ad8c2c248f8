"""What the training loop asks of its worker: what is due after a step, saving, reporting, making way, the end."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

from app.checkpoint.commit import CheckpointCommitter, describe, versions
from app.checkpoint.ledger import Ledger
from app.checkpoint.snapshot import Snapshots
from app.data.order import Steps
from app.data.ray_loader import RayLoader
from app.data.source import Batch, Source
from app.data.torch_loader import TorchLoader
from app.elastic.control import CommandPoller
from app.elastic.receipts import RESTARTING
from app.elastic.watchdog import Watchdog
from app.observe.metrics import MetricWindow, scalars
from app.observe.prometheus import Telemetry
from app.parallel import StepActions, sync_buffers
from app.run.attempts import Attempt
from app.run.checkpoints import Checkpoint
from app.settings import Settings
from app.tasks import Task
from app.train.reporter import Reporter

REPORT_TO_RAY_EVERY_S = 2
"""Ray takes one report for each poll of its controller, and makes the workers wait for it."""

DRAIN_S = 60
"""The most that storage is waited for before a restart, when no node is going, and memory has the state anyway."""

EXIT_AFTER_S = 5.0
"""Between the end of a worker group and the exit of its processes. Ray keeps them until it has room for a new group,
and with them a node that is to go: Kubernetes replaces a pod only when it is gone."""

DEADLINE_MARGIN_S = 1.0
"""Left of a notice when the workers end, committed or not: the survivors have the state in memory."""


@dataclass
class Worker:
    """What the training loop needs, the same names on every worker."""

    settings: Settings
    task: Task
    source: Source
    "The training rows."
    steps: Steps
    total_steps: int
    attempt: Attempt
    start: int
    "Optimizer steps taken where this group starts."
    evaluated: bool
    "False: an epoch ends at `start`, and is still to be evaluated."
    metrics: dict[str, Any]
    "Of the state that this group starts from."
    rank: int
    world_size: int
    device: torch.device
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: TorchLoader | RayLoader
    has_test: bool
    stand_in: Batch
    "Two rows for a worker whose share of a step is empty."
    control_group: dist.ProcessGroup
    "Carries decisions and numbers between workers, on the CPU and apart from the gradients."
    commands: CommandPoller
    watchdog: Watchdog
    ledger: Ledger
    telemetry: Telemetry
    snapshots: Snapshots | None
    "On one worker of each node, as under DDP each has the whole state; under FSDP on all."
    saver: CheckpointCommitter | None = None
    "On rank 0; under FSDP on all."
    news: Reporter | None = None
    "On rank 0 only."
    _reported: float = 0.0

    @property
    def in_parts(self) -> bool:
        """Whether each worker has, and saves, only its part of the state."""
        return self.settings.parallel == "fsdp"

    def due(self, step: int, step_time: float) -> StepActions:
        """What rank 0 wants done after `step`, which took `step_time` seconds; nothing, on the others."""
        if not self.news or not self.snapshots:
            return StepActions()
        news, command = self.news, self.commands.look()
        busy = self.in_parts and self.saver is not None and self.saver.busy
        return StepActions(
            save=not busy and news.save_timer.due(news.save_every_s),
            busy=busy,
            copy=self.snapshots.memory.shared and news.pace.due(step, step_time, self.snapshots.costs),
            report=news.report_timer.due(self.settings.report_every_s),
            stop=command.stop,
            restart=command.restart,
        )

    def took_step(self, step: int, rows: torch.Tensor | None, window: MetricWindow, epoch_ends: bool) -> None:
        """Note that a step has been taken, and which rows it consumed."""
        self.watchdog.heartbeat(step)
        self.ledger.add_step(step, rows)
        self.telemetry.took_step(step, window.last_step_s)
        if self.snapshots:
            self.snapshots.memory.heartbeat(self.attempt.number, step)
        if self.news:
            self.news.took_step(step, window, epoch_ends)

    def heartbeat(self) -> None:
        """Note that some rows have been evaluated."""
        self.watchdog.heartbeat()
        self.telemetry.evaluated()
        if self.news:
            self.news.heartbeat()

    def wait_for_copy(self) -> None:
        """Return when parameters may change again; raises what ended the commits for good, if anything did."""
        if self.snapshots:
            self.snapshots.wait_for_copy()
        if self.saver:
            self.saver.raise_if_failed()

    def keep(self, step: int, metrics: dict[str, Any], evaluated: bool, for_storage: bool) -> None:
        """Begin to copy the state at `step`, which all workers do together; `for_storage` makes it a checkpoint."""
        began = time.thread_time()  # waiting for slower workers is no cost: the next gradients would
        if self.settings.snapshot_cost:
            sync_buffers(self.model)
        windows = self.ledger.gather(step)
        together = time.thread_time() - began
        if not self.snapshots or not (self.snapshots.memory.shared or (self.saver and for_storage)):
            return
        if self.in_parts:
            self._finish_commit()
        about = describe(self.attempt, step, self.steps.per_epoch, self.total_steps, scalars(metrics), evaluated)
        commits = for_storage and self.saver is not None
        snapshot = self.snapshots.take(
            about,
            self.model,
            self.optimizer,
            self._extra_state(about) if commits else {},  # a copy in memory is read by this very run
            windows,
            needed=for_storage,
            for_storage=commits,
        )
        self.snapshots.charge(together)
        if self.saver and snapshot and commits:
            self.saver.commit(snapshot)

    def _finish_commit(self) -> None:
        """Wait for the commit of the snapshot before, on all workers: one that was taken in parts is never dropped for
        a newer one, as another worker might not. Only a checkpoint that cannot wait comes so early.
        """
        if self.saver:
            with self.watchdog.paused():
                self.saver.drain()
                dist.barrier(group=self.control_group)

    def _extra_state(self, about: Checkpoint) -> dict[str, Any]:
        """What a checkpoint says of where it comes from, besides its manifest."""
        return {
            "step": about.step,
            "epoch": about.epoch,
            # The loader's position and the generators' states are functions of these and the step.
            "loader": {"name": self.settings.loader, **dataclasses.asdict(self.steps)},
            "rng": {"seed": self.settings.seed, "step": about.step},
            "settings": self.settings.environment(),
            # What the task builds its model for (EmptySource): with it a checkpoint is all that a prediction needs.
            "data": {"shape": list(self.source.shape), "classes": self.source.classes},
            "versions": versions(),
        }

    def report(self, record: dict[str, Any]) -> None:
        """Add a record to the metric history, and tell Ray; all workers call this with the same record."""
        self.telemetry.report(record)
        if self.news:
            self.news.report(record)
        if record["time"] - self._reported >= REPORT_TO_RAY_EVERY_S:
            self._reported = record["time"]
            ray.train.report(scalars(record))

    def catch_up(self, step: int, results: dict[str, float] | None) -> None:
        """Record the evaluation that the workers before could not make; restart when these cannot either."""
        if results is None:
            self.restart()
        metrics = {**self.metrics, **results, "time": time.time()}
        if self.news:
            self.news.catch_up(metrics)
        self.keep(step, metrics, evaluated=True, for_storage=True)

    def restart(self) -> NoReturn:
        """Wait until the newest copy is safe, and end this worker group: Ray starts one on the nodes there are then."""
        with self.watchdog.paused():
            if self.snapshots:
                self.snapshots.wait_until_whole()
            if self.news:
                self.news.drain(self._drain_limit_s())
            dist.barrier(group=self.control_group)  # the first to end takes the others along
        gone = threading.Timer(EXIT_AFTER_S, os._exit, (0,))
        gone.daemon = True
        gone.start()
        raise RayActorError(error_msg=RESTARTING, preempted=True)

    def _drain_limit_s(self) -> float | None:
        """Seconds that the commit of the last checkpoint may take; None: as long as it takes."""
        deadline = self.commands.look().deadline
        if deadline is not None:
            return max(0.0, deadline - time.time() - DEADLINE_MARGIN_S)
        return DRAIN_S if self.snapshots and self.snapshots.memory.shared else None

    def finish(self) -> None:
        """Wait until the newest checkpoint is committed; what lies in memory is not needed any more."""
        with self.watchdog.paused():
            if self.saver:
                self.saver.finish()
            if self.snapshots:
                self.snapshots.wait_until_whole()
            dist.barrier(group=self.control_group)
            if self.snapshots:
                self.snapshots.memory.remove()
