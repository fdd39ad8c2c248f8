"""Reads the state of a run, or everything about the run, from storage."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, StorageError
from sunspot.run import Run
from sunspot.run.attempts import (
    IN_PLACE,
    Attempt,
    attempts_with_start,
    lineage,
    read_attempts,
    recorded_setting,
    step_of,
)
from sunspot.run.checkpoints import (
    Checkpoint,
    Retention,
    SkippedCheckpoint,
    Unusable,
    by_step,
    find_newest_good,
    retention,
)
from sunspot.run.cost import Spending, compute_spending
from sunspot.run.epochs import SourceProgress, find_layout
from sunspot.run.history import newest_record, read_journal
from sunspot.run.identity import Identity, read_identity
from sunspot.run.incidents import Receipt, goodput, read_receipts
from sunspot.run.objects import parse, read_if_exists, read_or_default
from sunspot.run.overview import RunSummary, state_from_storage, summarize_run
from sunspot.run.owner import Owner
from sunspot.run.requests import ScaleRequest, deletion_begun, read_scale, stop_requested
from sunspot.run.status import FOLDER, SILENT_AFTER_S, RunState, Status, is_alive, load_usable_status, read_status
from sunspot.storage.base import Storage


@dataclass(frozen=True)
class RunSeen:
    """A run's state as read from storage. If storage did not answer, the values are old or missing."""

    run: Run
    summary: RunSummary = field(default_factory=lambda: RunSummary(exists=False))
    """The part of the run that was listed. `look` lists only what the state depends on, so the sizes are incomplete. If
    the run is live, only the requests to stop or delete it are known."""
    status: Status | None = None
    time: float = field(default_factory=time.time)
    "The time of the read, in seconds since the epoch."
    trouble: str = ""
    "The error that prevented the last read, or an empty string if the values are current."
    refused: bool = False
    "True if this user has no access to the storage. The run's own processes might still have access."
    scale: ScaleRequest | None = None
    "The request to train with a different number of workers, if any. It is not read for lists of runs."

    @property
    def exists(self) -> bool:
        """True if the run is in storage."""
        return self.summary.exists or self.status is not None

    def judge(self) -> tuple[RunState, str]:
        """Return the state according to storage alone, and the reason for it."""
        if self.exists:
            return state_from_storage(self.progress, self.summary, self.time)
        if self.trouble:
            return RunState.SILENT, "its storage cannot be read, so its state is unknown"
        return RunState.LOST, "storage has no record of it"

    @property
    def state(self) -> RunState:
        """The state according to storage alone."""
        return self.judge()[0]

    @property
    def reason(self) -> str:
        """The reason for the state."""
        return self.judge()[1]

    @property
    def last_active(self) -> float:
        """The time of the last submission or sign of life, in seconds since the epoch."""
        return max(self.status.seen if self.status else self.summary.last_active, self.summary.submitted)

    @property
    def outside_clusters(self) -> bool:
        """True if the run was last trained outside a cluster and no RayJob has been submitted since."""
        if not self.status or self.state is RunState.PENDING:
            return False
        owner = Owner.parse(self.status.owner)
        return owner == Owner(owner.job)

    @property
    def progress(self) -> Status | None:
        """The status. If the run is not alive, the status includes the newest checkpoint found in storage."""
        status, name = self.status, self.summary.checkpoint
        if status is None or name is None or is_alive(status, self.time):
            return status
        step = max(status.step, step_of(name))
        epoch = status.epoch
        if step > status.step and status.steps_per_epoch:
            epoch = (step - 1) // status.steps_per_epoch + 1
        return replace(status, step=step, epoch=epoch, checkpoint=name, checkpoint_time=self.summary.checkpoint_time)

    def with_details(
        self,
        identity: Identity | None,
        attempts: list[Attempt],
        events: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
        newest_record: dict[str, Any],
    ) -> "RunDetails":
        """Return this object together with everything else that was read from storage.

        The result's `time` is the current time. With this object's older `time`, the age of newer data would be
        negative.
        """
        return RunDetails(
            **vars(replace(self, time=time.time())),
            identity=identity,
            attempts=attempts,
            events=events,
            receipts=read_receipts(events),
            checkpoint=checkpoint,
            newest_record=newest_record,
        )


def look(run: Run) -> RunSeen:
    """Return a run as seen in storage. Raises `StorageError`.

    If the status is recent, this takes a small listing, a read, and a check for each of three requests: to stop, delete
    or scale the run.
    """
    status, stop_wanted, deleting = read_in_parallel(
        lambda: _refreshed(run, read_status(run)),
        lambda: stop_requested(run),
        lambda: deletion_begun(run),
    )
    now = time.time()
    scale = read_scale(run) if status and status.scalable and is_alive(status, now) else None
    summary = RunSummary() if status and is_alive(status, now) else _list_parts(run, status)
    return RunSeen(run, replace(summary, stop_requested=stop_wanted, deleting=deleting), status, now, scale=scale)


