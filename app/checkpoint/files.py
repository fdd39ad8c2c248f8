"""A checkpoint's files: uploaded and read back, and loaded only with the bytes that the manifest lists."""

import hashlib
import io
from collections.abc import Callable
from typing import Any

import torch

from app.checkpoint.snapshot import Snapshot
from app.errors import ConflictError, DamageError, shorten
from app.run import Run
from app.run.checkpoints import Checkpoint
from app.storage.base import Writer

Files = dict[str, dict[str, Any]]
"""The files of a manifest (`Checkpoint.files`)."""


def write_whole(run: Run, snapshot: Snapshot) -> Files:
    """Write the files of a snapshot that holds the whole state."""
    name, state = snapshot.manifest.name, snapshot.state
    return {
        "model.pt": upload_state(run, name, "model.pt", state["model"]),
        "optimizer.pt": upload_state(run, name, "optimizer.pt", state["optimizer"]),
        "extra_state.pt": upload_state(run, name, "extra_state.pt", snapshot.extra_state),
    }


def upload(run: Run, name: str, file: str, write: Callable[[Writer], Any]) -> dict[str, Any]:
    """Stream one file of a checkpoint to storage, then read it back, as an acknowledged upload may still be lost.

    Returns its entry in the manifest; raises `DamageError` when other bytes come back.
    """
    key = run.key("checkpoints", name, file)
    with run.storage.writer(key) as writer:
        write(writer)
    written = (writer.size, writer.sha256)
    arrived = run.storage.digest(key)
    if arrived != written:
        raise DamageError(f"{run.storage.locate(key)}: {arrived[0]} bytes came back of {written[0]}, or other bytes")
    versions = [entry.version for entry in run.storage.list(key) if entry.key == key]
    if not versions:
        raise DamageError(f"{run.storage.locate(key)}: gone after it was written")
    return {"size": writer.size, "sha256": writer.sha256, "version": versions[0]}


def upload_state(run: Run, name: str, file: str, state: Any) -> dict[str, Any]:
    """`upload` a state, serialized by `torch.save`."""
    return upload(run, name, file, lambda writer: torch.save(state, writer))  # type: ignore[arg-type]  # write() is all


def read_file(run: Run, checkpoint: Checkpoint, file: str) -> bytes:
    """All bytes of a checkpoint's file; raises `DamageError` when they do not match the manifest."""
    key = run.key("checkpoints", checkpoint.name, file)
    content = run.storage.read(key)
    if hashlib.sha256(content).hexdigest() != checkpoint.files[file]["sha256"]:
        raise DamageError(f"{run.storage.locate(key)}: does not match its manifest")
    return content


def load_state(run: Run, checkpoint: Checkpoint, file: str) -> Any:
    """Load one file of a checkpoint on the CPU, checked against the manifest; raises `DamageError`.

    The bytes that were checked are the bytes that are loaded.
    """
    content = read_file(run, checkpoint, file)
    try:
        return unpack(content)
    except ValueError as error:
        raise DamageError(f"{run.storage.locate(run.key('checkpoints', checkpoint.name, file))}: {error}") from error


def unpack(content: bytes) -> Any:
    """What `torch.save` wrote, on the CPU; raises `ValueError` for anything but tensors and plain values.

    No code in it is run.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file, all kinds; torch's own text advises loading it without the check
        raise ValueError("not loaded: it is damaged, or holds more than tensors and plain values") from error


def load_weights(model: torch.nn.Module, state: Any, origin: str) -> None:
    """Load a state_dict into the model; raises `ConflictError` naming its `origin` when it does not fit."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"{origin}: its weights do not fit the model that the task builds: {shorten(error)}"
        ) from error
