"""What a driver leaves in storage of itself: that it began, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from app.background import Background
from app.errors import ConflictError, StorageError, SunspotError, SupersededError, shorten
from app.layout import Run
from app.layout.checkpoints import Checkpoint
from app.layout.failures import describe_failure, record_failure
from app.layout.status import STATUS_EVERY_S, RunState, Status, read_status, restore_status, write_status


class Outcome:
    """A driver's part in the run."""

    def __init__(self, before: Status | None) -> None:
        self.before = before
        "The status that it found."
        self.state = RunState.SUCCEEDED
        "How it ended when no error ended it; the caller fills it in."


@contextmanager
def recorded_outcome(run: Run, owner: str, newest: Checkpoint | None, most_starts: int) -> Iterator[Outcome]:
    """Write the run's status when the driver begins and when it ends, whatever it ends in.

    Raises `SunspotError` when the same owner has begun `most_starts` times in a row without a new checkpoint: on a
    cluster, the operator starts the driver again for every head it loses, and counts none of them.
    """
    name = newest.name if newest else None
    before = read_status(run)
    again = before is not None and before.owner == owner and before.checkpoint == name
    starts = before.starts + 1 if before and again else 1
    begun = replace(
        before or Status(RunState.STARTING, owner),
        state=RunState.STARTING,
        owner=owner,
        reason="the driver has begun",
        began=time.time(),
        starts=starts,
        checkpoint=name,
        checkpoint_time=newest.time if newest else None,
        step=newest.step if newest else 0,
        epoch=newest.epoch if newest else 0,
        world_size=0,
    )
    write_status(run, begun)
    outcome = Outcome(before)
    try:
        if starts > most_starts:
            raise SunspotError(
                f"{owner} was started {most_starts} times without a new checkpoint; the logs of those starts say why. "
                "SUNSPOT_MAX_DRIVER_STARTS allows more"
            )
        with Background(STATUS_EVERY_S, lambda: _refresh(run, owner)):
            yield outcome
    except SupersededError:
        raise  # the run is another's, and so is its status
    except SunspotError as error:
        if isinstance(error, ConflictError) and before and (before.state.terminal or before.owner != owner):
            restore_status(run, before)  # a start with other settings changes nothing about where the run stands
        else:
            _write_end(run, owner, RunState.FAILED, str(error))
        raise
    except KeyboardInterrupt:
        _write_end(run, owner, RunState.LOST, "interrupted; the same command goes on from the last checkpoint")
        raise
    except Exception as error:
        _write_end(run, owner, RunState.FAILED, shorten(error))
        with suppress(StorageError):
            record_failure(run, describe_failure(error, 0, None, begun.step))
        raise
    _write_end(run, owner, outcome.state, reason="")


def _refresh(run: Run, owner: str) -> None:
    """Show that the driver is there while no worker does: reading data and waiting for machines may take long."""
    status = read_status(run)
    if status and status.owner == owner and time.time() - status.time > 2 * STATUS_EVERY_S:
        reason = "no worker trains: the driver waits for them, or sums up what they did"
        write_status(run, replace(status, state=RunState.STARTING, reason=reason))


def _write_end(run: Run, owner: str, state: RunState, reason: str) -> None:
    """Say how it ended, unless the run has been taken over; what storage refuses now only readers will miss."""
    with suppress(StorageError):
        status = read_status(run)
        if status and status.owner == owner:
            write_status(run, replace(status, state=state, reason=reason))
