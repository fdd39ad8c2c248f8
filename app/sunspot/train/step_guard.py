"""Decides whether a step counts when another worker is lost. `undo.StepUndo` undoes a step that does not count."""

from collections.abc import Callable

from torch.optim import Optimizer

from sunspot.elastic.membership_channel import RegroupError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.step_barrier import StepBarrier
from sunspot.train.undo import StepUndo


class StepGuard:
    """Makes sure that each step of a worker in one group either counts as a whole or is undone.

    A step is complete once `accept` has been called, after the optimizer's update. On a GPU, the sums of the workers'
    gradients in a complete step may still turn out to be wrong (`SumGuard`). Until `confirm` has waited for the GPU,
    the step is in doubt and does not count. After the end of the group, `settle` counts the newest step if it is
    complete, and `undo` undoes a step that does not count.
    """

    def __init__(self, undo: StepUndo | None, place: WorkerPlace, cancellable: Optimizer | None) -> None:
        """Guard the steps that a worker takes in the group of `place`.

        `undo` is None if the next group does not use this process's state. `cancellable` is the optimizer whose step
        the GPU may cancel, or None if the loop may change parameters after the optimizer's step.
        """
        self._undo = undo
        self._place = place
        self._cancellable = cancellable
        self._cancelled = False
        "True if the GPU has cancelled the newest step."
        self._count: Callable[[], None] | None = None
        "The function that counts the newest step, or None once the step is counted."
        if undo:
            undo.keep()

    def begin_step(self) -> None:
        """Record the beginning of a step."""
        if self._undo:
            self._undo.begin_step()

    def before_change(self, optimizer: Optimizer | None) -> None:
        """Make sure that aborted sums change no parameters, and that a change by `optimizer` can be undone.

        Under hsdp, waits until all workers have complete gradients. Otherwise, waits until the workers' gradients are
        summed, unless the GPU can still cancel the step of `optimizer`. Raises `RegroupError` if the sums were aborted,
        or if the group has ended.
        """
        undo = self._undo
        sums = self._place.sums
        if not undo or not sums:
            return
        self.confirm()
        if self._place.replicas:
            self._await_all_workers(self._place.replicas.step_barrier)
        elif optimizer and optimizer is self._cancellable and sums.can_cancel(optimizer) and undo.nothing_early:
            sums.begin_step(optimizer)
        else:
            self.await_sums()
        if optimizer:
            undo.before_change(optimizer)

    def await_sums(self) -> None:
        """Wait until all sums so far are complete. Raises `RegroupError` if they were aborted."""
        if self._place.sums and not self._place.sums.await_sums():
            raise RegroupError

    def _await_all_workers(self, barrier: StepBarrier) -> None:
        """Wait until all workers have complete gradients. Raises `RegroupError` if the group ends before that."""
        self.await_sums()
        if not barrier.wait():
            raise RegroupError

    def accept(self, count: Callable[[], None]) -> None:
        """Record that a step is complete. `count` is called now, or in `confirm` if the step is in doubt."""
        self._count = count
        in_doubt = self._place.sums is not None and self._place.sums.end_step()
        if self._undo:
            self._undo.accept(in_doubt)
        if not in_doubt:
            self.confirm()

    def accept_evaluation(self) -> None:
        """Keep the changes that an evaluation has made to the model."""
        if self._undo:
            self._undo.accept()

    def confirm(self) -> None:
        """Count the newest step, unless it has already been counted.

        If the step is in doubt, wait until the GPU has finished it. Raises `RegroupError` if the GPU has cancelled it.
        """
        if not self._count:
            return
        if self._place.sums and not self._place.sums.confirm():
            raise RegroupError
        count, self._count = self._count, None
        count()

    def settle(self) -> None:
        """After the end of the group, count the newest complete step, unless the GPU has cancelled it."""
        self._cancelled = self._place.sums is not None and not self._place.sums.settle()
        if not self._cancelled:
            self.confirm()

    def undo(self) -> bool:
        """Restore the state as of the newest step that was counted, and return True if that was possible.

        Call `settle` first. Returns False if the next group does not use this process's state.
        """
        return self._undo is not None and self._undo.put_back(self._cancelled)
