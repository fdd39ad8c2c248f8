"""The state that a worker group starts from, on its way to the workers of a node.

One worker of each node reads and verifies what its node has in memory, or a checkpoint, and the others map its pages
(`NodeState` for a whole state, `NodeParts` for one in parts). What a node lacks is sent to it (`share_pages`). So a
restore reads each byte once for a node, and takes the memory of one state beside the workers' own.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from sunspot.background import map_parallel
from sunspot.checkpoint.files import load_checked
from sunspot.checkpoint.memory_files import LoadedSnapshot, MemorySnapshot, Sidecar, as_bytes, read_if_good
from sunspot.checkpoint.parts import Contents, is_sharded, load_pieces
from sunspot.checkpoint.pieces import Piece, Reads, extent_of
from sunspot.checkpoint.replicas import CHUNK, TIMEOUT_S
from sunspot.checkpoint.tensors import keys_of, make_outline, padded, tensors_in
from sunspot.parallel.collectives import gather_objects, run_on_all_ranks
from sunspot.run import Run
from sunspot.run.checkpoints import FILES_AT_ONCE, Checkpoint, compare_bytes
from sunspot.shared_pages import Pages, map_pages

STATES = ("model.pt", "optimizer.pt")
"""The files of a checkpoint that a worker group loads; others are only verified."""


def share_pages(
    group: dist.ProcessGroup | None,
    nodes: Sequence[str],
    own: Mapping[int, LoadedSnapshot],
    wanted: Mapping[int, MemorySnapshot],
) -> dict[int, torch.Tensor]:
    """Map the bytes of the copies that this rank has `wanted`, by numbers; all workers call this together.

    `own` are the copies that this rank has read, whose pages are closed in the end. What is wanted on a node where
    nobody has it is sent there by a rank that has. What one rank changes of the bytes, the others do not see.
    """
    rank, received = dist.get_rank(group) if group else 0, dict[int, Pages]()
    everyone = gather_objects((set(own), set(wanted)), group)
    holders: dict[int, list[int]] = {}
    receivers: dict[tuple[int, str], int] = {}
    for other, (has, wants) in enumerate(everyone):
        for number in has:
            holders.setdefault(number, []).append(other)
        for number in wants:
            receivers.setdefault((number, nodes[other]), other)
    work, sent, limit = [], Counter[int](), timedelta(seconds=TIMEOUT_S)
    for (number, node), receiver in sorted(receivers.items()):
        if node in {nodes[holder] for holder in holders[number]}:
            continue
        sender = holders[number][sent[number] % len(holders[number])]
        sent[number] += 1
        if rank == receiver:
            size = wanted[number].size
            pages = received[number] = Pages(size)
            target = map_pages(pages.path, size, shared=True)
            work += [dist.irecv(each, sender, group, number) for each in target.split(CHUNK)]
        elif rank == sender:
            work += [dist.isend(each, receiver, group, number) for each in own[number].data.split(CHUNK)]
    for each in work:  # a node that freezes is waited for no longer than the limit
        cast(dist.Work, each).wait(limit)
    for number, pages in received.items():
        if zlib.crc32(as_bytes(map_pages(pages.path, wanted[number].size))) != wanted[number].crc32:
            raise RuntimeError("a copy of the state that came from another node is not what was marked there")
    there = {**{number: loaded.pages for number, loaded in own.items()}, **received}
    here: dict[int, str] = {}
    for other, paths in enumerate(gather_objects({number: pages.path for number, pages in there.items()}, group)):
        if nodes[other] == nodes[rank]:
            here |= paths
    mapped = {number: map_pages(here[number], held.size) for number, held in wanted.items()}
    gather_objects(None, group)  # all have mapped them
    for pages in there.values():
        pages.close()
    return mapped


class NodeState:
    """One rank's hold on a whole state in its node's memory. All workers of `group` make one together."""

    def __init__(self, run: Run, group: dist.ProcessGroup | None, nodes: list[str]) -> None:
        """`nodes` identify the machine of each rank; `group` None: a worker alone."""
        self._run, self._group, self._nodes = run, group, nodes
        self._rank = dist.get_rank(group) if group else 0
        self._reader = nodes.index(nodes[self._rank])
        "The lowest rank of this node, which reads for all of its ranks."
        self._files: dict[str, Pages] = {}

    @property
    def reads(self) -> bool:
        """Whether this rank reads for its node."""
        return self._rank == self._reader

    def read(self, checkpoint: Checkpoint) -> list[str]:
        """Do this rank's share in reading a checkpoint on each node, and return what is damaged, a line per fault.

        Of a checkpoint in parts, each rank verifies some files; it loads the pieces that it needs once models are
        sharded.
        """
        self.close()
        sharded, mine = is_sharded(checkpoint), sorted(checkpoint.files)
        if sharded:
            mine = mine[self._rank :: len(self._nodes)]
        elif absent := [file for file in STATES if file not in mine]:
            return [f"its manifest lists no {file}" for file in absent]
        elif not self.reads:
            return []

        def read(file: str) -> list[str]:
            if sharded or file not in STATES:
                return compare_bytes(self._run, checkpoint, file)
            pages = self._files[file] = Pages()
            return compare_bytes(self._run, checkpoint, file, pages.write)

        return [fault for faults in map_parallel(read, mine, FILES_AT_ONCE) for fault in faults]

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load the `model` and `optimizer` that were read, on the CPU, out of pages that the node's ranks share.

        All workers call this together. Raises `ConflictError` for a file that cannot be loaded, whole as it is.
        """
        paths = gather_objects({file: pages.path for file, pages in self._files.items()}, self._group)[self._reader]

        def load(file: str) -> Any:
            return load_checked(self._run, checkpoint, file, paths[file])

        states = run_on_all_ranks(self._group, lambda: {file.removesuffix(".pt"): load(file) for file in STATES})
        self.close()
        return states

    def share(self, chosen: MemorySnapshot, rank: int, found: LoadedSnapshot | None) -> tuple[torch.Tensor, Sidecar]:
        """Return the bytes and the sidecar of the `chosen` copy, on every rank.

        `rank` has it, and perhaps others have; each hands in what it has `found`. All workers call this together.
        """
        has = found and (found.held.checkpoint, found.held.crc32) == (chosen.checkpoint, chosen.crc32)
        sidecar = gather_objects(found.sidecar if found and rank == self._rank else None, self._group)[rank]
        data = share_pages(self._group, self._nodes, {0: found} if found and has else {}, {0: chosen})
        return data[0], sidecar

    def close(self) -> None:
        """Let go of files that were read."""
        self._files = {}


