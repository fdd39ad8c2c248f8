"""Reads the state of a run, or everything about it, from storage."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, RefusedStorageError, StorageError
from sunspot.run import Run
from sunspot.run.attempts import IN_PLACE, Attempt, attempts_with_start, lineage, read_attempts, recorded_setting
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
from sunspot.run.history import newest_record, read_journal
from sunspot.run.identity import Identity, read_identity
from sunspot.run.incidents import Receipt, goodput, read_receipts
from sunspot.run.objects import parse, read_if_exists, read_or_default
from sunspot.run.overview import read_fresh_status, read_state, run_exists, state_from_storage, summarize_known
from sunspot.run.owner import Owner
from sunspot.run.requests import deletion_begun, stop_requested
from sunspot.run.status import RunState, Status


@dataclass(frozen=True)
class RunSeen:
    """A run as seen in storage. Values that could not be read are old or missing."""

    status: Status | None = None
    stop_wanted: bool = False
    deleting: bool = False
    "True if a deletion has begun."
    state: RunState | None = None
    "The state according to storage, or None if the run does not exist there or the state was not read."
    reason: str = ""
    "The reason for the state."
    trouble: str = ""
    "The error that prevented the last read, or an empty string if the values are current."
    refused: bool = False
    "True if this user has no access to the storage. The run's own processes might still have access."

    @property
    def outside_clusters(self) -> bool:
        """True if the run was last trained outside a cluster and no RayJob has been submitted since."""
        if not self.status or self.state is RunState.PENDING:
            return False
        owner = Owner.parse(self.status.owner)
        return owner == Owner(owner.job)


def look(run: Run, with_state: bool = True) -> RunSeen:
    """Return a run as seen in storage. A `StorageError` is recorded in the result, not raised.

    Set `with_state` to False to save requests if the state follows from a RayJob.
    """
    try:
        status, stop_wanted, deleting = read_in_parallel(
            lambda: read_fresh_status(run), lambda: stop_requested(run), lambda: deletion_begun(run)
        )
        known = with_state and (status or run_exists(run))
        state, reason = read_state(run, status) if known else (None, "")
    except StorageError as error:
        return RunSeen(trouble=str(error), refused=isinstance(error, RefusedStorageError))
    return RunSeen(status, stop_wanted, deleting, state, reason)


@dataclass(frozen=True, kw_only=True)
class RunDetails(RunSeen):
    """Everything about a run that is in storage."""

    run: Run
    state: RunState
    time: float
    "The time of the read, in seconds since the epoch."
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
    last_active: float = 0.0
    "The time at which the run's own processes last wrote to storage, in seconds since the epoch, or 0 if unknown."

    @property
    def step(self) -> int:
        """The newest optimizer step that is known."""
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
        """The time at which the run's processes were last active, in seconds since the epoch, or now if it is live."""
        if not self.state.terminal:
            return self.time
        times = [self.status.time] if self.status else [self.last_active, self.newest_record.get("time") or 0.0]
        return max(*times, *(attempt.time for attempt in self.attempts[-1:]), 0.0) or self.time

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
        return compute_spending(self.attempts, self.receipts, self._had_nodes_until)

    @property
    def _had_nodes_until(self) -> float:
        """The time until which the workers had nodes. A driver without an attempt might not have nodes yet."""
        if self.state.terminal or not self.status or not self.attempts:
            return self.ended
        if self.status.state.terminal:  # the run has been submitted again since then
            return self.status.time
        if self.status.driver == self.attempts[-1].driver:
            return self.time
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
        """The number of optimizer steps repeated because of incidents."""
        return sum(receipt.replayed for receipt in self.incidents)

    @property
    def restarts(self) -> int:
        """The number of restarts. Attempts that continue in place restart nothing and do not count."""
        return sum(attempt.metadata.tier != IN_PLACE for attempt in self.attempts[1:])


def read_details(run: Run) -> RunDetails:
    """Return everything about a run that is in storage. Raises `NotFoundError` and `StorageError`."""

    def attempts() -> tuple[list[Attempt], Any, dict[str, Any] | None]:
        found = read_attempts(run)
        # Checkpoint files are not read if the listing shows that they are unchanged.
        good, last = read_in_parallel(
            lambda: find_newest_good(run, found, trust_listing=True), lambda: newest_record(run, lineage(found))
        )
        return found, good, last

    summary, status, (found, (checkpoint, passed_over), last), identity, events = read_in_parallel(
        lambda: summarize_known(run),
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
    return RunDetails(
        run=run,
        state=state,
        reason=reason,
        time=now,
        status=status,
        stop_wanted=summary.stop_requested,
        deleting=summary.deleting,
        identity=identity,
        attempts=attempts_with_start(found),
        events=events,
        receipts=read_receipts(events),
        checkpoint=checkpoint,
        passed_over=passed_over,
        newest_record=last or {},
        last_active=summary.last_active,
    )


def find_deleted_checkpoint(status: Status | None, committed: Collection[str]) -> str:
    """Return the name of an ended run's last checkpoint if it no longer exists, or an empty string.

    A run always keeps its newest checkpoint, so something else has deleted it, such as a lifecycle rule.
    """
    name = status.checkpoint if status and status.state.terminal else None
    return name if name and name not in committed and by_step([name, *committed])[-1] == name else ""


def read_in_parallel(*parts: Callable[[], Any]) -> list[Any]:
    """Call the functions in parallel and return their results."""
    return map_parallel(lambda part: part(), parts)
