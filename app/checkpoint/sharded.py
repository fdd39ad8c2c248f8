"""Checkpoints in parts (PARALLEL=fsdp): each rank writes the part it holds, and rank 0 commits all of them.

The files are those of torch.distributed.checkpoint, so any PyTorch program can read the directory with its
`FileSystemReader`:

    __0_0.distcp __0_1.distcp   rank 0's part of the model, and of the optimizer's state: tensors, one after the other
    part-00000.json             where each tensor lies in them; written once they are verified to be there
    .metadata                   the same for all ranks, for torch; not read here, as it is a pickle
    extra_state.pt              as under DDP, and the optimizer's plain values, under `state`
    model.pt                    the whole model, in the last checkpoint of a finished run

Tensors are called `model.NAME` and `optimizer.state.NAME OF THE PARAMETER.NAME`. Rank 0 writes those that are not cut
(buffers, the optimizer's step counts).

Ranks learn only from storage what the others have written: a rank that dies leaves a directory without a manifest, and
no other rank waiting in a collective call. All ranks commit the same snapshots since they agree on them
(app/train/step.py).

What only they need of torch is imported where it is used, as it takes seconds at the start of every process.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from app.checkpoint.files import Files, load_state, load_weights, read_file, upload, upload_state
from app.checkpoint.snapshot import Snapshot, map_tensors, tensors_in
from app.errors import DamageError
from app.parallel import Place, parameters_of
from app.run import Run, to_json
from app.run.checkpoints import Checkpoint
from app.storage.base import Writer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

KINDS = ("model", "optimizer")
"""The files of a part, in the order of their numbers: prediction does not read the optimizer's."""

INDEX = "part-{:05d}.json"

METADATA = ".metadata"

LATE_S = 60.0
"""How much longer than STORAGE_TIMEOUT_S rank 0 waits for parts: a rank whose storage fails reports that first."""

POLL_EVERY_S = 0.5
"""Between two listings while rank 0 waits for parts as large as its own."""

WARN_AFTER_S = 30.0


class Piece(NamedTuple):
    """A piece of one tensor in a file, as the part's index lists it."""

    name: str
    dtype: str
    shape: list[int]
    "Of the whole tensor."
    offset: list[int]
    "Of the piece in the tensor."
    lengths: list[int]
    "Of the piece, in each dimension."
    file: str
    begin: int
    "Of its bytes in the file, as `torch.save` wrote them."
    size: int


class PartWriter:
    """Writes one rank's part of each snapshot, in the commit thread; rank 0 also writes the files common to all."""

    def __init__(
        self, rank: int, world_size: int, names: list[str], timeout_s: float, warn: Callable[[str], Any]
    ) -> None:
        """`names`: the parameters', in the optimizer's order (`parameter_names`)."""
        self._rank, self._world_size, self._names = rank, world_size, names
        self._timeout_s, self._warn = timeout_s + LATE_S, warn
        self._took_s = 0.0
        "Seconds that its own part took: the others', on slower connections, may take as long again."
        self._written = ""
        "The checkpoint whose part is in storage: a retry does not write it again."

    def __call__(self, run: Run, snapshot: Snapshot) -> Files | None:
        """Write this rank's part; on rank 0, wait for the others' and return the files of all."""
        name = snapshot.manifest.name
        if self._written != name:
            began = time.monotonic()
            write_part(run, snapshot, self._names, self._rank)
            self._written, self._took_s = name, time.monotonic() - began
        if self._rank:
            return None
        self._wait_for_parts(run, name)
        return write_common(run, snapshot, self._names, self._world_size)

    def _wait_for_parts(self, run: Run, name: str) -> None:
        began, warned, limit_s = time.monotonic(), False, self._timeout_s + self._took_s
        while True:
            there = {entry.key.rpartition("/")[2] for entry in run.storage.list(run.key("checkpoints", name))}
            missing = [rank for rank in range(self._world_size) if INDEX.format(rank) not in there]
            if not missing:
                return
            waited = time.monotonic() - began
            text = f"{name}: no part of ranks {', '.join(map(str, missing))} after {waited:.0f} s"
            if waited > limit_s:
                raise RuntimeError(text)
            if waited > WARN_AFTER_S and not warned:
                warned = True
                self._warn(f"{text}; waiting for at most {limit_s:.0f} s")
            time.sleep(POLL_EVERY_S)


