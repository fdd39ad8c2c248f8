"""Runs as storage alone shows them: the list of all runs, the state of one run, and everything known about it.

The list of runs is made almost without reading objects, because a listing has the name, size and time of each.
"""

import contextlib
import difflib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, StorageError
from sunspot.formatting import as_time, in_words, plural
from sunspot.log import warn_once
from sunspot.run import Run
from sunspot.run.attempts import CLAIM, IN_PLACE, Attempt, attempt_of, lineage, read_attempts, recorded_setting, step_of
from sunspot.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    Retention,
    SkippedCheckpoint,
    Unusable,
    by_step,
    find_newest_good,
    retention,
)
from sunspot.run.cost import Spending, compute_spending
from sunspot.run.history import newest_record, read_journal
from sunspot.run.identity import Identity, read_identity
from sunspot.run.incidents import Receipt, goodput, read_receipts
from sunspot.run.logs import SEGMENT, STREAM
from sunspot.run.objects import CHECKPOINT, RUN, parse, read_if_exists, read_or_default
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
"""Largest number of other runs that are named if a run does not exist, those with similar names first."""

LOST_AFTER_S = 3 * STATUS_EVERY_S + REQUEST_TRIES * READ_TIMEOUT_S
"""Seconds of silence after which a run is lost. Two status writes may fail, and storage may be slow to answer."""

STALLED_AFTER_S, STALLED_AFTER_STEPS = 20.0, 10
"""Limits after which a running run without a new step counts as stalled: seconds, and multiples of its step time. Both
must have passed. A rank then hangs, its node is frozen, or it waits for storage."""


# -------------------------------------------------------------------------------------------------------------- listing


@dataclass(frozen=True)
class RunSummary:
    """A run as a listing shows it. Times are in seconds since the epoch, or 0 if something never happened."""

    name: str
    modified: float = 0.0
    "Time at which any of its objects was last written."
    last_active: float = 0.0
    """Time of the last sign of life of its own processes: a write of the status, or of any object before there is a
    status. Writes of the submitter and of superseded processes do not count."""
    submitted: float = 0.0
    "Time at which it was last submitted to a cluster."
    checkpoint: str | None = None
    "Name of the newest committed checkpoint."
    checkpoint_time: float = 0.0
    stop_requested: bool = False
    bytes: int = 0
    deleting: bool = False
    status: Entry | None = None
    "Status object that counts."


def run_exists(run: Run) -> bool:
    """Return True if the run was begun or submitted, or if its deletion is incomplete."""
    begun = run.storage.exists(run.key("run.json")) or list_statuses(run) or list_submissions(run)
    return bool(begun) or deletion_begun(run)


def describe_absence(run: Run) -> str:
    """Return a message that the run does not exist, with other runs in its storage, or an empty text if it exists."""
    if run_exists(run):
        return ""
    runs: list[str] = []
    with contextlib.suppress(StorageError):  # the run does not exist even if the storage may not be listed
        runs = [summary.name for summary in list_runs(run.storage)]
    nearest = difflib.get_close_matches(run.name, runs, n=MAX_NAMED, cutoff=0.0)
    more = f" and {len(runs) - len(nearest)} more" if len(runs) > len(nearest) else ""
    others = f"there are {', '.join(nearest)}{more}" if runs else "no run is there"
    return f"no run {run.name} in {run.storage.locate('').rstrip('/')}; {others}"


def list_runs(storage: Storage) -> list[RunSummary]:
    """Return every run, the last modified first. This takes one listing of the storage, and no reads.

    A run that this user may not read completely is left out with a warning, because its state would be a guess.
    """
    unreadable: dict[str, StorageError] = {}
    folders: dict[str, list[Entry]] = {}
    for entry in storage.list_readable("", lambda key, error: unreadable.setdefault(key.partition("/")[0], error)):
        name, slash, _ = entry.key.partition("/")
        if slash and RUN.fullmatch(name):
            folders.setdefault(name, []).append(entry)
    for name, error in unreadable.items():
        folders.pop(name, None)
        if RUN.fullmatch(name):  # not the folder lost+found of a disk
            warn_once(log, f"{name}: {error}; left out")
    found = [summary for name, entries in folders.items() if (summary := summarize_run(name, entries))]
    return sorted(found, key=lambda summary: summary.modified, reverse=True)


