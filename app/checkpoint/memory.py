"""A node's shared memory, where copies of the training state outlive the worker that took them.

A copy lies in a slot: a file that gets a marker, with step and checksum, once it is complete. Each process has its own
directory below that of its run; the next process on the node finds what the one before left.
"""

import contextlib
import fcntl
import io
import json
import mmap
import os
import pickle
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from app.cgroup import memory_left
from app.run import SHARED_MEMORY, copies_of
from app.run.checkpoints import Checkpoint

MOST_SLOTS = 4
"""The newest complete copy, the one being made, and on rank 0 the one being uploaded and the one waiting for it."""

MEMORY_SHARE = 0.5
"""Part of the free shared memory that a node's first two slots may take: Ray's object store lies there too."""

STALE_S = 24 * 3600
"""Age at which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqd")
"""Attempt, step, seconds since the epoch."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete copy in this machine's shared memory, as its marker describes it."""

    attempt: int
    step: int
    evaluated: bool
    "Whether an epoch that ends at this step has been evaluated."
    time: float
    "When the step had been taken, in seconds since the epoch."
    size: int
    crc32: int
    "Of the tensors' bytes: the same on every node that holds this step."
    file: str


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

    def pin(self) -> None:
        """Lock its pages, so that a GPU copies into them without the CPU."""
        if not self._pinned:
            address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
            torch.cuda.cudart().cudaHostRegister(address, self.size, 0)
            self._pinned = True

    def unmark(self) -> None:
        """Its content is about to change: it no longer holds a copy."""
        if self.file:
            _marker(self.file).unlink(missing_ok=True)

    def mark(self, manifest: Checkpoint, rest: bytes) -> None:
        """Its copy is complete: write `rest` beside it, and the marker last."""
        assert self.file
        snapshot = MemorySnapshot(
            attempt=manifest.attempt,
            step=manifest.step,
            evaluated=manifest.evaluated,
            time=manifest.time,
            size=self.size,
            crc32=zlib.crc32(memoryview(self.map)[: self.size]),
            file=str(self.file),
        )
        self.file.with_suffix(".rest").write_bytes(rest)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({**asdict(snapshot), "rest_crc32": zlib.crc32(rest)}))
        temporary.rename(_marker(self.file))


class NodeMemory:
    """This process's directory in shared memory for the run at `location`.

    Without one (`location` None, or no room), slots are private to the process and nothing outlives it.
    """

    def __init__(self, location: str | None, warn: Callable[[str], Any] = print) -> None:
        self._warn = warn
        self._slots: list[Slot] = []
        self._newest: Slot | None = None
        self._inherited: Path | None = None
        "The newest copy of the process before, kept until there is a newer one."
        self.directory = self._lock_directory(location) if location else None
        self._heartbeat = self._open_heartbeat()

    @property
    def shared(self) -> bool:
        return self.directory is not None

    def heartbeat(self, attempt: int, step: int) -> None:
        """Record that `step` was taken: a write to memory, which outlives the process."""
        if self._heartbeat is not None:
            HEARTBEAT.pack_into(self._heartbeat, 0, attempt, step, time.time())

    def free_slot(self, size: int, needed: bool) -> Slot | None:
        """A slot of `size` bytes that nobody needs; None when there is none, unless it is `needed`."""
        self._slots = [slot for slot in self._slots if slot.size == size or slot.uploading or slot.sealing]
        for slot in self._slots:
            if slot.size == size and slot is not self._newest and not (slot.uploading or slot.sealing):
                slot.unmark()
                return slot
        if self.directory and len(self._slots) < MOST_SLOTS:
            try:
                if not self._slots:
                    self._check_room(size)
                taken = {slot.file for slot in self._slots} | {self._inherited}
                file = next(f for n in range(MOST_SLOTS + 1) if (f := self.directory / f"slot-{n}.data") not in taken)
                return self._add(size, file)
            except OSError as error:
                if len(self._slots) < 2:
                    self._give_up(f"{error.strerror or error}")
        return self._add(size, None) if needed else None

    def complete(self, slot: Slot, manifest: Checkpoint, rest: bytes) -> None:
        """Mark the copy in `slot` as complete, and as the newest."""
        if slot.file and self.directory:
            slot.mark(manifest, rest)
            if self._newest is None:
                self._remove_older()
            self._newest = slot
        slot.sealing = False

    def remove(self) -> None:
        """Remove this process's copies: nobody will resume from them."""
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process of the run is still there
                self.directory.parent.rmdir()

    def _add(self, size: int, file: Path | None) -> Slot:
        slot = Slot(size, file)
        self._slots.append(slot)
        return slot

    def _lock_directory(self, location: str) -> Path | None:
        """The run's first directory that no living process has locked; None when there is no shared memory."""
        try:
            for number in range(MOST_SLOTS * 4):
                directory = _root(location) / str(number)
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = (directory / "lock").open("w")
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._inherited = _keep_newest(directory)
                    return directory
        except OSError as error:
            self._warn(f"no copies in shared memory: {error}")
        return None

    def _remove_older(self) -> None:
        """Remove what earlier processes left, now that this one has a copy of its own."""
        assert self.directory
        if self._inherited:
            for file in self.directory.glob(f"{self._inherited.stem}.*"):
                file.unlink()
            self._inherited = None
        for directory in self.directory.parent.iterdir():
            _remove_if_free(directory)
        for run in self.directory.parent.parent.iterdir():
            if time.time() - run.stat().st_mtime > STALE_S:
                for directory in run.iterdir():
                    _remove_if_free(directory)
                with contextlib.suppress(OSError):
                    run.rmdir()

    def _check_room(self, size: int) -> None:
        free, left = shutil.disk_usage(SHARED_MEMORY).free, memory_left()  # shared memory counts as the container's
        free = free if left is None else min(free, left)
        if 2 * size > MEMORY_SHARE * free:
            raise OSError(f"two of {size / 1e6:.0f} MB take more than half of the {free / 1e6:.0f} MB that are free")

    def _give_up(self, why: str) -> None:
        self._warn(f"no copies in shared memory from here on: {why}; after a loss, the run resumes from storage")
        self.remove()
        self.directory, self._newest = None, None

    def _open_heartbeat(self) -> mmap.mmap | None:
        if not self.directory:
            return None
        with (self.directory / "pulse").open("a+b") as file:  # the last process's stays until the first step
            file.truncate(HEARTBEAT.size)
            return mmap.mmap(file.fileno(), HEARTBEAT.size)


