"""Runs as storage alone shows them: which there are, and where one stands. What a cluster says is no matter here.

A listing has the name, the size and the time of every object; that is most of what a summary needs.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.errors import NotFoundError, SettingsError, StorageError
from app.formatting import as_time, in_words
from app.run import Run
from app.run.attempts import Attempt, attempt_of, lineage, read_attempts, read_error, step_of
from app.run.checkpoints import MANIFEST, NAME, Checkpoint, find_newest_good
from app.run.history import read_journal
from app.run.incidents import Receipt, goodput, read_receipts
from app.run.status import MARK, STATUS_EVERY_S, RunState, Status, deletion_begun, read_status
from app.storage import open_storage
from app.storage.base import Entry, Storage, map_parallel
from app.storage.s3 import READ_TIMEOUT_S, REQUEST_TRIES

MOST_NAMED = 5
"""Runs that are named when the one asked for is not there, the nearest names first."""

HALF_DELETED = "it is being deleted; if nobody is at it any more, `sunspot delete` goes on"

SILENCE_S = 3 * STATUS_EVERY_S + REQUEST_TRIES * READ_TIMEOUT_S
"""Two writes of the status may fail, and a request to slow storage takes this long before it is given up."""


@dataclass(frozen=True)
class RunSummary:
    """What a listing shows of a run; nothing is read. Times are in seconds since the epoch, 0: never."""

    name: str
    modified: float
    "When anything of it was last written."
    heard: float
    "When its own processes last wrote anything: what the submitter leaves there is no sign of life."
    submitted: float
    "When it was last submitted to a cluster."
    job: str
    "What it was submitted as; empty: it never was."
    attempts: int
    "Starts of a worker group."
    checkpoint: str | None
    "Name of the newest committed checkpoint."
    checkpoint_time: float
    stop_wanted: bool
    bytes: int
    deleting: bool = False


@dataclass(frozen=True)
class RunView:
    """Where one run stands, and what became of it so far."""

    run: Run
    summary: RunSummary
    status: Status | None
    attempts: list[Attempt]
    error: Exception | None
    "What ended the newest attempt for good."
    identity: dict[str, Any]
    "Content of `run.json`: the settings the run may never change, and its data; empty before its driver has begun."
    checkpoint: Checkpoint | None
    "The newest verified one, the reading spared of what the listing shows to be whole."
    passed_over: tuple[str, ...]
    "Newer checkpoints that are not whole, each with the reason."
    records: list[dict[str, Any]]
    "The metric history, as far as it counts, oldest first."
    events: list[dict[str, Any]]
    "Those of all attempts."
    receipts: list[Receipt]
    "What each start of its workers cost, oldest first."
    state: RunState
    "By storage alone."
    reason: str
    time: float
    "When all this was read."

    @property
    def last(self) -> dict[str, Any]:
        """The newest record of the metric history; empty before there is one."""
        return self.records[-1] if self.records else {}

    @property
    def step(self) -> int:
        """Optimizer steps taken, as far as anything tells."""
        return max(
            self.status.step if self.status else 0,
            self.last.get("step", 0),
            self.checkpoint.step if self.checkpoint else 0,
        )

    @property
    def total_steps(self) -> int:
        """0: not known yet."""
        known = (self.status and self.status.total_steps) or (self.checkpoint and self.checkpoint.total_steps)
        return known or 0

    @property
    def epoch(self) -> int:
        """The epoch, from 1, that the newest step belongs to; 0: none yet."""
        per_epoch = self.identity.get("steps_per_epoch", 0)
        return (self.step - 1) // per_epoch + 1 if self.step and per_epoch else 0

    @property
    def loss(self) -> float | None:
        return self.status.loss if self.status and self.status.loss is not None else self.last.get("loss")

    @property
    def rows_per_s(self) -> float | None:
        return self.status.rows_per_s if self.status and self.status.rows_per_s else self.last.get("rows_per_s")

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the newest pace; None: unknown, or nothing is left or nobody trains."""
        if not self.status or not self.status.step_time_s or self.state.terminal or self.step >= self.total_steps:
            return None
        return (self.total_steps - self.step) * self.status.step_time_s

    @property
    def checkpoint_age_s(self) -> float | None:
        return self.time - self.checkpoint.time if self.checkpoint else None

    @property
    def goodput(self) -> float | None:
        """Useful worker-seconds over all worker-seconds; None while no receipt tells of any."""
        end = self.time
        if self.state.terminal:
            end = self.status.time if self.status else self.summary.heard
        return goodput(self.attempts, self.receipts, end)

    @property
    def incidents(self) -> list[Receipt]:
        """The receipts of what happened to the run."""
        return [receipt for receipt in self.receipts if receipt.cause.incident]

    @property
    def restarts(self) -> int:
        """Attempts beyond the first."""
        return max(0, len(self.attempts) - 1)

    @property
    def logs(self) -> str:
        """Where the output lies."""
        return self.run.storage.locate(self.run.key("logs"))


