"""A worker in a group. After each step, the worker evaluates, saves, reports or restarts as needed.

Parameters must not change while a copy thread reads them (see `Worker.wait_before_change`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, cast

import ray.train
import torch
import torch.distributed as dist

from sunspot.background import CLOSE_TIMEOUT_S, start_thread
from sunspot.checkpoint import CheckpointManager
from sunspot.data.source import Batch
from sunspot.elastic.control import CommandPoller
from sunspot.elastic.membership_channel import RegroupError
from sunspot.elastic.watchdog import Watchdog
from sunspot.log import warn_once
from sunspot.metric_names import MetricRecord
from sunspot.observe.metrics import MetricWindow, RecentMeans
from sunspot.observe.prometheus import Telemetry
from sunspot.parallel.collectives import broadcast_from_rank0, run_on_all_ranks
from sunspot.parallel.decisions import StepActions, StepDecisionBroadcast
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run.history import model_metrics
from sunspot.settings import PREFIX
from sunspot.train.evaluate import Evaluation, Patience, describe_absent, evaluate
from sunspot.train.learner import Learner
from sunspot.train.nan_watch import NanWatch
from sunspot.train.profiler import StepProfiler
from sunspot.train.reporter import Reporter
from sunspot.train.step_guard import StepGuard

log = logging.getLogger(__name__)

REPORT_TO_RAY_EVERY_S = 2
"""Minimum number of seconds between two reports to Ray, which makes all workers wait for each of them."""

DRAIN_S = 60
"""Maximum number of seconds to wait for a commit before a voluntary restart. The state is in memory already."""

EXIT_AFTER_S = 5.0
"""Seconds between the end of a worker group and the exit of its processes.

