"""Uploads and verifies a checkpoint's files, and loads files only if their bytes match the manifest.

With WEIGHTS=safetensors, a finished run's last checkpoint also contains all weights as safetensors files of at most
SHARD_BYTES, with an index in Hugging Face's format. These files are for other programs and for INIT_FROM, and are never
needed to resume.
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
"""The entries of files in a manifest (`Checkpoint.files`)."""

SHARD_BYTES = 1 << 30
"""Maximum size of a file in bytes, unless a single tensor is larger. While a file is written, memory holds it twice."""

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"

# At 1.3 GB/s, PyTorch's CRC-32 of each tensor is the slowest part of `torch.save`. The CRC is not needed, because files
# are verified by the SHA-256 in the manifest. The option is global, so it is set once instead of around each call.
torch.serialization.set_crc32_options(False)


class SnapshotWriter(Protocol):
    """Writes some of a checkpoint's files."""

    def files(self, snapshot: Snapshot) -> Files:
        """Write and verify the files, and return their entries for the manifest."""


class WholeStateWriter:
    """Writes all files of a snapshot whose state is not sharded."""

    def __init__(self, run: Run, safetensors: bool = False, more_files: MoreFiles | None = None) -> None:
        self._run = run
        self._safetensors = safetensors
        self._more_files = more_files

    def files(self, snapshot: Snapshot) -> Files:
        run = self._run
        name = snapshot.manifest.name
        model = snapshot.state["model"]
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
    """Stream a checkpoint's file to storage, verify it, and return its entry for the manifest.

    The file is read back unless storage has verified its bytes, because even an acknowledged upload can be lost. Raises
    `DamageError` if the file is missing or has different bytes.
    """
    key = run.key("checkpoints", name, file)
    with run.storage.writer(key) as writer:
        write(writer)
    size = writer.size
    sha256 = writer.sha256
    if not writer.verified and run.storage.digest(key) != (size, sha256):
        raise DamageError(
            f"{run.storage.locate(key)}: the bytes read back differ from the {size} bytes that were written"
        )
    listed = [entry for entry in run.storage.list(key) if entry.key == key]
    if not listed or listed[0].size != size:
        raise DamageError(f"{run.storage.locate(key)} was written, but it is now missing or truncated")
    return {"size": size, "sha256": sha256, "version": listed[0].version}


def upload_state(run: Run, name: str, file: str, state: Any) -> dict[str, Any]:
    """Serialize a state with `torch.save`, upload it, and return the file's entry for the manifest."""
    return upload(run, name, file, lambda writer: torch.save(state, writer))  # type: ignore[arg-type]  # only write() is called


def upload_bytes(run: Run, name: str, file: str, content: bytes) -> dict[str, Any]:
    """Upload a file with the given content, and return its entry for the manifest."""
    return upload(run, name, file, lambda writer: writer.write(content))


def plan_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors to store in each file, in order. The tensors can be on the meta device."""
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
    """Upload tensors as one safetensors file of a checkpoint, and return its entry for the manifest."""
    from safetensors.torch import save  # imported lazily, here and below, because few processes need it

    return upload_bytes(run, name, file, save(tensors, metadata={"format": "pt"}))


def upload_index(run: Run, name: str, tensors: Mapping[str, torch.Tensor]) -> Files:
    """Upload the index that maps tensors to files. If there is only one file, return {} without an upload."""
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
    """Raise `SettingsError` if a restart could not load the `states` from a checkpoint.

    The error describes the first value that `unpack` would reject.
    """
    plain = map_tensors(states, lambda _: None)
    if _can_be_loaded(plain):
        return
    keys, value = next((leaf for leaf in leaves_of(plain) if not _can_be_loaded(leaf[1])), (("its state",), plain))
    raise SettingsError(
        f"SUNSPOT_TASK={task}: {'.'.join(map(str, keys))} is a {type(value).__module__}.{type(value).__qualname__} "
        f"({reprlib.repr(value)}), which cannot be loaded from a checkpoint; use a tensor, a plain Python number such "
        "as float(...), a string, or a dict, list or tuple of these"
    )


def _can_be_loaded(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        unpack(file)
    except Exception:  # pickling unsupported values raises many kinds of errors
        return False
    return True


def refuse_other_than_tensors(model: torch.nn.Module) -> None:
    """Raise `SettingsError` if safetensors cannot store the model's state_dict."""
    others = [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]
    if others:
        raise SettingsError(
            f"SUNSPOT_WEIGHTS=safetensors only supports tensors, but the model's state_dict also contains "
            f"{', '.join(others)}; set SUNSPOT_WEIGHTS to pt"
        )


