"""The driver's part of a run's status: how the driver begins, what it does while no worker trains, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from sunspot.background import Background
from sunspot.errors import ConflictError, StorageError, SunspotError, SupersededError, shorten
from sunspot.formatting import as_time
from sunspot.run import Claimant, Run
from sunspot.run.attempts import newest_number
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.failures import describe_failure, record_failure
from sunspot.run.handover import left_for_move, read_handover
from sunspot.run.objects import read_if_usable
from sunspot.run.owner import Owner
from sunspot.run.requests import StopRequest, list_submissions
from sunspot.run.status import (
    STATUS_EVERY_S,
    WORKERS_SILENT_AFTER_S,
    RunState,
    Status,
    StatusKind,
    attempt_of_status,
    driver_of_status,
    find_own_status,
    is_alive,
    kind_of_status,
    list_statuses,
    load_status,
    load_usable_status,
    newest_status,
    read_status,
    withdraw_status,
    write_status,
)
from sunspot.storage.base import Entry
from sunspot.storage.limits import with_deadline

RECORD_S = 60.0
"""Seconds to wait for storage to accept a driver's status. After that, the driver continues anyway."""

LEAST_RECORD_S = 5.0
"""Minimum number of seconds to wait for a record, even if storage has not answered before."""

DRIVER_CHECK_EVERY_S = 5.0
"""Seconds between a driver's checks for the workers' status and the stop marker."""


Result = TypeVar("Result")