def _list_parts(run: Run, status: Status | None) -> RunSummary:
    """Return a summary of the files of a run that is not alive. The run's state is derived from this summary.

    If `status` is None, all of the run's folders are listed. Otherwise, only folders with files that can be newer than
    `status` are listed.
    """
    folders = [run.name]
    if status:
        folders = [run.key(FOLDER), run.key("submissions")]
        folders += [] if status.state.terminal else [run.key("checkpoints")]  # for newer checkpoints
    return summarize_run(run.name, [entry for found in map_parallel(run.storage.list, folders) for entry in found])


def read_listed(storage: Storage, listed: Mapping[str, RunSummary]) -> list[RunSeen]:
    """Return listed runs with their statuses. A damaged status is omitted. Each status takes one small request."""

    def read(name: str, summary: RunSummary) -> RunSeen:
        run = Run(storage, name)
        status = None
        with contextlib.suppress(NotFoundError):  # deleted since it was listed
            status = _refreshed(run, load_usable_status(storage, summary.status) if summary.status else None)
        return RunSeen(run, summary, status, time.time())

    return map_parallel(lambda each: read(*each), listed.items())


def _refreshed(run: Run, status: Status | None) -> Status | None:
    """Return `status`, or a newly read status if the run seems silent, because an NFS client can lag by a minute."""
    silent = status and not status.state.terminal and time.time() - status.seen > SILENT_AFTER_S
    if silent and not run.storage.is_bucket:
        with contextlib.suppress(StorageError):  # this user might not have write access
            run.storage.refresh(run.key(FOLDER))
            return read_status(run)
    return status


@dataclass(frozen=True, kw_only=True)
class RunDetails(RunSeen):
    """Everything that storage contains about a run."""

    identity: Identity | None
    "The run's identity, or None before its first driver has started."
    attempts: list[Attempt]
    events: list[dict[str, Any]]
    "The events of all attempts."
    receipts: list[Receipt]
    "The receipts of all worker starts, oldest first."
    checkpoint: Checkpoint | None
    "The newest verified checkpoint."
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    "Newer checkpoints that cannot be used or no longer exist."
    newest_record: dict[str, Any] = field(default_factory=dict)
    "The newest record of the metric history, or an empty dict before the first record."

    @property
    def step(self) -> int:
        """The latest known optimizer step, or 0 if no step is known."""
        return max(
            self.status.step if self.status else 0,
            self.newest_record.get("step", 0),
            self.checkpoint.step if self.checkpoint else 0,
        )

    @property
    def total_steps(self) -> int:
        """The run's total number of steps, or 0 if it is not known yet."""
        known = (self.status and self.status.total_steps) or (self.checkpoint and self.checkpoint.total_steps)
        return known or 0

    @property
    def epoch(self) -> int:
        """The epoch of the newest step, counted from 1, or 0 before the first step."""
        per_epoch = self.identity.rows.steps_per_epoch if self.identity and self.identity.rows else 0
        return (self.step - 1) // per_epoch + 1 if self.step and per_epoch else 0

    @property
    def sources(self) -> list[SourceProgress]:
        """The progress through each source of a mixture, or an empty list for a single dataset."""
        layout = find_layout(self.identity) if self.identity else None
        return layout.progress(self.step) if layout else []

    @property
    def loss(self) -> float | None:
        """The newest training loss."""
        return self.status.loss if self.status and self.status.loss is not None else self.newest_record.get("loss")

    @property
    def rows_per_s(self) -> float | None:
        """The newest throughput, summed over all ranks."""
        known = self.status.rows_per_s if self.status else None
        return known or self.newest_record.get("rows_per_s")

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the last step, or None if they are unknown or the run has ended."""
        if not self.status or not self.status.step_time_s or self.state.terminal or self.step >= self.total_steps:
            return None
        return (self.total_steps - self.step) * self.status.step_time_s

    @property
    def checkpoint_age_s(self) -> float | None:
        """The age of the newest verified checkpoint in seconds."""
        return self.time - self.checkpoint.time if self.checkpoint else None

    @property
    def retention(self) -> Retention:
        """The run's retention rules for checkpoints."""
        return retention(self.attempts)

    @property
    def begun(self) -> float | None:
        """The time at which the first workers started, in seconds since the epoch."""
        return self.attempts[0].time if self.attempts else None

    @property
    def ended(self) -> float:
        """The time at which the run's processes were last active, in seconds since the epoch.

        If the run is live, this is the time at which the run was read.
        """
        return find_end(self, self.attempts, self._written)

    @property
    def goodput(self) -> float | None:
        """The useful fraction of all worker-seconds, or None if there is no receipt."""
        return goodput(self.attempts, self.receipts, self.ended)

    @property
    def labels(self) -> dict[str, str]:
        """The run's labels. `sunspot cost` can group runs by them."""
        recorded = recorded_setting(self.attempts, "labels").encode()
        return read_or_default(lambda: parse(dict[str, str], recorded, f"the labels of {self.run.name}"), {})

    @property
    def spending(self) -> Spending:
        """The cost of the run's nodes."""
        return compute_spending(self.attempts, self.receipts, find_end_of_nodes(self, self.attempts, self._written))

    @property
    def _written(self) -> float:
        """The time of the newest record or checkpoint, or 0 if the run has neither."""
        return max(self.newest_record.get("time") or 0.0, self.checkpoint.time if self.checkpoint else 0.0)

    @property
    def incidents(self) -> list[Receipt]:
        """The receipts of worker starts that followed an incident."""
        return [receipt for receipt in self.receipts if receipt.cause.incident]

    @property
    def incidents_by_cause(self) -> Counter[str]:
        """The number of incidents for each cause."""
        return Counter(receipt.cause.value for receipt in self.incidents)

    @property
    def steps_replayed(self) -> int:
        """The number of optimizer steps that are known to have been repeated because of incidents."""
        return sum(receipt.replayed for receipt in self.incidents)

    @property
    def replayed_at_least(self) -> bool:
        """True if more than `steps_replayed` steps may have been repeated."""
        return any(receipt.at_least for receipt in self.incidents)

    @property
    def restarts(self) -> int:
        """The number of restarts. Attempts that continue in place restart nothing and do not count."""
        return sum(attempt.metadata.tier != IN_PLACE for attempt in self.attempts[1:])


