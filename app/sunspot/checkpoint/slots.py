"""Slots: files in shared memory that hold a copy of the training state, or of one worker's part of it.

A copy counts once a marker, with step and checksum, stands beside it.
"""

import contextlib
import io
import logging
import mmap
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sunspot.errors import DamageError
from sunspot.log import warn_once
from sunspot.run.attempts import checkpoint_name, nonce_of
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.objects import Count, Moment, parse_verified, with_checksum
from sunspot.shared_pages import Pages, map_pages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete copy in this machine's shared memory, as its marker describes it."""

    attempt: Count
    step: Count
    evaluated: bool
    "Whether an epoch that ends at this step has been evaluated."
    time: Moment
    "When the step had been taken, in seconds since the epoch."
    size: Count
    crc32: Count
    "Of the tensors' bytes: the same on every node that holds this step."
    file: str
    nonce: str
    "Of the attempt (`Attempt.nonce`)."
    rest_crc32: Count = 0
    "Of what lies beside the tensors."
    part: Count = 0
    "The rank whose part of the state it is."
    parts: Count = 0
    "How many make up the state; 0: it is the whole state."

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that it is a copy of, whether or not that was committed."""
        return checkpoint_name(self.step, self.attempt, self.nonce)


class Slot:
    """Room for one copy: a file in shared memory, or memory of this process alone."""

    def __init__(self, size: int, file: Path | None) -> None:
        self.size, self.file = size, file
        self.uploading = False
        "Whether the commit thread still needs it."
        self.sealing = False
        "Whether its copy is not complete yet."
        if file is None:
            self.map = mmap.mmap(-1, max(1, size))
        else:
            with file.open("a+b") as opened:
                # Reserves the pages: writing to a full file system through a map would end the process (SIGBUS).
                os.posix_fallocate(opened.fileno(), 0, max(1, size))
                self.map = mmap.mmap(opened.fileno(), max(1, size))
        self._pinned = False

    @property
    def busy(self) -> bool:
        """Whether its copy is still being made, or uploaded."""
        return self.uploading or self.sealing

    def pin(self) -> None:
        """Lock its pages, so that a GPU copies into them without the CPU; raises `OSError`, once, when CUDA refuses."""
        if self._pinned:
            return
        self._pinned = True
        address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        cudart = torch.cuda.cudart()
        refusal = cudart.cudaHostRegister(address, self.size, 0)
        if int(refusal):
            with contextlib.suppress(RuntimeError):  # CUDA would blame the next kernel for it
                torch.zeros(1, device="cuda")
            raise OSError(cudart.cudaGetErrorString(refusal))

    def unmark(self) -> None:
        """Its content is about to change: it no longer holds a copy."""
        if self.file:
            _marker(self.file).unlink(missing_ok=True)

    def mark(
        self,
        manifest: Checkpoint,
        rest: bytes,
        part: int = 0,
        parts: int = 0,
        changed: Callable[[], Collection[int]] = tuple,
    ) -> MemorySnapshot:
        """Its copy is complete: write `rest` beside it, and the marker last.

        Raises `DamageError` when something has `changed` while it was copied. That is asked for after the checksum: a
        change that was under way at the end of the copy has been counted by then.
        """
        snapshot = MemorySnapshot(
            attempt=manifest.attempt,
            step=manifest.step,
            evaluated=manifest.evaluated,
            time=manifest.time,
            size=self.size,
            crc32=self._crc32(),
            file=str(self.file),
            nonce=nonce_of(manifest.name),
            rest_crc32=zlib.crc32(rest),
            part=part,
            parts=parts,
        )
        if changed():
            raise DamageError("weights changed while they were copied, and not by the optimizer")
        self._write_marker(snapshot, rest)
        return snapshot

    def adopt(self, snapshot: MemorySnapshot, rest: bytes) -> None:
        """Its bytes and `rest` came from another worker's slot: mark them, too; raises `DamageError` for others."""
        if self._crc32() != snapshot.crc32 or zlib.crc32(rest) != snapshot.rest_crc32:
            raise DamageError(f"the part of rank {snapshot.part} did not arrive as it was sent")
        self._write_marker(replace(snapshot, file=str(self.file)), rest)

    def _crc32(self) -> int:
        return zlib.crc32(memoryview(self.map)[: self.size])

    def _write_marker(self, snapshot: MemorySnapshot, rest: bytes) -> None:
        assert self.file
        self.file.with_suffix(".rest").write_bytes(rest)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_bytes(with_checksum(asdict(snapshot)))
        temporary.rename(_marker(self.file))


class LoadedSnapshot(NamedTuple):
    """A copy in this machine's shared memory, read and checked."""

    held: MemorySnapshot
    data: torch.Tensor
    "The tensors' bytes, uint8 [size]."
    rest: dict[str, Any]
    "Beside them: `structure`, `about` (the manifest) and `ledger`."
    pages: Pages
    "Where `data` lies."


def read_snapshot(held: MemorySnapshot) -> LoadedSnapshot:
    """Read and check a copy; raises `OSError` or `DamageError` when it is damaged, or was replaced meanwhile."""
    with open(held.file, "rb") as file:
        if os.fstat(file.fileno()).st_size < held.size:
            raise DamageError("it is cut off")
        pages = Pages(held.size)
        data = map_pages(pages.path, held.size, shared=True)
        file.readinto(as_bytes(data))
    rest = Path(held.file).with_suffix(".rest").read_bytes()
    if zlib.crc32(as_bytes(data)) != held.crc32 or zlib.crc32(rest) != held.rest_crc32:
        raise DamageError("its bytes are not those that were marked")
    return LoadedSnapshot(held, data, torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True), pages)


def as_bytes(data: torch.Tensor) -> memoryview:
    """A uint8 tensor's bytes, without a copy."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer


def _marker(file: Path) -> Path:
    return file.with_suffix(".json")


def list_snapshots(directory: Path) -> Iterator[MemorySnapshot]:
    """The complete copies in a directory; those just being replaced are skipped."""
    for marker in directory.glob("*.json"):
        try:
            yield _read_marker(marker)
        except OSError:
            continue
        except DamageError as error:
            warn_once(log, str(error))


def _read_marker(marker: Path) -> MemorySnapshot:
    """The copy that a marker describes, which must be the one beside it; raises `OSError` or `DamageError`."""
    snapshot: MemorySnapshot = parse_verified(MemorySnapshot, marker.read_bytes(), str(marker))
    if snapshot.file != str(marker.with_suffix(".data")):
        raise DamageError(f"{marker} cannot be used: it describes another file")
    return snapshot


def position(snapshot: MemorySnapshot) -> tuple[int, int]:
    return snapshot.attempt, snapshot.step
