"""Where a run stands, in one small object.

The status tells a reader where a run stands; training never depends on it. The driver writes it when it starts and
ends, rank 0 while it trains. Each start of a driver has a status of its own for each of its attempts: a process that
was frozen while another one took the run over can come back in the middle of a write, when no check before the write
helps, and then it writes to an object of an older attempt, which no reader looks at any more.
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
    Measure,
    Moment,
    Workers,
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
"""The keys of status objects."""

READ_TRIES = 3
"""Tries of a read whose object goes away between listing and reading."""

STATUS_EVERY_S = 10.0
"""Rank 0 writes the status at least this often, from a thread: a long step or evaluation is no silence."""

WORKERS_SILENT_AFTER_S = 15.0
"""When rank 0 has not written for so long, its driver writes that no worker gives a sign of life."""

SILENT_AFTER_S = 25.0
"""A run whose status is older gives no sign of life: its driver, too, has missed a write, or storage is very slow."""


class RunState(enum.StrEnum):
    """The states of a run."""

    PENDING = "pending"
    "Submitted; its driver has not begun."
    STARTING = "starting"
    "The driver has begun; no worker trains yet, or any more."
    RUNNING = "running"
    FINISHING = "finishing"
    "All steps are taken: it evaluates, commits the last checkpoint, predicts or writes its report."
    SILENT = "silent"
    "It should train, and gives no sign of life: its processes are frozen, cut off, or gone without reporting."
    RETRYING = "retrying"
    "A try failed, and the cluster starts the next one."
    STOPPING = "stopping"
    "It was told to stop, and is saving."
    STOPPED = "stopped"
    "It was told to stop, and waits to be resumed."
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    "Not finished, and nothing trains it: its processes ended without reporting, or are silent for too long."
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
    began: Moment = 0.0
    "When the owner's driver started, in seconds since the epoch."
    starts: Count = 1
    "Consecutive starts of the same owner's driver without a new checkpoint in between."
    attempt: Count = 0
    """The attempt that it is of. Before the driver's first, the run's newest one when the driver began; or 0, so that
    the status of another start counts, which trained then."""
    after: tuple[str, ...] = ()
    "The starts of drivers that had left a status when this one began."
    driver: str = "00000000"
    "The start of the driver whose processes write it (`new_driver`)."
    world_size: Workers = 0
    step: Count = 0
    "Optimizer steps taken."
    heartbeat: Moment | None = None
    "When it last took a step (`step` may lag) or evaluated rows, in seconds since the epoch; None: not yet."
    epoch: Count = 0
    "The epoch, from 1, that `step` belongs to."
    total_steps: Count = 0
    steps_per_epoch: Count = 0
    checkpoint: CheckpointName | None = None
    "Name of the newest committed checkpoint."
    checkpoint_time: Moment | None = None
    "When that was committed, in seconds since the epoch."
    loss: float | None = None
    "Mean over the last training rows, as of a checkpoint (`RECENT_ROWS`)."
    test_loss: float | None = None
    "Mean over the held-out rows, at their newest evaluation."
    rows_per_s: Measure | None = None
    step_time_s: Measure | None = None
    save_s: Measure | None = None
    "Seconds the newest save took, to its commit."
    notice_s: Measure | None = None
    "Seconds of a node's notice that a save may use; None: not known."
    memory_every: Count = 0
    "Optimizer steps between copies in the nodes' shared memory; 0: none are made."
    warning: str = ""
    "For the user, before it matters: a save takes longer than the notice, say."
    nan_since: Count = 0
    "The step since which the loss or the weights are not finite (`checkpoints.NAN_SINCE`); 0 if they are finite."
    time: Moment = field(default_factory=time.time)
    "When it was written, in seconds since the epoch."
    stored: float | None = None
    "When storage took it, by this machine's clock; None: it was not read from storage."

    @property
    def place(self) -> str:
        """The namespace and the cluster in which the run trains, as readable text; empty if they are not known."""
        return Owner.parse(self.owner).place

    @property
    def nan_warning(self) -> str:
        """A warning if the loss or the weights are not finite, else empty."""
        return f"the loss or the weights are NaN or infinite since step {self.nan_since}" if self.nan_since else ""

    @property
    def seen(self) -> float:
        """The last sign of life, in seconds since the epoch: by storage's clock, as the writer's may be wrong."""
        return self.time if self.stored is None else self.stored


def is_alive(status: Status, now: float) -> bool:
    """Return True if a run has not ended and its newest status is recent; `now` is in seconds since the epoch."""
    return not status.state.terminal and now - status.seen <= SILENT_AFTER_S


def new_driver() -> str:
    """Return what identifies one start of a driver."""
    return uuid.uuid4().hex[:8]


def write_status(run: Run, status: Status) -> None:
    """Replace the status of its driver's attempt, with the current time; raises `StorageError`."""
    write_status_as_is(run, replace(status, time=time.time()))


