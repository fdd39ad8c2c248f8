"""Collectives on the CPU that all workers call together, and that wait for the slowest however long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sunspot.background import start_thread

Result = TypeVar("Result")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in its group."""

    group: dist.ProcessGroup | None = None
    "Carries what workers agree on, on the CPU and apart from the gradients; None: a worker alone."
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    nodes: Sequence[str] = ()
    "Ray's id of each rank's node; empty: not known."


ALONE = WorkerPlace()

ROUND_S = 5.0
"""Interval at which waiting ranks tell each other that they live: far below the time limit of any collective."""

_listeners: list[Callable[[], Any]] = []
"""Functions called after each round (`listening_to_rounds`)."""


def sync_buffers(model: torch.nn.Module) -> None:
    """Give every worker rank 0's buffers, which a checkpoint has; all workers call this together.

    Until then each has batch norm's averages of its own rows; DDP does the same before the next forward pass.
    """
    buffers = list(model.buffers())
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):  # in the same order on all workers, unlike a set
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in same])  # one message, not one for each
        dist.broadcast(flat, src=0)
        for buffer, values in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
            buffer.copy_(values.view_as(buffer))


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every worker's object, by rank; all call this together. `group` None: this worker is alone."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def any_rank(group: dist.ProcessGroup, *mine: bool) -> list[bool]:
    """Tell for each flag whether it is set on any worker; all workers call this together."""
    flags = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in flags.tolist()]


@contextmanager
def listening_to_rounds(listener: Callable[[], Any]) -> Iterator[None]:
    """Call `listener` after each round of `run_on_all_ranks` while the context lasts: all workers took part in it, and
    so are alive, however long one of them takes.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def run_on_all_ranks(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Return what `act` returns, once it has returned on all workers, which call this together.

    However long the slowest takes, no collective waits for longer than ROUND_S, so none runs into its time limit. What
    `act` raises is raised at once: the end of this worker ends the others. `group` None: this worker is alone.
    """
    if group is None:
        return act()
    mine = start_thread(act, "finish-together")
    while True:
        wait([mine], ROUND_S)
        finished = mine.done()
        if finished and (error := mine.exception()):
            raise error
        [waiting] = any_rank(group, not finished)
        for listener in _listeners:
            listener()
        if not waiting:
            return mine.result()


def broadcast_from_rank0(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Return on all workers what `act` returns on rank 0, however long it takes; all call this together."""
    if group is None:
        return act()
    result: list[Any] = [run_on_all_ranks(group, act if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(result, src=0, group=group)
    returned: Result = result[0]
    return returned
