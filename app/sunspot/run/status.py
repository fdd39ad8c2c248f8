"""The status of a run: its current state in small objects, each with one writer.

There are three kinds of objects (`StatusKind`). Rank 0 writes the first from its group's claim on
(train.reporter.Reporter). The driver writes the second while rank 0 does not write, and the third when the driver ends
(run.outcome.DriverStatusWriter). A search has no workers, so its driver writes the
progress. Readers use the current object (`newest_status`). Training never depends on the status.

Each driver has separate objects for each of its attempts. A process can freeze during a write, and complete the write
after another process has taken over the run or after the driver has ended. The late write then only changes an object
that is no longer current. If all drivers shared one object, no check before a write could prevent such a late write.
"""

import contextlib
import enum
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from sunspot.errors import NotFoundError, StorageError, SupersededError
from sunspot.run import Run, to_json
from sunspot.run.objects import (
    CheckpointName,
    Count,
    FiniteFloat,
    SmallCount,
    Timestamp,
    parse,
    read_content,
    read_or_default,
)
from sunspot.run.owner import Owner
from sunspot.run.size_limits import MAX_STATUS_BYTES
from sunspot.storage.base import Entry, Storage

FOLDER = "status"

NAME = re.compile(r"[^/]+/status/attempt-([0-9]{4,9})-([0-9a-f]{8})(|-workers|-ended)\.json")
"""Pattern for the storage keys of status objects. The groups are the attempt, the driver and the kind."""

READ_TRIES = 3
"""Number of attempts to read a status, because it can be deleted between listing and reading."""

STATUS_EVERY_S = 10.0
"""Seconds between rank 0's writes of the status. A thread writes it, so a long step does not delay a write."""

WORKERS_SILENT_AFTER_S = 15.0
"""Seconds without a write by rank 0 after which the driver reports that the workers show no sign of life."""

SILENT_AFTER_S = 25.0
"""Seconds without a write after which a run is silent. By then, the driver should have written, too."""


class RunState(enum.StrEnum):
    """The state of a run."""

    PENDING = "pending"
    "The run was submitted, but its driver has not started."
    STARTING = "starting"
    "The driver has begun, but no worker is training."
    RUNNING = "running"
    FINISHING = "finishing"
    "All steps are taken, and the last checkpoint, predictions or report are being made."
    SILENT = "silent"
    "The run shows no sign of life: its processes are frozen, cut off from storage, or gone, or storage cannot be read."
    RETRYING = "retrying"
    "The job failed, and the operator is starting it again."
    STOPPING = "stopping"
    "The run was asked to stop, and is saving."
    STOPPED = "stopped"
    "The run was asked to stop, and can be resumed."
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    "The run is unfinished, and its processes ended without a report or have been silent for too long."
    DELETING = "deleting"
    "The run is being deleted, or its deletion was interrupted."

    @property
    def terminal(self) -> bool:
        """True if the run stays in this state until a user acts."""
        ended = (RunState.STOPPED, RunState.SUCCEEDED, RunState.FAILED, RunState.LOST, RunState.DELETING)
        return self in ended


class StatusKind(enum.StrEnum):
    """The kind of a status object. The value is the suffix of the object's name."""

    DRIVER = ""
    "Written by the driver at its start, while rank 0 is silent, and while the run is finishing."
    WORKERS = "-workers"
    "Written by rank 0."
    ENDED = "-ended"
    "Written by the driver when it ends. Its other objects are then no longer used."


