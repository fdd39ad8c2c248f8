"""Keeps each part of a sharded state in the memory of two nodes, so that losing a node loses no part.

Each worker's seal thread sends its part to a worker on the next node while training continues. Under PARALLEL=hsdp,
workers of several replicas have the same part. If these workers are on different nodes, they do not send the part. The
seal threads use a separate process group, and wait at most TIMEOUT_S for an unresponsive worker.
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
from sunspot.parallel.transfers import transfer
from sunspot.run.checkpoints import Checkpoint

CHUNK = 16 << 20
"""Size of a message in bytes."""

TIMEOUT_S = 60.0
"""Seconds to wait for a message, or for the slowest worker to be ready for it."""

TRANSFER_COST = 0.1
"""Fraction of a transfer's duration that counts as lost to training, because both use the same network."""


class PartExchange:
    """Exchanges a worker's part with workers on other nodes.

    On a single node, the workers only agree that all parts have been copied.
    """

    def __init__(self, memory: NodeMemory, nodes: Sequence[str], group: dist.ProcessGroup, parts: int) -> None:
        """Create the exchange for a state that is split into `parts` parts. All workers must call this together.

        `nodes` identifies each rank's machine. Rank r has part r % parts. The workers use `group` to agree on whether
        to copy.
        """
        self._memory = memory
        self._control = group
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))
        self._rank = dist.get_rank(self._group)
        self._parts = parts
        backups = find_backup_ranks(nodes, parts)
        here = nodes[self._rank]
        self._backup_rank = backups[self._rank]
        self._peers = [rank for rank, backup in enumerate(backups) if backup == self._rank != rank]
        "The ranks on another node for which this worker also keeps the parts."
        self._newest: dict[int, Slot] = {}
        "The slots with each peer's newest part that belongs to a complete state, keyed by rank."
        self._next: dict[int, Slot] = {}
        "The slots for each peer's next part, keyed by rank."
        kept = sum(nodes[backup] == here != node for node, backup in zip(nodes, backups, strict=True))
        self.cost_s = 0.0
        "Seconds for which the newest transfer delayed training."
        self._failure = ""
        "The error that ended the exchange, or an empty string. The next group creates a new exchange."
        memory.expect_copies(2 * (nodes.count(here) + kept))  # the newest and the next copy of each part

    def agree_to_copy(self, has_slot: bool) -> bool:
        """Return True if all workers can copy their parts now.

        Otherwise, no worker copies its part, because the parts of a copied state must all come from the same step. All
        workers must call this together, in the training thread. `has_slot` is False on a worker that cannot copy.
        """
        lacking, stopped = any_rank(self._control, not has_slot, not self._memory.shared or bool(self._failure))
        if stopped:
            self._memory.pause(self._failure or "a worker has no room, or cannot exchange parts")
        return not lacking

    def complete(self, slot: Slot, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple) -> None:
        """Mark the copy of this worker's part as complete, like `NodeMemory.complete`, and send it to another node.

        The copy becomes the newest one once all parts exist twice. All workers must call this together, in their seal
        threads.
        """
        try:
            snapshot, problem = slot.mark(manifest, sidecar, changed, self._rank % self._parts, self._parts)
            if not self.back_up(slot, snapshot, sidecar):
                problem = problem or "a worker could not keep its part, or another node's part"
            self._memory.finish_copy(slot, manifest.step, problem)
        except RuntimeError as error:
            self._failure = f"parts cannot be exchanged: {shorten(error)}"
        finally:
            slot.uses.discard(Use.SEALING)

    def back_up(self, slot: Slot, snapshot: MemorySnapshot | None, sidecar: bytes) -> bool:
        """Send the part in `slot` to the next node, receive the peers' parts, and return True if every part arrived.

        All workers must call this together. `snapshot` describes this worker's part, or is None if the part could
        not be marked as complete. Raises `RuntimeError` if a worker is lost, or does not respond for TIMEOUT_S seconds.
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
        """Send buffers to the next node, and fill the buffers in `received`, which are keyed by the peers' ranks."""
        to_backup = _messages(sent) if self._backup_rank != self._rank else []
        from_peers = [[(rank, message) for message in _messages(buffers)] for rank, buffers in received.items()]
        together: Iterator[tuple[Any, ...]] = itertools.zip_longest(to_backup, *from_peers)
        for mine, *theirs in together:
            incoming = {rank: [message] for rank, message in filter(None, theirs)}
            transfer(self._group, {} if mine is None else {self._backup_rank: [mine]}, incoming, TIMEOUT_S)


def ranks_by_node(nodes: Iterable[str]) -> dict[str, list[int]]:
    """Return a mapping from nodes to their ranks, given the node of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def find_backup_ranks(nodes: Sequence[str], parts: int) -> list[int]:
    """Return each rank's backup rank, which stores a second copy of the rank's part. Rank r has part r % parts.

    A backup rank is on the next node. A rank is its own backup if there is only one node, or if another node has the
    same part.
    """
    ranks = ranks_by_node(nodes)
    following = dict(zip(ranks, [*list(ranks)[1:], *list(ranks)[:1]], strict=True))
    positions = {rank: position for on_node in ranks.values() for position, rank in enumerate(on_node)}
    backups = []
    for rank, node in enumerate(nodes):
        if len(set(nodes[rank % parts :: parts])) > 1:
            backups.append(rank)
            continue
        candidates = ranks[following[node]]
        backups.append(candidates[positions[rank] % len(candidates)])
    return backups


def _messages(buffers: Sequence[Any]) -> list[torch.Tensor]:
    """Return views of the buffers' bytes as tensors of at most CHUNK bytes."""
    whole = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    return [message for each in whole for message in each.split(CHUNK)]