# -------------------------------------------------------------------------------------------------------------- finding


def find_run(name: str, storage_path: str | None = None) -> Run:
    """The run `name` in `storage_path`, or else where the settings say; raises `NotFoundError` if nothing is there."""
    run = named_run(name, storage_path)
    if not is_there(run):
        raise NotFoundError(
            f"no run {run.name} in {run.storage.locate('').rstrip('/')}{_name_others(run.storage, run.name)}"
        )
    return run


def named_run(name: str, storage_path: str | None = None) -> Run:
    """Like `find_run`, whether or not anything is there yet."""
    path, checked = _settle(name, storage_path)
    return Run(open_storage(path), checked)


def find_storage(storage_path: str | None = None) -> Storage:
    """Where runs are kept: `storage_path`, or else what the settings say."""
    return open_storage(_settle(None, storage_path)[0])


def is_there(run: Run) -> bool:
    """Whether the run was begun or submitted, or something is left of it that was to be deleted."""
    return (
        run.storage.exists(run.key("run.json"))
        or run.storage.exists(run.key("status.json"))
        or bool(run.storage.list(run.key("submissions")))
        or deletion_begun(run)
    )


def _settle(name: str | None, storage_path: str | None) -> tuple[str, str]:
    """Storage path and run name by the rules of the settings; raises `SettingsError`."""
    from app.search_space import load_common  # pydantic: slow to import, and `sunspot VERB --help` does without
    from app.settings import PREFIX

    given = {
        PREFIX + key: value for key, value in (("RUN_NAME", name), ("STORAGE_PATH", storage_path)) if value is not None
    }
    if "" in given.values():  # as a setting, it would mean the default
        raise SettingsError("RUN and --storage may not be empty")
    settings, _, _ = load_common({**os.environ, **given})  # the environment may be that of a search
    return settings.storage_path, settings.run_name


def _name_others(storage: Storage, name: str) -> str:
    runs: list[str] = []
    with contextlib.suppress(StorageError):  # a folder of somebody else's: the run is not there all the same
        runs = [summary.name for summary in list_runs(storage)]
    nearest = difflib.get_close_matches(name, runs, n=MOST_NAMED, cutoff=0.0)
    more = f" and {len(runs) - len(nearest)} more" if len(runs) > len(nearest) else ""
    return f"; there are {', '.join(nearest)}{more}" if runs else "; no run is there"


# -------------------------------------------------------------------------------------------------------------- listing


def list_runs(storage: Storage) -> list[RunSummary]:
    """Every run, the one that was written last first: the pages of one listing, and nothing is read."""
    folders: dict[str, list[Entry]] = {}
    for entry in storage.list(""):
        name, slash, _ = entry.key.partition("/")
        if slash:
            folders.setdefault(name, []).append(entry)
    found = [summary for name, entries in folders.items() if (summary := summarize(name, entries))]
    return sorted(found, key=lambda summary: summary.modified, reverse=True)


def summarize(name: str, entries: Iterable[Entry]) -> RunSummary | None:
    """The summary of the run whose objects these are; None when they are no run's."""
    times: dict[str, float] = {}
    commits: dict[str, float] = {}
    attempts = size = 0
    heard = submitted = 0.0
    job = ""
    for entry in sorted(entries):
        path = entry.key.removeprefix(f"{name}/")
        folder, _, file = path.partition("/")
        times[path] = entry.modified
        size += entry.size
        if folder == "submissions":
            submitted, job = entry.modified, file.partition("-")[2].removesuffix(".yaml")
        elif path not in ("stop.json", MARK):
            heard = max(heard, entry.modified)
        if folder == "attempts" and file.removesuffix(".json").isdigit():
            attempts += 1
        elif folder == "checkpoints" and file.endswith(f"/{MANIFEST}"):
            checkpoint = file.partition("/")[0]
            if NAME.fullmatch(checkpoint):
                commits[checkpoint] = entry.modified
    if not ("run.json" in times or "status.json" in times or job or MARK in times):
        return None
    # The newest attempt has the run: of an older one, a higher step may be one that was lost.
    newest = max(commits, key=lambda checkpoint: (attempt_of(checkpoint), step_of(checkpoint)), default=None)
    return RunSummary(
        name=name,
        modified=max(times.values()),
        heard=heard,
        submitted=submitted,
        job=job,
        attempts=attempts,
        checkpoint=newest,
        checkpoint_time=commits[newest] if newest else 0.0,
        stop_wanted="stop.json" in times,
        bytes=size,
        deleting=MARK in times,
    )


