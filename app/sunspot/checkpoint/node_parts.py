"""The parts of a state in the memory of several nodes, on their way to the workers that need their bytes.

One worker reads and verifies each part, on a node that holds it, and the others of the node map its pages. To a node
where none does, but some need it, it is sent. The workers may be more or fewer than those whose parts they are.
"""

import itertools
import logging
import pickle
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from sunspot.checkpoint.names import keys_of, make_outline
from sunspot.checkpoint.neighbours import CHUNK, TIMEOUT_S
from sunspot.checkpoint.pieces import Piece, Reads
from sunspot.checkpoint.sharded import load_pieces
from sunspot.checkpoint.slots import MemorySnapshot, as_bytes, read_snapshot
from sunspot.checkpoint.snapshot import padded, tensors_in
from sunspot.errors import DamageError, shorten
from sunspot.log import warn_once
from sunspot.parallel.collectives import gather_objects
from sunspot.parallel.sharding import Place
from sunspot.shared_pages import Pages, map_pages

log = logging.getLogger(__name__)


class PartCopy(NamedTuple):
    """A part that was chosen."""

    rank: int
    "The worker that reads it, on a node that holds it."
    held: MemorySnapshot


class PartIndex(NamedTuple):
    """Where the tensors of a part lie in its slot."""

    cut: list[Piece]
    "Parts of tensors."
    whole: list[Piece]
    "Tensors that each part has (buffers, the optimizer's step counts)."


class NodeParts:
    """One rank's hold on a state in parts. All workers of `group` make one together."""

    def __init__(self, group: dist.ProcessGroup | None, nodes: list[str]) -> None:
        """`nodes` identify the machine of each rank; `group` None: a worker alone."""
        self._group, self._nodes = group, nodes
        self._rank = dist.get_rank(group) if group else 0
        self._chosen: Sequence[PartCopy] = ()
        self._pages: dict[int, Pages] = {}
        "The parts that this rank has read."
        self._rests: dict[int, dict[str, Any]] = {}
        "What lay beside them."
        self._indexes: dict[int, PartIndex] = {}
        self._outline: Any = None

    def read(self, chosen: Sequence[PartCopy]) -> list[PartCopy]:
        """Read the parts of a state, in their order, that are this rank's to read; returns those that are damaged."""
        self._chosen, self._pages, self._rests, damaged = chosen, {}, {}, []
        for copy in chosen:
            if copy.rank == self._rank:
                try:
                    loaded = read_snapshot(copy.held)
                except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, DamageError) as error:
                    warn_once(log, f"the copy in shared memory {copy.held.file} cannot be used: {shorten(error)}")
                    damaged.append(copy)
                else:
                    self._pages[copy.held.part], self._rests[copy.held.part] = loaded.pages, loaded.rest
        return damaged

    def describe(self) -> dict[str, Any]:
        """What lies beside the first part: `about` (the manifest) and `ledger`; all workers call this together."""
        mine = {part: make_index(part, rest) for part, rest in self._rests.items()}
        self._indexes = {
            part: index for indexes in gather_objects(mine, self._group) for part, index in indexes.items()
        }
        first = self._rests.get(0)
        beside = first and {
            "about": first["about"],
            "ledger": first["ledger"],
            "outline": make_outline(first["structure"], first["names"]),
        }
        [described] = [each for each in gather_objects(beside, self._group) if each]
        self._outline, self._rests = described["outline"], {}
        return cast(dict[str, Any], described)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a sharded model and its optimizer. All workers call this together.

        Raises `ConflictError` when the copy is of another model.
        """
        nearest = self._rank * len(self._indexes) // len(self._nodes)  # it has most of what this rank needs
        pieces = [piece for index in self._indexes.values() for piece in index.cut]
        pieces += self._indexes[nearest].whole

        def read(into: dict[str, torch.Tensor]) -> None:
            reads = Reads(pieces, into)
            data = self._fetch({int(piece.file) for piece in reads.wanted})
            for piece in reads.wanted:
                content = data[int(piece.file)][piece.begin : piece.begin + piece.size]
                reads.put(piece, content.view(getattr(torch, piece.dtype)).view(piece.lengths))

        load_pieces(pieces, self._outline, self._chosen[0].held.checkpoint, model, optimizer, read)

    def _fetch(self, needed: set[int]) -> dict[int, torch.Tensor]:
        """The bytes of the parts that this rank needs, in pages that the node's ranks share; all call this together."""
        receivers: dict[tuple[int, str], int] = {}
        for rank, parts in enumerate(gather_objects(needed, self._group)):
            for part in parts:
                receivers.setdefault((part, self._nodes[rank]), rank)
        work, received = [], dict[int, torch.Tensor]()
        for (part, node), receiver in sorted(receivers.items()):
            reader, held = self._chosen[part]
            if node == self._nodes[reader]:
                continue
            if self._rank == receiver:
                pages = self._pages[part] = Pages(held.size)
                received[part] = map_pages(pages.path, held.size, shared=True)
                work += [dist.irecv(each, reader, self._group, part) for each in received[part].split(CHUNK)]
            elif self._rank == reader:
                data = map_pages(self._pages[part].path, held.size)
                work += [dist.isend(each, receiver, self._group, part) for each in data.split(CHUNK)]
        for each in work:
            cast(dist.Work, each).wait(timedelta(seconds=TIMEOUT_S))
        for part, data in received.items():
            if zlib.crc32(as_bytes(data)) != self._chosen[part].held.crc32:
                raise RuntimeError(f"part {part}, which came from another node, is not what was marked there")
        paths = gather_objects({part: pages.path for part, pages in self._pages.items()}, self._group)
        here = {
            part: path
            for node, its in zip(self._nodes, paths, strict=True)
            for part, path in its.items()
            if node == self._nodes[self._rank]
        }
        mapped = {part: map_pages(here[part], self._chosen[part].held.size) for part in needed}
        gather_objects(None, self._group)  # all have mapped them
        for pages in self._pages.values():
            pages.close()
        self._pages = {}
        return mapped


def make_index(part: int, rest: dict[str, Any]) -> PartIndex:
    """Where the tensors lie in the slot of a part, as what lies beside them tells."""
    tensors = tensors_in(rest["structure"])
    keys, begins = keys_of(rest["structure"], rest["names"]), itertools.accumulate(map(padded, tensors), initial=0)
    index = PartIndex([], [])
    for key, tensor, place, begin in zip(keys, tensors, rest["places"], begins, strict=False):
        if tensor.numel() or not place:  # of a tensor with fewer rows than there are ranks, the last ranks have nothing
            shape, offset = place or Place(tuple(tensor.shape), (0,) * tensor.ndim)
            dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
            piece = Piece(key, dtype, list(shape), list(offset), list(tensor.shape), str(part), begin, size)
            (index.cut if place else index.whole).append(piece)
    return index
