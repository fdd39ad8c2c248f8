"""When the state is copied to memory, and when to storage."""

from __future__ import annotations

import math
from collections import deque
from statistics import median


class SnapshotInterval:
    """The shortest interval, in steps, at which snapshots cost at most a share of the time that steps take."""

    def __init__(self, share: float, start: int) -> None:
        self._share = share
        self._last = start
        self._times: deque[float] = deque(maxlen=20)
        self.every = 1
        "Steps between two snapshots."
        self.cost = 0.0
        "Share of the time that they cost."

    def due(self, step: int, step_time: float, costs: deque[float]) -> bool:
        """Whether a snapshot is due at `step`, which took `step_time` seconds; a yes begins the next interval."""
        if not self._share:
            return False
        self._times.append(step_time)
        if costs:
            cost, usual = median(costs), median(self._times)
            self.every = max(1, math.ceil(cost / (self._share * usual)))
            self.cost = cost / (self.every * usual)
        if step - self._last < self.every:
            return False
        self._last = step
        return True