class PartCopy(NamedTuple):
    """A copy of a part that a group goes on from."""

    rank: int
    "The worker that reads it, on a node that holds it."
    held: MemorySnapshot


class NodeParts:
    """One rank's hold on a state in parts. All workers of `group` make one together.

    They may be more or fewer than those whose parts they are.
    """

    def __init__(self, group: dist.ProcessGroup | None, nodes: list[str]) -> None:
        """`nodes` identify the machine of each rank; `group` None: a worker alone."""
        self._group, self._nodes = group, nodes
        self._rank = dist.get_rank(group) if group else 0
        self._chosen: Sequence[PartCopy] = ()
        self._loaded: dict[int, LoadedSnapshot] = {}
        "The parts that this rank has read."
        self._pieces: list[Piece] = []
        "What this rank may read."
        self._outline: Any = None

    def read(self, chosen: Sequence[PartCopy]) -> list[PartCopy]:
        """Read the parts of a state, in their order, that are this rank's to read; returns those that are damaged."""
        self._chosen, self._loaded, damaged = chosen, {}, []
        for copy in chosen:
            if copy.rank == self._rank:
                if loaded := read_if_good(copy.held):
                    self._loaded[copy.held.part] = loaded
                else:
                    damaged.append(copy)
        return damaged

    def describe(self) -> Sidecar:
        """Return the sidecar of the first part; all workers call this together, before `load`."""
        mine = {part: make_index(part, loaded.sidecar) for part, loaded in self._loaded.items()}
        indexes = {part: index for its in gather_objects(mine, self._group) for part, index in its.items()}
        nearest = self._rank * len(indexes) // len(self._nodes)  # it has most of what this rank needs
        self._pieces = [piece for cut, _ in indexes.values() for piece in cut] + indexes[nearest][1]
        first = self._loaded.get(0)
        sidecars = gather_objects(first and first.sidecar, self._group)
        sidecar: Sidecar = next(filter(None, sidecars))
        self._outline = make_outline(sidecar.structure, sidecar.names)
        return sidecar

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a sharded model and its optimizer. All workers call this together.

        Raises `ConflictError` when the copy is of another model.
        """

        def read(into: dict[str, torch.Tensor]) -> None:
            reads = Reads(self._pieces, into)
            wanted = {int(piece.file): self._chosen[int(piece.file)].held for piece in reads.wanted}
            data = share_pages(self._group, self._nodes, self._loaded, wanted)
            self._loaded = {}
            for piece in reads.wanted:
                content = data[int(piece.file)][piece.begin : piece.begin + piece.size]
                reads.put(piece, content.view(getattr(torch, piece.dtype)).view(piece.lengths))

        contents = Contents(self._pieces, self._outline)
        load_pieces(contents, self._chosen[0].held.checkpoint, model, optimizer, read)


def make_index(part: int, sidecar: Sidecar) -> tuple[list[Piece], list[Piece]]:
    """Tell where the tensors lie in the slot of a part, from its sidecar: those that are cut, and those that each part
    has whole (buffers, the optimizer's step counts).
    """
    tensors = tensors_in(sidecar.structure)
    keys = keys_of(sidecar.structure, sidecar.names)
    begins = itertools.accumulate(map(padded, tensors), initial=0)
    cut, whole = list[Piece](), list[Piece]()
    for key, tensor, place, begin in zip(keys, tensors, sidecar.places, begins, strict=False):
        if tensor.numel() or not place:  # of a tensor with fewer rows than there are ranks, the last ranks have nothing
            # No checksum: the whole part has been checked.
            piece = Piece(*extent_of(key, tensor, place), str(part), begin, tensor.nbytes, crc32=0)
            (cut if place else whole).append(piece)
    return cut, whole