class RecordLimit:
    """The time limit for each of a driver's records.

    If storage stops answering, the next records share RECORD_S seconds, so that the driver ends soon.
    """

    def __init__(self) -> None:
        self._left_s = RECORD_S

    def run(self, what: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which is described by `what`. Raises `StorageError` if the limit passes."""
        began = time.monotonic()
        try:
            result = with_deadline(self._left_s, what, work)
        except StorageError:
            self._left_s = max(LEAST_RECORD_S, self._left_s - (time.monotonic() - began))
            raise
        self._left_s = RECORD_S
        return result


@contextmanager
def recorded_outcome(
    claimant: Claimant,
    newest: Checkpoint | None,
    max_starts: int,
    stop_request: StopRequest | None = None,
    limit: RecordLimit | None = None,
) -> Iterator[DriverStatusWriter]:
    """Context manager that writes the run's status when the driver begins and when it ends.

    Inside the context, `stop_request` is updated once the stop marker is found. Raises `SunspotError` if more than
    `max_starts` drivers of the same owner have begun in a row without a new checkpoint. Without this limit, the
    operator could restart a driver forever, for example because its head is lost each time.
    """
    run = claimant.run
    limit = limit or RecordLimit()
    known, before, status = limit.run("writing the status", lambda: _begin(claimant, newest, limit))
    begun = status.begun

    def fail(state: RunState, reason: str, error: BaseException) -> bool:
        with suppress(StorageError):
            if limit.run("reading the status", lambda: _changed_nothing(run, begun, before, known, error)):
                status.withdraw()
                return False
        return status.end(state, reason)

    try:
        if begun.starts > max_starts:
            job = Owner.parse(claimant.owner).describe()
            raise SunspotError(
                f"{job} was started {max_starts} times without a new checkpoint; the drivers' logs show why; to "
                "allow more starts, raise SUNSPOT_MAX_DRIVER_STARTS"
            )
        stop_request = stop_request or StopRequest()
        checks = (partial(stop_request.read_marker, run), partial(_note_handover, claimant, stop_request))
        with Background(DRIVER_CHECK_EVERY_S, status.refresh, *checks):
            yield status
    except SupersededError:
        raise  # the run belongs to another owner
    except SunspotError as error:
        fail(RunState.FAILED, str(error), error)
        raise
    except KeyboardInterrupt as error:
        fail(RunState.STOPPED, str(error) or "interrupted; the same command resumes it", error)
        raise
    except Exception as error:
        if fail(RunState.FAILED, shorten(error), error):
            failure = describe_failure(error, 0, None, begun.step)
            with suppress(StorageError):
                limit.run("writing how the run failed", lambda: record_failure(run, failure))
        raise
    status.end_as_expected()


def _note_handover(claimant: Claimant, stop_request: StopRequest) -> None:
    """Record a request to stop if another owner is waiting for this driver to save and stop."""
    handover = read_handover(claimant.run)
    if handover and handover.old == claimant.owner:
        stop_request.note_move(handover.new)


def _begin(
    claimant: Claimant, newest: Checkpoint | None, limit: RecordLimit
) -> tuple[int, Status | None, DriverStatusWriter]:
    """Return the newest attempt's number, the previous status, and the writer of this driver's status."""
    run, owner = claimant.run, claimant.owner
    known = newest_number(run)
    before = read_status(run)
    name = newest.name if newest else None
    again = before is not None and before.owner == owner and before.checkpoint == name
    begun = replace(
        before or Status(RunState.STARTING, owner),
        state=RunState.STARTING,
        owner=owner,
        reason="no worker trains yet: the driver is reading its data or waiting for nodes",
        began=time.time(),
        starts=before.starts + 1 if before and again else 1,
        attempt=0 if before and before.owner != owner and is_alive(before, time.time()) else known,
        after=tuple(sorted({driver_of_status(entry) for entry in list_statuses(run)})),
        driver=claimant.driver,
        checkpoint=name,
        checkpoint_time=newest.time if newest else None,
        step=newest.step if newest else 0,
        epoch=newest.epoch if newest else 0,
        world_size=0,
        heartbeat=None,
        saved=before is not None and before.saved and before.attempt == known,
        nan_since=0,
    )
    return known, before, DriverStatusWriter(run, begun, limit)


def _changed_nothing(run: Run, begun: Status, before: Status | None, known: int, error: BaseException) -> bool:
    """Return True if a driver that ends with `error` should leave the run's previous status in force.

    `begun` is the driver's first status, and `known` is the newest attempt at that time. A driver that ends before it
    claims an attempt, for example because of a typo, has not changed the run. Such a driver should not create a run,
    and its error should not replace the status of a run that another driver trains or has ended. However, if the driver
    belongs to the RayJob that last trained the run, `error` ends the run.
    """
    if newest_number(run) > known:
        return False
    entry = newest_status(list_statuses(run), other_than=begun.driver)
    other = load_usable_status(run.storage, entry) if entry else before
    if not other:
        return not run.storage.exists(run.key("run.json")) and not list_submissions(run)
    if other.owner == begun.owner:
        return other.state.terminal and isinstance(error, ConflictError)
    return other.state.terminal or is_alive(other, time.time())


class DriverStatusWriter:
    """Writes the driver's status objects until another process owns the run."""

    def __init__(self, run: Run, begun: Status, limit: RecordLimit | None = None) -> None:
        self._run = run
        self.begun = begun
        self._limit = limit or RecordLimit()
        self._last = begun
        self._version = ""
        self._changed = time.monotonic()
        self._ended = False
        self._group_ended = ""
        "The reason why the newest worker group ended, or an empty string if it is not known."
        self._outcome: dict[str, Any] = {"state": RunState.SUCCEEDED, "reason": ""}
        "The fields of the final status if no error ends the driver."
        self._writing = threading.Lock()  # so that no background write comes after the end
        write_status(run, begun)

    def refresh(self) -> None:
        """Write the status if the workers have not written a status recently, for example while they start."""
        with self._writing:
            if not self._ended:
                self._refresh()

    def note_end(self, why: str) -> None:
        """Record why the newest worker group ended. The driver's status shows this until a worker writes a status."""
        self._group_ended = why

    def _refresh(self) -> None:
        entry = find_own_status(self._run, self._last.driver)
        if not entry:
            self._take_precedence()
            return
        if entry.version != self._version:
            self._version, self._changed = entry.version, time.monotonic()
        unchanged_s = time.monotonic() - self._changed
        if unchanged_s < STATUS_EVERY_S:
            return
        self._load(entry)
        if self._last.state is RunState.RUNNING:
            if unchanged_s < WORKERS_SILENT_AFTER_S:
                return
            since = as_time(self._last.time)
            reason = f"no sign of life from its workers since {since}: the driver waits for them"
            if self._group_ended:
                reason = f"its workers ended and will restart: {self._group_ended}"
            self._last = replace(self._last, state=RunState.STARTING, reason=reason, world_size=0)
        write_status(self._run, self._last)

    def _take_precedence(self) -> None:
        """Make this driver's status apply if the run's previous driver is silent or has ended.

        While the previous driver is alive, this driver's status has attempt 0, so that the previous driver's status
        applies.
        """
        own = newest_status(list_statuses(self._run), self.begun.driver)
        other = read_status(self._run)
        if own and attempt_of_status(own) == 0 and other and not is_alive(other, time.time()):
            self._last = replace(self.begun, attempt=other.attempt, saved=other.saved)
            write_status(self._run, self._last)

    def finishing(self) -> None:
        """Record that all steps are taken and only predictions and the report are missing."""
        self.replace(
            state=RunState.FINISHING,
            reason="all steps are taken; the driver predicts and writes the report",
            world_size=0,
        )

    def expect(self, state: RunState, reason: str = "", **fields: Any) -> None:
        """Set the fields of the final status, which is written when the driver ends without an error."""
        self._outcome = {"state": state, "reason": reason, **fields}

    def end_as_expected(self) -> None:
        """Record that the driver ended without an error.

        If the run moves to another place and the end cannot be recorded, raises `StorageError`, so that the operator
        starts the driver again. Without this error, the RayJob would count as succeeded, although the run might not
        train in either place.
        """
        if not left_for_move(replace(self._last, **self._outcome)):
            self.end(**self._outcome)
            return
        self._ended = True
        self._write_in_time(StatusKind.ENDED, **self._outcome)

    def withdraw(self) -> None:
        """Delete this driver's status, so that the previous status applies again.

        Raises `StorageError` if storage fails.
        """
        self._ended = True

        def delete() -> None:
            with self._writing:
                withdraw_status(self._run, self.begun.driver)

        self._limit.run("withdrawing the status", delete)

    def end(self, state: RunState, reason: str, **fields: Any) -> bool:
        """Write the final status, unless another process owns the run. Return True if it was written."""
        self._ended = True
        return self._write(StatusKind.ENDED, state=state, reason=reason, **fields)

    def replace(self, **fields: Any) -> bool:
        """Update fields of the status, unless another process owns the run. Return True if they were written.

        A driver without workers has to pass `attempt`, the number of the attempt that it claimed.
        """
        return self._write(StatusKind.DRIVER, **fields)

    def _write(self, kind: StatusKind, **fields: Any) -> bool:
        with suppress(StorageError):
            return self._write_in_time(kind, **fields)
        return False

    def _write_in_time(self, kind: StatusKind, **fields: Any) -> bool:
        """Write the status like `replace`. Raises `StorageError` if this fails or takes too long (`RecordLimit`)."""

        def write() -> bool:
            with self._writing:
                entry = find_own_status(self._run, self._last.driver, fields.get("attempt", 0))
                if entry:
                    self._load(entry)
                    self._last = replace(self._last, **fields)
                    write_status(self._run, self._last, kind)
            return entry is not None

        return self._limit.run("writing the status", write)

    def _load(self, entry: Entry) -> None:
        """Read a status object, unless this driver wrote it. The driver remembers what it has written."""
        if kind_of_status(entry) is StatusKind.WORKERS:
            self._last = read_if_usable(lambda: load_status(self._run.storage, entry)) or self._last
