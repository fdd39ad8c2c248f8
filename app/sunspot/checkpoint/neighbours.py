"""Keeps each part of a sharded state (PARALLEL=fsdp) in the memory of two nodes, so that a lost one takes none along.

Each worker sends its part to one on the next node. That happens in the thread that seals copies, over a process group
of its own, beside the training; a neighbour that does not answer is waited for no longer than TIMEOUT_S.
"""

import itertools
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from sunspot.checkpoint.slots import MemorySnapshot, Slot
from sunspot.errors import DamageError
from sunspot.parallel.collectives import any_rank
from sunspot.run.objects import parse_verified, with_checksum

CHUNK = 16 << 20
"""Bytes of one message."""

TIMEOUT_S = 60.0
"""For one message, and for the slowest worker to come to it."""

TRANSFER_COST = 0.1
"""Of the seconds of a transfer, counted as lost to training, whose own messages take the same network."""

SIZES = struct.Struct("<qqq")
"""Bytes of a marker, of what lies beside the tensors, and of the slot."""


class Ward:
    """A worker of another node that keeps its part here, too."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.newest: Slot | None = None
        "Of the newest copy that all workers have."
        self.next: Slot | None = None

    def settle(self) -> None:
        """The next copy has become the newest."""
        self.newest, self.next = self.next, self.newest


class PartExchange:
    """One worker's share in keeping each part on two nodes; on a single node, in knowing that all have theirs."""

    def __init__(self, nodes: Sequence[str], make_slot: Callable[[int, list[Slot]], Slot]) -> None:
        """All workers make one together. `nodes` identify the machine of each rank.

        `make_slot` returns a slot of so many bytes, beside those there are, or raises `OSError` when there is no room.
        """
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))
        self.rank, self.world_size = dist.get_rank(self._group), len(nodes)
        keepers, here = find_keepers(nodes), nodes[self.rank]
        self._keeper = keepers[self.rank]
        self._wards = [Ward(rank) for rank, keeper in enumerate(keepers) if keeper == self.rank != rank]
        self._make_slot = make_slot
        own = nodes.count(here)
        kept = sum(nodes[keeper] == here != node for node, keeper in zip(nodes, keepers, strict=True))
        self.copies = 2 * (own + kept)
        "The parts that this node's memory has to hold: of each, the newest copy and the next."
        self.cost_s = 0.0
        "Of the newest transfer, to training."

    def share(self, slot: Slot, snapshot: MemorySnapshot | None, rest: bytes) -> bool:
        """Have all workers' parts kept by their neighbours, this one's as it lies in `slot`; all call this together.

        `snapshot` None: this worker has none. Returns whether each part is where it should be. Raises `RuntimeError`
        when a worker is gone, or does not answer.
        """
        marker = bytearray(with_checksum(asdict(snapshot)) if snapshot else b"")
        sizes = {ward.rank: bytearray(SIZES.size) for ward in self._wards}
        own = bytearray(SIZES.pack(len(marker), len(rest), slot.size))
        self._pass_on([own], {rank: [size] for rank, size in sizes.items()})
        taken: dict[int, list[Any]] = {}
        room = True
        for ward in self._wards:
            *beside, size = SIZES.unpack(sizes[ward.rank])
            try:
                taken[ward.rank] = [*map(bytearray, beside), self._next_slot(ward, size).map]
            except OSError:
                room = False
        if any_rank(self._group, not room or snapshot is None)[0]:
            return False
        began = time.monotonic()
        self._pass_on([marker, bytearray(rest), slot.map], taken)
        self.cost_s = TRANSFER_COST * (time.monotonic() - began)
        if any_rank(self._group, not all([self._adopt(ward, *taken[ward.rank][:2]) for ward in self._wards]))[0]:
            return False
        for ward in self._wards:
            ward.settle()
        return True

    def _next_slot(self, ward: Ward, size: int) -> Slot:
        if ward.next is None or ward.next.size != size:
            ward.next = None
            ward.next = self._make_slot(
                size, [slot for each in self._wards for slot in (each.newest, each.next) if slot]
            )
        ward.next.unmark()
        return ward.next

    def _adopt(self, ward: Ward, marker: bytearray, rest: bytearray) -> bool:
        """Mark what came from a ward; whether it is whole."""
        assert ward.next
        try:
            ward.next.adopt(
                parse_verified(MemorySnapshot, bytes(marker), f"the marker of rank {ward.rank}"), bytes(rest)
            )
        except (DamageError, OSError):
            return False
        return True

    def _pass_on(self, given: Sequence[Any], taken: Mapping[int, Sequence[Any]]) -> None:
        """Send buffers to the keeper, while those of the wards are filled, by rank."""
        to_keeper = _messages(given) if self._keeper != self.rank else []
        from_wards = [[(rank, message) for message in _messages(buffers)] for rank, buffers in taken.items()]
        together: Iterator[tuple[Any, ...]] = itertools.zip_longest(to_keeper, *from_wards)
        for mine, *theirs in together:
            work = [dist.irecv(message[1], group=self._group, group_src=message[0]) for message in theirs if message]
            if mine is not None:
                work.append(dist.isend(mine, group=self._group, group_dst=self._keeper))
            for each in work:
                cast(dist.Work, each).wait()


def ranks_by_node(nodes: Iterable[str]) -> dict[str, list[int]]:
    """The ranks on each node, in their order; `nodes` are those of rank 0, 1, ..."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def find_keepers(nodes: Sequence[str]) -> list[int]:
    """For each rank, the rank that keeps a copy of its part: one on the next node; on a single node, itself."""
    ranks = ranks_by_node(nodes)
    following = dict(zip(ranks, [*list(ranks)[1:], *list(ranks)[:1]], strict=True))
    places = {rank: place for its in ranks.values() for place, rank in enumerate(its)}
    return [(there := ranks[following[node]])[places[rank] % len(there)] for rank, node in enumerate(nodes)]


def _messages(buffers: Sequence[Any]) -> list[torch.Tensor]:
    """The bytes of some buffers, in tensors of at most CHUNK, without a copy."""
    whole = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    return [message for each in whole for message in each.split(CHUNK)]
