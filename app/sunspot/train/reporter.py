"""Reports the progress of a training run to the terminal, the metric history, the status and the receipts."""

import logging
import math
import time
from contextlib import suppress
from dataclasses import replace

from sunspot.background import Background, Timer
from sunspot.checkpoint import CheckpointManager
from sunspot.checkpoint.manager import exceeds_notice
from sunspot.data.source import rows_in
from sunspot.elastic.claim import StartPoint
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.messages import Incident
from sunspot.elastic.receipts import OpenIncident, Phases
from sunspot.elastic.restore import TrainingState
from sunspot.elastic.sick_nodes import step_times
from sunspot.errors import StorageError, SupersededError
from sunspot.formatting import plural
from sunspot.metric_names import MetricRecord
from sunspot.observe.metrics import MetricWindow
from sunspot.observe.progress import PROGRESS_EVERY_S, Progress
from sunspot.observe.prometheus import RunGauges
from sunspot.observe.ranks import RankHistory, RankTable
from sunspot.parallel.nccl_log import own_log, read_network
from sunspot.plan import Plan
from sunspot.run import Run
from sunspot.run.attempts import IN_PLACE, ensure_owner, is_of_newest_driver, step_of
from sunspot.run.audit import tidy_audit
from sunspot.run.checkpoints import NAN_SINCE, NAN_WINDOWS
from sunspot.run.history import Journals, model_metrics, tidy_journals
from sunspot.run.incidents import Cause, describe_receipt, goodput
from sunspot.run.status import (
    STATUS_EVERY_S,
    RunState,
    Status,
    StatusKind,
    delete_older_statuses,
    refuse_if_ended,
    write_status,
)
from sunspot.storage.limits import with_deadline

log = logging.getLogger(__name__)

SHOW_CLAIM_S = 20.0
"""Maximum number of seconds to wait for storage to take an attempt's first status."""

GOODPUT_EVERY_S = 60.0
"""Seconds between two computations of the exported goodput, which take a second after a thousand restarts."""


