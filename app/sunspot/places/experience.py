"""Remembers how many nodes a place provided, and predicts how many it provides now."""

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
    """The nodes that a run found in a place at one time."""

    place: str
    time: float
    "Seconds since the epoch."
    share: float
    "The number of nodes that were there, divided by the number that the run wanted, from 0 to 1."


@dataclass(frozen=True)
class Experience:
    """The memory of a place's nodes, as of its last sighting."""

    time: float
    "The time of the last sighting, in seconds since the epoch."
    share: float
    "The share of the wanted nodes in the last sighting."
    average: float
    "The exponentially weighted average of the shares until then."

    def then(self, time: float, share: float) -> Experience:
        """Return the experience after another sighting. A sighting that is not newer changes nothing."""
        passed_s = time - self.time
        if passed_s <= 0:
            return self
        forgiven = _forgive(self.average, passed_s)
        weight = 1 - math.exp(-passed_s / AVERAGED_OVER_S)
        return Experience(time, share, forgiven + weight * (share - forgiven))

    def expect(self, now: float) -> float:
        """Return the expected share of the wanted nodes, from 0 to 1.

        The share is the last one or the average, whichever is lower: a place that just lost its nodes is left at once,
        and a place that just got them back is trusted slowly. With time, the shortage is forgotten.
        """
        return _forgive(min(self.share, self.average), max(0.0, now - self.time))


def learn(sightings: Iterable[Sighting]) -> dict[str, Experience]:
    """Return the experience with each place that was seen."""
    known: dict[str, Experience] = {}
    for each in sorted(sightings, key=lambda sighting: sighting.time):
        before = known.get(each.place)
        known[each.place] = (
            before.then(each.time, each.share) if before else Experience(each.time, each.share, each.share)
        )
    return known


def _forgive(share: float, passed_s: float) -> float:
    """Return the share that is expected some seconds after the place gave `share`. It rises towards 1."""
    return 1 - (1 - share) * math.exp(-passed_s / FORGOTTEN_AFTER_S)
