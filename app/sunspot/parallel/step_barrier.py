"""Makes sure that either all workers of a group change their shards in a step, or none does (PARALLEL=hsdp).

The workers that survive a loss can continue only if their shards belong to the same step. Before its optimizer's step,
each worker therefore waits at a barrier until all workers have complete gradients. If a loss interrupts the barrier,
some workers may already have passed it, but the others cannot know whether all workers had reached it.

The driver resolves this. When the driver announces the end of the group, each worker reports how many barriers it has
passed. From then on, no worker passes a barrier without the driver's answer. Once all live members have reported, the
driver answers with the largest of these numbers. If one worker has passed a barrier, all workers had complete
gradients, so those that still wait at this barrier also take the step. Otherwise, none does. (This is the termination
protocol of three-phase commit: D. Skeen, "Nonblocking Commit Protocols", SIGMOD 1981.)
"""

import threading
from collections.abc import Callable

CLOSED_WITHIN_S = 3.0
"""Seconds within which a member learns that its group is closed, after a loss has interrupted a collective."""

ANSWER_WITHIN_S = 15.0
"""Seconds to wait for the driver's answer. The driver waits for each live member until it counts as lost, which takes
up to 10 s (`membership_channel.PROCESS_LIMIT_S`)."""


class StepBarrier:
    """One process's side of the step barrier, used for all groups that the process joins in turn.

    Only the training thread calls `wait`. Any thread can call the other methods.
    """

    def __init__(self, meet: Callable[[], None]) -> None:
        """Create a barrier. `meet` returns once all workers have called it, and raises `RuntimeError` if it fails."""
        self._meet = meet
        self._changed = threading.Condition()
        self._group = 0
        "Number of this process's newest group."
        self._passed = 0
        "Number of barriers that this process has passed in the group."
        self._reported = False
        "True once the driver knows how many barriers this process has passed."
        self._answer: int | None = None
        """Number of barriers that the members of the closed group may pass.

        None until the driver has answered, or until the connection to the driver has ended.
        """

    def wait(self) -> bool:
        """Wait until all workers have complete gradients. Return False if the group ends before that.

        Raises `RuntimeError` if the barrier fails even though the group has not ended.
        """
        error = None
        try:
            self._meet()
        except RuntimeError as caught:
            error = caught
        with self._changed:
            if error and not self._changed.wait_for(self._has_ended, CLOSED_WITHIN_S):
                raise error
            if error or self._reported:
                self._changed.wait_for(lambda: self._answer is not None, ANSWER_WITHIN_S)
                if (self._answer or 0) <= self._passed:
                    return False
            self._passed += 1
            return True

    def _has_ended(self) -> bool:
        return self._reported or self._answer is not None

    def open(self, group: int) -> None:
        """Start a group with this number."""
        with self._changed:
            self._group = group
            self._passed = 0
            self._reported = False
            self._answer = None

    def close(self, group: int) -> int:
        """Record that a group has ended, and return how many of its barriers this process has passed."""
        with self._changed:
            if group != self._group:
                return 0
            self._reported = True
            self._changed.notify_all()
            return self._passed

    def answer(self, group: int, passed: int) -> None:
        """Record the driver's answer: the members of a group may pass this number of barriers."""
        with self._changed:
            if group == self._group:
                self._answer = passed
                self._changed.notify_all()

    def disconnect(self, group: int) -> None:
        """Record that the connection to the driver has ended, so that `wait` stops waiting for the driver's answer."""
        with self._changed:
            if group == self._group:
                self._answer = self._answer or 0
                self._changed.notify_all()
