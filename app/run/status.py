"""The newest news of a run in one small object, and the request to stop it.

`status.json` is what a reader needs to say in one request where a run stands; nothing that trains depends on it. The
driver writes it when it starts and ends, rank 0 while it trains. `stop.json` is there while the run is to stand still.
"""

from __future__ import annotations

import enum
import time
from dataclasses import asdict, dataclass, field, replace

from app.errors import NotFoundError, SupersededError
from app.run import Run, to_json

STOP, DELETION = "stop.json", "delete.json"
"""There while the run must stand still, or is being deleted."""

STATUS_EVERY_S = 10.0
"""A run that trains writes its status at least so often, whatever a step takes; silence tells that nobody is there."""


class RunState(enum.StrEnum):
    """Every state that a run can be in."""

    PENDING = "pending"
    "Submitted; its driver has not begun."
    STARTING = "starting"
    "The driver has begun; no worker trains yet, or none any more."
    RUNNING = "running"
    RETRYING = "retrying"
    "A try failed, and the cluster makes the next one."
    STOPPING = "stopping"
    "It was told to stop, and saves."
    STOPPED = "stopped"
    "It was told to stop, and stands still until it is resumed."
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    "It is not finished, and nothing trains it: its processes ended without a word."
    DELETING = "deleting"
    "It is being deleted, or that was interrupted: what is left of it is no run any more."

    @property
    def terminal(self) -> bool:
        """Whether the run stays in this state until somebody does something."""
        ended = (RunState.STOPPED, RunState.SUCCEEDED, RunState.FAILED, RunState.LOST, RunState.DELETING)
        return self in ended


@dataclass(frozen=True)
class Status:
    """Where a run stands, as its own processes saw it."""

    state: RunState
    owner: str
    "Who trains: the job, or the process (`attempts.Attempt.owner`)."
    reason: str = ""
    "One sentence, for the end of a run above all."
    began: float = 0.0
    "When the owner's driver began, in seconds since the epoch."
    starts: int = 1
    "Starts of the same owner's driver in a row without a new checkpoint between them."
    attempt: int = 0
    world_size: int = 0
    step: int = 0
    "Optimizer steps taken."
    heartbeat: float | None = None
    "When it last took a step (`step` may be behind) or evaluated rows, in seconds since the epoch; None: not yet."
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
    "Seconds from the beginning of the newest save to its commit."
    notice_s: float | None = None
    "Seconds between the notice that a node goes and its end, as far as a save may use them; None: not known."
    memory_every: int = 0
    "Optimizer steps between two copies in the nodes' shared memory; 0: none are made."
    warning: str = ""
    "What the user should know before it matters: a save that takes longer than the notice, say."
    time: float = field(default_factory=time.time)
    "When this was written, in seconds since the epoch."


def write_status(run: Run, status: Status) -> None:
    """Replace the status, its time being now; raises `StorageError`."""
    restore_status(run, replace(status, time=time.time()))


def restore_status(run: Run, status: Status) -> None:
    """Replace the status by one that was read before; raises `StorageError`."""
    record = asdict(status)
    record["beat"] = record.pop("heartbeat")  # its name on disk
    run.storage.write(run.key("status.json"), to_json(record))


def read_status(run: Run) -> Status | None:
    """The status as it was last written; None when no process of this run has begun. Raises `StorageError`."""
    try:
        record = run.read_json("status.json")
    except NotFoundError:
        return None
    known = {name: value for name, value in record.items() if name in Status.__dataclass_fields__}
    return Status(**{**known, "state": RunState(record["state"]), "heartbeat": record.get("beat")})


def request_stop(run: Run, by: str) -> None:
    """Ask the run, in whatever job it trains now or later, to save and stand still."""
    run.storage.write(run.key(STOP), to_json({"by": by, "time": time.time()}))


def stop_requested(run: Run) -> bool:
    """Whether the run is to stand still."""
    return run.storage.exists(run.key(STOP))


def clear_stop(run: Run) -> None:
    """Let the run train again."""
    run.storage.delete(run.key(STOP))


def mark_deletion(run: Run, by: str) -> None:
    """Say that the run is being deleted; raises `StorageError`."""
    run.storage.write(run.key(DELETION), to_json({"by": by, "time": time.time()}))


def deletion_begun(run: Run) -> bool:
    """Whether the run is being deleted, or was and not all of it is gone."""
    return run.storage.exists(run.key(DELETION))


def refuse_if_deleted(run: Run) -> None:
    """Raise `SupersededError` when the run is being deleted."""
    if deletion_begun(run):
        raise SupersededError(
            f"{run.location} is being deleted, so nothing may train it; `sunspot delete {run.name}` completes that"
        )


def clear_deletion(run: Run) -> None:
    """Take the mark away: nothing else of the run is left."""
    run.storage.delete(run.key(DELETION))
