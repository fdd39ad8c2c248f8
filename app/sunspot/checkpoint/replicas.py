"""Keeps each part of a sharded state (PARALLEL=fsdp) in the memory of two nodes, so that a lost one takes none along.

Each worker sends its part to one on the next node. That happens in the thread that seals copies, over a process group
of its own, beside the training; a worker that does not answer is waited for no longer than TIMEOUT_S.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from sunspot.checkpoint.memory import Changed, NodeMemory, Slot, Use
from sunspot.checkpoint.memory_files import MemorySnapshot
from sunspot.errors import shorten
from sunspot.parallel.collectives import any_rank, gather_objects
from sunspot.run.checkpoints import Checkpoint

CHUNK = 16 << 20
"""Bytes of one message."""

TIMEOUT_S = 60.0
"""How long one message is waited for, and the slowest worker that is to come to it."""

TRANSFER_COST = 0.1
"""Share of a transfer's seconds that counts as lost to training, whose own messages take the same network."""


class PartExchange:
    """One worker's share in keeping each part on two nodes; on a single node, in knowing that all have theirs."""

    def __init__(self, memory: NodeMemory, nodes: Sequence[str], group: dist.ProcessGroup) -> None:
        """All workers make one together. `nodes` identify the machine of each rank; in `group` they agree to copy."""
        self._memory, self._control = memory, group
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))
        self._rank, self._world_size = dist.get_rank(self._group), len(nodes)
        keepers, here = find_keepers(nodes), nodes[self._rank]
        self._keeper = keepers[self._rank]
        self._peers = [rank for rank, keeper in enumerate(keepers) if keeper == self._rank != rank]
        "The workers on another node whose parts are kept here, too."
        self._newest: dict[int, Slot] = {}
        "By these ranks, the newest copies that all workers have."
        self._next: dict[int, Slot] = {}
        kept = sum(nodes[keeper] == here != node for node, keeper in zip(nodes, keepers, strict=True))
        self.cost_s = 0.0
        "What the newest transfer cost training."
        memory.expect_copies(2 * (nodes.count(here) + kept))  # of each part, the newest and the next

    def all_copy(self, has_slot: bool) -> bool:
        """Return whether all workers copy their parts now: a state with some parts of another step is none.

        All call this together, in the training thread, and tell whether they have a slot.
        """
        lacking, stopped = any_rank(self._control, not has_slot, not self._memory.shared)
        if stopped:
            self._memory.pause("a worker has none")
        return not lacking

    def complete(self, slot: Slot, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple) -> None:
        """Mark the copy of this worker's part, like `NodeMemory.complete`, and have another node keep it.

        It is the newest once all workers have theirs. They call this together, in their threads that seal copies.
        """
        try:
            snapshot, problem = slot.mark(manifest, sidecar, changed, self._rank, self._world_size)
            if not self.share(slot, snapshot, sidecar):
                problem = problem or "a worker could not keep its part, or that of another node"
            self._memory.settle(slot, manifest.step, problem)
        except RuntimeError as error:
            self._memory.stop(f"parts cannot be exchanged: {shorten(error)}")
        finally:
            slot.uses.discard(Use.SEALING)

    def share(self, slot: Slot, snapshot: MemorySnapshot | None, sidecar: bytes) -> bool:
        """Have all workers' parts kept on the next nodes, this one's as it lies in `slot`; all call this together.

        `snapshot` None: this worker has none. Returns whether each part is where it should be. Raises `RuntimeError`
        when a worker is gone, or does not answer for TIMEOUT_S.
        """
        everyone = gather_objects((snapshot, len(sidecar), slot.size), self._group)
        taken: dict[int, list[Any]] = {}
        room = True
        for rank in self._peers:
            _, beside, size = everyone[rank]
            try:
                taken[rank] = [bytearray(beside), self._next_slot(rank, size).map]
            except OSError:
                room = False
        if any_rank(self._group, not room or snapshot is None)[0]:
            return False
        began = time.monotonic()
        self._pass_on([bytearray(sidecar), slot.map], taken)
        self.cost_s = TRANSFER_COST * (time.monotonic() - began)
        accepted = [self._next[rank].accept_copy(everyone[rank][0], bytes(taken[rank][0])) for rank in self._peers]
        if any_rank(self._group, not all(accepted))[0]:
            return False
        self._newest, self._next = self._next, self._newest
        return True

    def _next_slot(self, rank: int, size: int) -> Slot:
        slot = self._next.get(rank)
        if slot is None or slot.size != size:
            self._next.pop(rank, None)
            others = [*self._newest.values(), *self._next.values()]
            slot = self._next[rank] = self._memory.make_peer_slot(size, others)
        slot.unmark()
        return slot

    def _pass_on(self, given: Sequence[Any], taken: Mapping[int, Sequence[Any]]) -> None:
        """Send buffers to the keeper, while those of the peers are filled, by rank."""
        to_keeper = _messages(given) if self._keeper != self._rank else []
        from_peers = [[(rank, message) for message in _messages(buffers)] for rank, buffers in taken.items()]
        together: Iterator[tuple[Any, ...]] = itertools.zip_longest(to_keeper, *from_peers)
        for mine, *theirs in together:
            work = [dist.irecv(message[1], group=self._group, group_src=message[0]) for message in theirs if message]
            if mine is not None:
                work.append(dist.isend(mine, group=self._group, group_dst=self._keeper))
            for each in work:
                cast(dist.Work, each).wait()


def ranks_by_node(nodes: Iterable[str]) -> dict[str, list[int]]:
    """List the ranks on each node, in their order; `nodes` are those of rank 0, 1, ..."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def find_keepers(nodes: Sequence[str]) -> list[int]:
    """Find, for each rank, the rank that keeps a copy of its part: one on the next node; on a single node, itself."""
    ranks = ranks_by_node(nodes)
    following = dict(zip(ranks, [*list(ranks)[1:], *list(ranks)[:1]], strict=True))
    places = {rank: place for its in ranks.values() for place, rank in enumerate(its)}
    return [(there := ranks[following[node]])[places[rank] % len(there)] for rank, node in enumerate(nodes)]


def _messages(buffers: Sequence[Any]) -> list[torch.Tensor]:
    """View the bytes of some buffers as tensors of at most CHUNK."""
    whole = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    return [message for each in whole for message in each.split(CHUNK)]
