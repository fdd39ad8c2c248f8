"""Brings what rank 0 decides after a step to all workers, and ends an evaluation on all of them together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

ASK_EVERY_S = 0.1
"""Seconds between two decisions of rank 0: little of the time that a notice leaves."""

MAX_STEPS_BETWEEN = 16
"""Most steps between two decisions, however fast: when steps suddenly take seconds, a notice must not wait long."""

LONG_STEP_S = 0.3
"""Steps that take longer wait for the decision after them: a broadcast to 64 ranks takes less than a millisecond."""


class StepActions(NamedTuple):
    """What the workers do after a step."""

    save: bool = False
    "Save a checkpoint to storage."
    copy: bool = False
    "Copy the state to shared memory."
    report: bool = False
    "Add a record to the metric history."
    stop: bool = False
    "Save and return: the run ends here."
    restart: bool = False
    "Save and end, for Ray to start a new worker group."
    regroup: bool = False
    "Form the next group, of the members that there are by now; the processes stay."
    busy: bool = False
    "Under FSDP, while a checkpoint is being committed: begin no other that can wait."
    next_in: int = MAX_STEPS_BETWEEN
    "Steps after which there may be something to do again."


class StepDecisionBroadcast:
    """Brings rank 0's decisions to all workers, for the same step: about every ASK_EVERY_S, or with each longer step.

    After a short step the broadcast runs behind the next one, and its result comes a step late: no worker waits for
    the slowest, except where gradients make it wait anyway. After a step longer than LONG_STEP_S all wait for the
    result, as another step may be all that a notice leaves. Each broadcast also says how the next one works, and when.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._message = torch.zeros(len(StepActions._fields) + 1, dtype=torch.uint8)
        self._pending: dist.Work | None = None
        self._busy = self._waits = False
        self._every = self._left = 1
        "Steps between the last two broadcasts, and steps until the next."
        self._asked = time.monotonic()

    def agree(self, decide: Callable[[], StepActions]) -> StepActions:
        """Return the actions that rank 0 decided on after this step or the one before, the same on all workers.

        All call this after each step. `decide` is called when a broadcast is due; rank 0's result counts.
        """
        agreed = StepActions(busy=self._busy)
        if self._pending:
            agreed = self._receive()
            if self._waits:  # one result a step
                return agreed
        self._left -= 1
        if self._left == 0:
            mine = decide()
            every, waits = self._choose_interval(mine)
            self._message = torch.tensor([waits, *mine._replace(next_in=every)], dtype=torch.uint8)
            self._pending = dist.broadcast(self._message, group=self._group, group_src=0, async_op=True)
            if self._waits:
                return self._receive()
        return agreed

    def _receive(self) -> StepActions:
        assert self._pending
        self._pending.wait()
        self._pending = None
        waits, *actions, self._left = self._message.tolist()
        agreed = StepActions(*map(bool, actions))
        self._waits, self._busy = bool(waits), agreed.busy
        return agreed

    def _choose_interval(self, mine: StepActions) -> tuple[int, bool]:
        """Choose the steps until the next broadcast, and whether all wait for its result.

        At most twice as many steps as to this one: a pause tells little of the pace.
        """
        now = time.monotonic()
        step_s = max(now - self._asked, 1e-9) / self._every
        by_pace = int(ASK_EVERY_S / step_s)
        self._every, self._asked = max(1, min(by_pace, 2 * self._every, mine.next_in, MAX_STEPS_BETWEEN)), now
        return self._every, step_s > LONG_STEP_S


class EvaluationEnd:
    """Ends an evaluation on all workers after the same round, while each evaluates its rows at its own pace.

    A worker that has rows left does not wait for a round, which comes about every ASK_EVERY_S. One that has none
    waits, but no longer than for the slowest worker's next batch. Rounds go on until no worker has rows left, or one
    is to stop or restart.
    """

    def __init__(self, group: dist.ProcessGroup, together: bool) -> None:
        """`together`: the workers make each forward pass together, and so a round before each."""
        self._group, self._together = group, together
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._pending: dist.Work | None = None
        self._began = -math.inf
        self.stop = self.restart = False
        "Why it was cut short, known once it has ended."

    def reached(self, stop: bool, restart: bool, more: bool) -> bool:
        """Tell whether it ends here, given what this worker was told and whether it has `more` rows.

        Call before each batch, and repeatedly when there is none.
        """
        waits = self._together or not more
        if not self._pending and (waits or time.monotonic() - self._began >= ASK_EVERY_S):
            self._began, self._flags = time.monotonic(), torch.tensor([stop, restart, more], dtype=torch.uint8)
            self._pending = dist.all_reduce(self._flags, dist.ReduceOp.MAX, self._group, async_op=True)
        if not self._pending or not (waits or self._pending.is_completed()):
            return False
        self._pending.wait()
        self._pending = None
        self.stop, self.restart, more = map(bool, self._flags.tolist())
        return self.stop or self.restart or not more
