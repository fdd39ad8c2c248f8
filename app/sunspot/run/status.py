"""The status of a run: its current state in one small object.

The status informs readers, and training never depends on it. The driver writes it when it starts and when it ends, and
rank 0 while it trains. Each start of a driver has a status object of its own for each of its attempts. So if a process
is frozen in the middle of a write while another one takes the run over, it later writes to the object of an older
attempt, which is no longer read. No check before the write could prevent that. The driver and rank 0 of one attempt
share an object. Only time separates their writes: the driver writes if rank 0 has not written for a while.
"""

import contextlib
import enum
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from sunspot.errors import DamageError, NotFoundError, StorageError, SupersededError
from sunspot.run import Run, to_json
from sunspot.run.objects import (
    CheckpointName,
    Count,
    FiniteFloat,
    SmallCount,
    Timestamp,
    parse,
    read,
    read_content,
    read_or_default,
)
from sunspot.run.owner import Owner
from sunspot.run.size_limits import MAX_STATUS_BYTES
from sunspot.storage.base import Entry, Storage

FOLDER = "status"

NAME = re.compile(r"[^/]+/status/attempt-([0-9]{4,9})-([0-9a-f]{8})\.json")
"""Pattern of the storage keys of status objects."""

READ_TRIES = 3
"""Number of attempts to read a status that may be deleted between listing and reading."""

STATUS_EVERY_S = 10.0
"""Seconds between two writes of the status by rank 0. A thread writes it, so a long step does not delay a write."""

WORKERS_SILENT_AFTER_S = 15.0
"""Seconds without a write by rank 0 after which the driver writes that the workers give no sign of life."""

SILENT_AFTER_S = 25.0
"""Seconds without a write after which a run is silent. The driver has then missed a write, too, or storage is slow."""


class RunState(enum.StrEnum):
    """The states of a run."""

    PENDING = "pending"
    "Submitted, but its driver has not begun."
    STARTING = "starting"
    "The driver has begun, but no worker is training."
    RUNNING = "running"
    FINISHING = "finishing"
    "All steps are taken, and the last checkpoint, the predictions or the report are being made."
    SILENT = "silent"
    "The run should train but gives no sign of life: its processes are frozen, cut off from storage, or gone."
    RETRYING = "retrying"
    "A try failed, and the cluster starts the next one."
    STOPPING = "stopping"
    "The run was told to stop and is saving."
    STOPPED = "stopped"
    "The run was told to stop and can be resumed."
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    "Nothing trains the unfinished run: its processes ended without reporting, or have been silent for too long."
    DELETING = "deleting"
    "The run is being deleted, or its deletion was interrupted."

    @property
    def terminal(self) -> bool:
        """Return True if the run stays in this state until a user acts."""
        ended = (RunState.STOPPED, RunState.SUCCEEDED, RunState.FAILED, RunState.LOST, RunState.DELETING)
        return self in ended


@dataclass(frozen=True)
class Status:
    """The state of a run as its own processes report it."""

    state: RunState
    owner: str
    "The job or process that trains (`attempts.Attempt.owner`)."
    reason: str = ""
    "Reason of the state in one sentence, mostly about how the run ended."
    began: Timestamp = 0.0
    "Time at which the owner's driver started, in seconds since the epoch."
    starts: Count = 1
    "Number of consecutive starts of the owner's driver without a new checkpoint in between."
    attempt: Count = 0
    """Attempt that the status describes. Before the driver's first attempt, it is the attempt that was the newest when
    the driver began, or 0 if another start was training then, so that the status of that start counts."""
    after: tuple[str, ...] = ()
    "Starts of drivers that had written a status when this driver began."
    driver: str = "00000000"
    "Start of the driver whose processes write the status (`new_driver`)."
    world_size: SmallCount = 0
    step: Count = 0
    "Optimizer steps taken."
    heartbeat: Timestamp | None = None
    "Time of the last step (`step` may lag) or evaluated row, in seconds since the epoch. None before the first."
    epoch: Count = 0
    "Epoch, from 1, to which `step` belongs."
    total_steps: Count = 0
    steps_per_epoch: Count = 0
    checkpoint: CheckpointName | None = None
    "Name of the newest committed checkpoint."
    checkpoint_time: Timestamp | None = None
    "Time at which that checkpoint was committed, in seconds since the epoch."
    loss: float | None = None
    "Mean over the last training rows, like that of a checkpoint (`RECENT_ROWS`)."
    test_loss: float | None = None
    "Mean over the held-out rows in their newest evaluation."
    rows_per_s: FiniteFloat | None = None
    step_time_s: FiniteFloat | None = None
    save_s: FiniteFloat | None = None
    "Seconds from the beginning of the newest save to its commit."
    notice_s: FiniteFloat | None = None
    "Seconds of a node's notice that a save may use, or None if not known."
    memory_every: Count = 0
    "Optimizer steps between copies in the nodes' shared memory, or 0 if no copies are made."
    warning: str = ""
    "Early warning to the user, such as that a save takes longer than the notice."
    nan_since: Count = 0
    "Step since which the loss or the weights have not been finite (`checkpoints.NAN_SINCE`), or 0."
    time: Timestamp = field(default_factory=time.time)
    "Time at which the status was written, in seconds since the epoch."
    stored: float | None = None
    "Time at which storage received the status, by this machine's clock. None if it was not read from storage."

    @property
    def place(self) -> str:
        """The namespace and the cluster in which the run trains as readable text, or an empty text if not known."""
        return Owner.parse(self.owner).place

    @property
    def nan_warning(self) -> str:
        """A warning if the loss or the weights are not finite, or an empty text."""
        return (
            f"the loss or the weights have been NaN or infinite since step {self.nan_since}" if self.nan_since else ""
        )

    @property
    def seen(self) -> float:
        """Time of the last sign of life, in seconds since the epoch, by storage's clock if possible."""
        return self.time if self.stored is None else self.stored


