"""Makes the receipts that record the cost of each worker group's start.

Rank 0 of the new worker group writes the receipt after its first step, or after the evaluation that the previous group
did not complete.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from sunspot.checkpoint.memory_files import Heartbeat
from sunspot.elastic.claim import StartPoint
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.failures import describe_failure_in_line
from sunspot.elastic.merged_incidents import merge
from sunspot.elastic.messages import Incident, RankError, WorkerGroup
from sunspot.elastic.restore import TrainingState
from sunspot.run.attempts import IN_PLACE, Attempt
from sunspot.run.cost import cost_of_loss
from sunspot.run.incidents import Cause, Receipt, worker_seconds
from sunspot.run.overview import LOST_AFTER_S
from sunspot.run.owner import Owner
from sunspot.run.status import is_alive


class Phases(TypedDict, total=False):
    """Times at which the phases of a group's start ended, in seconds since the epoch (`Receipt`)."""

    launched: float | None
    up: float | None
    formed: float | None
    loaded: float | None


class OpenIncident:
    """The incident that ended the previous group, and the receipt that the new group will write.

    Rank 0 of the new group keeps this object until the group has taken its first step, or has repeated the evaluation
    that the previous group did not complete.
    """

    def __init__(self, start: StartPoint, state: TrainingState, control: ControlClient, phases: Phases) -> None:
        """Prepare the receipt of the group that starts from `start`. No tensors of `state` are kept."""
        self._start = start
        self._state = replace(state, model=None, optimizer=None)
        self._control = control
        self._phases = phases
        self._incident = Incident()

    def begin(self) -> Incident:
        """Register the new group with the driver, and return what is known about the end of the previous group."""
        start = self._start
        hosts = {int(rank): host for rank, host in start.attempt.metadata.nodes.items()}
        group = WorkerGroup(start.attempt.number, len(start.nodes), start.nodes, hosts)
        self._incident = self._control.call(ControlChannel.begin_group, group)
        return self._incident

    def close(self) -> Receipt:
        """Close the incident, and return its receipt. Call this after the group's first step or repeated evaluation."""
        later = self._control.call_or_none(ControlChannel.close_incident)
        if later:  # Ray may report a lack of memory after the group has begun
            self._incident = merge(self._incident, later)
        return make_receipt(self._start, self._state, self._incident, time.time(), self._phases)


def make_receipt(
    start: StartPoint, state: TrainingState, incident: Incident, first_step: float, phases: Phases | None = None
) -> Receipt:
    """Return the receipt of `start.attempt`, whose first step ended at `first_step` (seconds since the epoch).

    `incident` is the incident that ended the previous group, as known after the first step (`OpenIncident.close`).
    """
    attempt, before = start.attempt, start.before
    since = start.past.since
    interrupted = [earlier for earlier in before if earlier.number >= since] or before
    heartbeats = [each for each in start.past.heartbeats if each.attempt >= since and before]
    taken = complete_step(heartbeats) if state.tier == IN_PLACE else max((each.step for each in heartbeats), default=0)
    left = state.taken if state.taken is not None else (interrupted[0].time if interrupted else attempt.time)
    paused_since = incident.paused_since
    paused_s = max(0.0, attempt.time - max(paused_since, left)) if paused_since else 0.0
    world_before = before[-1].metadata.world_size if before else 0
    spent = worker_seconds([*before, attempt], left, first_step)
    cause, detail = _why(before, incident)
    receipt = Receipt(
        attempt=attempt.number,
        since=since,
        cause=cause,
        detail=detail,
        noticed=incident.noticed,
        save_began=incident.save_began,
        committed=incident.committed,
        restarted=attempt.time,
        first_step=first_step,
        left=left,
        step=attempt.step,
        last_step=max(attempt.step, incident.last_step, start.past.last_step, taken),
        at_least=bool(before) and state.tier != IN_PLACE and not start.past.knows_end_of(before[-1]),
        tier=state.tier,
        world_before=world_before,
        world_after=attempt.metadata.world_size,
        **(phases or {}),
        paused_s=paused_s,
        worker_seconds_lost=max(0.0, spent - paused_s * world_before),
    )
    return replace(receipt, cost=cost_of_loss([*before, attempt], receipt))


def complete_step(heartbeats: Sequence[Heartbeat]) -> int:
    """Return the newest step that at least one process for each shard of the state has taken, or 0.

    Under hsdp, a worker can be killed after it has taken a step, but a few milliseconds before the other workers take
    the same step. A step that was not taken for every shard was never complete, so it does not count.
    """
    newest: dict[int, dict[int, int]] = {}
    for each in heartbeats:
        steps = newest.setdefault(each.shards, {})
        steps[each.shard] = max(steps.get(each.shard, 0), each.step)
    return max((min(steps.values()) for shards, steps in newest.items() if len(steps) == shards), default=0)


def _why(before: Sequence[Attempt], incident: Incident) -> tuple[Cause, str]:
    """Return the cause of a restart and its description."""
    cause = incident.cause or (Cause.WORKER_LOST if before else Cause.BEGIN)
    details = (incident.loss, incident.detail) if cause is Cause.WORKER_LOST else (incident.detail, incident.loss)
    return cause, details[0] or details[1]


def first_incident(start: StartPoint) -> Incident:
    """Return why a driver starts its first worker group, or an empty incident for a later group.

    If the previous driver belonged to another job and was still alive, this job has taken over the run. The previous
    driver counts as alive if it wrote a status after this driver had begun. If it ran in a different place (for
    example, in another cluster), it also counts as alive if it wrote a status shortly before this driver claimed the
    run. A previous driver of the same job counts as lost, even if its workers run for another minute.
    """
    own, other = start.past.status, start.past.other
    if not start.before:
        return Incident(Cause.BEGIN)
    if start.before[-1].driver == start.attempt.driver:
        return Incident()
    if other is None:
        return Incident(Cause.DRIVER_LOST, "the previous driver wrote no status")
    # Its last status may be older than its last checkpoint and the last step that it has taken.
    step = max(other.step, start.attempt.step, start.past.last_step)
    if other.state.terminal:
        ended = f"the previous driver ended at step {step}: {other.state}"
        return Incident(Cause.RESUMED, ended, paused_since=other.time, last_step=step)
    new_owner, old_owner = Owner.parse(start.attempt.owner), Owner.parse(other.owner)
    lived_on = own and own.began < other.seen
    lived_elsewhere = new_owner.location != old_owner.location and is_alive(other, start.attempt.time)
    if new_owner != old_owner and (lived_on or lived_elsewhere):
        taken = f"by {new_owner.describe()}, from {old_owner.describe()} at step {step}"
        return Incident(Cause.TAKEN_OVER, taken, last_step=step)
    silent = f"the previous driver wrote no status after step {step}"
    # A lost run has no workers until it is started again. A head that the operator replaces leaves its workers running.
    paused_since = other.seen + LOST_AFTER_S if other.owner != start.attempt.owner else None
    return Incident(Cause.DRIVER_LOST, silent, paused_since=paused_since, last_step=step)


def explain_error(error: RankError) -> Incident:
    """Return the incident for an error that a rank reports.

    The incident is empty if the error is only a consequence of another process's exit.
    """
    if error.failure.is_consequence:
        return Incident()
    cause = Cause.OUT_OF_MEMORY if error.out_of_memory else Cause.WORKER_FAILED
    return Incident(cause, f"rank {error.failure.rank}: {describe_failure_in_line(error.failure)}", time.time())
