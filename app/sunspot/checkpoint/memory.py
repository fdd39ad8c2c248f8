"""Copies of the training state in a node's shared memory, where they outlive the process that made them.

Each process of a run has a directory of its own, which it locks while it lives. The next process on the node takes a
directory that nobody locks, and finds there what the one before has left:

    slot-0.data      the tensors of a copy, one after the other; or peer-0.data, of another node's part (replicas.py)
    slot-0.sidecar   what else belongs to the state (`Sidecar`)
    slot-0.json      the marker, written last: a copy counts only with it and the checksums in it
    heartbeat        the last step that the process has taken
"""

import contextlib
import fcntl
import io
import itertools
import logging
import math
import mmap
import os
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from sunspot.background import start_thread
from sunspot.cgroup import memory_left
from sunspot.errors import DamageError
from sunspot.log import warn_once
from sunspot.run import SHARED_MEMORY, node_memory_directory
from sunspot.run.attempts import checkpoint_name, nonce_of
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.objects import Count, Moment, is_count, is_moment, parse_verified, with_checksum
from sunspot.shared_pages import Pages, map_pages

log = logging.getLogger(__name__)

MAX_SLOTS = 4
"""The newest complete copy, the one being made, and where copies are uploaded, that one and the one waiting for it."""

MEMORY_SHARE = 0.5
"""Part of the free shared memory that a node's first two slots may take: Ray's object store lies there too."""

RETRY_S = 60.0
"""Time until room for copies is looked for again, after there was none."""

MAX_PROCESSES = 64
"""Processes of a run on one node, those included that are just ending."""

STALE_S = 24 * 3600
"""Age at which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqd")
"""Attempt, step, seconds since the epoch."""

GOES_BACK = "after a loss, the run goes back to the newest there is, or to storage"

Changed = Callable[[], Collection[int]]
"""Returns the tensors that are known to have changed while they were copied."""


# ---------------------------------------------------------------------------------------------------- what a copy is


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete copy in this node's shared memory, as its marker describes it."""

    attempt: Count
    step: Count
    evaluated: bool
    "Whether an epoch that ends at this step has been evaluated."
    time: Moment
    "When the step had been taken, in seconds since the epoch."
    size: Count
    crc32: Count
    "Checksum of the tensors' bytes: the same on every node that holds this step."
    file: str
    nonce: str
    "The attempt's (`Attempt.nonce`)."
    sidecar_crc32: Count = 0
    part: Count = 0
    "The rank whose part of the state it is."
    parts: Count = 0
    "How many parts make up the state; 0: it is the whole state."

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that it is a copy of, whether or not that was committed."""
        return checkpoint_name(self.step, self.attempt, self.nonce)


@dataclass(frozen=True)
class Sidecar:
    """What lies beside the tensors of a copy, and what a restart needs of it."""

    structure: Any
    "The state, with tensors on the meta device (without memory) in the places of its own."
    manifest_fields: dict[str, Any]
    "The fields of the checkpoint's manifest (`Checkpoint`), but for its files."
    places: list[Any]
    "For each tensor, where it lies in the whole one (`Place`); None: it is whole."
    ledger: list[Any]
    "Windows of consumed rows that were not in storage yet (`LedgerWindow`)."
    names: list[str]
    "The names of the optimizer's parameters (`parameter_names`), for a part of a state."

    def to_bytes(self) -> bytes:
        """Serialize it."""
        file = io.BytesIO()
        torch.save(vars(self), file)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sidecar":
        """Return what `to_bytes` serialized; raises `DamageError` for anything else."""
        try:
            return cls(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises of all kinds
            raise DamageError("its sidecar cannot be read") from error


class LoadedSnapshot(NamedTuple):
    """A copy that was read from this node's shared memory, and checked."""

    held: MemorySnapshot
    sidecar: Sidecar
    pages: Pages

    @property
    def data(self) -> torch.Tensor:
        """Its tensors' bytes, uint8 [size]; who changes them changes a copy of its own."""
        return map_pages(self.pages.path, self.held.size)


class Use(Enum):
    """A reason why a slot is not free."""

    SEALING = "its copy is being made, or marked as complete"
    UPLOADING = "the commit thread reads it"
    NEWEST = "it has the newest complete copy"