def only_submitted(name: str, submitted: float) -> RunSummary:
    """The summary of a run that has left nothing in storage yet."""
    return RunSummary(name, submitted, 0.0, submitted, "", 0, None, 0.0, False, 0)


def read_statuses(storage: Storage, names: Iterable[str]) -> dict[str, Status | None]:
    """The status of each of these runs, one small request for each, in parallel."""
    asked = list(names)
    return dict(zip(asked, map_parallel(lambda name: _status_of(Run(storage, name)), asked), strict=True))


def _status_of(run: Run) -> Status | None:
    """A status that cannot be used is as none: whoever lists a hundred runs shall see the others."""
    try:
        return read_status(run)
    except (ValueError, TypeError, KeyError):
        return None


# ---------------------------------------------------------------------------------------------------------------- state


def state_from_storage(
    status: Status | None,
    stop_wanted: bool,
    now: float,
    heard: float = 0.0,
    submitted: float = 0.0,
    deleting: bool = False,
) -> tuple[RunState, str]:
    """Where a run stands that no cluster knows, and a sentence that says why.

    `heard` and `submitted` are those of its summary, where somebody has made one; `now` is in seconds since the epoch.
    """
    if deleting:
        return RunState.DELETING, HALF_DELETED
    if submitted > heard or (status is None and not heard):
        since = f" at {as_time(submitted)}" if submitted else ""
        if stop_wanted:
            return RunState.STOPPED, f"submitted{since}, and told to stop before its driver began"
        return RunState.PENDING, f"submitted{since}; its driver has not begun"
    if status and status.state.terminal:
        return status.state, status.reason or f"{status.state} at step {status.step}"

    news = max(status.time if status else 0.0, heard)
    if now - news <= SILENCE_S:
        if stop_wanted:
            return RunState.STOPPING, "told to stop; it saves and ends"
        if status is None:
            return RunState.STARTING, "its driver has begun"
        return status.state, status.reason or f"step {status.step} of {status.total_steps}"
    silence = f"no news since {as_time(news)}, {in_words(now - news)} ago"
    if stop_wanted:
        return RunState.STOPPED, f"told to stop; {silence}"
    return RunState.LOST, f"{silence}: nothing trains it; submit it again to go on from the last checkpoint"


def read_state(run: Run) -> tuple[RunState, str]:
    """`state_from_storage`, asking no more than it takes: one small read while the news is fresh."""
    status, now = _status_of(run), time.time()
    if status and not status.state.terminal and now - status.time <= SILENCE_S:
        return state_from_storage(status, False, now)
    summary = summarize(run.name, run.storage.list(run.name))
    if summary is None:
        return state_from_storage(status, False, now)
    return state_from_storage(status, summary.stop_wanted, now, summary.heard, summary.submitted, summary.deleting)


# ----------------------------------------------------------------------------------------------------------------- view


def read_view(run: Run) -> RunView:
    """All that storage has to say of a run, the parts read in parallel. Raises `NotFoundError`, `StorageError`."""

    def attempts() -> tuple[list[Attempt], Checkpoint | None, tuple[str, ...], Exception | None]:
        found = read_attempts(run)
        checkpoint, passed_over = find_newest_good(run, found, trust_listing=True)
        return found, checkpoint, passed_over, read_error(run, found[-1].number) if found else None

    parts: list[Callable[[], Any]] = [
        lambda: summarize(run.name, run.storage.list(run.name)),
        lambda: _status_of(run),
        attempts,
        lambda: _identity(run),
        lambda: read_journal(run, "metrics"),
        lambda: read_journal(run, "events"),
    ]
    summary, status, (found, checkpoint, passed_over, error), identity, records, events = map_parallel(
        lambda part: part(), parts
    )
    if not summary:
        raise NotFoundError(f"{run.location}: no run is there")
    spans = lineage(found)
    counted = [r for r in records if any(span.holds(r["attempt"], r["step"]) for span in spans)]
    now = time.time()
    state, reason = state_from_storage(
        status, summary.stop_wanted, now, summary.heard, summary.submitted, summary.deleting
    )
    return RunView(
        run=run,
        summary=summary,
        status=status,
        attempts=found,
        error=error,
        identity=identity,
        checkpoint=checkpoint,
        passed_over=passed_over,
        records=counted,
        events=events,
        receipts=read_receipts(events),
        state=state,
        reason=reason,
        time=now,
    )


def _identity(run: Run) -> dict[str, Any]:
    try:
        return dict(run.read_json("run.json"))
    except (NotFoundError, json.JSONDecodeError):
        return {}
