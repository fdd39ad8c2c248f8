"""A finished run's whole weights as safetensors: files of at most SHARD_BYTES, with the index that Hugging Face reads.

Resuming never needs them: they are for other programs, and for INIT_FROM.
"""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from sunspot.checkpoint.files import Files, unpack, upload
from sunspot.checkpoint.snapshot import MoreFiles, Snapshot
from sunspot.errors import SettingsError
from sunspot.run import Run
from sunspot.storage import Storage

SHARD_BYTES = 1 << 30
"""Largest file, unless a single tensor is larger: it is in memory twice while it is written."""

SUFFIX = ".safetensors"

WEIGHTS_INDEX = f"model{SUFFIX}.index.json"
"""Names the file of each tensor, if there are several files."""


def plan_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Plan which tensors each file has, by names, in their order; the tensors may be on the meta device."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = size_of(tensor)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    several, count = len(shards) > 1, len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}{SUFFIX}" if several else f"model{SUFFIX}": names
        for number, names in enumerate(shards, start=1)
    }


def size_of(tensor: torch.Tensor) -> int:
    """Count the bytes of a whole tensor."""
    return math.prod(tensor.shape) * tensor.element_size()


def upload_shard(run: Run, name: str, file: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write one file of a checkpoint; returns its entry in the manifest."""
    from safetensors.torch import save  # here and below, as few processes need it

    content = save(tensors, metadata={"format": "pt"})
    return upload(run, name, file, lambda writer: writer.write(content))


def upload_index(run: Run, name: str, tensors: Mapping[str, torch.Tensor]) -> Files:
    """Write the index of the files; none for a single file."""
    shards = plan_shards(tensors)
    if len(shards) == 1:
        return {}
    index = {
        "metadata": {"total_size": sum(map(size_of, tensors.values()))},
        "weight_map": {tensor: file for file, names in shards.items() for tensor in names},
    }
    content = json.dumps(index, indent=2).encode()
    return {WEIGHTS_INDEX: upload(run, name, WEIGHTS_INDEX, lambda writer: writer.write(content))}


class SafetensorsWeights:
    """Writes the weights of a snapshot that holds the whole state as safetensors, for the last one of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def files(self, snapshot: Snapshot) -> Files:
        if not snapshot.manifest.finished:
            return {}
        name, model = snapshot.manifest.name, snapshot.state["model"]
        files = {
            file: upload_shard(self._run, name, file, {tensor: model[tensor] for tensor in names})
            for file, names in plan_shards(model).items()
        }
        return files | upload_index(self._run, name, model)


class TaskFiles:
    """Writes what a task adds to each snapshot that holds the whole state."""

    def __init__(self, run: Run, more_files: MoreFiles) -> None:
        self._run, self._more_files = run, more_files

    def files(self, snapshot: Snapshot) -> Files:
        return upload_more(self._run, snapshot.manifest.name, self._more_files(snapshot.state["model"]))


def upload_more(run: Run, name: str, contents: Mapping[str, bytes]) -> Files:
    """Write a task's own files of a checkpoint."""
    return {
        file: upload(run, name, file, lambda writer, content=content: writer.write(content))  # type: ignore[misc]
        for file, content in contents.items()
    }


def refuse_other_than_tensors(model: torch.nn.Module) -> None:
    """Raise `SettingsError` for a model whose state_dict safetensors cannot hold."""
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]:
        raise SettingsError(
            f"SUNSPOT_WEIGHTS=safetensors: the model's state_dict has {', '.join(others)}, which are no tensors; "
            "set it to pt"
        )


def read_weights(storage: Storage, file: str, content: bytearray) -> Any:
    """Return the state_dict in a file with this `content`, or in the files that are named if it is an index.

    Raises `ValueError` for anything else.
    """
    if file.endswith(SUFFIX):
        return _load(bytes(content))
    if not file.endswith(f"{SUFFIX}.index.json"):
        return unpack(io.BytesIO(content))
    try:
        files = sorted(set(json.loads(content)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