def summarize_run(name: str, entries: Collection[Entry]) -> RunSummary | None:
    """Return the summary of a folder with these objects, or None if it is not a run."""
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
    # The newest attempt owns the run. A higher step of an older attempt may have been lost.
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
    """Return True if a folder with these objects belongs to a run, even one whose start or deletion was interrupted.

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
    """Return the status of each run, or None if it cannot be read. Each status takes one small request."""

    def read(run: RunSummary) -> Status | None:
        with contextlib.suppress(NotFoundError):  # deleted since it was listed
            status = _refreshed(Run(storage, run.name), load_usable_status(storage, run.status) if run.status else None)
            return with_newest_checkpoint(status, run, time.time())
        return None

    return map_parallel(read, runs)


def read_fresh_status(run: Run) -> Status | None:
    """Return the status. If the run seems silent, read it again, because NFS clients may show it a minute late."""
    return _refreshed(run, read_status(run))


def with_newest_checkpoint(status: Status | None, summary: RunSummary, now: float) -> Status | None:
    """Return the status with the run's newest checkpoint, unless live processes have written that themselves."""
    name = summary.checkpoint
    if status is None or name is None or is_alive(status, now):
        return status
    step = max(status.step, step_of(name))
    epoch = status.epoch
    if step > status.step and status.steps_per_epoch:
        epoch = (step - 1) // status.steps_per_epoch + 1
    return replace(status, step=step, epoch=epoch, checkpoint=name, checkpoint_time=summary.checkpoint_time)


def _refreshed(run: Run, status: Status | None) -> Status | None:
    """Return the `status` that was read, or read it again if the run seems silent."""
    if (
        status
        and not run.storage.is_bucket
        and not status.state.terminal
        and time.time() - status.seen > SILENT_AFTER_S
    ):
        with contextlib.suppress(StorageError):  # this user may not be allowed to write
            run.storage.refresh(run.key(FOLDER))
            return read_status(run)
    return status


# ---------------------------------------------------------------------------------------------------------------- state


def state_from_storage(status: Status | None, summary: RunSummary, now: float) -> tuple[RunState, str]:
    """Return the state of a run without a RayJob, and its reason. `now` is in seconds since the epoch."""
    if summary.deleting:
        return RunState.DELETING, HALF_DELETED
    if summary.submitted > summary.last_active or (status is None and not summary.last_active):
        since = f" at {as_time(summary.submitted)}" if summary.submitted else ""
        if summary.stop_requested:
            return RunState.STOPPED, f"submitted{since}, and stopped before its driver started"
        return RunState.PENDING, f"submitted{since}; its driver has not begun"
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
        return RunState.SILENT, f"{silence}: it is frozen, cut off from its storage, or gone"
    if status is None:
        return RunState.STARTING, "its driver has begun"
    return status.state, status.reason or describe_work(status)


def describe_silence(seen: float, now: float) -> str:
    """Return a text that says since when there has been no sign of life."""
    return f"no sign of life since {as_time(seen)}, {in_words(now - seen)} ago"


def describe_stall(status: Status) -> str:
    """Return a text that says since when live workers have neither taken a step nor evaluated rows.

    The text is empty if they do, or if they have not begun yet.
    """
    if status.state is not RunState.RUNNING or not status.heartbeat:
        return ""
    still_s = status.time - status.heartbeat  # both by rank 0's clock
    if still_s <= max(STALLED_AFTER_S, STALLED_AFTER_STEPS * (status.step_time_s or 0.0)):
        return ""
    return f"no step since {as_time(status.heartbeat)}, for {in_words(still_s)}: it waits for storage, or a rank hangs"


def describe_work(status: Status, asked: object = None) -> str:
    """Return a text about the work of a live run whose status has no reason. The caller shows its step.

    `asked` is the requested number of workers if fewer train.
    """
    stall = describe_stall(status)
    if stall:
        return stall
    if not status.world_size:
        return "its driver has begun"
    if asked:
        return f"{status.world_size} of {asked} workers train"
    return f"{plural(status.world_size, 'worker')} train{'s' * (status.world_size == 1)}"


