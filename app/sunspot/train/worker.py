"""One worker of a group: ends each step, and evaluates, saves, reports and restarts as is due after it."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import ray.train
import torch
import torch.distributed as dist

from sunspot.background import CLOSE_TIMEOUT_S, start_thread
from sunspot.checkpoint import CheckpointManager
from sunspot.data.source import Batch
from sunspot.elastic.control import CommandPoller
from sunspot.elastic.copies import LiveState
from sunspot.elastic.restore import StateMetadata
from sunspot.elastic.watchdog import Watchdog
from sunspot.log import warn_once
from sunspot.observe.metrics import MetricWindow, RecentMeans
from sunspot.observe.prometheus import Telemetry
from sunspot.parallel.collectives import broadcast_from_rank0, run_on_all_ranks
from sunspot.parallel.decisions import StepActions, StepDecisionBroadcast
from sunspot.parallel.sharding import is_fsdp
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.settings import PREFIX
from sunspot.train.evaluate import Evaluation, Patience, evaluate
from sunspot.train.learner import Learner
from sunspot.train.nan_watch import NanWatch
from sunspot.train.reporter import Reporter

log = logging.getLogger(__name__)

REPORT_TO_RAY_EVERY_S = 2
"""Ray takes one report for each poll of its controller, and makes the workers wait for it."""

DRAIN_S = 60
"""Upper bound on the wait for a commit before a voluntary restart; the state is in memory already."""

EXIT_AFTER_S = 5.0
"""Between the end of a worker group and the exit of its processes. Ray keeps them until it has room for a new group,
and with them a node that is to go: Kubernetes replaces a pod only when it is gone."""

DEADLINE_MARGIN_S = 1.0
"""Left of a notice when the workers end, committed or not: the survivors have the state in memory."""


@dataclass(frozen=True)
class Beginning:
    """Where a worker group takes up the training."""

    step: int
    "Optimizer steps taken so far."
    evaluated: bool
    "False: an epoch ends at `step`, and its evaluation is to be made up."
    metrics: dict[str, Any]
    "Metrics of the state that the group starts from."
    await_sums: Callable[[], None] | None = None
    "Returns when a step's gradients are summed, of a process that outlives its group (train/survivor.py)."
    in_place: bool = False
    "Whether all workers have found their parameters to be the same, so that none needs another's."
    window: MetricWindow | None = None
    "The metrics that it brings from the group before."
    is_closed: Callable[[], bool] | None = None
    "Returns True once the group has ended, for a process that outlives it."
    examined: bool = True
    "Whether the weights are those of a checkpoint, which were looked at when it was saved."


class RegroupError(Exception):
    """Ends this worker's part in its group: the processes stay, and form the next one."""


@dataclass
class Step:
    """A step that this worker takes with the others."""

    number: int
    "Optimizer steps taken, with this one."
    share: Batch
    "This worker's rows; maybe none."
    size: int
    "Rows of all workers."
    began: float
    "When the wait for its rows began (`perf_counter`)."
    data_wait_s: float
    values: list[Batch] = field(default_factory=list)
    "What the loop has logged of each row, by pass."
    learning_rate: float = 0.0
    seconds: float = 0.0
    "How long it took, with the wait."

    @property
    def rows(self) -> torch.Tensor | None:
        """Ids of this worker's rows, int64 [B]."""
        return self.share.get("row")

    @property
    def has_rows(self) -> bool:
        return self.rows is not None and len(self.rows) > 0