class Slot:
    """Room for one copy: a file in shared memory, or memory of this process alone."""

    def __init__(self, size: int, file: Path | None) -> None:
        self.size, self.file = size, file
        self.uses: set[Use] = set()
        if file is None:
            self.map = mmap.mmap(-1, max(1, size))
        else:
            with file.open("a+b") as opened:
                # Reserves the pages: writing to a full file system through a map would end the process (SIGBUS).
                os.posix_fallocate(opened.fileno(), 0, max(1, size))
                self.map = mmap.mmap(opened.fileno(), max(1, size))
        self._pinned = False

    def pin(self) -> str:
        """Lock its pages, once, so that a GPU copies into them without the CPU; returns why CUDA refuses."""
        if self._pinned:
            return ""
        self._pinned = True
        address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        cudart = torch.cuda.cudart()
        refusal = cudart.cudaHostRegister(address, self.size, 0)
        if not int(refusal):
            return ""
        with contextlib.suppress(RuntimeError):  # CUDA would blame the next kernel for it
            torch.zeros(1, device="cuda")
        return str(cudart.cudaGetErrorString(refusal))

    def unmark(self) -> None:
        """Remove its marker: its content is about to change."""
        if self.file:
            self.file.with_suffix(".json").unlink(missing_ok=True)

    def mark(
        self, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple, part: int = 0, parts: int = 0
    ) -> MemorySnapshot | None:
        """Write the sidecar of its copy, which is complete, and then the marker; None for a slot without a file.

        Raises `DamageError` when something has `changed` while it was copied. That is asked for after the checksum: a
        change that was under way at the end of the copy has been counted by then.
        """
        if not self.file:
            return None
        snapshot = MemorySnapshot(
            attempt=manifest.attempt,
            step=manifest.step,
            evaluated=manifest.evaluated,
            time=manifest.time,
            size=self.size,
            crc32=self._crc32(),
            file=str(self.file),
            nonce=nonce_of(manifest.name),
            sidecar_crc32=zlib.crc32(sidecar),
            part=part,
            parts=parts,
        )
        if changed():
            raise DamageError("weights changed while they were copied, and not by the optimizer")
        self._write_marker(snapshot, sidecar)
        return snapshot

    def accept_copy(self, snapshot: MemorySnapshot, sidecar: bytes) -> None:
        """Mark what came from another worker's slot; raises `DamageError` when other bytes came than it marked."""
        if self._crc32() != snapshot.crc32 or zlib.crc32(sidecar) != snapshot.sidecar_crc32:
            raise DamageError(f"the part of rank {snapshot.part} did not arrive as it was sent")
        self._write_marker(replace(snapshot, file=str(self.file)), sidecar)

    def _crc32(self) -> int:
        return zlib.crc32(memoryview(self.map)[: self.size])

    def _write_marker(self, snapshot: MemorySnapshot, sidecar: bytes) -> None:
        assert self.file
        self.file.with_suffix(".sidecar").write_bytes(sidecar)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_bytes(with_checksum(asdict(snapshot)))
        temporary.rename(self.file.with_suffix(".json"))


# ----------------------------------------------------------------------------------------- the copies of this process


