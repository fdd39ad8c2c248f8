"""A checkpoint's files: uploaded and verified, and loaded only with the bytes that the manifest lists.

With WEIGHTS=safetensors a finished run's last checkpoint also has its whole weights in that form: files of at most
SHARD_BYTES, with the index that Hugging Face reads. Resuming never needs them: they are for other programs, and for
INIT_FROM.
"""

import contextlib
import io
import json
import reprlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol

import torch

from sunspot.background import map_parallel
from sunspot.checkpoint.snapshot import MoreFiles, Snapshot
from sunspot.checkpoint.tensors import leaves_of, map_tensors
from sunspot.errors import ConflictError, DamageError, SettingsError, shorten
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.storage import Storage
from sunspot.storage.base import Writer

Files = dict[str, dict[str, Any]]
"""The files of a manifest (`Checkpoint.files`)."""

SHARD_BYTES = 1 << 30
"""Largest file, unless a single tensor is larger: it is in memory twice while it is written."""

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"

# PyTorch's own CRC-32 of each tensor, at 1.3 GB/s the slowest part of `torch.save`, is read by nothing: a file counts
# with the SHA-256 in its manifest. There is one switch for the process, so it is set once and not around each call.
torch.serialization.set_crc32_options(False)


class SnapshotWriter(Protocol):
    """Writes some of a checkpoint's files."""

    def files(self, snapshot: Snapshot) -> Files:
        """Write and verify them; returns their entries in the manifest."""


class WholeState:
    """Writes the files of a snapshot that holds the whole state."""

    def __init__(self, run: Run, safetensors: bool = False, more_files: MoreFiles | None = None) -> None:
        self._run, self._safetensors, self._more_files = run, safetensors, more_files

    def files(self, snapshot: Snapshot) -> Files:
        run, name, model = self._run, snapshot.manifest.name, snapshot.state["model"]
        states = {
            "model.pt": model,
            "optimizer.pt": snapshot.state["optimizer"],
            "extra_state.pt": snapshot.extra_state,
        }
        entries = map_parallel(lambda file: upload_state(run, name, file, states[file]), states)
        files = dict(zip(states, entries, strict=True))
        if self._safetensors and snapshot.manifest.finished:
            for file, tensors in plan_shards(model).items():
                files[file] = upload_shard(run, name, file, {tensor: model[tensor] for tensor in tensors})
            files |= upload_index(run, name, model)
        if self._more_files:
            more = self._more_files(model)
            files |= {file: upload_bytes(run, name, file, content) for file, content in more.items()}
        return files


def upload(run: Run, name: str, file: str, write: Callable[[Writer], Any]) -> dict[str, Any]:
    """Stream one file of a checkpoint to storage, and check that it arrived, as an acknowledged upload may be lost.

    It is read back unless storage has verified what it got. Returns its entry in the manifest; raises `DamageError`
    when it is not there, or other bytes are.
    """
    key = run.key("checkpoints", name, file)
    with run.storage.writer(key) as writer:
        write(writer)
    size, sha256 = writer.size, writer.sha256
    if not writer.verified and run.storage.digest(key) != (size, sha256):
        raise DamageError(f"{run.storage.locate(key)}: other bytes came back than the {size} that were written")
    listed = [entry for entry in run.storage.list(key) if entry.key == key]
    if not listed or listed[0].size != size:
        raise DamageError(f"{run.storage.locate(key)}: gone after it was written, or cut off")
    return {"size": size, "sha256": sha256, "version": listed[0].version}


def upload_state(run: Run, name: str, file: str, state: Any) -> dict[str, Any]:
    """Upload a state, serialized by `torch.save`, like `upload`."""
    return upload(run, name, file, lambda writer: torch.save(state, writer))  # type: ignore[arg-type]  # write() is all


def upload_bytes(run: Run, name: str, file: str, content: bytes) -> dict[str, Any]:
    """Upload a file with this content, like `upload`."""
    return upload(run, name, file, lambda writer: writer.write(content))


def plan_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Plan which tensors each file has, by names, in their order; the tensors may be on the meta device."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    count = len(shards)
    if count == 1:
        return {f"model{SUFFIX}": shards[0]}
    return {f"model-{number:05d}-of-{count:05d}{SUFFIX}": names for number, names in enumerate(shards, start=1)}


