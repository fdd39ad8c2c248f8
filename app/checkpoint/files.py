"""A checkpoint's files: uploaded and verified, and loaded only with the bytes that the manifest lists."""

import io
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from app.checkpoint.snapshot import Snapshot
from app.errors import ConflictError, DamageError, shorten
from app.run import Run
from app.run.checkpoints import Checkpoint
from app.storage.base import Writer, map_parallel

Files = dict[str, dict[str, Any]]
"""The files of a manifest (`Checkpoint.files`)."""


# PyTorch's own CRC-32 of each tensor, at 1.3 GB/s the slowest part of `torch.save`, is read by nothing: a file counts
# with the SHA-256 in its manifest. There is one switch for the process, so it is set once and not around each call.
torch.serialization.set_crc32_options(False)


def write_whole(run: Run, snapshot: Snapshot) -> Files:
    """Write the files of a snapshot that holds the whole state, all at once."""
    name = snapshot.manifest.name
    states = {
        "model.pt": snapshot.state["model"],
        "optimizer.pt": snapshot.state["optimizer"],
        "extra_state.pt": snapshot.extra_state,
    }
    return dict(
        zip(states, map_parallel(lambda file: upload_state(run, name, file, states[file]), states), strict=True)
    )


def upload(run: Run, name: str, file: str, write: Callable[[Writer], Any]) -> dict[str, Any]:
    """Stream one file of a checkpoint to storage, and check that it arrived, as an acknowledged upload may be lost.

    It is read back unless storage has verified what it got. Returns its entry in the manifest; raises `DamageError`
    when it is not there, or other bytes are.
    """
    with run.storage.writer(run.key("checkpoints", name, file)) as writer:
        write(writer)
    return describe_arrived(run, name, file, writer.size, writer.sha256, verified=writer.verified)


def describe_arrived(run: Run, name: str, file: str, size: int, sha256: str, *, verified: bool) -> dict[str, Any]:
    """The manifest's entry of a file that was uploaded, like `upload`."""
    key = run.key("checkpoints", name, file)
    if not verified and run.storage.digest(key) != (size, sha256):
        raise DamageError(f"{run.storage.locate(key)}: other bytes came back than the {size} that were written")
    listed = [entry for entry in run.storage.list(key) if entry.key == key]
    if not listed or listed[0].size != size:
        raise DamageError(f"{run.storage.locate(key)}: gone after it was written, or cut off")
    return {"size": size, "sha256": sha256, "version": listed[0].version}


def upload_state(run: Run, name: str, file: str, state: Any) -> dict[str, Any]:
    """`upload` a state, serialized by `torch.save`."""
    return upload(run, name, file, lambda writer: torch.save(state, writer))  # type: ignore[arg-type]  # write() is all


def read_file(run: Run, checkpoint: Checkpoint, file: str) -> bytearray:
    """All bytes of a checkpoint's file; raises `DamageError` when they do not match the manifest."""
    key, content = run.key("checkpoints", checkpoint.name, file), bytearray()
    if run.storage.digest(key, content.extend)[1] != checkpoint.files[file]["sha256"]:
        raise DamageError(f"{run.storage.locate(key)}: does not match its manifest")
    return content


def load_state(run: Run, checkpoint: Checkpoint, file: str) -> Any:
    """Load one file of a checkpoint on the CPU, checked against the manifest; raises `DamageError`.

    The bytes that were checked are the bytes that are loaded.
    """
    content = read_file(run, checkpoint, file)
    try:
        return unpack(io.BytesIO(content))
    except ValueError as error:
        raise DamageError(f"{run.storage.locate(run.key('checkpoints', checkpoint.name, file))}: {error}") from error


def unpack(source: BinaryIO | str) -> Any:
    """What `torch.save` wrote, on the CPU; raises `ValueError` for anything but tensors and plain values.

    No code in it is run. Of a file given by its path, the tensors are its pages, which change for this process alone.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
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