def read_file(run: Run, checkpoint: Checkpoint, file: str) -> bytearray:
    """Return the bytes of a checkpoint's file. Raises `DamageError` if they do not match the manifest."""
    key = run.key("checkpoints", checkpoint.name, file)
    content = bytearray()
    if run.storage.digest(key, content.extend)[1] != checkpoint.files[file]["sha256"]:
        raise DamageError(f"{run.storage.locate(key)} does not match the manifest")
    return content


def load_state(run: Run, checkpoint: Checkpoint, file: str) -> Any:
    """Load a checkpoint's file on the CPU. Raises `DamageError` if its bytes do not match the manifest.

    The file is read only once, so exactly the verified bytes are loaded.
    """
    return load_checked(run, checkpoint, file, io.BytesIO(read_file(run, checkpoint, file)))


def load_checked(run: Run, checkpoint: Checkpoint, file: str, source: BinaryIO | str) -> Any:
    """Load a checkpoint's file from `source`, which has been verified against the manifest.

    Raises `ConflictError` if the intact file cannot be loaded.
    """
    try:
        return unpack(source)
    except ValueError as error:
        raise ConflictError(
            f"{run.storage.locate(run.key('checkpoints', checkpoint.name, file))} was not loaded, because it is "
            "compressed or contains more than tensors and plain values; start a run with another name and this run's "
            f"weights (SUNSPOT_INIT_FROM=run:{run.name})"
        ) from error


def unpack(source: BinaryIO | str) -> Any:
    """Load a file that was written by `torch.save`. All tensors are loaded on the CPU.

    Raises `ValueError` if the file is damaged, or contains anything but tensors and plain values. No code in `source`
    is executed, and nothing is decompressed. If `source` is a path, the tensors are private mappings of the file's
    pages, or copies if the file cannot be mapped.
    """
    try:
        refuse_compressed(source)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
    except Exception as error:  # torch raises many kinds of errors, and recommends an unsafe load
        if isinstance(source, str):
            with open(source, "rb") as file:
                return unpack(file)
        raise ValueError(
            "not loaded, because it is damaged, compressed, or contains more than tensors and plain values"
        ) from error


def refuse_compressed(source: BinaryIO | str) -> None:
    """Raise `ValueError` for a ZIP archive with compressed or overlapping members.

    `torch.save` does not compress, and a compressed archive of a few kilobytes could fill all memory. Files that are
    not ZIP archives are accepted.
    """
    with open(source, "rb") if isinstance(source, str) else contextlib.nullcontext(source) as file:
        if zipfile.is_zipfile(file):
            members = zipfile.ZipFile(file).infolist()
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if compressed or sum(member.file_size for member in members) > file.seek(0, io.SEEK_END):
                raise ValueError("the members are compressed or overlap")
        file.seek(0)


def load_weights(model: torch.nn.Module, state: Any, origin: str) -> None:
    """Load a state_dict from `origin` into a model. Raises `ConflictError` if it does not fit."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"{origin}: the weights do not fit the model that the task builds: {shorten(error)}"
        ) from error


def read_weights(storage: Storage, file: str, content: bytearray) -> Any:
    """Return the state_dict in a file with the given content. If the file is an index, read the listed files too.

    Raises `ValueError` if the content is invalid.
    """
    if file.endswith(SUFFIX):
        return _load(bytes(content))
    if not file.endswith(INDEX_SUFFIX):
        return unpack(io.BytesIO(content))
    return {key: tensor for name in files_in_index(content) for key, tensor in _load(storage.read(name)).items()}


def files_in_index(content: bytes | bytearray) -> list[str]:
    """Return the names of the safetensors files in an index. Raises `ValueError` if the index is invalid."""
    try:
        files = sorted(set(json.loads(content)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("the file is not an index of safetensors files") from error
    outside = [name for name in files if "/" in name or not name.endswith(SUFFIX)]
    if outside:
        raise ValueError(f"the index lists {outside[0]}, which is not a safetensors file in the same folder")
    return files


def _load(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError("it is damaged, or not a safetensors file") from error
