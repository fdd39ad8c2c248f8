"""Hands a run over from the driver of one owner to the workers of another, without repeating a step.

The new workers form their group while the old ones train. Then the new rank 0 writes a request that names both owners,
and waits. The old driver reads the request, saves after its current step, and stops. Only then does the new rank 0
claim the run, so the run pauses only for the save, the claim and the restore. If the old driver is gone, the new
workers continue from the newest checkpoint, like any new group. Claims alone decide who owns the run, so a lost or late
request cannot give the run two owners.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from sunspot.errors import ConflictError
from sunspot.run import Run, to_json
from sunspot.run.objects import Timestamp, read, read_if_exists, read_or_default
from sunspot.run.owner import Owner
from sunspot.run.status import RunState, Status, is_alive, read_status

HANDOVER = "handover.json"
"""Name of the request."""

MOVE = "its move"
"""Beginning of the description of what stopped the old driver."""

HANDED_OVER_WITHIN_S = 900.0
"""Seconds within which the old driver must save and stop. A large state takes minutes to upload."""

LOOK_EVERY_S = 1.0
"""Seconds between two checks of the old driver's status."""


@dataclass(frozen=True)
class Handover:
    """A request from a run's new owner to the old owner's driver to save and stop."""

    old: str = ""
    new: str = ""
    time: Timestamp = 0.0


def read_handover(run: Run) -> Handover | None:
    """Return the request, or None if there is no request. If the request is damaged, its owners are empty."""
    return read_if_exists(lambda: read_or_default(lambda: read(run, Handover, HANDOVER), Handover()))


def left_for_move(status: Status) -> bool:
    """Return True if the run's driver saved a checkpoint and stopped because the run is moving to another place."""
    return status.state is RunState.STOPPED and status.reason.startswith(f"stopped by {MOVE}")


def is_moving(status: Status, now: float) -> bool:
    """Return True if the driver has stopped for a move so recently that the new workers can still claim the run."""
    return left_for_move(status) and now - status.seen < HANDED_OVER_WITHIN_S


def clear_handover(run: Run) -> None:
    """Delete the request, so that the old driver keeps training if it has not read the request yet."""
    run.storage.delete(run.key(HANDOVER))


def take_over_from(run: Run, old: str, new: str) -> None:
    """Ask the driver of owner `old` to save and stop in favor of owner `new`, and wait until `old` stops training.

    Returns at once if `old` is not training. Raises `StorageError`, and `ConflictError` if `old` is still training
    after HANDED_OVER_WITHIN_S.
    """
    deadline = time.monotonic() + HANDED_OVER_WITHIN_S
    try:
        while not has_handed_over(run, old, new):
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"{Owner.parse(old).describe()} did not save a checkpoint and stop within "
                    f"{HANDED_OVER_WITHIN_S:.0f} s, so it still owns the run; try again later"
                )
            time.sleep(LOOK_EVERY_S)
    finally:
        clear_handover(run)


def has_handed_over(run: Run, old: str, new: str) -> bool:
    """Return True if owner `old` is no longer training. Otherwise, make sure that a request by `new` is in storage."""
    if not _trains(run, old):
        return True
    request = read_handover(run)
    if not request or (request.old, request.new) != (old, new):
        print(f"  waiting until {Owner.parse(old).describe()} has saved a checkpoint and stopped", flush=True)
        run.storage.write(run.key(HANDOVER), to_json(asdict(Handover(old, new, time.time()))))
    return False


def _trains(run: Run, owner: str) -> bool:
    """Return True if a driver of `owner` wrote the run's status and is still alive."""
    status = read_status(run)
    return status is not None and status.owner == owner and is_alive(status, time.time())