def read_state(run: Run, status: Status | None = None) -> tuple[RunState, str]:
    """Return the state of a run and its reason. As long as its `status` is recent, nothing else is read."""
    status = status or read_fresh_status(run)
    now = time.time()
    summary = None
    if not status or status.state.terminal or now - status.seen > SILENT_AFTER_S:
        summary = _summarize(run)
    return state_from_storage(status, summary or RunSummary(run.name), now)


# ----------------------------------------------------------------------------------------------------------------- view


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as storage shows it. The verbs `status` and `doctor` and the report share it."""

    run: Run
    state: RunState
    reason: str
    time: float
    "Time at which it was read, in seconds since the epoch."
    status: Status | None
    identity: Identity | None
    "Identity of the run, or None before its driver has begun."
    attempts: list[Attempt]
    events: list[dict[str, Any]]
    "Events of all attempts."
    receipts: list[Receipt]
    "Receipts of the starts of its workers, oldest first."
    checkpoint: Checkpoint | None
    "Newest verified checkpoint."
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    "Newer checkpoints that cannot be used or no longer exist."
    newest_record: dict[str, Any] = field(default_factory=dict)
    "Newest record of the metric history, empty if no record exists."
    last_active: float = 0.0
    "Time of the last sign of life of its own processes, in seconds since the epoch, or 0 if not known."

    @property
    def step(self) -> int:
        """The highest optimizer step that is known to be taken."""
        return max(
            self.status.step if self.status else 0,
            self.newest_record.get("step", 0),
            self.checkpoint.step if self.checkpoint else 0,
        )

    @property
    def total_steps(self) -> int:
        """The number of steps of the run, or 0 if not known yet."""
        known = (self.status and self.status.total_steps) or (self.checkpoint and self.checkpoint.total_steps)
        return known or 0

    @property
    def epoch(self) -> int:
        """The epoch, from 1, of the newest step, or 0 before the first step."""
        per_epoch = self.identity.rows.steps_per_epoch if self.identity and self.identity.rows else 0
        return (self.step - 1) // per_epoch + 1 if self.step and per_epoch else 0

    @property
    def loss(self) -> float | None:
        """The newest training loss."""
        return self.status.loss if self.status and self.status.loss is not None else self.newest_record.get("loss")

    @property
    def rows_per_s(self) -> float | None:
        """The newest throughput of all ranks together."""
        return (
            self.status.rows_per_s if self.status and self.status.rows_per_s else self.newest_record.get("rows_per_s")
        )

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the current step time. None if not known, or if the run is not training."""
        if not self.status or not self.status.step_time_s or self.state.terminal or self.step >= self.total_steps:
            return None
        return (self.total_steps - self.step) * self.status.step_time_s

    @property
    def checkpoint_age_s(self) -> float | None:
        """Seconds since the newest verified checkpoint was committed."""
        return self.time - self.checkpoint.time if self.checkpoint else None

    @property
    def retention(self) -> Retention:
        """The rules by which checkpoints are kept."""
        return retention(self.attempts)

    @property
    def begun(self) -> float | None:
        """Time at which the first workers started, in seconds since the epoch."""
        return self.attempts[0].time if self.attempts else None

    @property
    def ended(self) -> float:
        """Time at which the run's own processes were last active, in seconds since the epoch. It is now if the run is
        live."""
        if not self.state.terminal:
            return self.time
        times = [self.status.time] if self.status else [self.last_active, self.newest_record.get("time") or 0.0]
        return max(*times, *(attempt.time for attempt in self.attempts[-1:]), 0.0) or self.time

    @property
    def goodput(self) -> float | None:
        """Fraction of useful worker-seconds, or None if there is no receipt."""
        return goodput(self.attempts, self.receipts, self.ended)

    @property
    def labels(self) -> dict[str, str]:
        """The run's labels, by which `sunspot cost` groups runs."""
        recorded = recorded_setting(self.attempts, "labels").encode()
        return read_or_default(lambda: parse(dict[str, str], recorded, f"the labels of {self.run.name}"), {})

    @property
    def spending(self) -> Spending:
        """The cost of the run's nodes."""
        return compute_spending(self.attempts, self.receipts, self._had_nodes_until)

    @property
    def _had_nodes_until(self) -> float:
        """Time at which its workers were last known to have nodes. A start without an attempt may have no nodes yet."""
        if self.state.terminal or not self.status or not self.attempts:
            return self.ended
        if self.status.state.terminal:  # the run was submitted again since
            return self.status.time
        if self.status.driver == self.attempts[-1].driver:
            return self.time
        return max(self.newest_record.get("time") or 0.0, self.checkpoint.time if self.checkpoint else 0.0)

    @property
    def incidents(self) -> list[Receipt]:
        """The receipts of starts that followed an incident."""
        return [receipt for receipt in self.receipts if receipt.cause.incident]

    @property
    def incidents_by_cause(self) -> Counter[str]:
        """The number of incidents of each cause."""
        return Counter(receipt.cause.value for receipt in self.incidents)

    @property
    def steps_replayed(self) -> int:
        """Number of optimizer steps that were taken again because of incidents."""
        return sum(receipt.replayed for receipt in self.incidents)

    @property
    def restarts(self) -> int:
        """Number of attempts after the first, without those in place, in which nothing was restarted."""
        return sum(attempt.metadata.tier != IN_PLACE for attempt in self.attempts[1:])


