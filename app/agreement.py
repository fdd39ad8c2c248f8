"""What all workers decide together, without waiting for each other."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist


class Due(NamedTuple):
    """What is to be done after a step."""

    save: bool = False
    "A checkpoint in storage."
    copy: bool = False
    "A copy of the state in shared memory."
    report: bool = False
    "A record of the metric history."
    stop: bool = False
    "Save and return: the run is to end here."
    leave: bool = False
    "Save and make way for a new worker group."
    busy: bool = False
    "A checkpoint is still being committed, and one that can wait is not begun: under FSDP none replaces another."


class Agreement:
    """A few yes-or-no questions asked at every step; any worker's yes, one step later, is everybody's.

    The all-reduce runs behind the next step. Taking the answer a step late is what makes it free: no worker waits
    for the slowest one at a moment when gradients do not already make it wait.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._answers = torch.zeros(len(Due._fields), dtype=torch.uint8)
        self._asked: dist.Work | None = None

    def exchange(self, mine: Due) -> Due:
        """What all agreed on in the step before; asks `mine` of all workers for the step after."""
        if self._asked:
            self._asked.wait()
        agreed = Due(*(bool(answer) for answer in self._answers.tolist()))
        self._answers = torch.tensor(mine, dtype=torch.uint8)
        self._asked = dist.all_reduce(self._answers, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed


class Timer:
    """Says yes every so many seconds."""

    def __init__(self, overdue: bool = False) -> None:
        self._last = -math.inf if overdue else time.monotonic()

    def due(self, every_s: float) -> bool:
        """Whether `every_s` (0: never) have passed; a yes starts the next interval."""
        if not every_s or time.monotonic() - self._last < every_s:
            return False
        self._last = time.monotonic()
        return True
