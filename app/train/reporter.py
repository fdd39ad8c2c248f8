"""What rank 0 tells of a run while it trains: on the terminal, in the history, the status and the receipts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from app.background import Timer
from app.checkpoint.commit import CheckpointCommitter
from app.checkpoint.manager import SnapshotInterval
from app.checkpoint.snapshot import Snapshots
from app.elastic.control import CONTROL_TIMEOUT_S
from app.elastic.receipts import make_receipt
from app.elastic.restore import Start, State
from app.observe.metrics import MetricWindow, scalars
from app.observe.progress import PROGRESS_EVERY_S
from app.observe.prometheus import RunGauges
from app.run import Run
from app.run.attempts import ensure_owner, step_of
from app.run.history import Journal
from app.run.incidents import Cause, describe, goodput, read_receipts
from app.run.status import RunState, Status, write_status
from app.settings import Settings

SURE_AFTER = 3
"""Copies after which their cost is told: the first ones pay for the memory itself."""

NOTICE_MARGIN_S = 4.0
"""Between a notice and the save: the driver looks twice a second, rank 0 asks it as often, and a step has to end."""

GOODPUT_EVERY_S = 60.0
"""Between two computations of the goodput that is exported: with a thousand restarts, one takes a second."""


class Reporter:
    """Rank 0's word to everybody else."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        start: Start,
        state: State,
        control: Any,
        journals: dict[str, Journal],
        snapshots: Snapshots,
        saver: CheckpointCommitter,
        about: Status,
    ) -> None:
        self._run, self._settings, self._start, self._state = run, settings, start, state
        self._control, self._journals, self._snapshots, self._saver = control, journals, snapshots, saver
        self.pace = SnapshotInterval(settings.snapshot_cost, start.attempt.step)
        self.save_timer = Timer(overdue=state.tier == "memory")  # storage is behind what was recovered
        self.report_timer = Timer()
        self.hurry: Callable[[], None] = lambda: None
        "Makes `publish` come at once."
        self._shown = 0.0
        self._heartbeat: float | None = None
        self._restarted = self._paced = self._warned = False
        self._status = about
        self._receipts = read_receipts(start.events)
        self._interval_s: float | None = None
        self._goodput: float | None = None
        self._goodput_of: tuple[int, float] | None = None
        "The receipts, and the minute, that it was computed for."
        group = {"attempt": start.attempt.number, "world_size": len(start.nodes), "nodes": start.nodes}
        self._incident = ray.get(control.begin.remote(group), timeout=CONTROL_TIMEOUT_S)

    @property
    def save_every_s(self) -> float:
        """Seconds between two checkpoints: fewer than were asked for when a save no longer fits into the notice."""
        wanted = self._settings.checkpoint_every_s
        return min(wanted, self._saver.commit_s or wanted) if self._warning() else wanted

    def heartbeat(self) -> None:
        """Progress was made: a step, or some rows evaluated."""
        self._heartbeat = time.time()

    def took_step(self, step: int, window: MetricWindow, epoch_ends: bool) -> None:
        """The first step closes the incident; about once a second, the terminal hears how far the run is."""
        self.heartbeat()
        if not self._restarted:
            self._close_incident()
        if epoch_ends or time.monotonic() - self._shown >= PROGRESS_EVERY_S:
            self._shown = time.monotonic()
            newest = self._saver.last_committed.name if self._saver.last_committed else self._status.checkpoint
            state = {"step": step, "loss": window.mean_loss, "committed": step_of(newest) if newest else 0}
            self._control.show.remote({**state, "attempt": self._start.attempt.number, "time": time.time()})

    def report(self, record: dict[str, Any]) -> None:
        """Add a record to the metric history."""
        self._journals["metrics"].append(record)
        self._control.record.remote(scalars(record))
        self._say_pace()
        self._status = replace(
            self._status,
            step=record["step"],
            epoch=record["epoch"],
            loss=record["loss"],
            rows_per_s=record["rows_per_s"],
            step_time_s=record["seconds"] / record["steps"],
            save_s=self._saver.commit_s,
            notice_s=self._settings.notice_s or None,
            memory_every=self.pace.every if self._snapshots.memory.shared and self.pace.cost else 0,
            warning=self._warning(),
        )
        steps = min(self._settings.checkpoint_every_steps or math.inf, self._status.steps_per_epoch)
        step_s, commit_s = record["seconds"] / record["steps"], self._saver.commit_s or 0.0
        self._interval_s = checkpoint_interval(self.save_every_s, steps * step_s, commit_s)

    def catch_up(self, record: dict[str, Any]) -> None:
        """Add the evaluation of an epoch whose steps other workers took."""
        self._journals["metrics"].append({**record, "steps": 0, "rows": 0, "seconds": 0.0})
        self._control.record.remote(scalars(record))
        self._close_incident()

    def drain(self, time_left_s: float | None) -> None:
        """Wait for the commit of the newest snapshot, and say when it began and whether it is done."""
        self._control.note.remote(save_began=time.time())
        if self._saver.drain(time_left_s) and self._saver.last_committed:
            self._control.note.remote(committed=self._saver.last_committed.time)

    def publish(self) -> None:
        """Write the newest numbers to storage; raises `SupersededError` when they are no news any more."""
        ensure_owner(self._run, self._start.attempt)
        for journal in self._journals.values():
            journal.flush()
        committed = self._saver.last_committed
        if committed:
            self._status = replace(self._status, checkpoint=committed.name, checkpoint_time=committed.time)
        write_status(self._run, replace(self._status, heartbeat=self._heartbeat))

    def gauges(self) -> RunGauges:
        """What is exported of the whole run; asked by another thread."""
        status, start, receipts = self._status, self._start, list(self._receipts)
        attempts = [*start.before, start.attempt]
        newest = self._saver.last_committed or start.checkpoint
        if self._goodput_of != (of := (len(receipts), time.time() // GOODPUT_EVERY_S)):
            self._goodput_of, self._goodput = of, goodput(attempts, receipts, time.time())
        known = {
            "planned_steps": status.total_steps,
            "workers": status.world_size,
            "attempt": start.attempt.number,
            "attempt_timestamp_seconds": start.attempt.time,
            "loss": status.loss,
            "goodput_ratio": self._goodput,
            "checkpoint_timestamp_seconds": newest.time if newest else status.checkpoint_time or attempts[0].time,
            "checkpoint_interval_seconds": self._interval_s,
            "checkpoint_commit_seconds": self._saver.commit_s,
        }
        causes = [receipt.cause for receipt in receipts]
        return RunGauges(
            {name: float(value) for name, value in known.items() if value is not None},
            {cause: causes.count(cause) for cause in Cause if cause.incident},
        )

    def _close_incident(self) -> None:
        self._restarted = True
        receipt = make_receipt(self._start, self._state, self._incident, time.time())
        self._journals["events"].append(receipt.record())
        self._receipts.append(receipt)
        self._control.recovered.remote()
        if receipt.cause.incident:
            self._control.say.remote(describe(receipt))
        self.hurry()

    def _say_pace(self) -> None:
        """Once it is known what a copy costs: how many steps a loss without notice goes back at most."""
        if self._paced or not self._snapshots.memory.shared or len(self._snapshots.costs) < SURE_AFTER:
            return
        self._paced = True
        self._control.say.remote(
            f"  copies in memory: every {self.pace.every} steps, {self._snapshots.size / 1e6:.3g} MB each, "
            f"{self.pace.cost:.1%} of the time"
        )

    def _warning(self) -> str:
        """What the user should know before it matters; said once on the terminal and in the events, too."""
        text = warn_of_notice(self._saver.commit_s, self._settings.notice_s)
        if text and not self._warned:
            self._warned = True
            self._control.say.remote(f"warning: {text}")
            event = {"event": "save exceeds notice", "step": self._status.step, "time": time.time(), "detail": text}
            self._journals["events"].append(event)
        return text


def warn_of_notice(save_s: float | None, notice_s: float) -> str:
    """What to tell when a save of `save_s` seconds does not fit into a notice (0: unknown); empty when it does."""
    if not save_s or not notice_s or save_s + NOTICE_MARGIN_S <= notice_s:
        return ""
    return (
        f"a checkpoint takes {save_s:.0f} s to commit, and a notice leaves {notice_s:.0f} s: if all nodes are "
        "reclaimed at once, the run goes back to the checkpoint before. Faster storage or a longer notice helps"
    )


def checkpoint_interval(every_s: float, steps_s: float, commit_s: float) -> float:
    """The longest time, in seconds, that should pass between two checkpoints.

    They are due every `every_s` (0: never) and after the steps that take `steps_s`; one takes `commit_s` to save, and
    the next waits for it.
    """
    return max(min(every_s or math.inf, steps_s), commit_s)


def first_status(start: Start, total_steps: int, steps_per_epoch: int) -> Status:
    """The status of a worker group that has just been claimed."""
    before = start.status or Status(RunState.RUNNING, start.attempt.owner)
    return replace(
        before,
        state=RunState.RUNNING,
        reason="",
        warning="",
        attempt=start.attempt.number,
        world_size=len(start.nodes),
        step=start.attempt.step,
        heartbeat=None,
        checkpoint=start.checkpoint.name if start.checkpoint else before.checkpoint,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
    )
