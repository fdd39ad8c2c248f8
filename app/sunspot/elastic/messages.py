"""Messages that the driver, the workers and Ray Train's controller exchange through the control channel (control.py).

Times are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sunspot.observe.progress import Progress
from sunspot.run.failures import Failure, Hang
from sunspot.run.incidents import Cause

OUT_OF_MEMORY = 2
"""CUDA's error code for too little memory. The GPU itself works, but its memory is in use, or not yet freed."""


@dataclass(frozen=True)
class Command:
    """A request from the driver to the worker group."""

    stop: bool = False
    "Save and return, because the run ends here."
    restart: bool = False
    "Save and end, so that Ray starts a new group without the preempted nodes or with the new ones."
    deadline: float | None = None
    "Time at which the first preempted node is gone."
    save: bool = False
    "Save and keep training. The head is about to go, and a new head continues from this checkpoint."
    moves: bool = False
    "True if nodes are released together with the copies in their memory, so the state must be in storage."
    regroup: bool = False
    "Form the next group after this step and any evaluation that follows it, because workers join or leave."


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group that is training."""

    attempt: int
    world_size: int
    nodes: dict[int, str]
    "Ray's node id by rank."
    hosts: dict[int, str] = field(default_factory=dict)
    "Host name by rank, as far as known. In Kubernetes, it is the pod's name."


@dataclass(frozen=True)
class StepTimes:
    """Durations of the steps in a metric window."""

    attempt: int
    time: float
    "Time at which the window was closed."
    seconds: float
    "Length of the window."
    step_s: float
    "Seconds of a whole step, which is the same for all ranks."
    forward_s: tuple[float, ...]
    """Seconds of a step that each rank spends in forward passes, without waiting for other ranks. If a rank has more
    rows than is usual, this is the time for the usual number of rows."""


@dataclass(frozen=True)
class Note:
    """An event in the cluster or in a process, to be added to the run's events."""

    event: str
    detail: str
    time: float


@dataclass(frozen=True)
class Incident:
    """The known reasons why a worker group ended."""

    cause: Cause | None = None
    detail: str = ""
    "Human-readable description of the cause."
    noticed: float | None = None
    "Time at which the notice arrived or the loss was detected."
    loss: str = ""
    "Errors of ranks that ended without being told to."
    save_began: float | None = None
    committed: float | None = None
    paused_since: float | None = None
    "Time at which the previous driver ended."
    last_step: int = 0
    "Last step that the group is known to have taken."
    notes: tuple[Note, ...] = ()
    "Other events since the group began."

    def describe(self) -> str:
        """Return the cause and its details as readable text."""
        detail = self.detail or self.loss
        return f"{self.cause} ({detail})" if detail else str(self.cause)


@dataclass(frozen=True)
class RankError:
    """An error that ended one rank."""

    failure: Failure
    world_size: int
    taken: int
    "Number of steps that the rank's group had taken."
    from_outside: bool
    "True for a network, disk, memory or device error, rather than a program error."
    from_memory: bool = False
    "True if the rank's group began from an in-memory copy."
    node: str = ""
    "Ray's id of the rank's node."
    cuda_error: int | None = None
    "CUDA's error code, if CUDA failed for a reason other than too little memory."
    out_of_memory: bool = False
    "True if the machine or its GPU had too little memory."


@dataclass(frozen=True)
class FailureCounts:
    """Numbers of consecutive failed worker groups, by kind of failure (failures.py)."""

    charged: int = 0
    "Number of failures charged to MAX_FAILURES."
    starved: int = 0
    "Number of groups that got no rows."
    restores: int = 0
    "Number of groups that started from an in-memory copy and took no step."
    kept: int = -1
    "Step of the newest checkpoint, or the newest step in survivor mode, when the last group failed."
    lost: int = 0
    "Number of workers lost since the newest step, in survivor mode."
    workers: int = 0
    "Size of the group when the first of the `lost` workers was lost."
    error: tuple[object, ...] | None = None
    "Description of the newest failure, if all ranks failed alike."
    loops: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Count and newest time (seconds since the epoch) of each kind of failure that repeats soon after the previous one.
    A key is an error that all ranks raised, or Ray's id of a node where a process ran out of memory."""
    final: bool = False
    "True if another group would fail in the same way on any cluster."

    def since(self, kept: int) -> FailureCounts:
        """Return these counts with a new value of `kept`.

        If the new value is larger, all other fields except `error` and `loops` are reset.
        """
        none = FailureCounts(error=self.error, loops=self.loops)
        return replace(none if kept > self.kept else self, kept=kept)


@dataclass(frozen=True)
class GroupEnd:
    """Information about how the newest worker group ended."""

    errors: list[RankError] = field(default_factory=list)
    "Errors that ranks have reported."
    progress: Progress = field(default_factory=Progress)
    hangs: list[Hang] = field(default_factory=list)
    "Ranks that hung, without their stacks."
    fatal: Exception | None = None
    "The error that ends the training permanently."
    gave_up: str = ""
    "The reason why no new group will start, or an empty string if one can start."
    nodes: dict[int, str] = field(default_factory=dict)
    "Ray's node id by rank; empty if the group was asked to end."
    lost_on: list[str] = field(default_factory=list)
    "Nodes on which processes were lost in survivor mode. Ray numbers these processes differently."
    counts: FailureCounts = field(default_factory=FailureCounts)
    "Counts after the last decision of the failure judge."
    failed_replacements: int = 0
    "Number of replacements that have reported, since the last decision, that they could not train."
