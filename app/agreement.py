"""What all workers decide together, without waiting for each other."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


class Agreement:
    """A few yes-or-no questions asked at every step; any worker's yes, one step later, is everybody's.

    The all-reduce runs behind the next step. Taking the answer a step late is what makes it free: no worker waits
    for the slowest one at a moment when gradients do not already make it wait.
    """

    def __init__(self, group: dist.ProcessGroup, questions: int) -> None:
        self._group = group
        self._answers = torch.zeros(questions, dtype=torch.uint8)
        self._asked: dist.Work | None = None

    def exchange(self, *mine: bool) -> list[bool]:
        """The answers to the questions of the step before; asks `mine` of all workers for the step after."""
        if self._asked:
            self._asked.wait()
        agreed = [bool(answer) for answer in self._answers.tolist()]
        self._answers = torch.tensor(mine, dtype=torch.uint8)
        self._asked = dist.all_reduce(self._answers, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed


class Timer:
    """Says yes every so many seconds; never, with 0."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether the time has come; a yes starts the next interval."""
        if not self._every_s or time.monotonic() - self._last < self._every_s:
            return False
        self._last = time.monotonic()
        return True