def upload_shard(run: Run, name: str, file: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write one file of a checkpoint."""
    from safetensors.torch import save  # here and below, as few processes need it

    return upload_bytes(run, name, file, save(tensors, metadata={"format": "pt"}))


def upload_index(run: Run, name: str, tensors: Mapping[str, torch.Tensor]) -> Files:
    """Write the index of the files, which names that of each tensor; none for a single file."""
    shards = plan_shards(tensors)
    if len(shards) == 1:
        return {}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {tensor: file for file, names in shards.items() for tensor in names},
    }
    file = f"model{INDEX_SUFFIX}"
    return {file: upload_bytes(run, name, file, json.dumps(index, indent=2).encode())}


def refuse_unloadable(states: Mapping[str, Any], task: str) -> None:
    """Raise `SettingsError` for states that could be saved and verified, but that no restart could load.

    It names the first value in them that `unpack` would refuse.
    """
    plain = map_tensors(states, lambda _: None)
    if _comes_back(plain):
        return
    keys, value = next((leaf for leaf in leaves_of(plain) if not _comes_back(leaf[1])), (("its state",), plain))
    raise SettingsError(
        f"SUNSPOT_TASK={task}: {'.'.join(map(str, keys))} is a {type(value).__module__}.{type(value).__qualname__}, "
        f"{reprlib.repr(value)}, which no restart could load from a checkpoint; make it a tensor, a number of Python's "
        "own such as float(...), a string, or a dict, list or tuple of these"
    )


def _comes_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        unpack(file)
    except Exception:  # what cannot be pickled raises of all kinds, too
        return False
    return True


def refuse_other_than_tensors(model: torch.nn.Module) -> None:
    """Raise `SettingsError` for a model whose state_dict safetensors cannot hold."""
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]:
        raise SettingsError(
            f"SUNSPOT_WEIGHTS=safetensors: the model's state_dict has {', '.join(others)}, which are no tensors; "
            "set it to pt"
        )


def read_file(run: Run, checkpoint: Checkpoint, file: str) -> bytearray:
    """Read all bytes of a checkpoint's file; raises `DamageError` when they do not match the manifest."""
    key, content = run.key("checkpoints", checkpoint.name, file), bytearray()
    if run.storage.digest(key, content.extend)[1] != checkpoint.files[file]["sha256"]:
        raise DamageError(f"{run.storage.locate(key)}: does not match its manifest")
    return content


def load_state(run: Run, checkpoint: Checkpoint, file: str) -> Any:
    """Load one file of a checkpoint on the CPU, checked against the manifest; raises `DamageError`.

    The bytes that were checked are the bytes that are loaded.
    """
    return load_checked(run, checkpoint, file, io.BytesIO(read_file(run, checkpoint, file)))


def load_checked(run: Run, checkpoint: Checkpoint, file: str, source: BinaryIO | str) -> Any:
    """Load a file whose bytes in `source` are those of the manifest, so that it is not damaged.

    Raises `ConflictError` when it cannot be loaded.
    """
    try:
        return unpack(source)
    except ValueError as error:
        raise ConflictError(
            f"{run.storage.locate(run.key('checkpoints', checkpoint.name, file))}: not loaded: as it was saved, it "
            "is compressed, or holds more than tensors and plain values; begin a run of another name, with the weights "
            f"of this one by SUNSPOT_INIT_FROM=run:{run.name}"
        ) from error


def unpack(source: BinaryIO | str) -> Any:
    """Load what `torch.save` wrote, on the CPU. Raises `ValueError` for anything but tensors and plain values.

    No code in `source` is run, and nothing is decompressed. If `source` is a path, the tensors are private mappings of
    the file's pages; a file that cannot be mapped is read.
    """
    try:
        refuse_compressed(source)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
    except Exception as error:  # of a damaged file, all kinds; torch's own text advises loading it without the check
        if isinstance(source, str):
            with open(source, "rb") as file:
                return unpack(file)
        raise ValueError(
            "not loaded: it is damaged, compressed, or holds more than tensors and plain values"
        ) from error


def refuse_compressed(source: BinaryIO | str) -> None:
    """Raise `ValueError` for a ZIP archive whose members are compressed or overlap.

    `torch.save` does not compress. An archive of a few kilobytes could otherwise fill any memory. A file that is not an
    archive passes.
    """
    with open(source, "rb") if isinstance(source, str) else contextlib.nullcontext(source) as file:
        if zipfile.is_zipfile(file):
            members = zipfile.ZipFile(file).infolist()
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if compressed or sum(member.file_size for member in members) > file.seek(0, io.SEEK_END):
                raise ValueError("its members are compressed, or overlap")
        file.seek(0)


def load_weights(model: torch.nn.Module, state: Any, origin: str) -> None:
    """Load a state_dict into the model; raises `ConflictError` naming its `origin` when it does not fit."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"{origin}: its weights do not fit the model that the task builds: {shorten(error)}"
        ) from error


def read_weights(storage: Storage, file: str, content: bytearray) -> Any:
    """Return the state_dict in a file with this `content`, or in the files that are named if it is an index.

    Raises `ValueError` for anything else.
    """
    if file.endswith(SUFFIX):
        return _load(bytes(content))
    if not file.endswith(INDEX_SUFFIX):
        return unpack(io.BytesIO(content))
    try:
        files = sorted(set(json.loads(content)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not an index of safetensors files") from error
    if outside := [name for name in files if "/" in name or not name.endswith(SUFFIX)]:
        raise ValueError(f"its index names {outside[0]}, which is no safetensors file beside it")
    return {key: tensor for name in files for key, tensor in _load(storage.read(name)).items()}


def _load(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError("damaged, or no safetensors") from error
