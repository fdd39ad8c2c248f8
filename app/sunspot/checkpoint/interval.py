"""How often the state is copied to memory, and whether a commit fits into the notice of a preemption."""

import math
from collections import deque
from statistics import median

NOTICE_MARGIN_S = 4.0
"""Between a notice and the save: the driver polls twice a second, rank 0 polls it as often, and a step has to end."""


class SnapshotInterval:
    """The shortest interval, in steps, at which snapshots cost at most a given share of the steps' time."""

    def __init__(self, share: float, start: int) -> None:
        """A `share` of 0 turns snapshots off; the first interval begins at step `start`."""
        self._share = share
        self._last = start
        self._times: deque[float] = deque(maxlen=20)
        self.every = 1
        "Steps between two snapshots."
        self.cost = 0.0
        "Share of the time that they cost."

    def due(self, step: int, step_s: float, costs: deque[float]) -> bool:
        """Return whether a snapshot is due at `step`, which took `step_s` seconds; True begins the next interval.

        `costs` are the seconds that the last snapshots cost.
        """
        if not self._share:
            return False
        self._times.append(step_s)
        if costs:
            cost, usual = median(costs), median(self._times)
            self.every = max(1, math.ceil(cost / (self._share * usual)))
            self.cost = cost / (self.every * usual)
        if self.left(step) > 0:
            return False
        self._last = step
        return True

    def left(self, step: int) -> int:
        """Count the steps after `step` until a snapshot is due; at most 0 when it is."""
        return self._last + self.every - step


def exceeds_notice(commit_s: float | None, notice_s: float) -> bool:
    """Return whether a commit of `commit_s` seconds takes longer than a notice leaves; False if either is unknown."""
    return bool(commit_s and notice_s and commit_s + NOTICE_MARGIN_S > notice_s)