def read_details(seen: RunSeen) -> RunDetails:
    """Return all details of a run that are in storage.

    Raises `NotFoundError` if the run does not exist, and `StorageError` if storage cannot be read.
    """
    run, status = seen.run, seen.status
    if not seen.exists:
        raise NotFoundError(f"{run.location}: no run is there")

    found = read_attempts(run)
    (checkpoint, passed_over), last, identity, events = read_in_parallel(
        lambda: find_newest_good(run, found, trust_listing=True),  # reads no file that is unchanged in the listing
        lambda: newest_record(run, lineage(found)),
        lambda: read_if_exists(lambda: read_identity(run)),
        lambda: read_journal(run, "events"),
    )
    committed = [each.name for each in passed_over if each.kind in (Unusable.DAMAGED, Unusable.NOT_FINITE)]
    if checkpoint:
        committed.append(checkpoint.name)
    gone = find_deleted_checkpoint(status, committed)
    if gone:
        others = [each for each in passed_over if each.name != gone]
        passed_over = (SkippedCheckpoint(gone, Unusable.GONE, "although it is the run's last checkpoint"), *others)
    details = seen.with_details(identity, attempts_with_start(found), events, checkpoint, last or {})
    return replace(details, passed_over=passed_over)


def find_end(seen: RunSeen, attempts: Sequence[Attempt], written: float) -> float:
    """Return the time at which the run's processes were last active, or the time of the read if the run is live.

    `written` is the time of the run's newest record or checkpoint, or 0 if it is not known.
    """
    if not seen.state.terminal:
        return seen.time
    times = [seen.status.time] if seen.status else [seen.summary.last_active, written]
    return max(*times, *(attempt.time for attempt in attempts[-1:]), 0.0) or seen.time


def find_end_of_nodes(seen: RunSeen, attempts: Sequence[Attempt], written: float) -> float:
    """Return the time until which the workers had nodes. The arguments are those of `find_end`.

    If the run's newest driver has not claimed an attempt yet, its workers might not have nodes. In this case, the
    result is `written`.
    """
    if seen.state.terminal or not seen.status or not attempts:
        return find_end(seen, attempts, written)
    if seen.status.state.terminal:  # the run has been submitted again since then
        return seen.status.time
    return seen.time if seen.status.driver == attempts[-1].driver else written


def find_deleted_checkpoint(status: Status | None, committed: Collection[str]) -> str:
    """Return the name of a run's last checkpoint if the run has ended and the checkpoint no longer exists.

    Otherwise, return an empty string. A run always keeps its newest checkpoint, so
    something else has deleted it, such as a lifecycle rule.
    """
    name = status.checkpoint if status and status.state.terminal else None
    return name if name and name not in committed and by_step([name, *committed])[-1] == name else ""


def read_in_parallel(*parts: Callable[[], Any]) -> list[Any]:
    """Call the functions in parallel and return their results."""
    return map_parallel(lambda part: part(), parts)
