"""What driver, workers and Ray Train's controller tell each other through the control channel (control.py).

Times are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from sunspot.observe.progress import Progress
from sunspot.run.failures import Failure, Hang
from sunspot.run.incidents import Cause

OUT_OF_MEMORY = 2
"""CUDA's code. Such a GPU works: others have its memory, or have not given it back yet."""


@dataclass(frozen=True)
class Command:
    """What the driver asks of the worker group."""

    stop: bool = False
    "Save and return: the run ends here."
    restart: bool = False
    "Save and end: Ray starts a new worker group, without the preempted nodes or with the new ones."
    deadline: float | None = None
    "When the first preempted node is gone."
    save: bool = False
    "Save, and train on: the head is to go, and a new one continues from there."
    moves: bool = False
    "Nodes are given back, and with them the copies in their memory: the state has to be in storage."
    regroup: bool = False
    "Form the next group once the step is done, and an evaluation after it: others join, or leave."


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group that trains."""

    attempt: int
    world_size: int
    nodes: dict[int, str]
    "Ray's id of each rank's node."
    hosts: dict[int, str] = field(default_factory=dict)
    "Host name of each rank's node, which in Kubernetes is its pod's name, as far as it is known."


@dataclass(frozen=True)
class Note:
    """An incident of the cluster or of a process, for the run's events."""

    event: str
    detail: str
    time: float


@dataclass(frozen=True)
class Incident:
    """Why a worker group ended, as far as is known."""

    cause: Cause | None = None
    detail: str = ""
    "Of the cause, for people."
    noticed: float | None = None
    "When the notice arrived or the loss was detected."
    loss: str = ""
    "The errors of ranks that ended without having been told to."
    save_began: float | None = None
    committed: float | None = None
    paused_since: float | None = None
    "When the driver before had ended."
    last_step: int = 0
    "The last step that the group is known to have taken."
    notes: tuple[Note, ...] = ()
    "Other events since the group began."

    def describe(self) -> str:
        """Return the cause and its details as readable text."""
        said = self.detail or self.loss
        return f"{self.cause} ({said})" if said else str(self.cause)

    def completed_by(self, later: Incident) -> Incident:
        """Add what was learned later; what was known first stands."""
        unknown = [one.name for one in fields(self) if not getattr(self, one.name)]
        return replace(self, **{name: getattr(later, name) for name in unknown})


@dataclass(frozen=True)
class RankError:
    """The error that ended one rank."""

    failure: Failure
    world_size: int
    taken: int
    "Steps that its group had taken."
    from_outside: bool
    "It is no error of the program, but of a network, a disk, memory or a device."
    from_memory: bool = False
    "Its group began from a copy in memory."
    node: str = ""
    "Ray's id of its node."
    cuda_error: int | None = None
    "CUDA's code, if it is an error of CUDA other than too little memory."
    out_of_memory: bool = False
    "Whether the machine or its GPU had too little memory."


@dataclass(frozen=True)
class FailureCounts:
    """How many worker groups have failed in a row, and on what (failures.py)."""

    charged: int = 0
    "Those that MAX_FAILURES counts."
    starved: int = 0
    "Those that got no rows."
    restores: int = 0
    "Those that came to no step from a copy in memory."
    kept: int = -1
    "Step of the newest checkpoint then; of the newest step, where the others trained on."
    lost: int = 0
    "Workers lost since the newest step, if the others trained on."
    workers: int = 0
    "Size of the group when the first of these workers was lost."
    error: tuple[object, ...] | None = None
    "What the newest one failed with, if all of its ranks did so alike."
    loops: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """How often the same end came in a row, each time soon after the one before, and the time of the newest in seconds
    since the epoch. A key is an error that all ranks raised, or Ray's id of a node where a process lacked memory."""
    final: bool = False
    "Whether another group would fail in the same way, on any cluster."

    def since(self, kept: int) -> FailureCounts:
        """Return these counts, or zeros if a newer step is kept by now. The error and the loops remain."""
        none = FailureCounts(error=self.error, loops=self.loops)
        return replace(none if kept > self.kept else self, kept=kept)


@dataclass(frozen=True)
class GroupEnd:
    """What is known of the end of the newest worker group."""

    errors: list[RankError] = field(default_factory=list)
    "Of the ranks that could report theirs."
    progress: Progress = field(default_factory=Progress)
    hangs: list[Hang] = field(default_factory=list)
    "The ranks that hung, without stacks."
    fatal: Exception | None = None
    "The error that ends the training for good."
    gave_up: str = ""
    "Why no other group starts; empty if one may."
    nodes: dict[int, str] = field(default_factory=dict)
    "Ray's id of each rank's node, unless the group was asked to end."
    lost_on: list[str] = field(default_factory=list)
    "Nodes on which processes were lost that others outlive; their ranks are not Ray's."
    counts: FailureCounts = field(default_factory=FailureCounts)
    "As the judge left them who was asked last."
    failed_replacements: int = 0
    "Replacements that have told that they could not train, since a judge was asked."