class LoadedSnapshot(NamedTuple):
    """A copy in this machine's shared memory, read and checked."""

    held: MemorySnapshot
    data: torch.Tensor
    "The tensors' bytes, uint8 [size]."
    rest: dict[str, Any]
    "Beside them: `structure`, `about` (the manifest) and `ledger`."


def find_snapshot(location: str) -> LoadedSnapshot | None:
    """The newest usable copy of the run on this machine."""
    found = [snapshot for directory in sorted(_root(location).glob("*")) for snapshot in _list_snapshots(directory)]
    for snapshot in sorted(found, key=_position, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError):
            return _read_snapshot(snapshot)
    return None


def _read_snapshot(held: MemorySnapshot) -> LoadedSnapshot:
    """Read and check a copy; raises `OSError` or `ValueError` when it is damaged, or just being replaced."""
    data = torch.empty(held.size, dtype=torch.uint8)
    with open(held.file, "rb") as file:
        file.readinto(as_bytes(data))
    rest = Path(held.file).with_suffix(".rest").read_bytes()
    marker = json.loads(_marker(Path(held.file)).read_text())
    if zlib.crc32(as_bytes(data)) != held.crc32 or zlib.crc32(rest) != marker["rest_crc32"]:
        raise ValueError(f"{held.file}: its bytes are not those that were marked")
    return LoadedSnapshot(held, data, torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True))


def find_heartbeats(location: str) -> list[tuple[int, int, float]]:
    """The last step of each process of the run on this machine: attempt, step, seconds since the epoch."""
    heartbeats = []
    for file in _root(location).glob("*/pulse"):
        with contextlib.suppress(OSError, struct.error):
            attempt, step, when = HEARTBEAT.unpack(file.read_bytes())
            if attempt:
                heartbeats.append((attempt, step, when))
    return heartbeats


def as_bytes(data: torch.Tensor) -> memoryview:
    """A uint8 tensor's bytes, without a copy."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer


def _root(location: str) -> Path:
    """The directory of a run's copies on this machine."""
    return copies_of(location, SHARED_MEMORY)


def _marker(file: Path) -> Path:
    return file.with_suffix(".json")


def _list_snapshots(directory: Path) -> Iterator[MemorySnapshot]:
    """The complete copies in a directory; those just being replaced are skipped."""
    for marker in directory.glob("slot-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = json.loads(marker.read_text())
            yield MemorySnapshot(**{name: record[name] for name in MemorySnapshot.__dataclass_fields__})


def _position(snapshot: MemorySnapshot) -> tuple[int, int]:
    return snapshot.attempt, snapshot.step


def _keep_newest(directory: Path) -> Path | None:
    """Remove all but the newest complete copy that the process before left."""
    newest = max(_list_snapshots(directory), key=_position, default=None)
    for file in directory.glob("slot-*"):
        if not newest or file.stem != Path(newest.file).stem:
            file.unlink()
    return Path(newest.file) if newest else None


def _remove_if_free(directory: Path) -> None:
    """Remove a directory whose process is gone."""
    with contextlib.suppress(OSError), (directory / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
