"""Puts back what the forward pass of a step has changed, when the step is to be taken again."""

import torch


class StepBuffers:
    """A model's buffers as they were when the newest step began: batch norm's averages move with each forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._moving = set(range(len(self._buffers)))
        "Numbers of those that steps change: after the first one, only what has been seen to change."
        self._kept: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []

    def keep(self) -> None:
        """Note their values, as a step begins."""
        versions = [buffer._version for buffer in self._buffers]  # autograd's count of changes has no public name
        if self._versions:
            changed = {number for number, version in enumerate(versions) if version != self._versions[number]}
            self._moving = changed | (self._moving if len(self._moving) < len(versions) else set())
        self._versions = versions
        self._kept = {number: self._buffers[number].detach().clone() for number in self._moving}

    def put_back(self) -> None:
        """Set them to what they were."""
        with torch.no_grad():
            for number, values in self._kept.items():
                self._buffers[number].copy_(values)
        self._versions = []
        self._moving = set(range(len(self._buffers)))
