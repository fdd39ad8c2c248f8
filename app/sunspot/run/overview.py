"""Lists all runs in a storage location and determines their states from storage alone.

Few objects are read, because a listing contains the name, size and modification time of each object.
"""

import contextlib
import difflib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, StorageError
from sunspot.formatting import as_time, in_words, plural
from sunspot.log import warn_once
from sunspot.run import Run
from sunspot.run.attempts import CLAIM, attempt_of, step_of
from sunspot.run.checkpoints import (
    MANIFEST,
)
from sunspot.run.logs import SEGMENT, STREAM
from sunspot.run.objects import CHECKPOINT, RUN
from sunspot.run.requests import DELETION, STOP, SUBMISSION, deletion_begun, list_submissions
from sunspot.run.status import (
    FOLDER,
    SILENT_AFTER_S,
    STATUS_EVERY_S,
    RunState,
    Status,
    is_alive,
    list_statuses,
    load_usable_status,
    newest_status,
    read_status,
)
from sunspot.storage.base import Entry, Storage
from sunspot.storage.bucket import READ_TIMEOUT_S, REQUEST_TRIES

log = logging.getLogger(__name__)

START_AGAIN = "start it again to continue from the last checkpoint"

HALF_DELETED = "it is being deleted; if the deletion was interrupted, `sunspot delete` completes it"

MAX_NAMED = 5
"""Largest number of similarly named runs that are suggested if a run does not exist."""

LOST_AFTER_S = 3 * STATUS_EVERY_S + REQUEST_TRIES * READ_TIMEOUT_S
"""Seconds of silence after which a run is lost. It allows for two failed status writes and slow storage."""

STALLED_AFTER_S, STALLED_AFTER_STEPS = 20.0, 10
"""The limits after which a run without a new step counts as stalled, in seconds and in step times. Both must have
passed. A rank then hangs, its node is frozen, or it waits for storage."""


# -------------------------------------------------------------------------------------------------------------- listing


@dataclass(frozen=True)
class RunSummary:
    """A run as seen in a listing. Times are in seconds since the epoch, or 0 if the event never happened."""

    name: str
    modified: float = 0.0
    "The time at which any of its objects was last written."
    last_active: float = 0.0
    """Time of the last sign of life from its own processes: a write of the status, or of any object before there is a
    status. Writes of the submitter and of superseded processes do not count."""
    submitted: float = 0.0
    "The time at which the run was last submitted to a cluster."
    checkpoint: str | None = None
    "The name of the newest committed checkpoint."
    checkpoint_time: float = 0.0
    stop_requested: bool = False
    bytes: int = 0
    deleting: bool = False
    status: Entry | None = None
    "The newest status object."


def run_exists(run: Run) -> bool:
    """Return True if the run was started or submitted, or if its deletion is incomplete."""
    begun = run.storage.exists(run.key("run.json")) or list_statuses(run) or list_submissions(run)
    return bool(begun) or deletion_begun(run)


def describe_absence(run: Run) -> str:
    """Return a message that the run does not exist and suggests others, or an empty string if it exists."""
    if run_exists(run):
        return ""
    runs: list[str] = []
    with contextlib.suppress(StorageError):  # the run does not exist even if this user cannot list the storage
        runs = [summary.name for summary in list_runs(run.storage)]
    nearest = difflib.get_close_matches(run.name, runs, n=MAX_NAMED, cutoff=0.0)
    more = f" and {len(runs) - len(nearest)} more" if len(runs) > len(nearest) else ""
    others = f"there are {', '.join(nearest)}{more}" if runs else "no run is there"
    return f"no run {run.name} in {run.storage.locate('').rstrip('/')}; {others}"