def write_status_as_is(run: Run, status: Status) -> None:
    """Replace the status of its driver's attempt as it is, time included; raises `StorageError`."""
    record = asdict(status)
    del record["stored"]
    run.storage.write(run.key(FOLDER, _file(status)), to_json(record))


def _file(status: Status) -> str:
    return f"attempt-{status.attempt:04d}-{status.driver}.json"


def newest_status(listed: Iterable[Entry], driver: str = "", other_than: str = "") -> Entry | None:
    """Return the newest attempt's status object in a listing, of several the last.

    With `driver`, only of those of that start of a driver; with `other_than`, only of those of all other starts.
    """
    of_driver = [(entry, driver_of_status(entry)) for entry in listed if NAME.fullmatch(entry.key)]
    found = [entry for entry, its in of_driver if driver in ("", its) and its != other_than]
    return max(found, key=lambda entry: (attempt_of_status(entry), entry.modified), default=None)


def attempt_of_status(entry: Entry) -> int:
    """Return the attempt of a status object, from its name; -1 for another object."""
    match = NAME.fullmatch(entry.key)
    return int(match[1]) if match else -1


def driver_of_status(entry: Entry) -> str:
    """Return the start of the driver that a status object is of, from its name; empty for another object."""
    match = NAME.fullmatch(entry.key)
    return match[2] if match else ""


def list_statuses(run: Run) -> list[Entry]:
    """Return all status objects of the run; the order says nothing."""
    return [entry for entry in run.storage.list(run.key(FOLDER)) if NAME.fullmatch(entry.key)]


def find_own_status(run: Run, driver: str) -> Entry | None:
    """Return the status object of this start of a driver; None when another one owns the run, or it was deleted."""
    listed = list_statuses(run)
    newest, own = newest_status(listed), newest_status(listed, driver)
    return own if own and newest and attempt_of_status(own) == attempt_of_status(newest) else None


def read_status(run: Run, driver: str = "", other_than: str = "") -> Status | None:
    """Return the status that `newest_status` chooses; None if there is none, or a damaged one."""
    return read_or_default(lambda: load_newest_status(run, driver, other_than), None)


def load_newest_status(run: Run, driver: str = "", other_than: str = "") -> Status | None:
    """Read like `read_status`; raises `DamageError` too."""
    for _ in range(READ_TRIES):
        entry = newest_status(run.storage.list(run.key(FOLDER)), driver, other_than)
        if entry is None:
            return None
        with contextlib.suppress(NotFoundError):  # withdrawn, or tidied away by a newer attempt, since it was listed
            return load_status(run.storage, entry)
    return None


def load_usable_status(storage: Storage, entry: Entry) -> Status | None:
    """Load a status; None when it is damaged."""
    return read_or_default(lambda: load_status(storage, entry), None)


def load_status(storage: Storage, entry: Entry) -> Status:
    """Return the status in one object; raises `NotFoundError`, `StorageError` or `DamageError`."""
    status: Status = parse(Status, read_content(storage, entry.key, MAX_STATUS_BYTES), storage.locate(entry.key))
    return replace(status, stored=entry.modified - storage.ahead_s)


def refuse_if_ended(run: Run, status: Status) -> None:
    """Raise `SupersededError` when the driver of this status has written that its attempt has ended."""
    try:
        written = read(run, Status, FOLDER, _file(status))
    except (NotFoundError, DamageError):
        return  # not written yet, or damaged: the next one mends it
    if written.state.terminal:
        raise SupersededError(f"{run.location}: the driver of attempt {status.attempt} has ended it")


def delete_older_statuses(run: Run, attempt: int) -> None:
    """Tidy away the statuses of older attempts; a failure is made up for by the next attempt."""
    with contextlib.suppress(StorageError):
        run.storage.delete_many([entry.key for _, entry in run.entries(FOLDER) if attempt_of_status(entry) < attempt])


def withdraw_status(run: Run, driver: str) -> None:
    """Delete what this start of a driver said: the run stands where it stood before. Raises `StorageError`."""
    run.storage.delete_many([entry.key for entry in list_statuses(run) if driver_of_status(entry) == driver])
