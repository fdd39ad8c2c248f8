"""Moves runs between the places of a profile while `sunspot wait` watches them.

1. `may_consider` decides from the run's RayJob and status whether a move may help the run.
2. Once a minute, `Mover` calls `places.choose_place` with the experience of this and other runs in each place.
3. `moving.move_run` renders the RayJob's request (see `applied`) for the chosen place, and moves the run there.

If `sunspot wait` exits during a move, the drivers complete the move, and the next `Mover` finds the run in the new
place.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

from sunspot.background import start_thread
from sunspot.errors import ClusterError, SettingsError, SunspotError
from sunspot.places.experience import Sighting
from sunspot.run.handover import left_for_move
from sunspot.run.overview import LOST_AFTER_S
from sunspot.run.owner import Owner
from sunspot.run.requests import newest_submission
from sunspot.run.sightings import NODES_WITHIN_S
from sunspot.run.status import is_alive, read_status
from sunspot.submitter.cluster.api import Cluster, connect
from sunspot.submitter.cluster.applied import read_request
from sunspot.submitter.cluster.moving import move_run
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.placing import context_of, read_prospects
from sunspot.submitter.cluster.start import Submission, place_of
from sunspot.submitter.cluster.state import HEAD_GIVEN_UP, owns, was_written_by
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S
from sunspot.submitter.manifest.render import JobRequest, choose_profile
from sunspot.submitter.printing import warn

CONSIDER_EVERY_S = 60.0
"""Seconds between two choices of a run's place."""

SETTLED_AFTER_S = 120.0
"""Seconds for which another place must be better before a run moves. A lost node is often replaced in less time."""


CLAIMED_WITHIN_S = 180.0
"""Seconds within which the new workers claim a run after its old driver has stopped for a move."""


def may_consider(snapshot: RunSnapshot, now: float) -> bool:
    """Return True if a move to another place may be considered. `now` is in seconds since the epoch.

    A run is not moved if it has ended, or if something other than its newest RayJob is training it. If a run has no
    driver yet, a move is considered after NODES_WITHIN_S. If its driver is silent, a move is considered after
    LOST_AFTER_S, because the operator might replace the head before then.
    """
    job, seen = snapshot.job, snapshot.storage
    status = seen.status
    if not job or seen.trouble or seen.summary.stop_requested or seen.summary.deleting:
        return False
    if status and is_alive(status, now):
        return owns(job, status.owner)
    if job.failure == HEAD_GIVEN_UP:
        return not (status and status.state.terminal and was_written_by(seen, job))
    if snapshot.state()[0].terminal:
        return is_stranded(snapshot, now)
    own = status if was_written_by(seen, job) else None
    return now - own.seen > LOST_AFTER_S if own else now - job.created > NODES_WITHIN_S


def is_stranded(snapshot: RunSnapshot, now: float) -> bool:
    """Return True if the newest RayJob stopped to let the run move, but no other RayJob claimed the run in time."""
    job, status = snapshot.job, snapshot.storage.status
    if not job or not status or not owns(job, status.owner):
        return False
    return left_for_move(status) and now - status.seen > CLAIMED_WITHIN_S


