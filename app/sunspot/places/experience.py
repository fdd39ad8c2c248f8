"""Remembers how many nodes a place has provided, and predicts how many it would provide now."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

AVERAGED_OVER_S = 3600.0
"""Time constant of the average over the sightings of a place, in seconds.

A place whose nodes come and go needs about this long to be trusted again.
"""

FORGOTTEN_AFTER_S = 7200.0
"""Time constant, in seconds, with which a place's lack of nodes is forgotten.

In the probes of SkyNomad (NSDI '27), a zone kept all of 16 H100 for 23 minutes to 13 hours on average, so a failure
says little about the next morning.
"""


@dataclass(frozen=True)
class Sighting:
    """The share of the nodes wanted by a run that were available in a place at a given time."""

    place: str
    time: float
    "Seconds since the epoch."
    share: float
    "The number of nodes that were there, divided by the number that the run wanted, from 0 to 1."


@dataclass(frozen=True)
class Experience:
    """A summary of all sightings of a place, as of the last sighting."""

    time: float
    "The time of the last sighting, in seconds since the epoch."
    share: float
    "The share of the run's nodes that were available at the last sighting, from 0 to 1."
    average: float
    "The exponentially weighted average of the shares in all sightings."

    def then(self, time: float, share: float) -> Experience:
        """Return the summary updated with a newer sighting.

        The summary is returned unchanged if `time` is not later than the last sighting.
        """
        passed_s = time - self.time
        if passed_s <= 0:
            return self
        forgiven = _forgive(self.average, passed_s)
        weight = 1 - math.exp(-passed_s / AVERAGED_OVER_S)
        return Experience(time, share, forgiven + weight * (share - forgiven))

    def expect(self, now: float) -> float:
        """Return the share of a run's nodes that the place is expected to have, from 0 to 1.

        The result is based on the last share or the average, whichever is lower. A place that has just lost its nodes
        is therefore abandoned at once, and a place that has just regained them is trusted only slowly. With time, the
        result rises toward 1.
        """
        return _forgive(min(self.share, self.average), max(0.0, now - self.time))


def learn(sightings: Iterable[Sighting]) -> dict[str, Experience]:
    """Return a summary of each place's sightings, keyed by place."""
    known: dict[str, Experience] = {}
    for each in sorted(sightings, key=lambda sighting: sighting.time):
        before = known.get(each.place)
        known[each.place] = (
            before.then(each.time, each.share) if before else Experience(each.time, each.share, each.share)
        )
    return known


def _forgive(share: float, passed_s: float) -> float:
    """Return the share that is expected `passed_s` seconds after a place provided `share`.

    The expected share rises toward 1 with time.
    """
    return 1 - (1 - share) * math.exp(-passed_s / FORGOTTEN_AFTER_S)