class Worker:
    """A worker between its steps: `finish_step` is the one place where a step ends, for every kind of loop."""

    def __init__(
        self,
        learner: Learner,
        beginning: Beginning,
        checkpoints: CheckpointManager,
        commands: CommandPoller,
        watchdog: Watchdog,
        telemetry: Telemetry,
        reporter: Reporter | None,
        outputs: ExitStack,
    ) -> None:
        """`commands` asks the driver on rank 0, which alone has a `reporter`; closing `outputs` brings a rank's log,
        metrics and status to storage.
        """
        self.learner, self.beginning, self.checkpoints = learner, beginning, checkpoints
        self.commands, self.watchdog, self.telemetry = commands, watchdog, telemetry
        self.reporter, self._outputs = reporter, outputs
        self._group = cast(dist.ProcessGroup, learner.place.group)  # one that trains has a group, if only of one
        recent = RecentMeans(learner.plan.steps.rows, beginning.metrics)
        if beginning.window:
            beginning.window.move(self._group)
        self.window = beginning.window or MetricWindow(self._group, learner.place.device, recent)
        "Metrics of the steps since the newest record."
        self._decisions = StepDecisionBroadcast(self._group)
        self._evaluated = beginning.evaluated
        "Whether the epoch that ends at `step`, if one does, is evaluated."
        self._makes_up = not beginning.evaluated
        self._record = beginning.metrics
        "Metrics of the state at `step`; empty for one that no record ends at."
        self._patience = Patience(learner.plan.settings, beginning.metrics)
        examined = beginning.examined or beginning.step == 0
        self._nan_watch = NanWatch(learner.plan.settings, self._group, beginning.metrics, learner.model, examined)
        self._reported = 0.0
        self.outlives, self.step, self.taken = bool(beginning.await_sums), beginning.step, time.time()
        "Optimizer steps taken, and when the last one had been."
        self._saved = False
        "Whether it has saved as the head is to go."
        self._undo = learner.undo if self.outlives and not is_fsdp(learner.model) else None
        if self._undo:
            self._undo.keep()

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over several workers."""
        return self.learner.place.world_size > 1

    # ------------------------------------------------------------------------------------------------ after a step

    def finish_step(self, taken: Step) -> bool:
        """Record a step and do what is due after it; all workers call this together. Returns whether the run stops.

        Raises to end the group when it restarts.
        """
        plan, step = self.learner.plan, taken.number
        self.step, self.taken = step, time.time()
        if self._undo:
            self._undo.accept()
            for text in self._undo.warnings() if self.reporter else ():
                warn_once(log, text)
        if self.reporter and step == self.beginning.step + 1:
            unread = plan.settings.task_args.describe_unread()
            if unread:
                warn_once(log, f"{PREFIX}TASK_ARGS: {unread}")
        every, has_more = plan.settings.checkpoint_every_steps, step < plan.total_steps
        epoch_ends = not has_more or step % plan.steps.per_epoch == 0
        self._evaluated, self._record = not (epoch_ends and plan.test), {}
        self._record_step(taken, epoch_ends)

        # Decide: what rank 0 wants, and what every rank knows of the step's number.
        agreed = self._decisions.agree(lambda: self.wanted(step))
        stop, restart, regroup = agreed.stop, agreed.restart and has_more, agreed.regroup and has_more
        parts_move = regroup and is_fsdp(self.learner.model)
        by_interval = agreed.save or (every > 0 and step % every == 0)
        save = stop or restart or epoch_ends or (by_interval and not agreed.busy)
        self._leave_closed_group()

        # Measure and evaluate.
        record: dict[str, Any] = {}
        if save or agreed.report or parts_move:
            record = self.window.close(step, (step - 1) // plan.steps.per_epoch + 1, taken.learning_rate)
            self._nan_watch.look(record, taken.values, save)
            record |= self._nan_watch.state
            self._end_if_diverged(record, last=not has_more)
        self._record = record
        if not (self._evaluated or stop or restart or regroup):
            # A loss meanwhile costs the evaluation, and no step.
            self.checkpoints.save(step, self._metrics(record), evaluated=False, to_storage=False)
            results, stop, restart = self._evaluate()
            record |= results or {}
            self._end_if_diverged(record, last=self._patience.over)

        # Act.
        if record:
            self.report(record)
        if save or agreed.copy or parts_move:
            if save and not self._nan_watch.finite_weights:
                self._drain()
            metrics = self._metrics(record)
            self.checkpoints.save(step, metrics, evaluated=self._evaluated, to_storage=save, needed=parts_move)
        if restart:
            self.restart_group()
        if regroup:
            if parts_move:
                self.checkpoints.close(finished=False)
            raise RegroupError
        return stop

    def _end_if_diverged(self, record: dict[str, Any], last: bool) -> None:
        """Raise `DivergedError` on all workers if the loss has not been finite for too long, or at the last step.

        The current state is not saved, but earlier states reach storage first. `last` is True if no step follows.
        """
        error = self._nan_watch.verdict(last)
        if error:
            self.report(record)
            with self.watchdog.paused():
                self.checkpoints.close(finished=True)
            raise error

    def _drain(self) -> None:
        """Wait on all workers until the newest state is in storage, before a state with NaN weights can replace it.

        Waiting costs nothing, because training from such weights is of no use.
        """
        with self.watchdog.paused():
            run_on_all_ranks(self._group, self.checkpoints.drain)

    def begin_step(self, step: Step) -> None:
        """Note that a step begins. Raises `RegroupError` if the group has ended."""
        self._leave_closed_group()
        if self._undo:
            self._undo.begin_step()
        if self.outlives:
            self.checkpoints.begin_step(step.number, step.rows, step.size)

    def _leave_closed_group(self) -> None:
        """Raise `RegroupError` if the group has ended. In a group of one, no collective would fail because of that."""
        if self.beginning.is_closed and self.beginning.is_closed():
            raise RegroupError

    def begin_change(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Wait until the step that has begun may change parameters; `optimizer` is the one that is about to, if any."""
        self.checkpoints.wait_for_copy()
        if self.beginning.await_sums:
            self.beginning.await_sums()
        if self._undo and optimizer:
            self._undo.before_change(optimizer)

    def leave(self) -> tuple[LiveState, StateMetadata] | None:
        """Return the state that this process has when its group ends.

        Returns None if the process has only a part of the state (fsdp), or has begun a step that cannot be taken back.
        """
        windows = self.checkpoints.leave_group(self.step)
        if not self._undo or not self._undo.put_back():
            return None
        live = LiveState(self.checkpoints.name_at(self.step), self._evaluated)
        return live, StateMetadata(self._metrics(self._record), self.taken, windows)

    def _metrics(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has of a record; a copy without one hands on the means."""
        return {**record, **self.window.recent.newest, **self._patience.state, **self._nan_watch.state}

    def _record_step(self, taken: Step, epoch_ends: bool) -> None:
        self.learner.average.update(taken.number)
        self.window.add_step(taken.values, taken.seconds, taken.data_wait_s)
        self.watchdog.heartbeat(taken.number)
        self.telemetry.took_step(taken.number, taken.seconds)
        self.checkpoints.took_step(taken.number, taken.rows)
        if self.reporter:
            self.reporter.took_step(taken.number, self.window, epoch_ends)

    def wanted(self, step: int) -> StepActions:
        """Return what rank 0 wants done after `step`; nothing on other ranks."""
        if not self.reporter:
            return StepActions()
        command, due = self.commands.poll(), self.checkpoints.due(step, self.window.last_step_s)
        asked = command.save and not self._saved and not due.busy
        self._saved |= asked
        return due._replace(
            save=due.save or asked,
            report=self.reporter.due(),
            stop=command.stop,
            restart=command.restart,
            regroup=command.regroup,
        )

    def report(self, record: dict[str, Any]) -> None:
        """Add the record of a closed window to the metric history and report it to Ray; all workers do so together."""
        self.telemetry.report(self.window.own)
        if self.reporter:
            self.reporter.report(record, self.window.recent.newest, self.window.ranks or {})
        if self.outlives:
            return  # Ray's report is a barrier: one would wait there for the others, who form the next group
        if abs(record["time"] - self._reported) >= REPORT_TO_RAY_EVERY_S:  # a clock may be set back
            self._reported = record["time"]
            ray.train.report(record)

    # -------------------------------------------------------------------------------------------------- evaluation

    def make_up_evaluation(self) -> bool:
        """Evaluate the end of the epoch that this group starts from, if the one before did not.

        Returns whether the run stops; raises to end the group when it restarts.
        """
        if not self._makes_up:
            return False
        self._makes_up = False
        step, metrics = self.beginning.step, self.beginning.metrics
        results, stop, restart = self._evaluate()
        if results is None:
            self.checkpoints.save(step, metrics, evaluated=False)  # it may be in memory only
        else:
            metrics = {**metrics, **results, **self._patience.state, "time": time.time()}
            if self.reporter:
                self.reporter.add_evaluation(metrics)
            self.checkpoints.save(step, metrics)
        if restart:
            self.restart_group()
        return stop

    def _evaluate(self) -> Evaluation:
        """Evaluate, and stop if that is no better than those before."""
        if self.learner.plan.settings.ema:
            self.checkpoints.wait_for_copy()  # the average takes the weights' place
        results, stop, restart = evaluate(self.learner, self.commands.poll, self._heartbeat)
        self._evaluated = results is not None
        if self._undo:
            self._undo.accept()
        return Evaluation(results, stop or (results is not None and self._patience.ends(results)), restart)

    def _heartbeat(self, evaluated: bool) -> None:
        """Record that this worker is alive in an evaluation, and whether it has `evaluated` a batch."""
        self._leave_closed_group()
        if evaluated:
            self.telemetry.evaluated()
        self.watchdog.heartbeat()
        if self.reporter:
            self.reporter.heartbeat()

    # ----------------------------------------------------------------------------------------------------- restart

    def restart_group(self) -> NoReturn:
        """End this worker group once the newest copy is safe: Ray starts one on the nodes there are then.

        Ray kills all of its processes once the first has raised, so what they printed and measured goes to storage
        before, as far as a notice leaves time for it.
        """
        with self.watchdog.paused():
            limit_s = self._drain_limit_s()
            run_on_all_ranks(self._group, lambda: self.reporter.drain(limit_s) if self.reporter else None)
            self.checkpoints.close(finished=False)
            restart = GroupRestartError()
            print(restart)  # how its log ends
            left_s = broadcast_from_rank0(self._group, self._drain_limit_s)  # which alone knows of a notice
            output_s = CLOSE_TIMEOUT_S if left_s is None else min(left_s, CLOSE_TIMEOUT_S)

            def close() -> None:
                with suppress(TimeoutError):
                    close_outputs(self._outputs).result(output_s)

            run_on_all_ranks(self._group, close)
        timer = threading.Timer(EXIT_AFTER_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        raise restart

    def _drain_limit_s(self) -> float | None:
        """Return the seconds that the last commit may take, and then the last output; None: no limit."""
        command = self.commands.poll()
        if command.deadline is not None:
            left_s = max(0.0, command.deadline - time.time() - DEADLINE_MARGIN_S)
            # A clock that was set back would wait for hours.
            return min(left_s, self.learner.plan.settings.notice_s or left_s)
        return DRAIN_S if self.checkpoints.in_memory and not command.moves else None


def close_outputs(outputs: ExitStack) -> Future[None]:
    """Begin to bring to storage what is not there yet of a worker's outputs; who waits for it chooses how long."""
    return start_thread(outputs.pop_all().close, "outputs")
