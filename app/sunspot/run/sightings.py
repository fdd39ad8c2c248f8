"""Reads from storage how many nodes each place provided to past runs (`sunspot.places.experience`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from sunspot.background import map_parallel
from sunspot.errors import DamageError
from sunspot.places.experience import Sighting
from sunspot.run import Run
from sunspot.run.attempts import Attempt, read_attempts
from sunspot.run.overview import list_runs
from sunspot.run.owner import Owner
from sunspot.run.requests import SubmissionRecord, read_submissions
from sunspot.run.status import Status, is_alive, read_status
from sunspot.storage.base import Storage

log = logging.getLogger(__name__)

RECENT_S = 24 * 3600.0
"""Seconds after which a sighting no longer matters, because it is almost completely forgotten by then."""

MAX_RUNS = 20
"""Largest number of runs that are read, the most recently modified first. Each takes a few requests."""

NODES_WITHIN_S = 600.0
"""Seconds within which a place with free nodes provides them. After that, the place counts as having none."""


def read_sightings(storage: Storage, now: float) -> list[Sighting]:
    """Return the sightings of all recent runs in this storage. `now` is in seconds since the epoch.

    Runs whose records are damaged are omitted.
    """
    recent = [name for name, seen in list_runs(storage).items() if now - seen.modified < RECENT_S]

    def read_one(name: str) -> list[Sighting]:
        run = Run(storage, name)
        try:
            return list(find_sightings(read_attempts(run), read_submissions(run), read_status(run), now))
        except DamageError as error:
            log.warning(f"ignoring the place history of run {name}: {error}")
            return []

    return [each for found in map_parallel(read_one, recent[:MAX_RUNS]) for each in found]


def find_sightings(
    attempts: Sequence[Attempt], submissions: Sequence[SubmissionRecord], status: Status | None, now: float
) -> Iterator[Sighting]:
    """Yield a sighting for each time that a run got nodes in a place, or waited there without getting any.

    Attempts and submissions are oldest first. Each attempt yields a sighting with its workers. A submission that waited
    longer than NODES_WITHIN_S without an attempt yields a sighting without workers. If the run has not ended, its
    status yields another sighting, with the current workers if the run is alive, or without workers if it is silent.
    """
    for attempt in attempts:
        place = Owner.parse(attempt.owner).place
        if place:
            yield Sighting(place, attempt.time, _share(attempt, attempt.metadata.world_size))
    if attempts and status and not status.state.terminal:
        place = Owner.parse(status.owner).place
        alive = is_alive(status, now)
        # After this time, the RayJob may have been deleted, so the silence says nothing about the place's nodes.
        silent_at = min(now, status.seen + NODES_WITHIN_S)
        if place and status.attempt:
            yield Sighting(place, status.seen if alive else silent_at, _share(attempts[-1], status.world_size) * alive)
    for number, submission in enumerate(submissions, 1):
        end = submission.withdrawn or (submissions[number].time if number < len(submissions) else now)
        began = any(
            Owner.parse(attempt.owner).job == submission.job and submission.time <= attempt.time <= end
            for attempt in attempts
        )
        if submission.place and not began and end - submission.time > NODES_WITHIN_S:
            yield Sighting(submission.place, end, 0.0)


def _share(attempt: Attempt, workers: int) -> float:
    """Return `workers` as a fraction of the workers that the attempt wanted, at most 1."""
    from sunspot.settings import PREFIX  # pydantic is slow to import, and most verbs do not need it

    most = attempt.metadata.settings.get(PREFIX + "NUM_WORKERS", "").rpartition("..")[2]
    return min(1.0, workers / int(most)) if most.isdigit() and int(most) else float(workers > 0)
