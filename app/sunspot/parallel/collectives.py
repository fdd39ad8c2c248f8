"""Collectives on the CPU, which all workers call together. They wait for the slowest worker without a time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sunspot.background import start_thread

Result = TypeVar("Result")

CPU = torch.device("cpu")

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by size in bytes. The bits of numbers are summed up as integers of the same size."""


@dataclass(frozen=True)
class WorkerPlace:
    """Rank of a worker, and the group in which it has that rank."""

    group: dist.ProcessGroup | None = None
    """Process group on the CPU for agreements between workers, separate from that for gradients; None for a single
    worker."""
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    nodes: Sequence[str] = ()
    "Ray's node id of each rank; empty if unknown."


ALONE = WorkerPlace()

ROUND_S = 5.0
"""Seconds between two rounds in which waiting ranks tell each other that they are alive. It is far below the time limit
of any collective."""

_listeners: list[Callable[[], Any]] = []
"""Functions that are called after each round (`listening_to_rounds`). They are in a module variable because most
callers of `run_on_all_ranks` do not know the watchdog that listens."""


def sync_buffers(model: torch.nn.Module) -> None:
    """Give every worker rank 0's buffers, which a checkpoint contains. All workers call this together.

    Until then, each worker has batch norm's averages of its own rows. DDP does the same before the next forward pass.
    """
    for same, flat in flatten(model.buffers()):  # one message for each type instead of one for each buffer
        dist.broadcast(flat, src=0)
        unflatten(same, flat)


def flatten(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield the tensors of each type, together with one tensor of all their values."""
    for same in by_type(tensors):
        yield same, torch.cat([tensor.reshape(-1) for tensor in same])


def by_type(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors of each type. The types are in the order in which they appear, which is the same on all
    workers.
    """
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def unflatten(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Set tensors to the values that `flatten` has returned for them."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def same_parameters(model: torch.nn.Module, group: dist.ProcessGroup) -> bool:
    """Return True if the sums of the bits of all parameters are equal on all workers. All workers call this
    together.
    """
    with torch.no_grad():
        sums = [sum_of_bits(parameter) for parameter in model.parameters()]
        mine = torch.stack(sums).tolist() if sums else []
    return all(sums == mine for sums in gather_objects(mine, group))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a tensor's numbers, taken as integers, without waiting for a device."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(INTEGER_OF_SIZE[real.element_size()]).sum()


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every worker's object, by rank. All workers call this together. `group` is None for a single worker."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def any_rank(group: dist.ProcessGroup, *mine: bool) -> list[bool]:
    """Return for each flag whether it is set on any worker. All workers call this together."""
    flags = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in flags.tolist()]


@contextmanager
def listening_to_rounds(listener: Callable[[], Any]) -> Iterator[None]:
    """Call `listener` after each round of `run_on_all_ranks` while the context lasts.

    All workers took part in the round, so they are all alive, even if one of them takes long.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def run_on_all_ranks(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Return the result of `act` once it has returned on all workers. All workers call this together.

    No collective waits for longer than ROUND_S for the slowest worker, so that none reaches its time limit. An error of
    `act` is raised at once, because the end of this worker ends the others. `group` is None for a single worker.
    """
    if group is None:
        return act()
    mine = start_thread(act, "finish-together")
    while True:
        wait([mine], ROUND_S)
        finished = mine.done()
        error = mine.exception() if finished else None
        if error:
            raise error
        [waiting] = any_rank(group, not finished)
        for listener in _listeners:
            listener()
        if not waiting:
            return mine.result()


def broadcast_from_rank0(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Return rank 0's result of `act` on all workers, without a time limit. All workers call this together."""
    if group is None:
        return act()
    result: list[Any] = [run_on_all_ranks(group, act if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(result, src=0, group=group)
    returned: Result = result[0]
    return returned
