"""Where a run stands in one small object, and the requests to stop or delete it.

`status.json` tells a reader in one request where a run stands; training never depends on it. The driver writes it when
it starts and ends, rank 0 while it trains.
"""

import enum
import time
from dataclasses import asdict, dataclass, field, replace

from app.errors import NotFoundError, SupersededError
from app.run import Run, to_json

STOP, DELETION = "stop.json", "delete.json"
"""There while the run must stand still, or is being deleted."""

STATUS_EVERY_S = 10.0
"""A run writes its status at least this often while it trains, however long a step takes: silence means it is gone."""


class RunState(enum.StrEnum):
    """The states of a run."""

    PENDING = "pending"
    "Submitted; its driver has not begun."
    STARTING = "starting"
    "The driver has begun; no worker trains yet, or any more."
    RUNNING = "running"
    RETRYING = "retrying"
    "A try failed, and the cluster starts the next one."
    STOPPING = "stopping"
    "It was told to stop, and is saving."
    STOPPED = "stopped"
    "It was told to stop, and waits to be resumed."
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    "Not finished, and nothing trains it: its processes ended without reporting."
    DELETING = "deleting"
    "It is being deleted, or its deletion was interrupted: the rest is not a run any more."

    @property
    def terminal(self) -> bool:
        """Whether the run stays in this state until somebody acts."""
        ended = (RunState.STOPPED, RunState.SUCCEEDED, RunState.FAILED, RunState.LOST, RunState.DELETING)
        return self in ended


@dataclass(frozen=True)
class Status:
    """Where a run stands, by its own processes."""

    state: RunState
    owner: str
    "Who trains: the job, or the process (`attempts.Attempt.owner`)."
    reason: str = ""
    "One sentence, mostly about how the run ended."
    began: float = 0.0
    "When the owner's driver started, in seconds since the epoch."
    starts: int = 1
    "Consecutive starts of the same owner's driver without a new checkpoint in between."
    attempt: int = 0
    world_size: int = 0
    step: int = 0
    "Optimizer steps taken."
    heartbeat: float | None = None
    "When it last took a step (`step` may lag) or evaluated rows, in seconds since the epoch; None: not yet."
    epoch: int = 0
    "The epoch, from 1, that `step` belongs to."
    total_steps: int = 0
    steps_per_epoch: int = 0
    checkpoint: str | None = None
    "Name of the newest committed checkpoint."
    checkpoint_time: float | None = None
    "When that was committed, in seconds since the epoch."
    loss: float | None = None
    rows_per_s: float | None = None
    step_time_s: float | None = None
    save_s: float | None = None
    "Seconds the newest save took, to its commit."
    notice_s: float | None = None
    "Seconds of a node's notice that a save may use; None: not known."
    memory_every: int = 0
    "Optimizer steps between copies in the nodes' shared memory; 0: none are made."
    warning: str = ""
    "For the user, before it matters: a save takes longer than the notice, say."
    time: float = field(default_factory=time.time)
    "When it was written, in seconds since the epoch."


def write_status(run: Run, status: Status) -> None:
    """Replace the status, with the current time; raises `StorageError`."""
    restore_status(run, replace(status, time=time.time()))


def restore_status(run: Run, status: Status) -> None:
    """Replace the status as it is, time included; raises `StorageError`."""
    record = asdict(status)
    record["beat"] = record.pop("heartbeat")  # its name on disk
    run.storage.write(run.key("status.json"), to_json(record))


def read_status(run: Run) -> Status | None:
    """The status as last written; None before any process of the run has started. Raises `StorageError`."""
    try:
        record = run.read_json("status.json")
    except NotFoundError:
        return None
    known = {name: value for name, value in record.items() if name in Status.__dataclass_fields__}
    return Status(**{**known, "state": RunState(record["state"]), "heartbeat": record.get("beat")})


def request_stop(run: Run, by: str) -> None:
    """Ask the run, whichever job trains it now or later, to save and stop."""
    run.storage.write(run.key(STOP), to_json({"by": by, "time": time.time()}))


def stop_requested(run: Run) -> bool:
    """Whether the run has to stop, and stay stopped."""
    return run.storage.exists(run.key(STOP))


def clear_stop(run: Run) -> None:
    """Let the run train again."""
    run.storage.delete(run.key(STOP))


def mark_deletion(run: Run, by: str) -> None:
    """Record that the run is being deleted; raises `StorageError`."""
    run.storage.write(run.key(DELETION), to_json({"by": by, "time": time.time()}))


def deletion_begun(run: Run) -> bool:
    """Whether the run is being deleted, or its deletion was interrupted."""
    return run.storage.exists(run.key(DELETION))


def refuse_if_deleted(run: Run) -> None:
    """Raise `SupersededError` when the run is being deleted."""
    if deletion_begun(run):
        raise SupersededError(
            f"{run.location} is being deleted, so nothing may train it; `sunspot delete {run.name}` completes that"
        )


def clear_deletion(run: Run) -> None:
    """Delete the record, last of all."""
    run.storage.delete(run.key(DELETION))
