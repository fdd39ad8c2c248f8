"""Collectives on the CPU, which all workers must call together.

`run_on_all_ranks` and `broadcast_from_rank0` wait for the slowest worker without a time limit.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sunspot.background import start_thread
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sharding import part_of
from sunspot.parallel.sum_guard import SumGuard

Result = TypeVar("Result")

CPU = torch.device("cpu")

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A mapping from sizes in bytes to integer types. A number's bits are summed as an integer of the same size."""


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's rank in its group, and facts about the group."""

    group: dist.ProcessGroup | None = None
    "The CPU process group for agreements, separate from the one for gradients. None for a single worker."
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    nodes: Sequence[str] = ()
    "Ray's node ID of each rank. Empty if unknown."
    sums: SumGuard | None = None
    """The guard against incomplete sums of collectives on a GPU. It is off on a CPU.

    In survivor mode, every worker has a guard, and `Worker.outlives_groups` relies on this. None in restart mode.
    """
    replicas: ReplicaGroups | None = None
    "The groups of this worker's replica and shard. None unless PARALLEL is hsdp."

    @property
    def shards(self) -> int:
        """The number of workers that together hold one replica of the model under hsdp. It is 1 otherwise."""
        return self.replicas.degree if self.replicas else 1

    @property
    def parts(self) -> int:
        """The number of parts of a sharded state. Rank r has part r % parts."""
        return self.replicas.degree if self.replicas else self.world_size

    @property
    def shard(self) -> int:
        """The index of this worker's shard under hsdp. It is 0 otherwise."""
        return self.rank % self.shards


ALONE = WorkerPlace()

ROUND_S = 5.0
"""Seconds between rounds in which waiting ranks confirm that they are alive, far below any collective's timeout."""

_listeners: list[Callable[[], Any]] = []
"""Functions that are called after each round (`listening_to_rounds`).

They are in a module variable, because most callers of `run_on_all_ranks` do not know about the watchdog that listens.
"""


def sync_buffers(model: torch.nn.Module, sums: SumGuard | None) -> None:
    """Copy rank 0's buffers to every worker, so that all workers have the buffers that a checkpoint contains.

    All workers must call this together. Before this call, each worker's batch norm statistics come only from its own
    rows. DDP also copies the buffers, but not until the next forward pass. If `sums` is given, an aborted broadcast
    changes nothing.
    """
    for same, flat in flatten(model.buffers()):  # one message per type instead of one per buffer
        own = flat.clone() if sums else flat
        dist.broadcast(flat, src=0)
        unflatten(same, sums.keep_complete(own, flat) if sums else flat)


def flatten(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield, for each dtype, a list of its tensors and one flat tensor with all their values."""
    for same in by_type(tensors):
        yield same, torch.cat([tensor.reshape(-1) for tensor in same])


def by_type(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors grouped by dtype, in order of first appearance. This order is the same on all workers."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def unflatten(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy the values of `flat` back into `tensors`. This is the inverse of `flatten`."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def same_parameters(model: torch.nn.Module, place: WorkerPlace) -> bool:
    """Return True if the parameters' `sum_of_bits` is the same on all workers. All workers must call this together.

    Under hsdp, this compares workers with the same shard.
    """
    with torch.no_grad():
        sums = [sum_of_bits(parameter) for parameter in model.parameters()]
        mine = torch.stack(sums).tolist() if sums else []
    everyone = gather_objects(mine, place.group)
    return all(sums == everyone[rank % place.shards] for rank, sums in enumerate(everyone))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Read the bits of a tensor's values as integers, and return their sum. Does not wait for the device.

    If the tensor is sharded, only this worker's part is summed.
    """
    part = part_of(tensor)
    real = torch.view_as_real(part) if part.is_complex() else part
    return real.view(INTEGER_OF_SIZE[real.element_size()]).sum()


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every worker's object, ordered by rank. All workers must call this together.

    `group` is None for a single worker.
    """
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def gather_on_rank0(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every worker's object on rank 0, ordered by rank, and an empty list on the other workers.

    All workers must call this together. Each object is sent to rank 0 directly. `gather_objects` sends every object
    through all workers in turn, which takes a hundred times as long with 512 workers.
    """
    body = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = _gather_tensors(torch.tensor([len(body)]), group)
    largest = torch.stack(sizes).amax(0) if sizes else torch.zeros(1, dtype=torch.int64)
    dist.broadcast(largest, group=group, group_src=0)
    padded = torch.nn.functional.pad(body, (0, int(largest) - len(body)))  # pickle ignores what follows an object
    return [pickle.loads(each.numpy().tobytes()) for each in _gather_tensors(padded, group)]


def _gather_tensors(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return every worker's tensor on rank 0, and an empty list on the others. All tensors have the same shape."""
    everyone = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else []
    dist.gather(mine, everyone or None, group=group, group_dst=0)
    return everyone


def any_rank(group: dist.ProcessGroup, *mine: bool) -> list[bool]:
    """Return, for each flag, True if any worker has set it. All workers must call this together."""
    flags = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in flags.tolist()]


@contextmanager
def listening_to_rounds(listener: Callable[[], Any]) -> Iterator[None]:
    """Context manager that calls `listener` after each round of messages in `run_on_all_ranks`.

    A round proves that all workers are alive, even if one of them is slow.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def run_on_all_ranks(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """Call `act`, and return its result once it has returned on all workers. All workers must call this together.

    The workers exchange messages at least every ROUND_S, so that no collective times out if one worker is slow. An
    error raised by `act` is raised at once, without waiting for the other workers. They stop when this worker fails.
    `group` is None for a single worker.
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
    """Call `act` on rank 0, and return its result on all workers. All workers must call this together.

    `group` is None for a single worker.
    """
    if group is None:
        return act()
    result: list[Any] = [run_on_all_ranks(group, act if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(result, src=0, group=group)
    returned: Result = result[0]
    return returned