def list_runs(storage: Storage) -> list[RunSummary]:
    """Return all runs, the most recently modified first. This takes one listing and no reads.

    A run that this user cannot read completely is left out with a warning, because its state is unknown.
    """
    unreadable: dict[str, StorageError] = {}
    folders: dict[str, list[Entry]] = {}
    for entry in storage.list_readable("", lambda key, error: unreadable.setdefault(key.partition("/")[0], error)):
        name, slash, _ = entry.key.partition("/")
        if slash and RUN.fullmatch(name):
            folders.setdefault(name, []).append(entry)
    for name, error in unreadable.items():
        folders.pop(name, None)
        if RUN.fullmatch(name):  # leaves out a disk's lost+found folder
            warn_once(log, f"{name}: {error}; left out")
    found = [summary for name, entries in folders.items() if (summary := summarize_run(name, entries))]
    return sorted(found, key=lambda summary: summary.modified, reverse=True)


def summarize_run(name: str, entries: Collection[Entry]) -> RunSummary | None:
    """Return the summary of a run with these objects, or None if they do not belong to a run."""
    status = newest_status(entries)
    times: dict[str, float] = {}
    commits: dict[str, float] = {}
    size = 0
    last_active = 0.0
    submitted = 0.0
    for entry in sorted(entries):
        path = entry.key.removeprefix(f"{name}/")
        folder, _, file = path.partition("/")
        times[path] = entry.modified
        size += entry.size
        if folder == "submissions":
            submitted = entry.modified if SUBMISSION.fullmatch(file) else submitted
        elif path not in (STOP, DELETION):
            last_active = max(last_active, entry.modified)
        if folder == "checkpoints" and file.endswith(f"/{MANIFEST}"):
            checkpoint = file.partition("/")[0]
            if CHECKPOINT.fullmatch(checkpoint):
                commits[checkpoint] = entry.modified
    if not ("run.json" in times or status or submitted or DELETION in times):
        return None
    # The newest attempt owns the run. An older attempt can have a higher step that was lost since.
    newest = max(commits, key=lambda checkpoint: (attempt_of(checkpoint), step_of(checkpoint)), default=None)
    return RunSummary(
        name=name,
        modified=max(times.values()),
        last_active=status.modified if status else last_active,
        submitted=submitted,
        checkpoint=newest,
        checkpoint_time=commits[newest] if newest else 0.0,
        stop_requested=STOP in times,
        bytes=size,
        deleting=DELETION in times,
        status=status,
    )


def holds_run(name: str, entries: Collection[Entry]) -> bool:
    """Return True if these objects belong to a run, even one with an interrupted start or deletion.

    The names of subfolders do not suffice, because a user's own folder may have `logs`, too. So the names of the
    objects in the subfolders are also checked.
    """

    def is_of_run(entry: Entry) -> bool:
        top, _, path = entry.key.removeprefix(f"{name}/").partition("/")
        folder, _, file = path.partition("/")
        matches = {
            "attempts": CLAIM.fullmatch(path),
            "checkpoints": CHECKPOINT.fullmatch(folder) and file,
            "logs": STREAM.fullmatch(folder) and SEGMENT.fullmatch(file),
            "failures": STREAM.fullmatch(path.removesuffix(".json")),
        }
        return bool(matches.get(top))

    return summarize_run(name, entries) is not None or any(map(is_of_run, entries))


def read_statuses(storage: Storage, runs: Sequence[RunSummary]) -> list[Status | None]:
    """Return each run's status, or None if it cannot be read. Each status takes one small request."""

    def read(run: RunSummary) -> Status | None:
        with contextlib.suppress(NotFoundError):  # deleted since it was listed
            status = _refreshed(Run(storage, run.name), load_usable_status(storage, run.status) if run.status else None)
            return with_newest_checkpoint(status, run, time.time())
        return None

    return map_parallel(read, runs)


def read_fresh_status(run: Run) -> Status | None:
    """Return the status. If the run seems silent, read it again, because an NFS client can lag by a minute."""
    return _refreshed(run, read_status(run))


def with_newest_checkpoint(status: Status | None, summary: RunSummary, now: float) -> Status | None:
    """Return the status with the newest listed checkpoint, unless the run is alive and reports its own."""
    name = summary.checkpoint
    if status is None or name is None or is_alive(status, now):
        return status
    step = max(status.step, step_of(name))
    epoch = status.epoch
    if step > status.step and status.steps_per_epoch:
        epoch = (step - 1) // status.steps_per_epoch + 1
    return replace(status, step=step, epoch=epoch, checkpoint=name, checkpoint_time=summary.checkpoint_time)