class NodeMemory:
    """This process's slots in the shared memory of its node, for the run at `location`.

    Without a directory there (`location` None, or no room), slots are private to the process, and nothing outlives it.
    """

    def __init__(self, location: str | None, told: bool = True) -> None:
        """What holds for one process of a node holds for all: one is enough to be `told` of as a warning."""
        self._level = logging.WARNING if told else logging.INFO
        self._slots: list[Slot] = []
        self._copies = 2
        "How many copies of this size the node has to have room for, of all its processes."
        self._inherited: set[Path] = set()
        "The copies of the process before, kept until there is a newer one."
        self._making: Future[str] | None = None
        "The slot that is being made; its result is why it could not be."
        self._failing = self._unpinned = False
        "Whether the user has been told that copies cannot be kept, and that they are not pinned."
        self._paused_until = -math.inf
        "When copies may be made again, by the monotonic clock."
        self.directory: Path | None = None
        try:
            if location:
                self.directory, self._lock = _lock_directory(location)
                self._inherited = _keep_newest(self.directory)
        except OSError as error:
            self._tell(f"no copies in shared memory: {error}")
        self._heartbeat = self._open_heartbeat()

    @property
    def shared(self) -> bool:
        """Whether copies are made that outlive this process."""
        return self.directory is not None and time.monotonic() >= self._paused_until

    @property
    def newest(self) -> Slot | None:
        """The slot with the newest complete copy."""
        return next((slot for slot in self._slots if Use.NEWEST in slot.uses), None)

    def heartbeat(self, attempt: int, step: int) -> None:
        """Record that `step` was taken: a write to memory, which outlives the process."""
        if self._heartbeat is not None:
            HEARTBEAT.pack_into(self._heartbeat, 0, attempt, step, time.time())

    # Slots, in the training thread.

    def expect_copies(self, count: int) -> None:
        """Make no slots unless the node has room for so many copies of the size."""
        self._copies = count

    def free_slot(self, size: int, needed: bool, device: torch.device | None = None) -> Slot | None:
        """Return a slot of `size` bytes that is not in use; None when there is none, unless it is `needed`.

        Then another one is made meanwhile (`reserve`), and so it is when none will be free after this copy. One that is
        needed, and not there yet, is made at once.
        """
        slot = self._choose_slot(size, needed, device)
        if slot and all(Use.UPLOADING in other.uses for other in self._slots if other is not slot):
            self.reserve(size, device)
        return slot

    def reserve(self, size: int, device: torch.device | None) -> None:
        """Make a slot in a thread: its memory, pinned for copies from `device`, takes a second for each GB."""
        if self.shared and not self._making:
            self._making = start_thread(lambda: self._make_slot(size, device), "make-slot")

    def _choose_slot(self, size: int, needed: bool, device: torch.device | None) -> Slot | None:
        if self._making:
            if not needed and not self._making.done():
                return None
            self._pause_without_room(self._making.result())
            self._making = None
        self._drop_unused(size)
        if slot := self._find_free(size):
            return slot
        if needed:
            self._pause_without_room(self._make_slot(size, None))
            return self._find_free(size) or self._add(size, None)
        self.reserve(size, device)
        return None

    def _find_free(self, size: int) -> Slot | None:
        for slot in self._slots:
            if slot.size == size and not slot.uses:
                slot.unmark()
                return slot
        return None

    def _drop_unused(self, size: int) -> None:
        """Remove slots that no copy goes to any more: of another size, as a state may grow, and private ones once there
        is room for others.
        """
        kept = []
        for slot in self._slots:
            if slot.uses or (slot.size == size and (slot.file or not self.shared)):
                kept.append(slot)
            elif slot.file:
                _remove_copy(slot.file)
        self._slots = kept

    def _make_slot(self, size: int, device: torch.device | None) -> str:
        """Add a slot in shared memory, unless there are enough; returns why there is no room."""
        if not self.directory or not self.shared or len(self._slots) >= MAX_SLOTS:
            return ""
        try:
            if not any(slot.file and slot.size == size for slot in self._slots):
                room = _room_for_copies(self.directory)
                if self._copies * size > MEMORY_SHARE * room:
                    what = f"{self._copies} of {size / 1e6:.0f} MB"
                    return f"{what} take more than half of the {room / 1e6:.0f} MB that are free"
            slot = self._add(size, self._free_file("slot", self._slots))
        except OSError as error:
            return str(error.strerror or error)
        if device:
            with torch.cuda.device(device):
                self.pin(slot)
        return ""

    def pin(self, slot: Slot) -> None:
        """Lock a slot's pages, as far as CUDA lets us."""
        if (refusal := slot.pin()) and not self._unpinned:
            self._tell(f"copies of the state go to memory that is not pinned, and take longer: {refusal}")
            self._unpinned = True

    def _add(self, size: int, file: Path | None) -> Slot:
        slot = Slot(size, file)
        self._slots.append(slot)
        return slot

    def _pause_without_room(self, problem: str) -> None:
        if problem and sum(slot.file is not None for slot in self._slots) < 2:
            self.pause(problem)

    def _free_file(self, kind: str, slots: Sequence[Slot]) -> Path:
        """Return a file that neither these slots nor the copies of the process before have."""
        assert self.directory
        taken = {slot.file for slot in slots} | self._inherited
        files = (self.directory / f"{kind}-{number}.data" for number in itertools.count())
        return next(file for file in files if file not in taken)

    # Complete copies, in the thread that seals them.

    def make_peer_slot(self, size: int, others: Sequence[Slot]) -> Slot:
        """Make room for the part of a worker on another node, beside `others`; raises `OSError` without room."""
        if not self.shared:
            raise OSError("no shared memory")
        return Slot(size, self._free_file("peer", others))

    def complete(self, slot: Slot, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple) -> None:
        """Mark the copy in `slot` as complete, and as the newest.

        The one before stays the newest without room for the mark, or when something has `changed` meanwhile.
        """
        problem = ""
        try:
            snapshot = slot.mark(manifest, sidecar, changed)
        except (OSError, DamageError) as error:
            snapshot, problem = None, str(error)
        try:
            if snapshot or problem:
                self.settle(slot, manifest.step, problem)
        finally:
            slot.uses.discard(Use.SEALING)

    def settle(self, slot: Slot, step: int, problem: str) -> None:
        """Have the copy in `slot` be the newest, unless there is a `problem`."""
        if problem:
            if not self._failing:
                self._failing = True
                self._tell(
                    f"the copy at step {step} is not kept in shared memory: {problem}; "
                    "until one is, a loss takes the run back to the copy or the checkpoint before"
                )
            return
        first = not self.newest
        for other in list(self._slots):
            other.uses.discard(Use.NEWEST)
        slot.uses.add(Use.NEWEST)
        if first and self.directory:
            with contextlib.suppress(OSError):  # what stays is removed later
                for file in self._inherited:
                    _remove_copy(file)
                self._inherited = set()
            _remove_others(self.directory)
        if self._failing:
            self._failing = False
            self._tell(f"copies in shared memory go on at step {step}")

    def pause(self, why: str) -> None:
        """Make no copies that outlive this process for RETRY_S; those there are stay."""
        self._paused_until = max(self._paused_until, time.monotonic() + RETRY_S)
        if not self._failing:
            self._failing = True
            self._tell(f"no copies in shared memory until there is room: {why}; {GOES_BACK}")

    def stop(self, why: str) -> None:
        """Make no more copies that outlive this process; those there are stay."""
        if self.shared:
            self._tell(f"no more copies in shared memory: {why}; {GOES_BACK}")
        self._paused_until = math.inf

    def keep_parts_of(self, checkpoint: str | None) -> None:
        """Remove the parts that the process before left, but for those of this checkpoint."""
        for held in list_snapshots(self.directory) if self.directory else ():
            if held.parts and held.checkpoint != checkpoint:
                _remove_copy(Path(held.file))
                self._inherited.discard(Path(held.file))

    def remove(self) -> None:
        """Remove this process's copies: nobody will resume from them."""
        if self._making:
            wait([self._making])
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process of the run is still there
                self.directory.parent.rmdir()

    def _open_heartbeat(self) -> mmap.mmap | None:
        if not self.directory:
            return None
        try:
            with (self.directory / "heartbeat").open("a+b") as file:  # the last process's stays until the first step
                os.posix_fallocate(file.fileno(), 0, HEARTBEAT.size)  # as for a slot
                return mmap.mmap(file.fileno(), HEARTBEAT.size)
        except OSError as error:
            self._tell(f"steps are not recorded in shared memory, so a receipt may count too few lost ones: {error}")
            return None

    def _tell(self, text: str) -> None:
        log.log(self._level, text)


