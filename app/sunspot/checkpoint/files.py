"""A checkpoint's files: uploaded and verified, and loaded only with the bytes that the manifest lists."""

import io
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol

import torch

from sunspot.background import map_parallel
from sunspot.checkpoint.snapshot import Snapshot
from sunspot.checkpoint.tensors import leaves_of, map_tensors
from sunspot.errors import ConflictError, DamageError, SettingsError, shorten
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.storage.base import Writer

Files = dict[str, dict[str, Any]]
"""The files of a manifest (`Checkpoint.files`)."""


# PyTorch's own CRC-32 of each tensor, at 1.3 GB/s the slowest part of `torch.save`, is read by nothing: a file counts
# with the SHA-256 in its manifest. There is one switch for the process, so it is set once and not around each call.
torch.serialization.set_crc32_options(False)


class SnapshotWriter(Protocol):
    """Writes some of a checkpoint's files."""

    def files(self, snapshot: Snapshot) -> Files:
        """Write and verify them; returns their entries in the manifest."""


class WholeState:
    """Writes the files of a snapshot that holds the whole state."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def files(self, snapshot: Snapshot) -> Files:
        name = snapshot.manifest.name
        states = {
            "model.pt": snapshot.state["model"],
            "optimizer.pt": snapshot.state["optimizer"],
            "extra_state.pt": snapshot.extra_state,
        }
        entries = map_parallel(lambda file: upload_state(self._run, name, file, states[file]), states)
        return dict(zip(states, entries, strict=True))


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
            "holds more than tensors and plain values; begin a run of another name, with the weights of this one by "
            f"SUNSPOT_INIT_FROM=run:{run.name}"
        ) from error


def unpack(source: BinaryIO | str) -> Any:
    """Return what `torch.save` wrote, on the CPU; raises `ValueError` for anything but tensors and plain values.

    No code in it is run. Of a file given by its path, the tensors are its pages, which change for this process alone;
    one that cannot be mapped is read.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
    except Exception as error:  # of a damaged file, all kinds; torch's own text advises loading it without the check
        if isinstance(source, str):
            with open(source, "rb") as file:
                return unpack(file)
        raise ValueError("not loaded: it is damaged, or holds more than tensors and plain values") from error


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


def load_weights(model: torch.nn.Module, state: Any, origin: str) -> None:
    """Load a state_dict into the model; raises `ConflictError` naming its `origin` when it does not fit."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"{origin}: its weights do not fit the model that the task builds: {shorten(error)}"
        ) from error
