"""A node's shared memory, where copies of the training state outlive the worker that took them.

A copy lies in a slot: a file that gets a marker, with step and checksum, once it is complete. Each process has its own
directory below that of its run; the next process on the node finds what the one before left.
"""

import contextlib
import fcntl
import io
import mmap
import os
import pickle
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from app.background import start_thread
from app.cgroup import memory_left
from app.errors import DamageError, shorten
from app.run import SHARED_MEMORY, copies_of
from app.run.attempts import checkpoint_name, nonce_of
from app.run.checkpoints import Checkpoint
from app.run.objects import Count, Moment, is_count, is_moment, parse_truth, seal, warn_once
from app.shared_pages import Pages, map_pages

MOST_SLOTS = 4
"""The newest complete copy, the one being made, and where copies are uploaded, that one and the one waiting for it."""

MEMORY_SHARE = 0.5
"""Part of the free shared memory that a node's first two slots may take: Ray's object store lies there too."""

STALE_S = 24 * 3600
"""Age at which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqd")
"""Attempt, step, seconds since the epoch."""


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
            nonce=nonce_of(manifest.name),
            rest_crc32=zlib.crc32(rest),
        )
        self.file.with_suffix(".rest").write_bytes(rest)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_bytes(seal(asdict(snapshot)))
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
        self._making: Future[None] | None = None
        "The slot that is being made."
        self._failing = self._unpinned = False
        "Whether the user has been told that copies cannot be kept, and that they are not pinned."
        self.directory = self._lock_directory(location) if location else None
        self._heartbeat = self._open_heartbeat()

    @property
    def shared(self) -> bool:
        return self.directory is not None

    def heartbeat(self, attempt: int, step: int) -> None:
        """Record that `step` was taken: a write to memory, which outlives the process."""
        if self._heartbeat is not None:
            HEARTBEAT.pack_into(self._heartbeat, 0, attempt, step, time.time())

    def free_slot(self, size: int, needed: bool, device: torch.device | None = None) -> Slot | None:
        """A slot of `size` bytes that nobody needs; None when there is none, unless it is `needed`.

        Then another one is made meanwhile, in a thread: reserving its memory, and pinning it for copies from `device`,
        takes a second for each GB. One that is needed is made at once.
        """
        if self._making:
            if not needed and not self._making.done():
                return None
            self._making.result()
            self._making = None
        self._slots = [slot for slot in self._slots if slot.size == size or slot.uploading or slot.sealing]
        for slot in self._slots:
            if slot.size == size and slot is not self._newest and not (slot.uploading or slot.sealing):
                slot.unmark()
                return slot
        if needed:
            return self._add_shared(size) or self._add(size, None)
        if self.directory and len(self._slots) < MOST_SLOTS:
            self._making = start_thread(lambda: self._make_slot(size, device), "make-slot")
        return None

    def _make_slot(self, size: int, device: torch.device | None) -> None:
        slot = self._add_shared(size)
        if slot and device:
            with torch.cuda.device(device):
                self.pin(slot)

    def _add_shared(self, size: int) -> Slot | None:
        """Another slot in shared memory; None when there is no room."""
        if not self.directory or len(self._slots) >= MOST_SLOTS:
            return None
        try:
            if not self._slots:
                self._check_room(size)
            taken = {slot.file for slot in self._slots} | {self._inherited}
            file = next(f for n in range(MOST_SLOTS + 1) if (f := self.directory / f"slot-{n}.data") not in taken)
            return self._add(size, file)
        except OSError as error:
            if len(self._slots) < 2:
                self._give_up(f"{error.strerror or error}")
        return None

    def pin(self, slot: Slot) -> None:
        """Lock a slot's pages, as far as CUDA lets us."""
        try:
            slot.pin()
        except OSError as error:
            if not self._unpinned:
                self._warn(f"copies of the state go to memory that is not pinned, and take longer: {error}")
            self._unpinned = True

    def complete(self, slot: Slot, manifest: Checkpoint, rest: bytes) -> None:
        """Mark the copy in `slot` as complete, and as the newest; without room for the mark, the one before stays."""
        try:
            if slot.file and self.directory:
                slot.mark(manifest, rest)
                first, self._newest = self._newest is None, slot
                if first:
                    self._remove_older()
                if self._failing:
                    self._failing = False
                    self._warn(f"copies in shared memory go on at step {manifest.step}")
        except OSError as error:
            slot.unmark()
            if not self._failing:
                self._failing = True
                self._warn(
                    f"the copy at step {manifest.step} is not kept in shared memory: {error}; "
                    "until one is, a loss takes the run back to the copy or the checkpoint before"
                )
        finally:
            slot.sealing = False

    def remove(self) -> None:
        """Remove this process's copies: nobody will resume from them."""
        if self._making:
            wait([self._making])
        self._remove_directory()

    def _remove_directory(self) -> None:
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
                _claim_user_directory(_root(location).parent)
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
        with contextlib.suppress(OSError):  # another process removes the same; what stays is removed later
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
        self._remove_directory()
        self.directory, self._newest = None, None

    def _open_heartbeat(self) -> mmap.mmap | None:
        if not self.directory:
            return None
        try:
            with (self.directory / "pulse").open("a+b") as file:  # the last process's stays until the first step
                os.posix_fallocate(file.fileno(), 0, HEARTBEAT.size)  # as for a slot
                return mmap.mmap(file.fileno(), HEARTBEAT.size)
        except OSError as error:
            self._warn(f"steps are not recorded in shared memory, so a receipt may count too few lost ones: {error}")
            return None


