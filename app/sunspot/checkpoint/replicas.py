"""Keeps each part of a sharded state (PARALLEL=fsdp) in the memory of two nodes, so that losing a node loses no part.

Each worker sends its part to a worker on the next node while training continues. The seal thread does this, over a
process group of its own. It waits at most TIMEOUT_S for a worker that does not answer.
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
"""Largest number of seconds to wait for one message, or for the slowest worker to be ready for it."""

TRANSFER_COST = 0.1
"""Fraction of a transfer's seconds that counts as lost to training, because both use the same network."""


class PartExchange:
    """Exchanges one worker's part with workers on other nodes.

    On a single node, the workers only agree that all parts are kept.
    """

    def __init__(self, memory: NodeMemory, nodes: Sequence[str], group: dist.ProcessGroup) -> None:
        """Create the exchange, on all workers together.

        `nodes` identify the machine of each rank. The workers use `group` to agree on whether they copy.
        """
        self._memory = memory
        self._control = group
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))
        self._rank = dist.get_rank(self._group)
        self._world_size = len(nodes)
        replicas = find_replica_ranks(nodes)
        here = nodes[self._rank]
        self._replica_rank = replicas[self._rank]
        self._peers = [rank for rank, replica in enumerate(replicas) if replica == self._rank != rank]
        "Workers on another node whose parts this worker keeps, too."
        self._newest: dict[int, Slot] = {}
        "Slots by rank of a peer, with its newest part that belongs to a complete state."
        self._next: dict[int, Slot] = {}
        "Slots by rank of a peer, for its next part."
        kept = sum(nodes[replica] == here != node for node, replica in zip(nodes, replicas, strict=True))
        self.cost_s = 0.0
        "Seconds of training that the newest transfer cost."
        memory.expect_copies(2 * (nodes.count(here) + kept))  # the newest and the next copy of each part

    def agree_to_copy(self, has_slot: bool) -> bool:
        """Return True if all workers copy their parts now. Parts of different steps would not make up a state.

        All workers call this together, in the training thread; `has_slot` is False on a worker that cannot copy.
        """
        lacking, stopped = any_rank(self._control, not has_slot, not self._memory.shared)
        if stopped:
            self._memory.pause("a worker has no room")
        return not lacking

    def complete(self, slot: Slot, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple) -> None:
        """Mark the copy of this worker's part, like `NodeMemory.complete`, and send it to another node.

        The copy becomes the newest once all parts are kept twice. All workers call this together, in their seal
        threads.
        """
        try:
            snapshot, problem = slot.mark(manifest, sidecar, changed, self._rank, self._world_size)
            if not self.replicate(slot, snapshot, sidecar):
                problem = problem or "a worker could not keep its part, or that of another node"
            self._memory.finish_copy(slot, manifest.step, problem)
        except RuntimeError as error:
            self._memory.stop(f"parts cannot be exchanged: {shorten(error)}")
        finally:
            slot.uses.discard(Use.SEALING)

    def replicate(self, slot: Slot, snapshot: MemorySnapshot | None, sidecar: bytes) -> bool:
        """Send the part in `slot` to the next node, and keep the parts of this worker's peers.

        All workers call this together. `snapshot` describes this worker's part, or is None if it could not be marked.
        Returns True if every part is kept on its next node. Raises `RuntimeError` if a worker is gone or does not
        answer for TIMEOUT_S seconds.
        """
        everyone = gather_objects((snapshot, len(sidecar), slot.size), self._group)
        received: dict[int, list[Any]] = {}
        room = True
        for rank in self._peers:
            _, sidecar_size, size = everyone[rank]
            try:
                received[rank] = [bytearray(sidecar_size), self._next_slot(rank, size).map]
            except OSError:
                room = False
        if any_rank(self._group, not room or snapshot is None)[0]:
            return False
        began = time.monotonic()
        self._transfer([bytearray(sidecar), slot.map], received)
        self.cost_s = TRANSFER_COST * (time.monotonic() - began)
        accepted = [self._next[rank].accept_copy(everyone[rank][0], bytes(received[rank][0])) for rank in self._peers]
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

    def _transfer(self, sent: Sequence[Any], received: Mapping[int, Sequence[Any]]) -> None:
        """Send these buffers to the next node, and at the same time fill the buffers for the peers, given by rank."""
        to_replica = _messages(sent) if self._replica_rank != self._rank else []
        from_peers = [[(rank, message) for message in _messages(buffers)] for rank, buffers in received.items()]
        together: Iterator[tuple[Any, ...]] = itertools.zip_longest(to_replica, *from_peers)
        for mine, *theirs in together:
            work = [dist.irecv(message[1], group=self._group, group_src=message[0]) for message in theirs if message]
            if mine is not None:
                work.append(dist.isend(mine, group=self._group, group_dst=self._replica_rank))
            for each in work:
                cast(dist.Work, each).wait()


def ranks_by_node(nodes: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks on each node, in order. `nodes` has the node of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def find_replica_ranks(nodes: Sequence[str]) -> list[int]:
    """Return the rank that keeps a copy of each rank's part: a rank on the next node, or the rank itself on one
    node."""
    ranks = ranks_by_node(nodes)
    following = dict(zip(ranks, [*list(ranks)[1:], *list(ranks)[:1]], strict=True))
    positions = {rank: position for on_node in ranks.values() for position, rank in enumerate(on_node)}
    replicas = []
    for rank, node in enumerate(nodes):
        candidates = ranks[following[node]]
        replicas.append(candidates[positions[rank] % len(candidates)])
    return replicas


def _messages(buffers: Sequence[Any]) -> list[torch.Tensor]:
    """Return views of the buffers' bytes as tensors of at most CHUNK bytes."""
    whole = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    return [message for each in whole for message in each.split(CHUNK)]