class Reporter:
    """Reports the progress of a worker group. Only rank 0 has a reporter."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        start: StartPoint,
        state: TrainingState,
        control: ControlClient,
        journals: Journals,
        checkpoints: CheckpointManager,
        phases: Phases,
    ) -> None:
        """Prepare to report a new group.

        `phases` contains the end time of each phase of the group's start, for the group's receipt.
        """
        self._run = run
        self._settings = plan.settings
        self._start = start
        self._tier = state.tier
        self._incident = OpenIncident(start, state, control, phases)
        self._control = control
        self._journals = journals
        self._checkpoints = checkpoints
        self._ranks = RankHistory(run, start.attempt.number)
        self.publisher = Background(min(self._settings.report_every_s, STATUS_EVERY_S), self.publish)
        "Background thread that writes the status. The caller enters it."
        self._timer = Timer()
        self._shown = 0.0
        self._heartbeat: float | None = None
        self._recovered = False
        "True once the group has taken a step, which closes the incident."
        self._summarized = False
        "True once the cost of copies in memory has been printed."
        self._warned = False
        "True once the user has been warned that a save takes longer than a notice."
        self._tidied = False
        "True once the leftovers of older attempts have been deleted."
        self._nan_windows = 0
        self._reported_nan: set[str] = set()
        "Metrics that were reported as not finite."
        self._superseded: SupersededError | None = None
        "Error that ends the worker, set once another driver owns the run."
        self._status = replace(
            first_status(start, plan), state=RunState.RUNNING, reason="", world_size=len(start.nodes)
        )
        if start.attempt.step >= plan.total_steps:  # only the evaluation of the last epoch is missing
            self._finishing(start.attempt.step)
        self._receipts = list(start.past.receipts)
        self._interval_s: float | None = None
        self._goodput: float | None = None
        self._goodput_of: tuple[int, float] | None = None
        "The number of receipts and the minute at which `_goodput` was computed."
        self._test_rows = rows_in(plan.test) if plan.test else 0
        self._failed_before = ""
        "Part of the status's warning that names the failure of the previous group."

    def announce(self) -> None:
        """Register the group with the driver, print where it starts, and record why the previous group ended."""
        start, tier = self._start, self._tier
        origin = "the beginning" if tier == "beginning" else f"step {start.attempt.step}"
        known = f", from {tier}" if tier in ("memory", "storage") else ""
        workers = len(start.nodes)
        verb = "continue" if tier == IN_PLACE else "start"
        line = f"  {plural(workers, 'worker')} {verb}{'s' if workers == 1 else ''} at {origin}{known}"
        self._control.send(ControlChannel.log, line)
        incident = self._incident.begin()
        if incident.cause is Cause.WORKER_FAILED:
            self._failed_before = f"its workers were restarted after {incident.describe()}"
        self._status = replace(self._status, warning=self._failed_before)
        for note in incident.notes:
            self._journals.events.note(note.event, start.attempt.step, note.detail, note.time)

    def due(self) -> bool:
        """Return True if the next record of the metric history is due."""
        return self._timer.due(self._settings.report_every_s)

    def heartbeat(self) -> None:
        """Record that the group has just taken a step or evaluated some rows.

        Raises `SupersededError` once another driver owns the run.
        """
        if self._superseded:
            raise self._superseded
        self._heartbeat = time.time()

    def took_step(self, step: int, window: MetricWindow, epoch_ends: bool) -> None:
        """Report that the group has completed a step. The group's first step closes the previous group's incident.

        The progress is sent to the driver about once a second, and at the end of each epoch.
        """
        self.heartbeat()
        self._warn_of_notice()
        if step >= self._status.total_steps:
            self._finishing(step)
        if not self._recovered:
            self._write_receipt()
        if epoch_ends or time.monotonic() - self._shown >= PROGRESS_EVERY_S:
            self._shown = time.monotonic()
            newest = self._checkpoints.newest.name if self._checkpoints.newest else self._status.checkpoint
            doing = f"evaluating {plural(self._test_rows, 'row')}" if epoch_ends and self._test_rows else ""
            committed = step_of(newest) if newest else 0
            number = self._start.attempt.number
            progress = Progress(number, step, window.mean_loss, committed, time.time(), doing)
            self._control.send(ControlChannel.set_progress, progress)

    def report(self, record: MetricRecord, recent: MetricRecord, ranks: RankTable) -> None:
        """Add a record to the metric history, with the numbers of each rank.

        The status, the terminal and checkpoints contain the `recent` means (`RecentMeans`) instead of the record's
        values, because a record may cover only one step.
        """
        self._journals.metrics.append(record)
        self._ranks.append(record, ranks)
        self._control.send(ControlChannel.add_metrics, {**record, **recent})
        if ranks:
            times = step_times(self._start.attempt.number, record, ranks)
            self._control.send(ControlChannel.add_step_times, times)
        self._summarize_copies()
        self._warn_of_nan(record)
        self._status = replace(
            self._status,
            step=record["step"],
            epoch=record["epoch"],
            loss=recent.get("loss"),  # None if the task's own loop logs no loss
            test_loss=record.get("test_loss", self._status.test_loss),
            rows_per_s=record["rows_per_s"],
            step_time_s=record["seconds"] / record["steps"],
            save_s=self._checkpoints.commit_s,
            notice_s=self._settings.job.notice_s or None,
            memory_every=self._checkpoints.interval_steps,
            warning="; ".join(filter(None, (self._failed_before, self._warn_of_notice()))),
            nan_since=record.get(NAN_SINCE, 0),
        )
        steps = min(self._settings.checkpoint_every_steps or math.inf, self._status.steps_per_epoch)
        step_s = record["seconds"] / record["steps"]
        commit_s = self._checkpoints.commit_s or 0.0
        self._interval_s = checkpoint_interval(self._checkpoints.save_every_s, steps * step_s, commit_s)

    def add_evaluation(self, record: MetricRecord) -> None:
        """Record the evaluation of an epoch that ended in the previous worker group."""
        self._journals.metrics.append({**record, "steps": 0, "rows": 0, "seconds": 0.0})
        self._status = replace(self._status, test_loss=record.get("test_loss"))
        self._control.send(ControlChannel.add_metrics, record)
        self._write_receipt()

    def _finishing(self, step: int) -> None:
        """Show that all steps have been taken, because the last evaluation and checkpoint can take a long time."""
        reason = "all steps are taken; the last evaluation and checkpoint follow"
        self._status = replace(self._status, state=RunState.FINISHING, reason=reason, step=step)
        self.publisher.run_now()

    def drain(self, time_left_s: float | None) -> None:
        """Wait until the newest snapshot is committed, and report when the commit began and ended."""
        self._control.send(ControlChannel.add_incident_facts, Incident(save_began=time.time()))
        if self._checkpoints.drain(time_left_s) and self._checkpoints.newest:
            committed = Incident(committed=self._checkpoints.newest.time)
            self._control.send(ControlChannel.add_incident_facts, committed)
            self.saved_last_step()

    def saved_last_step(self) -> None:
        """Record in the status that the group's last step is committed. The last `publish` writes this status."""
        self._status = replace(self._status, saved=True)

    def publish(self) -> None:
        """Write the newest metrics and the status to storage.

        Raises `SupersededError` if another process owns the run, or if the driver has ended the attempt while this
        process was frozen or cut off.
        """
        try:
            ensure_owner(self._run, self._start.attempt)
        except SupersededError as error:
            # A newer attempt of this driver belongs to the next group, which this process may join.
            if not is_of_newest_driver(self._run, self._start.attempt):
                self._superseded = error  # raised in the training thread, because an error of this one is ignored
            raise
        refuse_if_ended(self._run, self._status)
        self._journals.flush()
        self._ranks.flush()
        committed = self._checkpoints.newest
        # Only the training thread changes `_status`. Otherwise, a change by one thread could undo the other's.
        status = replace(self._status, heartbeat=self._heartbeat)
        if committed:
            status = replace(status, checkpoint=committed.name, checkpoint_time=committed.time)
        write_status(self._run, status, StatusKind.WORKERS)
        if not self._tidied:
            self._tidied = True
            tidy_journals(self._run, self._start.attempt.number)
            tidy_audit(self._run, self._start.attempt.number)
            delete_older_statuses(self._run, self._start.attempt.number)

    def end(self) -> None:
        """Record that the group is about to end. From now on, ranks' metrics are written to storage immediately."""
        self._ranks.end()

    def gauges(self) -> RunGauges:
        """Return the metrics of the whole run for export. Another thread calls this."""
        status = self._status
        start = self._start
        receipts = list(self._receipts)
        attempts = [*start.before, start.attempt]
        newest = self._checkpoints.newest or start.checkpoint
        computed_for = (len(receipts), time.time() // GOODPUT_EVERY_S)
        if self._goodput_of != computed_for:
            self._goodput_of = computed_for
            self._goodput = goodput(attempts, receipts, time.time())
        known = {
            "planned_steps": status.total_steps,
            "workers": status.world_size,
            "attempt": start.attempt.number,
            "attempt_timestamp_seconds": start.attempt.time,
            "loss": status.loss,
            "nan_windows": self._nan_windows,
            "goodput_ratio": self._goodput,
            "checkpoint_timestamp_seconds": newest.time if newest else status.checkpoint_time or attempts[0].time,
            "checkpoint_interval_seconds": self._interval_s,
            "checkpoint_commit_seconds": self._checkpoints.commit_s,
        }
        causes = [receipt.cause for receipt in receipts]
        return RunGauges(
            {name: float(value) for name, value in known.items() if value is not None},
            {cause: causes.count(cause) for cause in Cause if cause.incident},
        )

    def _write_receipt(self) -> None:
        self._recovered = True
        receipt = self._incident.close()
        self._journals.events.append(receipt.record())
        self._receipts.append(receipt)
        network = read_network(own_log()) if len({*self._start.nodes.values()}) > 1 else ""
        if network:
            self._control.send(ControlChannel.log, f"  between nodes, NCCL uses {network}")
        if receipt.cause.incident or receipt.cause is Cause.TAKEN_OVER:
            self._control.send(ControlChannel.log, describe_receipt(receipt))
        self.publisher.run_now()

    def _summarize_copies(self) -> None:
        """Print the cost and the interval of in-memory copies once they are known."""
        text = "" if self._summarized else self._checkpoints.memory_summary
        if text:
            self._summarized = True
            self._control.send(ControlChannel.log, f"  copies in memory: {text}")

    def _warn_of_nan(self, record: MetricRecord) -> None:
        """Print a message and record an event when the loss stops being finite, and when it is finite again.

        If the loss of the record's last step is finite, also report each metric, including the loss, whose mean over
        the record's steps is not finite. Each metric is reported only once.
        """
        self._nan_windows = record.get(NAN_WINDOWS, 0)
        first = record["step"] - record["steps"] + 1
        last = record["step"]
        text = describe_nan(record)
        if text and not self._status.nan_since:
            self._note_nan("loss not finite", last, text)
        elif self._status.nan_since and not text:
            self._note_nan("loss finite again", last, f"the loss is finite again in the steps {first} to {last}")
        broken = {name for name, value in model_metrics(record).items() if not math.isfinite(value)}
        broken -= self._reported_nan
        if broken and not text:
            self._reported_nan |= broken
            found = f"{', '.join(sorted(broken))}: the mean over the steps {first} to {last} is not finite"
            self._note_nan("metric not finite", last, f"{found}; the loss of step {last} is finite")

    def _note_nan(self, event: str, step: int, text: str) -> None:
        log.warning(text)
        self._journals.events.note(event, step, text)
        self.publisher.run_now()

    def _warn_of_notice(self) -> str:
        """Return the warning of `warn_of_notice`, if any. The first time, also print it and record it as an event."""
        text = warn_of_notice(self._checkpoints.commit_s, self._settings.job.notice_s)
        if text and not self._warned:
            self._warned = True
            log.warning(text)
            self._journals.events.note("save exceeds notice", self._status.step, text)
        return text


def describe_nan(record: MetricRecord) -> str:
    """Return a message if a history record shows a loss or weights that are not finite, otherwise an empty string."""
    since = record.get(NAN_SINCE)
    windows = record.get(NAN_WINDOWS)
    if not since:
        return ""
    if not windows:
        return f"some weights have been NaN or infinite since step {since}"
    return f"the loss has been NaN or infinite since step {since}, in {plural(windows, 'window')} of metrics in a row"


def warn_of_notice(save_s: float | None, notice_s: float) -> str:
    """Return a warning if committing a checkpoint takes longer than a preemption notice lasts.

    `notice_s` is 0 if the length of notices is unknown.
    """
    if not exceeds_notice(save_s, notice_s):
        return ""
    return (
        f"a checkpoint takes {save_s:.0f} s to commit, but a notice leaves {notice_s:.0f} s: if all nodes are "
        "reclaimed at once, the run resumes from the previous checkpoint. Use faster storage, or a longer notice"
    )


def checkpoint_interval(every_s: float, steps_s: float, commit_s: float) -> float:
    """Return the longest expected time between two checkpoints, in seconds.

    A checkpoint is due after `every_s` seconds (0 turns this off) or after a number of steps that take `steps_s`
    seconds, whichever comes first. It waits until the previous checkpoint is committed, which takes `commit_s` seconds.
    """
    return max(min(every_s or math.inf, steps_s), commit_s)


def first_status(start: StartPoint, plan: Plan, why: Incident | None = None) -> Status:
    """Return the status of a worker group that has claimed its attempt but has not taken a step yet.

    The status includes the reason why the previous group ended, if the incident `why` is given.
    """
    attempt = start.attempt
    after = f"; the previous group ended: {why.describe()}" if why and why.cause and why.cause.incident else ""
    before = start.past.status or Status(RunState.STARTING, attempt.owner)
    return replace(
        before,
        state=RunState.STARTING,
        reason=f"its workers load the state that attempt {attempt.number} starts from{after}",
        warning="",
        owner=attempt.owner,
        driver=attempt.driver,
        attempt=attempt.number,
        world_size=0,
        scalable=str(plan.settings.num_workers) if plan.outlives and plan.settings.num_workers.elastic else "",
        step=attempt.step,
        heartbeat=None,
        saved=False,
        checkpoint=start.checkpoint.name if start.checkpoint else before.checkpoint,
        total_steps=plan.total_steps,
        steps_per_epoch=plan.steps.per_epoch,
    )


def show_claim(run: Run, status: Status) -> None:
    """Write the first status of a claimed attempt. If this fails, the reporter writes the status later."""
    with suppress(StorageError):
        with_deadline(SHOW_CLAIM_S, "writing the status", write_status, run, status, StatusKind.WORKERS)