class LoadedSnapshot(NamedTuple):
    """A copy in this machine's shared memory, read and checked."""

    held: MemorySnapshot
    data: torch.Tensor
    "The tensors' bytes, uint8 [size]."
    rest: dict[str, Any]
    "Beside them: `structure`, `about` (the manifest) and `ledger`."
    pages: Pages
    "Where `data` lies."


def find_snapshot(location: str) -> LoadedSnapshot | None:
    """The newest usable copy of the run on this machine."""
    found = [snapshot for directory in _list_processes(location) for snapshot in _list_snapshots(directory)]
    for snapshot in sorted(found, key=_position, reverse=True):
        try:
            return _read_snapshot(snapshot)
        except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, DamageError) as error:
            warn_once(f"the copy in shared memory {snapshot.file} cannot be used: {shorten(error)}")
    return None


def _read_snapshot(held: MemorySnapshot) -> LoadedSnapshot:
    """Read and check a copy; raises `OSError` or `DamageError` when it is damaged, or just being replaced."""
    with open(held.file, "rb") as file:
        if os.fstat(file.fileno()).st_size < held.size:
            raise DamageError("it is cut off")
        pages = Pages(held.size)
        data = map_pages(pages.path, held.size, shared=True)
        file.readinto(as_bytes(data))
    rest = Path(held.file).with_suffix(".rest").read_bytes()
    if _read_marker(_marker(Path(held.file))) != held:
        raise DamageError("it was replaced meanwhile")
    if zlib.crc32(as_bytes(data)) != held.crc32 or zlib.crc32(rest) != held.rest_crc32:
        raise DamageError("its bytes are not those that were marked")
    return LoadedSnapshot(held, data, torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True), pages)


def find_heartbeats(location: str) -> list[tuple[int, int, float]]:
    """The last step of each process of the run on this machine: attempt, step, seconds since the epoch."""
    heartbeats = []
    for file in [directory / "pulse" for directory in _list_processes(location)]:
        with contextlib.suppress(OSError, struct.error):
            attempt, step, when = HEARTBEAT.unpack(file.read_bytes())
            if attempt and is_count(attempt) and is_count(step) and is_moment(when):
                heartbeats.append((attempt, step, when))
    return heartbeats


def as_bytes(data: torch.Tensor) -> memoryview:
    """A uint8 tensor's bytes, without a copy."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer


def _root(location: str) -> Path:
    """The directory of a run's copies on this machine."""
    return copies_of(location, SHARED_MEMORY)


def _claim_user_directory(path: Path) -> None:
    """Make the directory of all of this user's copies, for this user alone.

    Anybody may make one of that name in shared memory: raises `PermissionError` if another user did.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_own(path):
        raise PermissionError(f"{path} belongs to another user, or is a link; remove it")
    path.chmod(0o700)


def _is_own(path: Path) -> bool:
    """Whether it is a directory of this user's, and no link."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _list_processes(location: str) -> list[Path]:
    """The directories of all processes of the run on this machine."""
    root = _root(location)
    return sorted(root.glob("*")) if _is_own(root.parent) else []


def _marker(file: Path) -> Path:
    return file.with_suffix(".json")


def _list_snapshots(directory: Path) -> Iterator[MemorySnapshot]:
    """The complete copies in a directory; those just being replaced are skipped."""
    for marker in directory.glob("slot-*.json"):
        try:
            yield _read_marker(marker)
        except OSError:
            continue
        except DamageError as error:
            warn_once(str(error))


def _read_marker(marker: Path) -> MemorySnapshot:
    """The copy that a marker describes, which must be the one beside it; raises `OSError` or `DamageError`."""
    snapshot: MemorySnapshot = parse_truth(MemorySnapshot, marker.read_bytes(), str(marker))
    if snapshot.file != str(marker.with_suffix(".data")):
        raise DamageError(f"{marker} cannot be used: it describes another file")
    return snapshot


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