def write_part(run: Run, snapshot: Snapshot, names: list[str], rank: int) -> None:
    """Write one rank's part: the tensors, then their index, which tells that they are in storage."""
    name, files, pieces = snapshot.manifest.name, {}, []
    tensors = zip(keys_of(snapshot.state, names), tensors_in(snapshot.state), snapshot.places, strict=True)
    # Rank 0 writes what is not cut; of a tensor with fewer rows than there are ranks, the last ranks have nothing.
    mine = [
        (key, tensor, place or Place(tuple(tensor.shape), (0,) * tensor.ndim))
        for key, tensor, place in tensors
        if rank == 0 or (place and tensor.numel())
    ]
    for number, kind in enumerate(KINDS):
        file = f"__{rank}_{number}.distcp"

        def write(writer: Writer, file: str = file, kind: str = kind) -> None:
            for key, tensor, place in mine:
                if key.startswith(f"{kind}."):
                    begin = writer.size
                    torch.save(tensor, writer)  # type: ignore[arg-type]  # it needs only write()
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    extent = (list(place.shape), list(place.offset), list(tensor.shape))
                    pieces.append(Piece(key, dtype, *extent, file, begin, writer.size - begin))

        files[file] = upload(run, name, file, write)
    index = {"files": files, "tensors": [piece._asdict() for piece in pieces]}
    run.storage.write(run.key("checkpoints", name, INDEX.format(rank)), to_json(index))


def write_common(run: Run, snapshot: Snapshot, names: list[str], world_size: int) -> Files:
    """Write the files common to all ranks, once all parts are there; returns the files of the whole checkpoint."""
    name = snapshot.manifest.name
    listed = {entry.key.rpartition("/")[2]: entry for entry in run.storage.list(run.key("checkpoints", name))}
    files: Files = {}
    pieces: list[Piece] = []
    for rank in range(world_size):
        file = INDEX.format(rank)
        content = run.storage.read(run.key("checkpoints", name, file))
        index = json.loads(content)
        files |= index["files"]
        files[file] = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "version": listed[file].version,
        }
        pieces += [Piece(**piece) for piece in index["tensors"]]
    for file, written in files.items():
        if file not in listed or (listed[file].size, listed[file].version) != (written["size"], written["version"]):
            raise DamageError(f"{run.storage.locate(run.key('checkpoints', name, file))}: changed after it was written")
    metadata = make_metadata(pieces)
    files[METADATA] = upload(run, name, METADATA, lambda writer: pickle.dump(metadata, writer))  # type: ignore[arg-type]
    outline = make_outline(snapshot.state, names)
    extra_state = {**snapshot.extra_state, "state": outline}
    files["extra_state.pt"] = upload_state(run, name, "extra_state.pt", extra_state)
    if snapshot.manifest.finished:
        written_so_far = replace(snapshot.manifest, files=files)
        model = _read_whole(run, written_so_far, pieces, outline["model"])
        files["model.pt"] = upload_state(run, name, "model.pt", model)
    return files


def make_metadata(pieces: Sequence[Piece]) -> Metadata:
    """The metadata that torch.distributed.checkpoint reads; raises `DamageError` when a piece is missing."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # what torch's own reader finds in .metadata
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for piece in pieces:
        properties = TensorProperties(dtype=getattr(torch, piece.dtype))
        tensor = tensors.setdefault(piece.name, TensorStorageMetadata(properties, torch.Size(piece.shape), []))
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.lengths)))
        storage[MetadataIndex(piece.name, piece.offset)] = _StorageInfo(piece.file, piece.begin, piece.size)
    for name, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise DamageError(f"{name}: its pieces do not make up the whole tensor of shape {list(tensor.size)}")
    return Metadata(tensors, storage_data=storage)


# --------------------------------------------------------------------------------------------------------- reading


def is_sharded(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was written in parts."""
    return INDEX.format(0) in checkpoint.files


def load_model(run: Run, checkpoint: Checkpoint) -> Any:
    """The model's whole state_dict, on the CPU, from `model.pt` or from parts; raises `DamageError`."""
    if "model.pt" in checkpoint.files:
        return load_state(run, checkpoint, "model.pt")
    return load_whole(run, checkpoint, ["model"])["model"]