# ------------------------------------------------------------------------------------- what processes before have left


def find_snapshot(location: str) -> LoadedSnapshot | None:
    """Read the newest good copy of the run's whole state on this node."""
    found = [snapshot for snapshot in _list_all(location) if not snapshot.parts]
    loaded = (read_if_good(snapshot) for snapshot in sorted(found, key=_position, reverse=True))
    return next(filter(None, loaded), None)


def find_parts(location: str) -> tuple[MemorySnapshot, ...]:
    """List the copies on this node of the parts of states, as their markers describe them."""
    return tuple(snapshot for snapshot in _list_all(location) if snapshot.parts)


def find_heartbeats(location: str) -> list[tuple[int, int, float]]:
    """List the last step of each process of the run on this node: attempt, step, seconds since the epoch."""
    heartbeats = []
    for file in [directory / "heartbeat" for directory in _list_processes(location)]:
        with contextlib.suppress(OSError, struct.error):
            attempt, step, when = HEARTBEAT.unpack(file.read_bytes())
            if attempt and is_count(attempt) and is_count(step) and is_moment(when):
                heartbeats.append((attempt, step, when))
    return heartbeats


def read_if_good(held: MemorySnapshot) -> LoadedSnapshot | None:
    """Read and check a copy; None and a warning when it is damaged, or was replaced meanwhile."""
    try:
        with open(held.file, "rb") as file:
            if os.fstat(file.fileno()).st_size < held.size:
                raise DamageError("it is cut off")
            pages = Pages(held.size)
            data = map_pages(pages.path, held.size, shared=True)
            file.readinto(as_bytes(data))
        sidecar = Path(held.file).with_suffix(".sidecar").read_bytes()
        if zlib.crc32(as_bytes(data)) != held.crc32 or zlib.crc32(sidecar) != held.sidecar_crc32:
            raise DamageError("its bytes are not those that were marked")
        return LoadedSnapshot(held, Sidecar.from_bytes(sidecar), pages)
    except (OSError, ValueError, DamageError) as error:
        warn_once(log, f"the copy in shared memory {held.file} cannot be used: {error}; left out")
        return None


