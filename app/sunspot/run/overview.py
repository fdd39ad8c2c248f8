"""Lists all runs in a storage location, and determines their states from storage alone.

A listing contains the name, size and modification time of each object, so no object is read.
"""

import contextlib
import difflib
import logging
from collections.abc import Collection
from dataclasses import dataclass

from sunspot.errors import StorageError
from sunspot.formatting import as_time, in_words, plural
from sunspot.log import warn_once
from sunspot.run import Run
from sunspot.run.attempts import CLAIM, attempt_of, step_of
from sunspot.run.checkpoints import MANIFEST
from sunspot.run.logs import SEGMENT, STREAM
from sunspot.run.objects import CHECKPOINT, RUN
from sunspot.run.requests import DELETION, SCALE, STOP, SUBMISSION, deletion_begun, list_submissions
from sunspot.run.status import SILENT_AFTER_S, STATUS_EVERY_S, RunState, Status, is_alive, list_statuses, newest_status
from sunspot.storage.base import Entry, Storage
from sunspot.storage.bucket import READ_TIMEOUT_S, REQUEST_TRIES

log = logging.getLogger(__name__)

START_AGAIN = "start it again to continue from the last checkpoint"

HALF_DELETED = "it is being deleted; if the deletion was interrupted, `sunspot delete` completes it"

MAX_NAMED = 5
"""Largest number of similarly named runs that are suggested if a run does not exist."""

LOST_AFTER_S = 3 * STATUS_EVERY_S + REQUEST_TRIES * READ_TIMEOUT_S
"""Seconds of silence after which a run counts as lost. It allows for two failed status writes and slow storage."""

STALLED_AFTER_S, STALLED_AFTER_STEPS = 20.0, 10
"""The limits after which a run without a new step counts as stalled, in seconds and in step times. Both must have
passed. The run is then waiting for storage, or a rank hangs, or a node is frozen."""


# -------------------------------------------------------------------------------------------------------------- listing


@dataclass(frozen=True)
class RunSummary:
    """A run as it appears in a listing. Times are in seconds since the epoch, or 0 if the event never happened."""

    exists: bool = True
    "True if the run was started or submitted, or if its deletion is incomplete."
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
    """Return a message that a run does not exist, with suggestions, or an empty string if the run exists."""
    if run_exists(run):
        return ""
    runs: list[str] = []
    with contextlib.suppress(StorageError):  # the run does not exist even if this user cannot list the storage
        runs = list(list_runs(run.storage))
    nearest = difflib.get_close_matches(run.name, runs, n=MAX_NAMED, cutoff=0.0)
    more = f" and {len(runs) - len(nearest)} more" if len(runs) > len(nearest) else ""
    others = f"it contains {', '.join(nearest)}{more}" if runs else "it contains no runs"
    return f"no run {run.name} in {run.storage.locate('').rstrip('/')}; {others}"


def list_runs(storage: Storage) -> dict[str, RunSummary]:
    """Return all runs by name, the most recently modified first. This takes one listing and no reads.

    A run that this user cannot read completely is omitted with a warning, because its state is unknown.
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
    found = {name: summarize_run(name, entries) for name, entries in folders.items()}
    newest_first = sorted(found, key=lambda name: found[name].modified, reverse=True)
    return {name: found[name] for name in newest_first if found[name].exists}


def summarize_run(name: str, entries: Collection[Entry]) -> RunSummary:
    """Return the summary of a run that consists of these objects."""
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
        elif path not in (STOP, SCALE, DELETION):
            last_active = max(last_active, entry.modified)
        if folder == "checkpoints" and file.endswith(f"/{MANIFEST}"):
            checkpoint = file.partition("/")[0]
            if CHECKPOINT.fullmatch(checkpoint):
                commits[checkpoint] = entry.modified
    # The newest attempt owns the run. An older attempt can have a higher step that has been lost since.
    newest = max(commits, key=lambda checkpoint: (attempt_of(checkpoint), step_of(checkpoint)), default=None)
    return RunSummary(
        exists=bool("run.json" in times or status or submitted or DELETION in times),
        modified=max(times.values(), default=0.0),
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

    A subfolder with a name such as `logs` is not enough, because a user's own folder can contain such a subfolder. The
    names of the objects in the subfolder must also match those of a run.
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

    return summarize_run(name, entries).exists or any(map(is_of_run, entries))


# ---------------------------------------------------------------------------------------------------------------- state


def state_from_storage(status: Status | None, summary: RunSummary, now: float) -> tuple[RunState, str]:
    """Return the state of a run without a RayJob, and the reason for the state. `now` is in seconds since the epoch.

    If the status is recent, the summary is used only to find requests to stop or delete the run.
    """
    if summary.deleting:
        return RunState.DELETING, HALF_DELETED
    alive = status is not None and is_alive(status, now)  # then it trains, even if it was just submitted again
    if not alive and (summary.submitted > summary.last_active or (status is None and not summary.last_active)):
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
        return RunState.LOST, f"{silence}: nothing is training it; {START_AGAIN}"
    if summary.stop_requested:
        return RunState.STOPPING, f"told to stop; {silence or 'it saves and ends'}"
    if silence:
        return RunState.SILENT, f"{silence}: it is frozen, cut off from storage, or gone"
    if status is None:
        return RunState.STARTING, "its driver has started"
    return status.state, status.reason or describe_work(status)


def describe_silence(seen: float, now: float) -> str:
    """Describe how long ago the last sign of life was. Both arguments are in seconds since the epoch."""
    return f"no sign of life since {as_time(seen)}, {in_words(now - seen)} ago"


def describe_stall(status: Status) -> str:
    """Describe how long ago live workers last took a step or evaluated rows.

    Returns an empty string if the workers are not stalled or have not begun yet.
    """
    if status.state is not RunState.RUNNING or not status.heartbeat:
        return ""
    still_s = status.time - status.heartbeat  # both times are from rank 0's clock
    if still_s <= max(STALLED_AFTER_S, STALLED_AFTER_STEPS * (status.step_time_s or 0.0)):
        return ""
    return f"no step since {as_time(status.heartbeat)}, for {in_words(still_s)}: it waits for storage, or a rank hangs"


def describe_work(status: Status, asked: object = None) -> str:
    """Return the reason for a live run's state, based on the run's status.

    `asked` is the requested number of workers if fewer are training, or None otherwise.
    """
    stall = describe_stall(status)
    if stall:
        return stall
    if not status.world_size:
        return "its driver has started"
    if asked:
        return f"{status.world_size} of {asked} workers train"
    return f"{plural(status.world_size, 'worker')} train{'s' * (status.world_size == 1)}"