def _refreshed(run: Run, status: Status | None) -> Status | None:
    """Return `status`, or read it again if the run seems silent."""
    if (
        status
        and not run.storage.is_bucket
        and not status.state.terminal
        and time.time() - status.seen > SILENT_AFTER_S
    ):
        with contextlib.suppress(StorageError):  # this user might not have write access
            run.storage.refresh(run.key(FOLDER))
            return read_status(run)
    return status


def summarize_known(run: Run) -> RunSummary | None:
    """Return the summary that determines a run's state. If a status exists, only a few folders are listed."""
    parts = ("run.json", FOLDER, "submissions", STOP, DELETION)
    entries = [entry for part in map_parallel(lambda name: run.storage.list(run.key(name)), parts) for entry in part]
    return summarize_run(run.name, entries if newest_status(entries) else run.storage.list(run.name))


# ---------------------------------------------------------------------------------------------------------------- state


def state_from_storage(status: Status | None, summary: RunSummary, now: float) -> tuple[RunState, str]:
    """Return the state of a run without a RayJob, and its reason. `now` is in seconds since the epoch."""
    if summary.deleting:
        return RunState.DELETING, HALF_DELETED
    if summary.submitted > summary.last_active or (status is None and not summary.last_active):
        since = f" at {as_time(summary.submitted)}" if summary.submitted else ""
        if summary.stop_requested:
            return RunState.STOPPED, f"submitted{since}, and stopped before its driver started"
        return RunState.PENDING, f"submitted{since}; its driver has not started"
    if status and status.state.terminal:
        return status.state, status.reason or f"{status.state} at step {status.step}"

    seen = status.seen if status else summary.last_active
    silence = describe_silence(seen, now) if now - seen > SILENT_AFTER_S else ""
    if now - seen > LOST_AFTER_S:
        if summary.stop_requested:
            return RunState.STOPPED, f"told to stop; {silence}"
        return RunState.LOST, f"{silence}: nothing trains it; {START_AGAIN}"
    if summary.stop_requested:
        return RunState.STOPPING, f"told to stop; {silence or 'it saves and ends'}"
    if silence:
        return RunState.SILENT, f"{silence}: it is frozen, cut off from storage, or gone"
    if status is None:
        return RunState.STARTING, "its driver has started"
    return status.state, status.reason or describe_work(status)


def describe_silence(seen: float, now: float) -> str:
    """Return a text with the time since the last sign of life."""
    return f"no sign of life since {as_time(seen)}, {in_words(now - seen)} ago"


def describe_stall(status: Status) -> str:
    """Return a text with the time since live workers last took a step or evaluated rows.

    The text is empty if the workers are not stalled or have not begun yet.
    """
    if status.state is not RunState.RUNNING or not status.heartbeat:
        return ""
    still_s = status.time - status.heartbeat  # both times are from rank 0's clock
    if still_s <= max(STALLED_AFTER_S, STALLED_AFTER_STEPS * (status.step_time_s or 0.0)):
        return ""
    return f"no step since {as_time(status.heartbeat)}, for {in_words(still_s)}: it waits for storage, or a rank hangs"


def describe_work(status: Status, asked: object = None) -> str:
    """Return the reason for the state of a live run if its status contains none.

    `asked` is the requested number of workers, or None if that many train.
    """
    stall = describe_stall(status)
    if stall:
        return stall
    if not status.world_size:
        return "its driver has started"
    if asked:
        return f"{status.world_size} of {asked} workers train"
    return f"{plural(status.world_size, 'worker')} train{'s' * (status.world_size == 1)}"


def read_state(run: Run, status: Status | None = None) -> tuple[RunState, str]:
    """Return the state of a run and its reason. If the `status` is recent, nothing else is read."""
    status = status or read_fresh_status(run)
    now = time.time()
    summary = None
    if not status or status.state.terminal or now - status.seen > SILENT_AFTER_S:
        summary = summarize_known(run)
    return state_from_storage(status, summary or RunSummary(run.name), now)