@dataclass(frozen=True)
class Status:
    """A run's state, as reported by its own processes."""

    state: RunState
    owner: str
    "The job or process that trains (`attempts.Attempt.owner`)."
    reason: str = ""
    "The reason for the state in one sentence."
    began: Timestamp = 0.0
    "The time at which the driver started, in seconds since the epoch."
    starts: Count = 1
    "The number of consecutive driver starts by this owner without a new checkpoint in between."
    attempt: Count = 0
    """The attempt that the status describes. Before the driver's first attempt, this is the newest attempt at the time.
    It is 0 if another driver was still training then, so that the other driver's status applies."""
    after: tuple[str, ...] = ()
    "The IDs of the drivers that had written a status when this driver began."
    driver: str = "00000000"
    "The ID of the driver that the status belongs to (`new_driver`)."
    world_size: SmallCount = 0
    scalable: str = ""
    "The setting NUM_WORKERS if workers can leave and join while the others train, or an empty string."
    step: Count = 0
    "The number of optimizer steps taken."
    heartbeat: Timestamp | None = None
    "The time of the last step or evaluated row, in seconds since the epoch, or None before the first one."
    epoch: Count = 0
    "The epoch of `step`, counted from 1."
    total_steps: Count = 0
    steps_per_epoch: Count = 0
    checkpoint: CheckpointName | None = None
    "The name of the newest committed checkpoint."
    checkpoint_time: Timestamp | None = None
    "The time at which `checkpoint` was committed, in seconds since the epoch."
    saved: bool = False
    "True if the workers of `attempt` have ended after their last step was committed."
    loss: float | None = None
    "The mean loss over the last training rows, as in checkpoints (`RECENT_ROWS`)."
    test_loss: float | None = None
    "The mean loss over the held-out rows in their newest evaluation."
    rows_per_s: FiniteFloat | None = None
    step_time_s: FiniteFloat | None = None
    save_s: FiniteFloat | None = None
    "Seconds from the start of the newest save to its commit."
    notice_s: FiniteFloat | None = None
    "Seconds that a save can take after a node's notice, or None if unknown."
    memory_every: Count = 0
    "Optimizer steps between copies to the nodes' shared memory, or 0 if no copies are made."
    warning: str = ""
    "A warning for the user, for example that a save takes longer than the notice."
    nan_since: Count = 0
    "The step since which the loss or the weights have not been finite (`checkpoints.NAN_SINCE`), or 0."
    time: Timestamp = field(default_factory=time.time)
    "The time at which the status was written, in seconds since the epoch."
    stored: float | None = None
    "The time at which storage received the status, by this machine's clock, or None if it was not read from storage."

    @property
    def location(self) -> str:
        """The run's place, namespace and cluster as readable text, or an empty string if none of them is known."""
        return Owner.parse(self.owner).location

    @property
    def nan_warning(self) -> str:
        """A warning if the loss or the weights are not finite, or an empty string."""
        return (
            f"the loss or the weights have been NaN or infinite since step {self.nan_since}" if self.nan_since else ""
        )

    @property
    def seen(self) -> float:
        """The time of the last sign of life, in seconds since the epoch: `stored`, or `time` if `stored` is None."""
        return self.time if self.stored is None else self.stored


def is_alive(status: Status, now: float) -> bool:
    """Return True if a run has not ended and its status is recent. `now` is in seconds since the epoch."""
    return not status.state.terminal and now - status.seen <= SILENT_AFTER_S


def new_driver() -> str:
    """Return a new ID for a driver process."""
    return uuid.uuid4().hex[:8]


def write_status(run: Run, status: Status, kind: StatusKind = StatusKind.DRIVER) -> None:
    """Write a status with the current time. Raises `StorageError`."""
    write_status_as_is(run, replace(status, time=time.time()), kind)


def write_status_as_is(run: Run, status: Status, kind: StatusKind = StatusKind.DRIVER) -> None:
    """Write a status without changing its time. Raises `StorageError`."""
    record = asdict(status)
    del record["stored"]
    run.storage.write(run.key(FOLDER, _file(status, kind)), to_json(record))


def _file(status: Status, kind: StatusKind) -> str:
    return f"attempt-{status.attempt:04d}-{status.driver}{kind}.json"


