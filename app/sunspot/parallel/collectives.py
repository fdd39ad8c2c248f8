"""Collectives on the CPU that all workers call together, and that wait for the slowest however long it takes."""

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

OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of so many bytes, as which the bits of a number are summed up."""


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
    for same, flat in flatten(model.buffers()):  # one message, not one for each
        dist.broadcast(flat, src=0)
        unflatten(same, flat)


def flatten(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield the tensors of each type, and all of their values in one."""
    for same in by_type(tensors):
        yield same, torch.cat([tensor.reshape(-1) for tensor in same])


def by_type(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors of each type, the types in the order in which they appear: the same on all workers."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def unflatten(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Set tensors to what `flatten` has returned for them."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def same_parameters(model: torch.nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether all workers have the same parameters, by the sums of their bits; all workers call this together."""
    with torch.no_grad():
        sums = [sum_of_bits(parameter) for parameter in model.parameters()]
        mine = torch.stack(sums).tolist() if sums else []
    return all(sums == mine for sums in gather_objects(mine, group))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of each number of a tensor, taken for an integer, without waiting for a device."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(OF_BYTES[real.element_size()]).sum()


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
