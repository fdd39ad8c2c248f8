"""Finds the position of each tensor in weight files, so that a worker can read only its part of each tensor.

The weights can be in safetensors files (with or without an index), in a state_dict that `torch.save` wrote, or in a
directory that torch.distributed.checkpoint (DCP) wrote. Only headers are read here. `read_pieces` reads the tensors.

Torch modules that few processes need are imported lazily, because importing them takes seconds.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from sunspot.checkpoint.files import INDEX_SUFFIX, SUFFIX, files_in_index, refuse_compressed
from sunspot.checkpoint.pieces import METADATA, Decode, Piece, decode_archive, decode_values, read_pieces
from sunspot.errors import ConflictError, StorageError, shorten
from sunspot.storage import Storage
from sunspot.storage.base import CHUNK

PIECE_BYTES = 8 << 20
"""Maximum size of a piece of a tensor, unless a single row is larger. A worker reads whole pieces."""

HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header, as in the safetensors library."""

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""A mapping from names in safetensors headers to dtypes."""

DCP_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}
"""The names in each module that a pickle of DCP may contain. Loading any other name could run code."""


class WeightFiles(NamedTuple):
    """Weight files in storage, and the pieces of tensors in them."""

    pieces: Sequence[Piece]
    "The pieces. `Piece.file` is the file's key in storage."
    versions: Mapping[str, str]
    "The version of each file (`Entry.version`) when its header was read."
    archives: bool = False
    "True if each piece was written by `torch.save`. Otherwise, the files contain the plain values."

    def read_into(self, storage: Storage, tensors: dict[str, torch.Tensor]) -> None:
        """Read the pieces that are needed to fill `tensors`, which contains tensors or DTensors by name.

        Raises `ConflictError` if a file has changed since its header was read.
        """
        decode: Decode = decode_archive if self.archives else decode_values
        read_pieces(storage, [piece for piece in self.pieces if piece.name in tensors], tensors, decode)
        for file, version in self.versions.items():
            if [entry.version for entry in storage.list(file) if entry.key == file] != [version]:
                raise ConflictError(
                    f"{storage.locate(file)} was replaced while it was being read; use files that nobody writes to"
                )

    def rename(self, names: Mapping[str, str]) -> WeightFiles:
        """Return these files with renamed tensors. `names` maps new to current names; other tensors are omitted."""
        new = {old: name for name, old in names.items()}
        return self._replace(pieces=[each._replace(name=new[each.name]) for each in self.pieces if each.name in new])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor, keyed by name."""
        return {piece.name: piece.shape for piece in self.pieces}


def find_weights(storage: Storage, file: str) -> WeightFiles | None:
    """Return the tensors in a weight file.

    Returns None if the file is invalid or contains a tensor that is not contiguous. The file must then be read as a
    whole. If it is invalid, reading it raises an error with the reason.
    """
    try:
        if file.endswith(INDEX_SUFFIX):
            files = [f"{file.rpartition('/')[0]}/{name}".lstrip("/") for name in files_in_index(storage.read(file))]
        else:
            files = [file]
        entries = {name: entry for name in files for entry in storage.list(name) if entry.key == name}
        list_tensors = _list_safetensors if files[0].endswith(SUFFIX) else _list_saved
        pieces = [piece for name in files for piece in list_tensors(storage, name, entries[name].size)]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError):
        return None  # reading the whole file finds the reason
    return WeightFiles(pieces, {name: entry.version for name, entry in entries.items()})


def find_in_folder(storage: Storage, folder: str) -> WeightFiles | None:
    """Return the tensors in a folder that DCP wrote, or None if it has no `.metadata`.

    Raises `ValueError` if the metadata is damaged, contains objects that DCP does not write, or lists files of another
    format.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    key = f"{folder}/{METADATA}"
    versions = {entry.key: entry.version for entry in storage.list(folder)}
    if key not in versions:
        return None
    pieces = []
    try:
        metadata = DcpUnpickler(io.BytesIO(storage.read(key))).load()
        for index, info in metadata.storage_data.items():
            tensor = metadata.state_dict_metadata[index.fqn]
            if not isinstance(tensor, TensorStorageMetadata):
                continue  # a plain value, such as a learning rate
            file = f"{folder}/{info.relative_path}"
            if file not in versions or getattr(info, "transform_descriptors", None):
                raise ValueError(f"{info.relative_path} is missing or compressed")
            lengths = next(chunk.sizes for chunk in tensor.chunks if chunk.offsets == index.offset)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            extent = (index.fqn, dtype, list(tensor.size), list(index.offset), list(lengths))
            pieces.append(Piece(*extent, file, info.offset, info.length, crc32=None))
    except StorageError:
        raise
    except Exception as error:  # a damaged pickle raises all kinds of errors
        raise ValueError(f"{METADATA} cannot be used: {type(error).__name__}: {shorten(error)}") from error
    return WeightFiles(pieces, {file: versions[file] for file in {key, *(piece.file for piece in pieces)}}, True)


def _list_safetensors(storage: Storage, file: str, size: int) -> Iterator[Piece]:
    with storage.open(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size, HEADER_BYTES):
            raise ValueError("the header is damaged")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = DTYPES[entry["dtype"]]
            begin, end = entry["data_offsets"]
            if end - begin != math.prod(entry["shape"]) * dtype.itemsize or 8 + length + end > size:
                raise ValueError("the header's offsets do not match the tensors' shapes or the file's size")
            yield from _split(Values(name, dtype, entry["shape"], file, 8 + length + begin))


def _list_saved(storage: Storage, file: str, size: int) -> Iterator[Piece]:
    """Yield the pieces of a state_dict that `torch.save` wrote. Raises `ValueError` if a tensor is not contiguous."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with io.BufferedReader(cast(Any, RangeFile(storage, file, size)), CHUNK) as stream:
        refuse_compressed(stream)
        with FakeTensorMode():  # torch.load then reads no values, and notes each tensor's position in the file
            state = torch.load(stream, map_location="cpu", weights_only=True)
    for name, tensor in state.items():
        if not tensor.is_contiguous():
            raise ValueError("a tensor is not contiguous")
        begin = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        yield from _split(Values(name, tensor.dtype, list(tensor.shape), file, begin))


class DcpUnpickler(pickle.Unpickler):
    """Loads the metadata of DCP without running code from the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in DCP_CLASSES.get(module, ()):
            raise ValueError(f"it contains {module}.{name}")
        return super().find_class(module, name)


class Values(NamedTuple):
    """The position of a tensor's values in a file, in row-major order."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    file: str
    begin: int


def _split(values: Values) -> Iterator[Piece]:
    """Yield pieces of several rows, so that a worker can read some rows of a large tensor without the others."""
    rows, *others = values.shape or [1]
    row_bytes = math.prod(others) * values.dtype.itemsize
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    dtype = str(values.dtype).removeprefix("torch.")
    for first in range(0, max(1, rows), step):
        count = min(step, rows - first)
        offset = [first, *(0 for _ in others)] if values.shape else []
        lengths = [count, *others] if values.shape else []
        begin = values.begin + first * row_bytes
        extent = (values.name, dtype, values.shape, offset, lengths)
        yield Piece(*extent, values.file, begin, count * row_bytes, crc32=None)


class RangeFile(io.RawIOBase):
    """A file object for a file in storage. Only the requested ranges are read."""

    def __init__(self, storage: Storage, file: str, size: int) -> None:
        self._storage = storage
        self._file = file
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        with self._storage.open(self._file, self._at) as stream:
            data = stream.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
