"""Gives all workers of a group the state from which the group starts.

One worker on each node reads and verifies a copy in the node's memory, or a checkpoint. The node's other workers map
the same pages. `NodeState` does this for a whole state, and `NodeParts` for a sharded state. A node without the copy
gets it from another node (`share_pages`). A restore therefore reads each byte at most once per node, and needs memory
for one additional state per node.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sunspot.background import map_parallel
from sunspot.checkpoint.files import load_checked
from sunspot.checkpoint.memory_files import LoadedSnapshot, MemorySnapshot, Sidecar, as_bytes, read_if_intact
from sunspot.checkpoint.part_exchange import CHUNK, TIMEOUT_S
from sunspot.checkpoint.parts import ShardedContents, is_sharded, load_pieces
from sunspot.checkpoint.pieces import Piece, ReadPlan, extent_of
from sunspot.checkpoint.tensors import keys_of, make_outline, padded, tensors_in
from sunspot.machine.shared_pages import Pages, map_pages
from sunspot.parallel.collectives import gather_objects, run_on_all_ranks
from sunspot.parallel.transfers import transfer
from sunspot.run import Run
from sunspot.run.checkpoints import FILES_AT_ONCE, Checkpoint, compare_bytes
from sunspot.run.shards import find_gaps

STATES = ("model.pt", "optimizer.pt")
"""The files of a checkpoint that a worker group loads. All other files are only verified."""


def share_pages(
    group: dist.ProcessGroup | None,
    nodes: Sequence[str],
    own: Mapping[int, LoadedSnapshot],
    wanted: Mapping[int, MemorySnapshot],
) -> dict[int, torch.Tensor]:
    """Map all `wanted` copies into private memory, and return the mappings under the same keys.

    All workers must call this together, and use the same key for the same copy. `own` contains the copies that this
    rank has read, and this function closes their pages. If no rank of a node has a wanted copy, a rank of another node
    sends it.
    """
    rank = dist.get_rank(group) if group else 0
    received = dict[int, Pages]()
    everyone = gather_objects((set(own), set(wanted)), group)
    holders: dict[int, list[int]] = {}
    receivers: dict[tuple[int, str], int] = {}
    for other, (has, wants) in enumerate(everyone):
        for number in has:
            holders.setdefault(number, []).append(other)
        for number in wants:
            receivers.setdefault((number, nodes[other]), other)
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    sent = Counter[int]()
    for (number, node), receiver in sorted(receivers.items()):
        if node in {nodes[holder] for holder in holders[number]}:
            continue
        sender = holders[number][sent[number] % len(holders[number])]
        sent[number] += 1
        if rank == receiver:
            size = wanted[number].size
            pages = received[number] = Pages(size)
            target = map_pages(pages.path, size, shared=True)
            incoming.setdefault(sender, []).extend(target.split(CHUNK))
        elif rank == sender:
            outgoing.setdefault(receiver, []).extend(own[number].data.split(CHUNK))
    if group:  # the limit ends the wait for a frozen node
        transfer(group, outgoing, incoming, TIMEOUT_S)
    for number, pages in received.items():
        if zlib.crc32(as_bytes(map_pages(pages.path, wanted[number].size))) != wanted[number].crc32:
            raise RuntimeError("a copy of the state from another node does not match its marker's checksum")
    mine = {**{number: loaded.pages for number, loaded in own.items()}, **received}
    here: dict[int, str] = {}
    for other, paths in enumerate(gather_objects({number: pages.path for number, pages in mine.items()}, group)):
        if nodes[other] == nodes[rank]:
            here |= paths
    mapped = {number: map_pages(here[number], snapshot.size) for number, snapshot in wanted.items()}
    gather_objects(None, group)  # after this, all ranks have mapped the pages
    for pages in mine.values():
        pages.close()
    return mapped


class NodeState:
    """Reads a whole state for one node, and shares it with all of the node's ranks.

    All workers of `group` must create a reader together.
    """

    def __init__(self, run: Run, group: dist.ProcessGroup | None, nodes: list[str]) -> None:
        """Create the reader. `nodes` identifies each rank's machine. `group` is None for a single worker."""
        self._run = run
        self._group = group
        self._nodes = nodes
        self._rank = dist.get_rank(group) if group else 0
        self._reader = nodes.index(nodes[self._rank])
        "The lowest rank on this node, which reads the state for all of the node's ranks."
        self._files: dict[str, Pages] = {}

    @property
    def reads(self) -> bool:
        """True if this rank reads the state for all ranks on its node."""
        return self._rank == self._reader

    def read(self, checkpoint: Checkpoint) -> list[str]:
        """Read and verify this rank's share of a checkpoint's files, and return a line for each fault.

        If the checkpoint is sharded, each rank only verifies some files. The needed pieces are loaded later, when the
        model is sharded.
        """
        self.close()
        sharded = is_sharded(checkpoint)
        mine = sorted(checkpoint.files)
        if sharded:
            mine = mine[self._rank :: len(self._nodes)]
        else:
            absent = [file for file in STATES if file not in mine]
            if absent:
                return [f"the manifest does not list {file}" for file in absent]
            if not self.reads:
                return []

        def read(file: str) -> list[str]:
            if sharded or file not in STATES:
                return compare_bytes(self._run, checkpoint, file)
            pages = self._files[file] = Pages()
            return compare_bytes(self._run, checkpoint, file, pages.write)

        found = [fault for faults in map_parallel(read, mine, FILES_AT_ONCE) for fault in faults]
        return found or (find_gaps(self._run, checkpoint) if sharded and self._rank == 0 else [])

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the states of `model` and `optimizer` from the files that `read` has read.

        The node's ranks share the memory of these states. All workers must call this together. Raises `ConflictError`
        if an intact file cannot be loaded.
        """
        paths = gather_objects({file: pages.path for file, pages in self._files.items()}, self._group)[self._reader]

        def load(file: str) -> Any:
            return load_checked(self._run, checkpoint, file, paths[file])

        states = run_on_all_ranks(self._group, lambda: {file.removesuffix(".pt"): load(file) for file in STATES})
        self.close()
        return states

    def share(self, chosen: MemorySnapshot, rank: int, found: LoadedSnapshot | None) -> tuple[torch.Tensor, Sidecar]:
        """Return the bytes and the sidecar of the `chosen` copy, on every rank.

        The worker `rank` has the copy, and other workers can have it too. Each worker passes the copy that it `found`
        on its node. All workers must call this together.
        """
        has = found and (found.snapshot.checkpoint, found.snapshot.crc32) == (chosen.checkpoint, chosen.crc32)
        sidecar = gather_objects(found.sidecar if found and rank == self._rank else None, self._group)[rank]
        data = share_pages(self._group, self._nodes, {0: found} if found and has else {}, {0: chosen})
        return data[0], sidecar

    def close(self) -> None:
        """Discard the files that were read."""
        self._files = {}


class PartCopy(NamedTuple):
    """A copy of one part of the state from which a group resumes."""

    rank: int
    "The worker that reads the copy, which is on this worker's node."
    snapshot: MemorySnapshot


class NodeParts:
    """Reads a sharded state for one rank. All workers of `group` must create a reader together.

    The number of workers can differ from the number of parts.
    """

    def __init__(self, group: dist.ProcessGroup | None, nodes: list[str]) -> None:
        """Create the reader. `nodes` identifies each rank's machine. `group` is None for a single worker."""
        self._group = group
        self._nodes = nodes
        self._rank = dist.get_rank(group) if group else 0
        self._chosen: Sequence[PartCopy] = ()
        self._loaded: dict[int, LoadedSnapshot] = {}
        "The parts that this rank has read, keyed by number."
        self._pieces: list[Piece] = []
        "The pieces that this rank might read."
        self._outline: Any = None

    def read(self, chosen: Sequence[PartCopy]) -> list[PartCopy]:
        """Read this rank's share of the parts, and return the damaged parts. `chosen` contains all parts in order."""
        self._chosen = chosen
        self._loaded = {}
        damaged = []
        for copy in chosen:
            if copy.rank == self._rank:
                loaded = read_if_intact(copy.snapshot)
                if loaded:
                    self._loaded[copy.snapshot.part] = loaded
                else:
                    damaged.append(copy)
        return damaged

    def describe(self) -> Sidecar:
        """Return the first part's sidecar. All workers must call this together, before `load`."""
        mine = {part: make_index(part, loaded.sidecar) for part, loaded in self._loaded.items()}
        indexes: dict[int, tuple[list[Piece], list[Piece]]] = {}
        for parts in gather_objects(mine, self._group):
            indexes |= parts
        nearest = self._rank * len(indexes) // len(self._nodes)  # the part with the most pieces for this rank
        self._pieces = [piece for sharded, _ in indexes.values() for piece in sharded] + indexes[nearest][1]
        first = self._loaded.get(0)
        sidecars = gather_objects(first and first.sidecar, self._group)
        sidecar: Sidecar = next(filter(None, sidecars))
        self._outline = make_outline(sidecar.structure, sidecar.names)
        return sidecar

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a sharded model and its optimizer. All workers must call this together.

        Raises `ConflictError` if the copy does not fit the model.
        """

        def read(into: dict[str, torch.Tensor]) -> None:
            plan = ReadPlan(self._pieces, into)
            wanted = {int(piece.file): self._chosen[int(piece.file)].snapshot for piece in plan.wanted}
            data = share_pages(self._group, self._nodes, self._loaded, wanted)
            self._loaded = {}
            for piece in plan.wanted:
                content = data[int(piece.file)][piece.begin : piece.begin + piece.size]
                plan.copy_piece(piece, content.view(getattr(torch, piece.dtype)).view(piece.lengths))

        contents = ShardedContents(self._pieces, self._outline)
        load_pieces(contents, self._chosen[0].snapshot.checkpoint, model, optimizer, read)


def make_index(part: int, sidecar: Sidecar) -> tuple[list[Piece], list[Piece]]:
    """Return the positions of the tensors in a part's slot.

    The first list contains pieces of sharded tensors. The second list contains tensors that are complete in every part,
    such as buffers.
    """
    tensors = tensors_in(sidecar.structure)
    keys = keys_of(sidecar.structure, sidecar.names)
    begins = itertools.accumulate(map(padded, tensors), initial=0)
    sharded = list[Piece]()
    whole = list[Piece]()
    for key, tensor, place, begin in zip(keys, tensors, sidecar.places, begins, strict=False):
        if tensor.numel() or not place:  # the last ranks have no piece of a tensor with few rows
            # No checksum is needed, because the whole part has been verified.
            piece = Piece(*extent_of(key, tensor, place), str(part), begin, tensor.nbytes, crc32=0)
            (sharded if place else whole).append(piece)
    return sharded, whole
