"""Process groups for PARALLEL=hsdp, which shards a model within a replica and replicates it between replicas.

A replica is a set of `degree` workers that together hold one copy of the model. Rank r holds shard r % degree of
replica r // degree:

              shard 0   shard 1
  replica 0   rank 0    rank 1     gather parameters and reduce gradients with each other (`own`)
  replica 1   rank 2    rank 3
                  average the gradients of their shard with each other (`across`)

FSDP2 is written for process groups that last as long as the model. Here, a model outlives its groups, because the
loss of a worker closes them and the survivors form new ones. FSDP2 therefore communicates through objects that always
use the newest groups. `connect` gives these objects to FSDP2's modules.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from sunspot.background import start_thread
from sunspot.parallel.mesh import mesh_of
from sunspot.parallel.step_barrier import StepBarrier

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

STUCK_S = 5.0
"""Seconds that a collective may last after its connections were shut down, which should end it at once."""


class ReplicaGroups:
    """The process groups of a worker's replica and shard. The groups are replaced whenever a worker is lost."""

    def __init__(self, degree: int) -> None:
        """Prepare groups with `degree` workers in each replica."""
        import torch.distributed.fsdp  # noqa: F401 - takes seconds; registers the `fake` backend, too (torch 2.15)

        self.degree = degree
        self._own: dist.ProcessGroup | None = None
        self._across: dist.ProcessGroup | None = None
        self._shape: dist.ProcessGroup | None = None
        "The group that `mesh` uses, which has the members of this replica and no connections."
        self._formed = 0
        "Number of times that the groups have formed."
        self.step_barrier = StepBarrier(self._meet)
        self._collective_began: float | None = None
        "Start of the collective in progress, in `time.monotonic` seconds, or None."

    def form(self, timeout: timedelta) -> None:
        """Form both groups from the members of the default group. All workers must call this together."""
        self._formed += 1
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        replica, shard = divmod(rank, self.degree)
        first = replica * self.degree
        self._own = _new_group(range(first, first + self.degree), timeout=timeout)
        self._shape = _new_group(range(first, first + self.degree), backend=dist.Backend.FAKE)
        self._across = _new_group(range(shard, world_size, self.degree), timeout=timeout)

    @property
    def all(self) -> list[dist.ProcessGroup]:
        """Both groups, or an empty list before the first `form`."""
        return [group for group in (self._own, self._across) if group]

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh that tells FSDP2 which shard this worker holds. Call `connect` once the model is sharded.

        New groups are formed whenever a worker is lost, but a mesh always keeps its first group. The mesh's group is
        therefore only a placeholder. It uses torch's `fake` backend, which never connects or communicates.
        """
        assert self._shape
        return mesh_of(self._shape, device_type)

    @contextmanager
    def pretend(self, shard: int) -> Iterator[None]:
        """Context manager that lets this process shard a model before the process is in any group."""
        dist.init_process_group(dist.Backend.FAKE, rank=shard, world_size=self.degree)
        self._shape = dist.group.WORLD
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def connect(self, modules: Iterable[FSDPModule]) -> None:
        """Make FSDP2 modules communicate through the newest groups.

        This destroys the group of the mesh (`mesh`), so a DTensor operation that needs communication, such as
        `full_tensor`, raises an error. Otherwise, the group's `fake` backend would return a wrong result.
        """
        dist.destroy_process_group(self._shape)
        gather, scatter = Gather(self), Scatter(self)
        for module in modules:
            module.set_custom_all_gather(cast(Any, gather))
            module.set_custom_reduce_scatter(cast(Any, scatter))
            module.set_all_reduce_hook(self.average_across)

    def gather(self, output: torch.Tensor, part: torch.Tensor, async_op: bool) -> dist.Work | None:
        """Fill `output` with the parts of all workers of this replica, in order of their shards."""
        with self._collective():
            return dist.all_gather_into_tensor(output, part, group=self._own, async_op=async_op)

    def scatter(self, part: torch.Tensor, whole: torch.Tensor, op: Any, async_op: bool) -> dist.Work | None:
        """Reduce `whole` over this replica's workers, and store this worker's part of the result in `part`."""
        with self._collective():
            return dist.reduce_scatter_tensor(part, whole, op=op, group=self._own, async_op=async_op)

    def average_across(self, gradient: torch.Tensor) -> None:
        """Average the gradient of this worker's shard over all replicas, in place."""
        assert self._across
        replicas = dist.get_world_size(self._across)
        if replicas > 1:
            with self._collective():
                dist.all_reduce(gradient, group=self._across)
            gradient /= replicas

    def sum_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over this replica's workers, in place, and return it."""
        with self._collective():
            dist.all_reduce(value, group=self._own)
        return value

    def _meet(self) -> None:
        """Wait until all workers of all replicas have called this method."""
        with self._collective():
            dist.all_reduce(torch.zeros(1))

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._collective_began = time.monotonic()
        try:
            yield
        finally:
            self._collective_began = None

    def end_if_stuck(self) -> None:
        """Exit the process if it hangs in a collective of groups whose connections were shut down.

        If a connection ends when only a part of a message has been sent or received, gloo keeps waiting for the rest of
        the message (`Pair::signalException`, torch 2.15). Most collectives fail nevertheless, because they also wait
        for a message that has not begun, and this wait fails. If a collective does not fail, all other workers
        wait for this process until the collective times out. It is faster to exit, because replacing the process takes
        only seconds.
        """
        formed, cut = self._formed, time.monotonic()

        def watch() -> None:
            while self._formed == formed:
                began = self._collective_began
                if began and time.monotonic() - max(began, cut) > STUCK_S:
                    print(
                        "a collective is still hanging after its connections were shut down; exiting, so that this "
                        "process is replaced",
                        flush=True,
                    )
                    os._exit(1)
                time.sleep(STUCK_S / 10)

        start_thread(watch, "stuck-collective")


class Gather:
    """Gathers parameters for FSDP2. Implements torch's `AllGather` interface, which torch 2.15 does not export."""

    def __init__(self, groups: ReplicaGroups) -> None:
        self._groups = groups

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor`. The `group` of the mesh is ignored."""
        return self._groups.gather(output_tensor, input_tensor, async_op)


class Scatter(Gather):
    """Reduces gradients for FSDP2. Implements torch's `ReduceScatter` interface, which torch 2.15 does not export."""

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` with this worker's part of the reduced input. The `group` of the mesh is ignored."""
        return self._groups.scatter(output_tensor, input_tensor, op, async_op)


def _new_group(ranks: range, **options: Any) -> dist.ProcessGroup:
    """Form a group. Only its own members need to call this."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True, **options))
