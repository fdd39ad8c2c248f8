"""The outcome of a Ray trainer, and the decision whether another trainer follows."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError

from sunspot.elastic.failures import WorkersFailedError
from sunspot.elastic.merged_incidents import merge
from sunspot.elastic.messages import FailureCounts, GroupEnd, Incident
from sunspot.elastic.out_of_memory import advise_memory, find_killed_for_memory
from sunspot.errors import shorten
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run.incidents import Cause

DRIVER_TRIES = 3
"""Maximum number of times that a trainer is started if Ray's controller fails. These starts do not count toward
MAX_FAILURES, because no worker has failed."""


@dataclass(frozen=True)
class TrainerStart:
    """The reason for starting a Ray trainer, and the failures so far."""

    incident: Incident = field(default_factory=Incident)
    "The incident that ended the previous trainer."
    counts: FailureCounts = field(default_factory=FailureCounts)
    "Number of worker groups that have failed before, by kind."
    failed_controllers: int = 0
    "Number of previous trainers whose controller failed."


class EndReason(StrEnum):
    """The reason why a Ray trainer ended."""

    NO_ERROR = "Ray reported no error: the workers have finished, or none is left"
    RESTART = "the workers ended for a restart"
    WORKERS_FAILED = "Ray reported errors of the workers"
    CONTROLLER_FAILED = "Ray's controller failed"
    OUT_OF_MEMORY = "Ray's controller ran out of memory on the only machine of the run, and would again"


@dataclass(frozen=True)
class GroupOutcome:
    """The outcome of a Ray trainer."""

    reason: EndReason
    error: Exception | None = None
    "Ray's error, or None if Ray reported no error."
    end: GroupEnd | None = field(default_factory=GroupEnd)
    "The workers' report about their end, or None if the control channel does not answer."
    incident: Incident = field(default_factory=Incident)
    "Why the newest worker group ended."

    @property
    def fatal_error(self) -> Exception | None:
        """A worker's error that a restart cannot fix, or None."""
        return self.end.fatal if self.end else None

    @property
    def failure(self) -> Exception | None:
        """The error to raise if no other trainer follows, or None if neither Ray nor the workers reported an error.

        The workers' own report takes precedence, because it is more precise than Ray's.
        """
        if self.fatal_error:
            return self.fatal_error
        if self.end and self.end.gave_up:
            return WorkersFailedError(self.end.gave_up, self.end.counts.final)
        if self.reason is EndReason.OUT_OF_MEMORY:
            return WorkersFailedError(f"{self.describe_error()} while workers started; {advise_memory([], True)}", True)
        if self.reason is EndReason.CONTROLLER_FAILED:
            return WorkersFailedError(f"Ray's controller failed: {self.describe_error()}")
        return self.error

    def describe_error(self) -> str:
        """Return Ray's error in one line, or an empty string if Ray reported none."""
        return describe_killed(self.error) or shorten(self.error) if self.error else ""


def find_reason(error: Exception | None, restart: bool, one_machine: bool) -> EndReason:
    """Return why a trainer ended. `error` is Ray's error, or None if Ray reported no error.

    `restart` is True if the driver asked for a restart. `one_machine` is True if all workers are on this machine.
    """
    if isinstance(error, ControllerError | OutOfMemoryError):
        again = one_machine and describe_killed(error)
        return EndReason.OUT_OF_MEMORY if again else EndReason.CONTROLLER_FAILED
    if error:
        failures = getattr(error, "worker_failures", {})
        asked = any(isinstance(each, GroupRestartError) for each in failures.values())
        return EndReason.RESTART if asked else EndReason.WORKERS_FAILED
    return EndReason.RESTART if restart else EndReason.NO_ERROR


def describe_killed(error: Exception) -> str:
    """Return the memory usage of a controller that Ray killed to free memory, or an empty string."""
    _, figures = find_killed_for_memory(getattr(error, "controller_failure", error))
    return figures


def next_start(
    outcome: GroupOutcome, start: TrainerStart, max_failures: int, survivor_mode: bool
) -> TrainerStart | None:
    """Return how to start the next trainer, or None if no trainer follows. `start` is the current trainer's start.

    In restart mode, Ray starts the next group itself, so another trainer is needed only if Ray's controller failed.
    """
    end = outcome.end
    if (end and (end.fatal or end.gave_up)) or outcome.reason is EndReason.OUT_OF_MEMORY:
        return None
    if outcome.reason is EndReason.CONTROLLER_FAILED:
        failed = start.failed_controllers + 1
        incident = Incident(Cause.DRIVER_LOST, "Ray's controller failed")
        return replace(start, incident=incident, failed_controllers=failed) if failed < DRIVER_TRIES else None
    if end is None or not survivor_mode:
        return None
    following = replace(start, incident=outcome.incident, counts=end.counts)
    if not outcome.error:
        waited = Incident(Cause.NODE_LOST, "no worker was left, and Ray waited for a node")
        following = replace(following, incident=merge(outcome.incident, waited))
    judged = outcome.error is not None and end.counts != start.counts
    if outcome.reason is EndReason.RESTART or judged:  # the failure judge has counted this end, if it is a failure
        return following
    # Keep the newest error and the counts of repeated failures, because they also limit the next trainer.
    noted = replace(start.counts, error=end.counts.error, loops=end.counts.loops)
    counts = noted.since(end.progress.committed)
    return (
        replace(following, counts=replace(counts, charged=counts.charged + 1))
        if counts.charged < max_failures
        else None
    )