def newest_status(listed: Iterable[Entry], driver: str = "", other_than: str = "") -> Entry | None:
    """Return the current status object in a listing, or None if there is no such object. Nothing is read.

    If a driver has ended, all of its objects except the ENDED object are ignored. Among the remaining objects of the
    newest attempt, the object that was written last is current. If two objects were written at the same time, the
    driver's object is current, because a driver writes only if its workers do not.

    `driver` limits the search to the objects of one driver. `other_than` excludes the objects of one driver.
    """
    statuses = [entry for entry in listed if NAME.fullmatch(entry.key)]
    ended = {driver_of_status(entry) for entry in statuses if kind_of_status(entry) is StatusKind.ENDED}

    def counts(entry: Entry) -> bool:
        writer = driver_of_status(entry)
        wanted = driver in ("", writer) and writer != other_than
        return wanted and (writer not in ended or kind_of_status(entry) is StatusKind.ENDED)

    def order(entry: Entry) -> tuple[int, float, bool]:
        return attempt_of_status(entry), entry.modified, kind_of_status(entry) is not StatusKind.WORKERS

    return max(filter(counts, statuses), key=order, default=None)


def attempt_of_status(entry: Entry) -> int:
    """Return the attempt in a status object's name, or -1 if the object is not a status."""
    match = NAME.fullmatch(entry.key)
    return int(match[1]) if match else -1


def driver_of_status(entry: Entry) -> str:
    """Return the driver in a status object's name, or an empty string if the object is not a status."""
    match = NAME.fullmatch(entry.key)
    return match[2] if match else ""


def kind_of_status(entry: Entry) -> StatusKind | None:
    """Return the kind in a status object's name, or None if the object is not a status."""
    match = NAME.fullmatch(entry.key)
    return StatusKind(match[3]) if match else None


def list_statuses(run: Run) -> list[Entry]:
    """Return all status objects of the run, in no particular order."""
    return [entry for entry in run.storage.list(run.key(FOLDER)) if NAME.fullmatch(entry.key)]


def find_own_status(run: Run, driver: str, claimed: int = 0) -> Entry | None:
    """Return this driver's current status object, or None if another driver owns the run or the run was deleted.

    `claimed` is an attempt that this driver has claimed, but may not have written to a status yet.
    """
    listed = list_statuses(run)
    newest, own = newest_status(listed), newest_status(listed, driver)
    return own if own and newest and attempt_of_status(newest) <= max(attempt_of_status(own), claimed) else None


def read_status(run: Run, driver: str = "", other_than: str = "") -> Status | None:
    """Return the current status (`newest_status`), or None if no status exists or it is damaged."""
    return read_or_default(lambda: load_newest_status(run, driver, other_than), None)


def load_newest_status(run: Run, driver: str = "", other_than: str = "") -> Status | None:
    """Return the current status (`newest_status`), or None. Raises `DamageError` if it is damaged."""
    for _ in range(READ_TRIES):
        entry = newest_status(run.storage.list(run.key(FOLDER)), driver, other_than)
        if entry is None:
            return None
        with contextlib.suppress(NotFoundError):  # its driver or a newer attempt deleted it after it was listed
            return load_status(run.storage, entry)
    return None


def load_usable_status(storage: Storage, entry: Entry) -> Status | None:
    """Return the status in an object, or None if it is damaged."""
    return read_or_default(lambda: load_status(storage, entry), None)


def load_status(storage: Storage, entry: Entry) -> Status:
    """Return the status in an object. Raises `NotFoundError`, `StorageError` or `DamageError`."""
    status: Status = parse(Status, read_content(storage, entry.key, MAX_STATUS_BYTES), storage.locate(entry.key))
    return replace(status, stored=entry.modified - storage.ahead_s)


def refuse_if_ended(run: Run, status: Status) -> None:
    """Raise `SupersededError` if the driver to which this status belongs has ended."""
    with contextlib.suppress(NotFoundError):
        run.storage.read(run.key(FOLDER, _file(status, StatusKind.ENDED)))
        raise SupersededError(f"{run.location}: the driver of attempt {status.attempt} has ended")


def delete_older_statuses(run: Run, attempt: int) -> None:
    """Delete the status objects of attempts before `attempt`. If this fails, the next attempt deletes them."""
    with contextlib.suppress(StorageError):
        run.storage.delete_many([entry.key for _, entry in run.entries(FOLDER) if attempt_of_status(entry) < attempt])


def withdraw_status(run: Run, driver: str) -> None:
    """Delete this driver's status objects, so that the previous status applies again.

    Raises `StorageError` if storage fails.
    """
    run.storage.delete_many([entry.key for entry in list_statuses(run) if driver_of_status(entry) == driver])
