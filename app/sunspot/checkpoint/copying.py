"""Copies tensors to host memory: those of a CPU at once, those of a GPU in a stream of their own.

No thread waits for a GPU's copies before parameters change: the training's stream does, and the CPU goes on filling it.
"""

import functools
from typing import TypeAlias

import torch

Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Target and source of each copy."""


def mark_queue(device: torch.device | None) -> torch.cuda.Event | None:
    """Mark the point in the GPU's current stream at which the state is the one to copy; None without a GPU."""
    if device is None:
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def copy(pairs: Pairs, mark: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """Copy, or with a `mark` have the GPU copy what is there at that point; returns the end of the GPU's copies.

    The sources must be kept until that end: memory that is free is given to other tensors.
    """
    if mark is None:
        for target, source in pairs:
            target.copy_(source)
        return None
    end = torch.cuda.Event(enable_timing=True)
    stream = _side_stream(mark.device)
    stream.wait_event(mark)
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        end.record()
    return end


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies from a GPU: one for all, as each keeps memory of its own for what it lays out."""
    return torch.cuda.Stream(device)


class QueueWait:
    """A wait of the training's stream for copies."""

    def __init__(self, end: torch.cuda.Event) -> None:
        """Have the current stream wait for the `end` of the copies, and not the CPU."""
        stream = torch.cuda.current_stream(end.device)
        self._end, self._reached = end, torch.cuda.Event(enable_timing=True)
        self._reached.record(stream)
        stream.wait_event(end)

    @property
    def seconds(self) -> float:
        """How long the GPU stood still for the copies; returns once these have ended."""
        self._end.synchronize()
        return max(0.0, self._reached.elapsed_time(self._end) / 1000) if self._reached.query() else 0.0