class Mover:
    """Moves runs between the places of one profile. One `Mover` handles all runs that `sunspot wait` watches."""

    def __init__(self, profile: str) -> None:
        """Create a mover. Raises `SettingsError` if the profile cannot be used or has no places."""
        self._profile = profile
        self._considered: dict[str, float] = {}
        "The monotonic time at which each run's place was last chosen."
        self._better: dict[str, tuple[str, float]] = {}
        "The better place for each run, or an empty name, and the monotonic time since which this has not changed."
        self._moves: dict[str, Future[Submission | None]] = {}
        self._failures: dict[str, list[Sighting]] = {}
        "Failed moves of each run. The places of these moves are avoided until the failures are forgotten."
        if not choose_profile(JobRequest(profile)).places:
            raise SettingsError(
                f"profile {profile} has no places to which a run can move; add places, or omit --profile"
            )

    @property
    def storage_path(self) -> str | None:
        """The storage path in the profile, or None."""
        return (choose_profile(JobRequest(self._profile)).settings or {}).get("STORAGE_PATH")

    def clusters(self) -> dict[str, Cluster]:
        """Return the cluster and namespace of each place. Sends no requests."""
        places = choose_profile(JobRequest(self._profile)).places or ()
        requests = {place.name: JobRequest(self._profile, place=place.name) for place in places}
        return {name: connect(context_of(each), choose_profile(each).namespace) for name, each in requests.items()}

    def find(self, access: RunAccess) -> RunAccess:
        """Return access to the cluster of the place where the run is alive, or was last submitted."""
        status, submitted = read_status(access.run), newest_submission(access.run)
        place = submitted.place if submitted else ""
        if status and is_alive(status, time.time()):
            place = Owner.parse(status.owner).place
        return RunAccess(access.run, self.clusters().get(place, access.cluster), access.cluster_error)

    def attend(self, access: RunAccess, snapshot: RunSnapshot) -> Submission | None:
        """Start moving the run in the background if another place is better.

        Returns the new RayJob once the run has moved, and None until then.
        """
        name, now = access.run.name, time.monotonic()
        if name in self._moves:
            return self._moves.pop(name).result() if self._moves[name].done() else None
        if now - self._considered.get(name, -CONSIDER_EVERY_S) < CONSIDER_EVERY_S:
            return None
        self._considered[name] = now
        request, reason = self._choose(access, snapshot)
        place, since = self._better.get(name, ("", now))
        if not request or place != request.place:
            since = now
        self._better[name] = (request.place or "" if request else "", since)
        if request and now - since >= SETTLED_AFTER_S:
            self._moves[name] = start_thread(partial(self._move, access.run.name, request, reason), "move")
        return None

    def rescue(self, access: RunAccess, snapshot: RunSnapshot) -> Submission | None:
        """Move a run to a better place after the operator gave up on its head pod.

        Returns None if this fails or no place is better.
        """
        request, reason = self._choose(access, snapshot)
        return self._move(access.run.name, request, reason) if request else None

    def close(self, name: str) -> None:
        """Wait until the background thread has undone a move of the run.

        Call this if the run ended before the move was complete. Gives up after GONE_WITHIN_S.
        """
        wait([move for move in [self._moves.pop(name, None)] if move], GONE_WITHIN_S)

    def _choose(self, access: RunAccess, snapshot: RunSnapshot) -> tuple[JobRequest | None, str]:
        """Return a request for the run in a better place, and the reason. The request is None if the run should stay.

        The run also stays if its request or storage cannot be read.
        """
        try:
            return self._compare(access, snapshot)
        except SunspotError as error:
            warn(f"{access.run.name} stays where it is: {error}")
            return None, ""

    def _compare(self, access: RunAccess, snapshot: RunSnapshot) -> tuple[JobRequest | None, str]:
        """Return a request and a reason, as `_choose` does.

        Raises `SunspotError` if the request cannot be used, or if storage cannot be read.
        """
        run, job = access.run, snapshot.job
        now = time.time()
        request = read_request(job, self._profile) if job and may_consider(snapshot, now) else None
        if not job or not request:
            return None, ""
        prospects = read_prospects(request, self._failures.get(run.name, ()))
        if prospects.run.location != run.location:
            raise ClusterError(
                f"the request in RayJob {job.name} is for {prospects.run.location}, not for {run.location}"
            )
        choice = prospects.choose()
        stays = choice.place == place_of(job.raw) and not is_stranded(snapshot, now)
        return (None if stays or not choice.place else replace(request, place=choice.place)), choice.reason

    def _move(self, name: str, request: JobRequest, reason: str) -> Submission | None:
        """Move a run, and return its new RayJob. Return None if the move fails and the run stays where it was."""
        warn(f"{name}: moving to {request.place}, {reason}")
        try:
            return move_run(request, None, NODES_WITHIN_S)
        except SunspotError as error:
            warn(f"{name}: {error}")
            self._failures.setdefault(name, []).append(Sighting(request.place or "", time.time(), 0.0))
            return None