def is_alive(status: Status, now: float) -> bool:
    """Return True if a run has not ended and its newest status is recent. `now` is in seconds since the epoch."""
    return not status.state.terminal and now - status.seen <= SILENT_AFTER_S


def new_driver() -> str:
    """Return a new identity for a start of a driver."""
    return uuid.uuid4().hex[:8]


def write_status(run: Run, status: Status) -> None:
    """Write the status of an attempt and driver with the current time. Raises `StorageError`."""
    write_status_as_is(run, replace(status, time=time.time()))


def write_status_as_is(run: Run, status: Status) -> None:
    """Write the status of an attempt and driver with the time that it has. Raises `StorageError`."""
    record = asdict(status)
    del record["stored"]
    run.storage.write(run.key(FOLDER, _file(status)), to_json(record))


def _file(status: Status) -> str:
    return f"attempt-{status.attempt:04d}-{status.driver}.json"


def newest_status(listed: Iterable[Entry], driver: str = "", other_than: str = "") -> Entry | None:
    """Return the status object of the newest attempt in a listing, and of several the one that was written last.

    With `driver`, only objects of that start of a driver count. With `other_than`, only objects of other starts count.
    """
    drivers = [(entry, driver_of_status(entry)) for entry in listed if NAME.fullmatch(entry.key)]
    found = [entry for entry, writer in drivers if driver in ("", writer) and writer != other_than]
    return max(found, key=lambda entry: (attempt_of_status(entry), entry.modified), default=None)


def attempt_of_status(entry: Entry) -> int:
    """Return the attempt in the name of a status object, or -1 if it is another object."""
    match = NAME.fullmatch(entry.key)
    return int(match[1]) if match else -1


def driver_of_status(entry: Entry) -> str:
    """Return the start of a driver in the name of a status object, or an empty text if it is another object."""
    match = NAME.fullmatch(entry.key)
    return match[2] if match else ""


def list_statuses(run: Run) -> list[Entry]:
    """Return all status objects of the run, in no particular order."""
    return [entry for entry in run.storage.list(run.key(FOLDER)) if NAME.fullmatch(entry.key)]


def find_own_status(run: Run, driver: str) -> Entry | None:
    """Return the status object of this start of a driver, or None if another start owns the run or it was deleted."""
    listed = list_statuses(run)
    newest, own = newest_status(listed), newest_status(listed, driver)
    return own if own and newest and attempt_of_status(own) == attempt_of_status(newest) else None


def read_status(run: Run, driver: str = "", other_than: str = "") -> Status | None:
    """Return the status that `newest_status` chooses, or None if no status exists or it is damaged."""
    return read_or_default(lambda: load_newest_status(run, driver, other_than), None)


def load_newest_status(run: Run, driver: str = "", other_than: str = "") -> Status | None:
    """Return the same as `read_status`, but raise `DamageError` if the status is damaged."""
    for _ in range(READ_TRIES):
        entry = newest_status(run.storage.list(run.key(FOLDER)), driver, other_than)
        if entry is None:
            return None
        with contextlib.suppress(NotFoundError):  # deleted since it was listed, by its driver or by a newer attempt
            return load_status(run.storage, entry)
    return None


def load_usable_status(storage: Storage, entry: Entry) -> Status | None:
    """Return the status in one object, or None if it is damaged."""
    return read_or_default(lambda: load_status(storage, entry), None)


def load_status(storage: Storage, entry: Entry) -> Status:
    """Return the status in one object. Raises `NotFoundError`, `StorageError` or `DamageError`."""
    status: Status = parse(Status, read_content(storage, entry.key, MAX_STATUS_BYTES), storage.locate(entry.key))
    return replace(status, stored=entry.modified - storage.ahead_s)


def refuse_if_ended(run: Run, status: Status) -> None:
    """Raise `SupersededError` if the driver of this status has written that its attempt has ended."""
    try:
        written = read(run, Status, FOLDER, _file(status))
    except (NotFoundError, DamageError):
        return  # not written yet, or damaged, which the next write repairs
    if written.state.terminal:
        raise SupersededError(f"{run.location}: the driver of attempt {status.attempt} has ended it")


def delete_older_statuses(run: Run, attempt: int) -> None:
    """Delete the statuses of attempts before `attempt`. If that fails, the next attempt does it."""
    with contextlib.suppress(StorageError):
        run.storage.delete_many([entry.key for _, entry in run.entries(FOLDER) if attempt_of_status(entry) < attempt])


def withdraw_status(run: Run, driver: str) -> None:
    """Delete the statuses of this start of a driver, so that the one before counts again. Raises `StorageError`."""
    run.storage.delete_many([entry.key for entry in list_statuses(run) if driver_of_status(entry) == driver])