def load_whole(run: Run, checkpoint: Checkpoint, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """The whole state_dicts of a checkpoint in parts, by their kinds, on the CPU; raises `DamageError`."""
    pieces, outline = _read_pieces(run, checkpoint), load_state(run, checkpoint, "extra_state.pt")["state"]
    return {kind: _read_whole(run, checkpoint, pieces, outline[kind]) for kind in kinds}


def load_parts(run: Run, checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's part of a sharded model and its optimizer, however many ranks wrote the checkpoint.

    Raises `DamageError`, or `ConflictError` when the checkpoint is of another model.
    """
    pieces, outline = _read_pieces(run, checkpoint), load_state(run, checkpoint, "extra_state.pt")["state"]
    own = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    parameters = parameters_of(optimizer)
    owners = {
        key: parameters[number]
        for number, values in outline["optimizer"]["state"].items()
        if number < len(parameters)
        for key in _leaves(values)
        if isinstance(key, str)
    }

    def place(piece: Piece) -> torch.Tensor:
        like = own.get(piece.name, owners.get(piece.name))
        if like is None or list(like.shape) != piece.shape:
            return torch.empty(piece.shape, dtype=getattr(torch, piece.dtype))
        return like if piece.name in own else torch.empty_like(like.detach(), dtype=getattr(torch, piece.dtype))

    tensors = {piece.name: place(piece) for piece in pieces}
    _read(run, checkpoint, pieces, tensors)
    load_weights(model, _fill(outline["model"], tensors), checkpoint.name)
    optimizer.load_state_dict(_fill(outline["optimizer"], tensors))


def weights_digest(checkpoint: Checkpoint) -> str:
    """A SHA-256 that identifies the weights of a checkpoint."""
    if "model.pt" in checkpoint.files:
        return str(checkpoint.files["model.pt"]["sha256"])
    ending = f"_{KINDS.index('model')}.distcp"
    parts = sorted((file, entry["sha256"]) for file, entry in checkpoint.files.items() if file.endswith(ending))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_pieces(run: Run, checkpoint: Checkpoint) -> list[Piece]:
    indexes = sorted(file for file in checkpoint.files if re.fullmatch(r"part-\d+\.json", file))
    return [Piece(**piece) for file in indexes for piece in json.loads(read_file(run, checkpoint, file))["tensors"]]


def _read_whole(run: Run, checkpoint: Checkpoint, pieces: Sequence[Piece], outline: Any) -> Any:
    """The state that `outline` describes, with whole tensors."""
    named = set(_leaves(outline))
    wanted = [piece for piece in pieces if piece.name in named]
    tensors = {piece.name: torch.empty(piece.shape, dtype=getattr(torch, piece.dtype)) for piece in wanted}
    _read(run, checkpoint, wanted, tensors)
    return _fill(outline, tensors)


def _read(run: Run, checkpoint: Checkpoint, pieces: Sequence[Piece], into: dict[str, torch.Tensor]) -> None:
    """Fill tensors (whole ones and DTensors) by name; torch's planner finds the pieces that cover them.

    Files are read whole, one at a time: only bytes that were checked are loaded.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, make_metadata(pieces))
    by_offset = {(piece.name, tuple(piece.offset)): piece for piece in pieces}
    by_file: dict[str, list[tuple[ReadItem, Piece]]] = {}
    for item in planner.create_local_plan().items:
        piece = by_offset[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
        by_file.setdefault(piece.file, []).append((item, piece))
    for file, items in by_file.items():
        content = memoryview(read_file(run, checkpoint, file))
        for item, piece in items:
            bytes_of_piece = io.BytesIO(content[piece.begin : piece.begin + piece.size])
            tensor = torch.load(bytes_of_piece, map_location="cpu", weights_only=True)
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, offset, length)
            planner.resolve_tensor(item).detach().copy_(tensor)


# ----------------------------------------------------------------------------------------- tensors and their names


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which its state_dict numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters_of(optimizer)]


def keys_of(state: Mapping[str, Any], names: list[str]) -> list[str]:
    """The name of each tensor of `model` and `optimizer`, in the order of `tensors_in`."""
    keys = []
    for path in _paths(state):
        if path[:2] == ("optimizer", "state"):
            path = (*path[:2], names[path[2]], *path[3:])
        keys.append(".".join(map(str, path)))
    return keys


def make_outline(state: Mapping[str, Any], names: list[str]) -> Any:
    """The state with each tensor replaced by its name."""
    keys = iter(keys_of(state, names))
    return map_tensors(state, lambda _: next(keys))  # type: ignore[arg-type, return-value]  # a name for each tensor


def _fill(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `make_outline` was given, with these tensors."""
    if isinstance(outline, Mapping):
        return {key: _fill(item, tensors) for key, item in outline.items()}
    if isinstance(outline, (list, tuple)):
        return type(outline)(_fill(item, tensors) for item in outline)
    return tensors.get(outline, outline) if isinstance(outline, str) else outline


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each tensor, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _paths(item, (*path, number))