def read_view(run: Run) -> RunView:
    """Return everything that storage has on a run. Raises `NotFoundError` and `StorageError`."""

    def attempts() -> tuple[list[Attempt], Any, dict[str, Any] | None]:
        found = read_attempts(run)
        # Files of checkpoints that the listing shows to be unchanged are not read.
        good, last = read_in_parallel(
            lambda: find_newest_good(run, found, trust_listing=True), lambda: newest_record(run, lineage(found))
        )
        return found, good, last

    summary, status, (found, (checkpoint, passed_over), last), identity, events = read_in_parallel(
        lambda: _summarize(run),
        lambda: read_fresh_status(run),
        attempts,
        lambda: read_if_exists(lambda: read_identity(run)),
        lambda: read_journal(run, "events"),
    )
    if not summary:
        raise NotFoundError(f"{run.location}: no run is there")
    committed = [each.name for each in passed_over if each.kind in (Unusable.DAMAGED, Unusable.NOT_FINITE)]
    if checkpoint:
        committed.append(checkpoint.name)
    gone = find_deleted_checkpoint(status, committed)
    if gone:
        others = [each for each in passed_over if each.name != gone]
        passed_over = (SkippedCheckpoint(gone, Unusable.GONE, "though the run ended with it"), *others)
    now = time.time()
    state, reason = state_from_storage(status, summary, now)
    return RunView(
        run=run,
        state=state,
        reason=reason,
        time=now,
        status=status,
        identity=identity,
        attempts=[attempt for attempt in found if attempt.chosen],
        events=events,
        receipts=read_receipts(events),
        checkpoint=checkpoint,
        passed_over=passed_over,
        newest_record=last or {},
        last_active=summary.last_active,
    )


def find_deleted_checkpoint(status: Status | None, committed: Collection[str]) -> str:
    """Return the last checkpoint of an ended run if it is newer than all `committed` ones, or an empty text.

    A run always keeps its newest checkpoint, so something else has deleted it, such as a lifecycle rule.
    """
    name = status.checkpoint if status and status.state.terminal else None
    return name if name and name not in committed and by_step([name, *committed])[-1] == name else ""


def read_in_parallel(*parts: Callable[[], Any]) -> list[Any]:
    """Return the results of these functions, which are called in parallel."""
    return map_parallel(lambda part: part(), parts)


def _summarize(run: Run) -> RunSummary | None:
    """Return the summary that a view needs. If there is a status, only a few folders of the run are listed."""
    parts = ("run.json", FOLDER, "submissions", STOP, DELETION)
    entries = [entry for part in map_parallel(lambda name: run.storage.list(run.key(name)), parts) for entry in part]
    return summarize_run(run.name, entries if newest_status(entries) else run.storage.list(run.name))