def as_bytes(data: torch.Tensor) -> memoryview:
    """View a uint8 tensor's bytes."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer


def list_snapshots(directory: Path) -> Iterator[MemorySnapshot]:
    """Yield the complete copies in a directory; those just being replaced are skipped."""
    for marker in directory.glob("*.json"):
        try:
            snapshot: MemorySnapshot = parse_verified(MemorySnapshot, marker.read_bytes(), str(marker))
            if snapshot.file != str(marker.with_suffix(".data")):
                raise DamageError(f"{marker} cannot be used: it describes another file")
        except OSError:
            continue
        except DamageError as error:
            warn_once(log, f"{error}; left out")
        else:
            yield snapshot


def _list_all(location: str) -> list[MemorySnapshot]:
    return [snapshot for directory in _list_processes(location) for snapshot in list_snapshots(directory)]


def _position(snapshot: MemorySnapshot) -> tuple[int, int]:
    """Sort key: a larger one is a newer copy."""
    return snapshot.attempt, snapshot.step


def _keep_newest(directory: Path) -> set[Path]:
    """Remove all but the newest complete copy that the process before left, and return what is left.

    Of parts two stay: the newest that all workers have may be the one before.
    """
    found = sorted(list_snapshots(directory), key=_position, reverse=True)
    steps = sorted({_position(held) for held in found if held.parts}, reverse=True)[:2]
    whole = next((held for held in found if not held.parts), None)
    kept = {Path(held.file) for held in found if held == whole or (held.parts and _position(held) in steps)}
    for file in directory.glob("*-*"):
        if file.with_suffix(".data") not in kept:
            file.unlink()
    return kept


def _remove_copy(file: Path) -> None:
    """Remove a slot with what stands beside it, the marker first."""
    for suffix in (".json", ".sidecar", ".data"):
        file.with_suffix(suffix).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- directories


def _root(location: str) -> Path:
    """Return the directory of a run's copies on this node."""
    return node_memory_directory(location, SHARED_MEMORY)


def _lock_directory(location: str) -> tuple[Path, IO[str]]:
    """Lock the run's first directory that no living process has locked; returns it, and what keeps it locked.

    Raises `OSError` when there is no shared memory.
    """
    _claim_user_directory(_root(location).parent)
    for number in range(MAX_PROCESSES):
        directory = _root(location) / str(number)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return directory, lock
    raise OSError(f"{MAX_PROCESSES} processes of the run are on this node")


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
    """Return whether it is a directory of this user's, and no link."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _list_processes(location: str) -> list[Path]:
    """List the directories of all processes of the run on this node."""
    root = _root(location)
    return sorted(root.glob("*")) if _is_own(root.parent) else []


def _room_for_copies(own: Path) -> int:
    """Count the bytes that the run's copies on this node may take, given a process's own directory.

    What is free may still be written to shared memory, which counts as the container's, and copies that are there make
    way for new ones: whether there is room does not depend on whether there was before.
    """
    free, left = shutil.disk_usage(SHARED_MEMORY).free, memory_left()
    taken = 0
    for file in own.parent.glob("*/*.data"):
        with contextlib.suppress(OSError):  # removed meanwhile
            taken += file.stat().st_size
    return taken + (free if left is None else min(free, left))


def _remove_others(own: Path) -> None:
    """Remove the directories of processes that are gone: of this run, and of others after STALE_S."""
    with contextlib.suppress(OSError):  # another process removes the same; what stays is removed later
        for directory in own.parent.iterdir():
            _remove_if_free(directory)
        for run in own.parent.parent.iterdir():
            if time.time() - max(path.stat().st_mtime for path in (run, *run.rglob("*"))) > STALE_S:
                for directory in run.iterdir():
                    _remove_if_free(directory)
                with contextlib.suppress(OSError):
                    run.rmdir()


def _remove_if_free(directory: Path) -> None:
    """Remove a directory whose process is gone."""
    with contextlib.suppress(OSError), (directory / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
