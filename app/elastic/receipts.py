"""What a restart cost: the receipt that the new worker group's rank 0 writes after its first step."""

from __future__ import annotations

import time
from typing import Any

import ray.train

from app.elastic.restore import Start, State
from app.run.attempts import Attempt
from app.run.incidents import HUNG, Cause, Receipt, read_receipts, suspects, worker_seconds
from app.run.status import Status

RESTARTING = "the workers make way for a new group"
"""What workers say that were told to leave."""

LONGEST_GIST, LONGEST_DETAIL = 160, 500
"""Characters of what one worker, and of what all of them said as they failed."""


def make_receipt(start: Start, state: State, incident: dict[str, Any], first_step: float) -> Receipt:
    """The receipt of `start.attempt`, whose first step was done at `first_step` (seconds since the epoch).

    `incident` is what the control channel knows (`ControlChannel.begin`).
    """
    attempt, before = start.attempt, start.before
    since = max((receipt.attempt for receipt in read_receipts(start.events)), default=0)
    interrupted = [earlier for earlier in before if earlier.number >= since] or before
    seen = incident.get("seen", {})
    last_steps = [step for number, step, _ in start.heartbeats if number >= since and before]
    last_steps += [seen.get("step", 0), incident.get("last_step", 0)]
    left = state.taken if state.taken is not None else (interrupted[0].time if interrupted else attempt.time)
    paused_since = incident.get("paused_since")
    paused_s = max(0.0, attempt.time - max(paused_since, left)) if paused_since else 0.0
    world_before = before[-1].metadata.get("world_size", 0) if before else 0
    spent = worker_seconds([*before, attempt], left, first_step)
    cause = _cause(before, incident)
    return Receipt(
        attempt=attempt.number,
        since=since,
        cause=cause,
        detail=_detail(cause, start, incident),
        noticed=incident.get("noticed"),
        save_began=incident.get("save_began"),
        committed=incident.get("committed"),
        restarted=attempt.time,
        first_step=first_step,
        left=left,
        step=attempt.step,
        last_step=max(attempt.step, *last_steps),
        tier=state.tier,
        world_before=world_before,
        world_after=attempt.metadata["world_size"],
        paused_s=paused_s,
        worker_seconds_lost=max(0.0, spent - paused_s * world_before),
    )


def _cause(before: list[Any], incident: dict[str, Any]) -> Cause:
    making_way = incident.get("cause") == Cause.SCALE_UP
    if "cause" in incident and not (making_way and "loss" in incident):  # lost before it had left
        return Cause(incident["cause"])
    if not before:
        return Cause.BEGIN
    return Cause.WORKER_LOST


def _detail(cause: Cause, start: Start, incident: dict[str, Any]) -> str:
    if cause is Cause.HUNG:
        return _blame(start)
    order = ("loss", "detail") if cause is Cause.WORKER_LOST else ("detail", "loss")
    return next((str(incident[name]) for name in order if incident.get(name)), "")


def _blame(start: Start) -> str:
    """Which rank hung, and where; all of them, when that cannot be told."""
    hung = [e for e in start.events if e["event"] == HUNG and e["attempt"] == start.before[-1].number]
    blamed = suspects(hung, start.before[-1].metadata["world_size"])
    details = [event["detail"] for event in hung if event["rank"] in blamed or not blamed]
    silent = [f"rank {rank}: left no word" for rank in blamed if rank not in {event["rank"] for event in hung}]
    return "; ".join([*details, *silent])


def first_incident(attempts: list[Attempt], before: Status | None) -> dict[str, Any]:
    """What a driver knows of why it begins, for its first worker group: `before` is the status it found."""
    if not attempts:
        return {"cause": Cause.BEGIN}
    if before and before.state.terminal:
        ended = f"the driver before ended at step {before.step}: {before.state}"
        return {"cause": Cause.RESUMED, "detail": ended, "paused_since": before.time, "last_step": before.step}
    silent = f"no word of the driver before since step {before.step}" if before else "no word of the driver before"
    return {"cause": Cause.DRIVER_LOST, "detail": silent, "last_step": before.step if before else 0}


class FailureRecorder(ray.train.UserCallback):
    """Notes on the control channel when Ray's controller sees a worker fail; it runs in the controller."""

    def __init__(self, control: Any) -> None:
        self._control = control

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called at every poll while there are errors; what was noted first stands."""
        lost = {rank: error for rank, error in worker_exceptions.items() if RESTARTING not in str(error)}
        if not lost:
            return  # they were told to leave, and did
        lines = [f"rank {rank}: {_gist(error)}" for rank, error in sorted(lost.items())]
        self._control.note.remote(loss="; ".join(lines)[:LONGEST_DETAIL], noticed=time.time())


def _gist(error: Exception) -> str:
    """The line that says why: of a lost worker, Ray puts a page about it before."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("The actor")), lines[0])[:LONGEST_GIST]