Ray would keep the processes until it has room for a new group. They would keep a draining node alive, and Kubernetes
does not replace a pod until the pod is gone.
"""

DEADLINE_MARGIN_S = 1.0
"""Seconds before the deadline of a notice at which the workers end, even if the state is only in memory."""


@dataclass(frozen=True)
class GroupStart:
    """The state from which a worker group continues, and the objects that a worker keeps from its previous group."""

    step: int
    "Optimizer steps taken so far."
    evaluated: bool
    "False if an epoch ends at `step` and its evaluation is still missing."
    metrics: MetricRecord
    "Metrics of the state that the group starts from."
    in_place: bool = False
    "True if all workers hold the same parameters already, so that rank 0 need not broadcast its own."
    window: MetricWindow | None = None
    "Window of metrics that the process has kept from the previous group."
    is_closed: Callable[[], bool] | None = None
    "Function that returns True once the group has ended, or None if the process ends with its group."
    weights_checked: bool = True
    "True if the weights come from a checkpoint. They were checked for NaN when the checkpoint was saved."


@dataclass
class Step:
    """A step that this worker takes together with the others."""

    number: int
    "Number of optimizer steps taken, including this one."
    share: Batch
    "This worker's rows of the step. There may be none."
    size: int
    "Number of rows of all workers together."
    began: float
    "Time at which the wait for the rows began (`perf_counter`)."
    data_wait_s: float
    "Seconds that the worker waited for its rows."
    values: list[Batch] = field(default_factory=list)
    "Values that the loop has logged for each row, one batch for each pass."
    learning_rate: float = 0.0
    seconds: float = 0.0
    "Duration of the step, including the wait for its rows."
    ended: float = field(default=0.0, init=False)
    "Time at which the step ended."

    def __post_init__(self) -> None:
        self.rows = self.share.get("row")
        "IDs of this worker's rows, int64 [B], or None if it has no rows. `run.batches` prefers those in main memory."
        self.own_rows = 0 if self.rows is None else self.rows.shape[0]
        "Number of this worker's rows."


class Worker:
    """A worker in a group. All kinds of training loops use it through the same few methods.

    `TrainingRun` calls `begin_step` before each step, `wait_before_change` before parameters change, and `finish_step`
    after each step. If the group ends during a step, `step_guard` undoes the step (`survivor.abandon_step`).
    """

    def __init__(
        self,
        learner: Learner,
        group_start: GroupStart,
        checkpoints: CheckpointManager,
        commands: CommandPoller,
        watchdog: Watchdog,
        telemetry: Telemetry,
        reporter: Reporter | None,
        outputs: ExitStack,
    ) -> None:
        """Create a worker. Only rank 0 has a `reporter`, and only rank 0's `commands` query the driver.

        Closing `outputs` writes the rest of this rank's log, metrics and status to storage.
        """
        self.learner = learner
        self.group_start = group_start
        self.checkpoints = checkpoints
        self.commands = commands
        self.watchdog = watchdog
        self.telemetry = telemetry
        self.reporter = reporter
        self._outputs = outputs
        self._group = cast(dist.ProcessGroup, learner.place.group)  # a training worker has a group, perhaps of one
        recent = RecentMeans(learner.plan.steps.rows, group_start.metrics)
        if group_start.window:
            group_start.window.move(self._group)
        self.window = group_start.window or MetricWindow(self._group, learner.place.device, recent)
        "Metrics of the steps since the newest record."
        self._decisions = StepDecisionBroadcast(self._group)
        self.evaluated = group_start.evaluated
        "False if an epoch ends at `step` and its evaluation has not been done."
        self._must_repeat_evaluation = not group_start.evaluated
        "True until the evaluation that the previous group did not complete has been repeated."
        self.record = group_start.metrics
        "Metrics of the state at `step`, or empty if no record ends there."
        self._patience = Patience(learner.plan.settings, group_start.metrics)
        checked = group_start.weights_checked or group_start.step == 0
        self.profiler = StepProfiler(learner.plan, learner.place)
        self._nan_watch = NanWatch(learner.plan.settings, self._group, group_start.metrics, learner.model, checked)
        self._reported = 0.0
        self.step = group_start.step
        "Number of optimizer steps taken."
        self.step_ended = time.time()
        "Time at which the newest step ended."
        self.outlives_groups = learner.place.sums is not None
        "True if this process outlives its group and joins the next group."
        self._saved_for_head = False
        "True once this worker has saved because the head node is being reclaimed."
        undo = learner.undo if self.outlives_groups and learner.plan.settings.parallel != "fsdp" else None
        own_loop = learner.task.train or learner.task.library_loop  # such a loop may change parameters after the step
        self.step_guard = StepGuard(undo, learner.place, None if own_loop else learner.optimizer)

    @property
    def averages(self) -> bool:
        """True if gradients are averaged over several workers."""
        return self.learner.place.world_size > 1

    # ------------------------------------------------------------------------------------------------ after a step

    def finish_step(self, taken: Step) -> bool:
        """Record a step, and evaluate, save and report if needed. Return True if the run stops.

        All workers call this together. Raises `GroupRestartError` if Ray starts another group, and `RegroupError` if
        the processes form another group themselves.
        """
        self._accept(taken)
        step = taken.number
        due = self._decide(taken)
        stop = due.stop
        restart = due.restart
        parts_move = due.regroup and self.learner.plan.settings.parallel == "fsdp"
        self._leave_closed_group()

        # Measure and evaluate. Everything that leaves this process needs a step that counts.
        record: MetricRecord = {}
        if due.save or due.report or due.regroup or (due.copy and self.learner.plan.settings.ema):
            self.step_guard.confirm()
        if due.save or due.report or parts_move:
            record = self._close_window(taken, due.save)
            self._end_if_diverged(record, last=step == self.learner.plan.total_steps)
        if not (self.evaluated or stop or restart or due.regroup):
            # If a worker is lost during the evaluation, the evaluation is repeated, but no step.
            self.checkpoints.save(step, self.state_metrics(record), evaluated=False, to_storage=False)
            results, stop, restart = self._evaluate()
            record |= results or {}
            self._end_if_diverged(record, last=self._patience.over)

        if self.evaluated and self._ends_epoch(step):
            self._warn_about_metric(record)

        # Act. Report before saving, because a checkpoint relies on the history up to its step.
        if record:
            self.report(record)
        if due.save:
            self.step_guard.await_sums()
            if not self._nan_watch.finite_weights:
                self._drain()
        if due.save or due.copy or parts_move:
            metrics = self.state_metrics(record)
            self.checkpoints.save(step, metrics, evaluated=self.evaluated, to_storage=due.save, needed=parts_move)
        if restart:
            self.restart_group()
        if due.regroup:
            if parts_move:
                self.checkpoints.close(finished=False)
            raise RegroupError
        if due.profile:
            self.profiler.begin(step)
        return stop

    def _accept(self, taken: Step) -> None:
        """Accept and record a step.

        Call this before the first collective after the step, so that the complete step counts even if the collective
        fails.
        """
        taken.ended = time.time()
        self.step_guard.accept(partial(self._count, taken))
        if self._ends_epoch(taken.number):
            self.step_guard.confirm()  # because the progress shows this step while the epoch is evaluated
        self.watchdog.heartbeat(taken.number)
        self.telemetry.took_step(taken.number, taken.seconds)
        self.profiler.end_step(taken.number)
        self.checkpoints.took_step(taken.number, taken.rows)
        if self.reporter:
            # This writes the receipt after the group's first step, which is never in doubt: each group has a new
            # `SumGuard`, which lets the device cancel only steps after the first one.
            self.reporter.took_step(self.step, self.window, self._ends_epoch(taken.number))
            for text in self.learner.undo.warnings():
                warn_once(log, text)
            if taken.number == self.group_start.step + 1:
                unread = self.learner.plan.settings.task_args.describe_unread()
                if unread:
                    warn_once(log, f"{PREFIX}TASK_ARGS: {unread}")

    def _count(self, taken: Step) -> None:
        """Count a complete step."""
        self.step = taken.number
        self.checkpoints.count_step(taken.number)
        self.step_ended = taken.ended
        self.evaluated = not (self.learner.plan.test and self._ends_epoch(taken.number))
        self.record = {}
        self.learner.average.update(taken.number)
        self.window.add_step(taken.values, taken.seconds, taken.data_wait_s)

    def _decide(self, taken: Step) -> StepActions:
        """Return the actions to take after a step.

        Rank 0 broadcasts its choice. Everything else follows from the step's number, so all ranks agree.
        """
        agreed = self._decisions.agree(lambda: self.choose_actions(taken))
        step = taken.number
        has_more = step < self.learner.plan.total_steps
        restart = agreed.restart and has_more
        every = self.learner.plan.settings.checkpoint_every_steps
        by_interval = agreed.save or (every > 0 and step % every == 0)
        save = agreed.stop or restart or self._ends_epoch(step) or (by_interval and not agreed.busy)
        return agreed._replace(save=save, restart=restart, regroup=agreed.regroup and has_more)

    def _close_window(self, taken: Step, save: bool) -> MetricRecord:
        """Return the metrics of the steps since the newest record, with the counters of NaN values."""
        epoch = (taken.number - 1) // self.learner.plan.steps.per_epoch + 1
        record = self.window.close(taken.number, epoch, taken.learning_rate)
        self._nan_watch.look(record, taken.values, save)
        record |= self._nan_watch.state
        self.record = record
        return record

    def _warn_about_metric(self, record: MetricRecord) -> None:
        """Warn if the record at the end of an epoch lacks CHECKPOINT_METRIC, which ranks checkpoints."""
        absent = describe_absent(self.learner.plan.settings.checkpoint_metric, model_metrics(record))
        if absent and self.reporter:
            warn_once(log, absent)

    def _end_if_diverged(self, record: MetricRecord, last: bool) -> None:
        """Raise `DivergedError` on all workers if NaN or infinite values end the run (`NanWatch.verdict`).

        `last` is True if no step follows. Before the error is raised, earlier states are written to storage. The
        current state is not saved.
        """
        error = self._nan_watch.verdict(last)
        if error:
            self.report(record)
            with self.watchdog.paused():
                self.checkpoints.close(finished=True)
            raise error

    def _drain(self) -> None:
        """Wait until the newest snapshot is committed. All workers wait together.

        Call this before a state with NaN weights is saved. Otherwise, the new snapshot would replace an earlier
        snapshot whose commit has not begun. The lost time does not matter, because training with NaN weights is
        useless.
        """
        with self.watchdog.paused():
            run_on_all_ranks(self._group, self.checkpoints.drain)

    def begin_step(self, step: Step) -> None:
        """Record the beginning of a step. Raises `RegroupError` if the group has ended."""
        self._leave_closed_group()
        self.step_guard.begin_step()
        if self.outlives_groups:
            self.checkpoints.begin_step(step.number, step.rows, step.size)

    def _leave_closed_group(self) -> None:
        """Raise `RegroupError` if the group has ended.

        A worker that is alone in its group needs this check, because it has no peers whose loss would make a collective
        fail.
        """
        if self.group_start.is_closed and self.group_start.is_closed():
            raise RegroupError

    def wait_before_change(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Block until the current step may change parameters.

        **The copy of the previous state must be complete before parameters change.** A copy thread reads the parameters
        themselves during the next forward and backward passes. A change during that time would mix two steps in one
        checkpoint, and the checkpoint would still pass verification.

        Only `TrainingRun.before_change` calls this. That method is called by a hook on each torch optimizer, and by the
        callbacks of libraries' Trainers. `optimizer` is the optimizer that is about to take its step, if there is one.
        """
        self.checkpoints.wait_for_copy()
        self.step_guard.before_change(optimizer)

    def state_metrics(self, record: MetricRecord) -> MetricRecord:
        """Return the metrics of a checkpoint: the record, and the means and counters that the next group needs."""
        return {**record, **self.window.recent.newest, **self._patience.state, **self._nan_watch.state}

    def _ends_epoch(self, step: int) -> bool:
        plan = self.learner.plan
        return step == plan.total_steps or step % plan.steps.per_epoch == 0

    def choose_actions(self, taken: Step) -> StepActions:
        """Return the actions that are due after a step. Only rank 0 chooses actions; other ranks return none."""
        if not self.reporter:
            return StepActions()
        command = self.commands.poll()
        due = self.checkpoints.due(taken.number, taken.seconds)
        save_for_head = command.save and not self._saved_for_head and not due.busy
        self._saved_for_head |= save_for_head
        return due._replace(
            save=due.save or save_for_head,
            report=self.reporter.due(),
            stop=command.stop,
            restart=command.restart,
            regroup=command.regroup,
            profile=self.profiler.is_due(taken.number),
        )

    def report(self, record: MetricRecord) -> None:
        """Add a closed window's record to the metric history, and report it to Ray. All workers call this together."""
        self.telemetry.report(self.window.own)
        if self.reporter:
            self.reporter.report(record, self.window.recent.newest, self.window.ranks)
        if self.outlives_groups:
            return  # Ray's report is a barrier: this worker could wait in it while the others form the next group
        if abs(record["time"] - self._reported) >= REPORT_TO_RAY_EVERY_S:  # abs, because a clock may be set back
            self._reported = record["time"]
            ray.train.report(record)

    # -------------------------------------------------------------------------------------------------- evaluation

    def repeat_evaluation(self) -> bool:
        """Repeat the evaluation that the previous group did not complete, if any. Return True if the run stops.

        Raises `GroupRestartError` if the group is restarted.
        """
        if not self._must_repeat_evaluation:
            return False
        self._must_repeat_evaluation = False
        step = self.group_start.step
        metrics = self.group_start.metrics
        results, stop, restart = self._evaluate()
        if results is None:
            self.checkpoints.save(step, metrics, evaluated=False)  # the state may be in memory only
        else:
            metrics = {**metrics, **results, **self._patience.state, "time": time.time()}
            if self.reporter:
                self.reporter.add_evaluation(metrics)
            self.checkpoints.save(step, metrics)
        if restart:
            self.restart_group()
        return stop

    def _evaluate(self) -> Evaluation:
        """Evaluate the held-out rows. The run stops after too many evaluations without an improvement."""
        if self.learner.plan.settings.ema:
            self.checkpoints.wait_for_copy()  # the averaged weights replace the trained ones during the evaluation
        results, stop, restart = evaluate(self.learner, self.commands.poll, self._heartbeat)
        self.evaluated = results is not None
        self.step_guard.accept_evaluation()
        return Evaluation(results, stop or (results is not None and self._patience.ends(results)), restart)

    def _heartbeat(self, evaluated: bool) -> None:
        """Record that this worker is alive during an evaluation. `evaluated` is True if it evaluated a batch."""
        self._leave_closed_group()
        if evaluated:
            self.telemetry.evaluated()
        self.watchdog.heartbeat()
        if self.reporter:
            self.reporter.heartbeat()

    # ----------------------------------------------------------------------------------------------------- restart

    def restart_group(self) -> NoReturn:
        """Complete the newest copy, and end this worker group. Ray then starts another group on the remaining nodes.

        Ray kills all processes of a group as soon as one of them raises an error. The logs and metrics are therefore
        written to storage first, unless a notice leaves too little time.
        """
        with self.watchdog.paused():
            limit_s = self._drain_limit_s()
            run_on_all_ranks(self._group, lambda: self.reporter.drain(limit_s) if self.reporter else None)
            self.checkpoints.close(finished=False)
            restart = GroupRestartError()
            print(restart)  # the last line of the log
            left_s = broadcast_from_rank0(self._group, self._drain_limit_s)  # only rank 0 knows of a notice
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
        """Return the time limit in seconds for the last commit or the last output, or None if there is no limit."""
        command = self.commands.poll()
        if command.deadline is not None:
            left_s = max(0.0, command.deadline - time.time() - DEADLINE_MARGIN_S)
            # After a clock was set back, the wait would take hours.
            return min(left_s, self.learner.plan.settings.job.notice_s or left_s)
        return DRAIN_S if self.checkpoints.in_memory and not command.moves else None


def close_outputs(outputs: ExitStack) -> Future[None]:
    """Start writing a worker's remaining outputs to storage. Return a future that is done once they are written."""
    return start_thread(outputs.pop_all().close, "outputs")
