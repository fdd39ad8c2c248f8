"""Broadcasts rank 0's decisions during training, and makes all workers end an evaluation together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

ASK_EVERY_S = 0.1
"""Seconds between decisions of rank 0, a small fraction of the time left after a preemption notice."""

MAX_STEPS_BETWEEN = 16
"""Largest number of steps between decisions, so that a notice is not delayed for long if steps become slow."""

LONG_STEP_S = 0.3
"""Duration of a step in seconds above which workers wait for the decision after it.

A broadcast to 64 ranks takes less than a millisecond.
"""


class StepActions(NamedTuple):
    """The workers' actions after a step."""

    save: bool = False
    "Save a checkpoint to storage."
    copy: bool = False
    "Copy the state to shared memory."
    report: bool = False
    "Add a record to the metric history."
    stop: bool = False
    "Save and return, because the run ends."
    restart: bool = False
    "Save and exit, so that Ray starts a new worker group."
    regroup: bool = False
    "Form a new group in the same processes, because workers join or leave."
    profile: bool = False
    "Start a profile. Rank 0 then broadcasts the request for it."
    busy: bool = False
    "Under fsdp, postpone optional checkpoints, because another checkpoint is being committed."
    next_in: int = MAX_STEPS_BETWEEN
    "The number of steps until the next possible action."


class StepDecisionBroadcast:
    """Sends rank 0's decisions to all workers, roughly once per ASK_EVERY_S, or after each step if steps are longer.

    After a short step, the broadcast overlaps with the next step, so workers do not wait for each other, and the result
    arrives one step late. After a step longer than LONG_STEP_S, all workers wait for the result, because a preemption
    notice might leave time for only one more step. Each broadcast also contains the number of steps until the next
    broadcast, and whether workers will wait for the next broadcast's result.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._message = torch.zeros(len(StepActions._fields) + 1, dtype=torch.uint8)
        self._pending: dist.Work | None = None
        self._busy = self._waits = False
        self._every = 1
        "The number of steps between the last two broadcasts."
        self._left = 1
        "The number of steps until the next broadcast."
        self._asked = time.monotonic()

    def agree(self, decide: Callable[[], StepActions]) -> StepActions:
        """Return the actions that rank 0 chose after this step or the previous one. They are the same on all workers.

        All workers must call this after each step. `decide` is called when a broadcast is due. Only rank 0's result is
        used.
        """
        agreed = StepActions(busy=self._busy)
        if self._pending:
            agreed = self._receive()
            if self._waits:  # one result per step
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
        """Return the number of steps until the next broadcast, and whether the workers will wait for its result.

        The interval at most doubles each time, because a single measurement can be wrong.
        """
        now = time.monotonic()
        step_s = max(now - self._asked, 1e-9) / self._every
        by_pace = int(ASK_EVERY_S / step_s)
        self._every = max(1, min(by_pace, 2 * self._every, mine.next_in, MAX_STEPS_BETWEEN))
        self._asked = now
        return self._every, step_s > LONG_STEP_S


class EvaluationEnd:
    """Ends an evaluation on all workers after the same round of messages. Each worker evaluates at its own pace.

    Rounds take place about every ASK_EVERY_S. A worker that still has rows does not wait for a round. A worker that has
    no rows left waits, but only until the slowest worker begins its next batch. Rounds continue until no worker has
    rows left, or until a worker is asked to stop or restart.
    """

    def __init__(self, group: dist.ProcessGroup, together: bool) -> None:
        """Create the state for one evaluation.

        `together` is True if all workers must run each forward pass at the same time.
        """
        self._group, self._together = group, together
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._pending: dist.Work | None = None
        self._began = -math.inf
        self.stop = self.restart = False
        "Why the evaluation ended early, if it did."

    def reached(self, stop: bool, restart: bool, more: bool) -> bool:
        """Return True if the evaluation ends now. `more` is True if this worker has rows left.

        Call this before each batch, and repeatedly once no rows are left.
        """
        waits = self._together or not more
        if not self._pending and (waits or time.monotonic() - self._began >= ASK_EVERY_S):
            self._began = time.monotonic()
            self._flags = torch.tensor([stop, restart, more], dtype=torch.uint8)
            self._pending = dist.all_reduce(self._flags, dist.ReduceOp.MAX, self._group, async_op=True)
        if not self._pending or not (waits or self._pending.is_completed()):
            return False
        self._pending.wait()
        self._pending = None
        self.stop, self.restart, more = map(bool, self._flags.tolist())
        return self.stop or self.restart or not more
