"""Prevents the wrong sums of aborted collectives from changing parameters, without waiting for the sums.

An aborted NCCL collective ends without an error, and leaves a wrong sum. A worker could wait for the sums before each
change of parameters, but the GPU would then have no work until the optimizer's kernels arrive. Instead, the GPU itself
finds out whether the sums are complete:

1. `trip` sets a word in main memory. `ProcessGroups.abort_collectives` calls it *before* it aborts any
   collective.
2. `begin_step` queues a read of this word behind the sums. If the GPU reads 0, no abort had begun by then, so the sums
   are complete. If it reads 1, they may be wrong.
3. A fused optimizer gets this value as its `found_inf`, which gradient scalers use to cancel a step. If the value is 1,
   the step changes neither parameters nor the optimizer's state.
4. `confirm` is called one step later. It waits for the end of the step, and returns whether the step counts. At most
   one step is therefore in doubt at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from sunspot.parallel.sharding import parameters_of


class Event(Protocol):
    """A mark in a device's queue, like `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the current end of the queue."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""
        ...


class SumGuard:
    """Protects the parameters on this worker's device from one group's wrong sums."""

    def __init__(self, device: torch.device | None = None, new_event: Callable[[], Event] = torch.cuda.Event) -> None:
        """Create a guard for sums that are computed on `device`.

        Pass None for a backend such as gloo, which needs no guard, because its aborted collectives raise an error.
        """
        self._on = device is not None
        self._event = new_event() if self._on else None
        on_gpu = device is not None and device.type == "cuda"
        # The GPU reads and writes pinned memory itself, when its queue gets there.
        self._word = torch.zeros((), pin_memory=on_gpu)
        "The word, which is 1 once the group is about to be aborted."
        self._read = torch.zeros((), device=device)
        "The value of the word that the device read after the sums of the newest step."
        self._result = torch.zeros((), pin_memory=on_gpu)
        "A copy of this value in main memory, which exists once the device has taken the step."
        self._stepping: Optimizer | None = None
        "The optimizer whose step has begun and not ended."
        self._in_doubt = False
        "True if the newest step has not been confirmed."
        self._stepped = set[int]()
        "The `id` of each parameter that has had a gradient in an earlier step."

    # ------------------------------------------------------------------------------------------------------- any thread

    def trip(self) -> None:
        """Announce that the group's collectives will be aborted."""
        self._word.fill_(1)

    @property
    def aborted(self) -> bool:
        """True if an abort was announced (`trip`), so the results of collectives may be wrong.

        Collectives that the device completed before the abort have correct results. Always False if no guard is needed.
        """
        return self._on and bool(self._word)

    # -------------------------------------------------------------------------------------------------- training thread

    def await_sums(self) -> bool:
        """Wait for the device, and return True if all sums so far are complete."""
        if self._event:
            self._event.record()
            self._event.synchronize()
        return not self.aborted

    def can_cancel(self, optimizer: Optimizer) -> bool:
        """Return True if the device is able to cancel an optimizer's next step in case the sums are incomplete.

        This is False for a parameter's first step, because a cancelled step would leave fused SGD with a momentum
        buffer that was never written.
        """
        if not self._on or not type(optimizer).__module__.startswith("torch.optim."):
            return False
        # torch has no public API for these (2.15). A hook could change parameters after a step that was cancelled.
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or optimizer._optimizer_step_post_hooks:
            return False
        first = [id(p) for p in parameters_of(optimizer) if p.grad is not None and id(p) not in self._stepped]
        self._stepped.update(first)
        return not first

    def begin_step(self, optimizer: Optimizer) -> None:
        """Make the device cancel an optimizer's step unless the sums are complete. Call this before the step."""
        self._read.copy_(self._word, non_blocking=True)
        self._stepping = optimizer
        cast(Any, optimizer).found_inf = self._read

    def end_step(self) -> bool:
        """Return True if the device may still cancel the step, which is then in doubt. Call this after the step."""
        if not (self._release() and self._event):
            return False
        self._result.copy_(self._read, non_blocking=True)
        self._event.record()
        self._in_doubt = True
        return True

    def confirm(self) -> bool:
        """Wait until the device has completed the newest step, and return False if the step was cancelled."""
        if self._in_doubt and self._event:
            self._event.synchronize()
            self._in_doubt = bool(self._result)
        return not self._in_doubt

    def settle(self) -> bool:
        """Wait for the device after the group has ended, and return False if the newest step was cancelled."""
        self._release()  # an error has ended the optimizer's step
        return self.confirm()

    def _release(self) -> bool:
        """Let the optimizer take its next step unconditionally.

        Returns True if `begin_step` was called since the last call of this method.
        """
        optimizer, self._stepping = self._stepping, None
        if optimizer:
            del cast(Any, optimizer).found_inf
        return optimizer is not None

    def keep_complete(self, before: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return `received`, the result of a collective, or `before` if the collective may have been aborted."""
        if not self._on:
            return received
        return torch.where(torch.empty_like(self._read).copy_(self._word, non_blocking=True) > 0, before, received)
