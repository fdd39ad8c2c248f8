"""Reads only the needed pieces of tensors from a sharded checkpoint or from weight files.

Torch modules that only sharded checkpoints need are imported lazily, because importing them takes seconds.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from sunspot.background import map_parallel
from sunspot.checkpoint.files import read_file, unpack
from sunspot.errors import DamageError
from sunspot.parallel.sharding import TensorSlice
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.shards import Extent, describe_gap, find_indexes
from sunspot.storage import Storage
from sunspot.storage.base import CHUNK

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

INDEX = "part-{:05d}.json"
"""File name of the index of a rank's part."""

METADATA = ".metadata"
"""Name of the file in which torch.distributed.checkpoint lists the tensors of a directory. The file is a pickle."""

REQUEST_BYTES = 64 << 20
"""Maximum number of bytes per request, unless a single piece is larger. Larger requests would not be faster."""

REQUESTS_AT_ONCE = 4
"""Number of requests that a rank sends at once. It is small because a node can have eight ranks."""


class Piece(NamedTuple):
    """A piece of a tensor in a checkpoint file, as listed in the index of a rank's part."""

    name: str
    dtype: str
    shape: list[int]
    "The shape of the whole tensor."
    offset: list[int]
    "The index of the piece's first element in the whole tensor."
    lengths: list[int]
    "The length of the piece in each dimension."
    file: str
    begin: int
    "The position of the piece's first byte in the file."
    size: int
    crc32: int | None
    "The checksum of the piece's bytes. None if another program wrote them."

    @property
    def extent(self) -> Extent:
        """The position of the piece in the whole tensor."""
        return Extent(self.name, self.shape, self.offset, self.lengths)

    def allocate(self, device: str = "cpu") -> torch.Tensor:
        """Allocate the whole tensor without initializing it."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


def extent_of(
    name: str, part: torch.Tensor, place: TensorSlice | None
) -> tuple[str, str, list[int], list[int], list[int]]:
    """Return the first five fields of a `Piece`: name, dtype, shape, offset and lengths.

    `part` is the slice of the tensor at `place`, or the whole tensor if `place` is None.
    """
    shape, offset = place or (part.shape, (0,) * part.ndim)
    return name, str(part.dtype).removeprefix("torch."), list(shape), list(offset), list(part.shape)


def make_metadata(pieces: Sequence[Piece]) -> Metadata:
    """Return the metadata that torch.distributed.checkpoint reads. Raises `DamageError` if pieces are missing."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # torch's own reader expects it in .metadata
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    gap = describe_gap(piece.extent for piece in pieces)
    if gap:
        raise DamageError(gap)
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for piece in pieces:
        properties = TensorProperties(dtype=getattr(torch, piece.dtype))
        tensor = tensors.setdefault(piece.name, TensorStorageMetadata(properties, torch.Size(piece.shape), []))
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.lengths)))
        storage[MetadataIndex(piece.name, piece.offset)] = _StorageInfo(piece.file, piece.begin, piece.size)
    return Metadata(tensors, storage_data=storage)


def read_index(run: Run, checkpoint: Checkpoint) -> list[Piece]:
    """Return all pieces of a checkpoint, in rank order. Raises `DamageError` if an index is invalid or incomplete."""
    place = run.storage.locate(run.key("checkpoints", checkpoint.name))
    try:
        contents = map_parallel(lambda file: json.loads(read_file(run, checkpoint, file)), find_indexes(checkpoint))
        pieces = [Piece(**piece) for content in contents for piece in content["tensors"]]
        gap = describe_gap(piece.extent for piece in pieces)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(f"{place}: the indexes of the parts cannot be read: {type(error).__name__}") from error
    if gap:
        raise DamageError(f"{place}: {gap}")
    return pieces


def read_into(run: Run, checkpoint: Checkpoint, pieces: Sequence[Piece], into: dict[str, torch.Tensor]) -> None:
    """Read pieces of a checkpoint into full tensors or DTensors, keyed by name, like `read_pieces`."""
    located = [piece._replace(file=run.key("checkpoints", checkpoint.name, piece.file)) for piece in pieces]
    read_pieces(run.storage, located, into, decode_archive)


def read_pieces(storage: Storage, pieces: Sequence[Piece], into: dict[str, torch.Tensor], decode: Decode) -> None:
    """Read pieces into the full tensors or DTensors of `into`, keyed by name.

    `Piece.file` is the file's key in `storage`. Torch's planner decides which pieces the tensors need. Only these
    pieces and small gaps between them are read. Raises `DamageError` if `decode` rejects the bytes of a piece.
    """
    plan = ReadPlan(pieces, into)

    def load(adjacent: list[Piece]) -> None:
        key = adjacent[0].file
        at = adjacent[0].begin
        with storage.open(key, at) as stream:
            for piece in adjacent:
                stream.read(piece.begin - at)
                data = stream.read(piece.size)
                at = piece.begin + piece.size
                try:
                    plan.copy_piece(piece, decode(piece, data))
                except ValueError as error:
                    raise DamageError(f"{storage.locate(key)}: {piece.name} {error}") from error

    map_parallel(load, group_adjacent(plan.wanted), REQUESTS_AT_ONCE)


Decode = Callable[[Piece, bytes], torch.Tensor]
"""A function that returns the tensor in the bytes of a piece. It raises `ValueError` if they are invalid."""


def decode_archive(piece: Piece, data: bytes) -> torch.Tensor:
    """Decode a tensor saved by `torch.save`.

    Raises `ValueError` if `data` is invalid or does not match the piece's checksum.
    """
    if piece.crc32 is not None and zlib.crc32(data) != piece.crc32:
        raise ValueError("does not match the index of its part")
    try:
        return cast(torch.Tensor, unpack(io.BytesIO(data)))
    except ValueError as error:
        raise ValueError(f"is {error}") from error


def decode_values(piece: Piece, data: bytes) -> torch.Tensor:
    """Return a tensor whose values are stored in row-major order."""
    if len(data) != piece.size:
        raise ValueError("is truncated")
    dtype = getattr(torch, piece.dtype)
    values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return values.view(piece.lengths)


class ReadPlan:
    """A plan of the pieces to read, and of the elements to copy from each piece."""

    def __init__(self, pieces: Sequence[Piece], into: dict[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(into, make_metadata(pieces))
        self._items: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in self._planner.create_local_plan().items:
            place = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            self._items.setdefault(place, []).append(item)
        wanted = (piece for piece in pieces if (piece.name, tuple(piece.offset)) in self._items)
        self.wanted = sorted(wanted, key=lambda piece: (piece.file, piece.begin))
        "The pieces to read, in file order."

    def copy_piece(self, piece: Piece, content: torch.Tensor) -> None:
        """Copy the needed elements from a piece's `content` to the tensors."""
        for item in self._items[piece.name, tuple(piece.offset)]:
            tensor = content
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, offset, length)
            self._planner.resolve_tensor(item).detach().copy_(tensor)


def group_adjacent(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Group adjacent pieces so that each group can be read with one request of at most REQUEST_BYTES.

    A larger piece forms a group of its own.
    """
    groups: list[list[Piece]] = []
    for piece in pieces:
        group = groups[-1] if groups else []
        gap = piece.begin - (group[-1].begin + group[-1].size) if group else 0
        near = group and piece.file == group[-1].file and 0 <= gap <= CHUNK  # tied weights are in the same place
        if near and piece.begin + piece.size - group[0].begin <= REQUEST_BYTES:
            group.append(piece)
        else:
            groups.append([piece])
    return groups
