"""Copies of the training state that this process makes in its node's shared memory (memory_files.py)."""

import contextlib
import itertools
import logging
import math
import mmap
import os
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path

import torch

from sunspot.background import start_thread
from sunspot.checkpoint.memory_files import (
    HEARTBEAT,
    MemorySnapshot,
    keep_newest,
    list_snapshots,
    lock_directory,
    remove_copy,
    remove_others,
    room_for_copies,
)
from sunspot.run.attempts import nonce_of
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.objects import with_checksum

log = logging.getLogger(__name__)

MAX_SLOTS = 4
"""The newest complete copy, the one being made, and where copies are uploaded, that one and the one waiting for it."""

MEMORY_SHARE = 0.5
"""Part of the free shared memory that a node's first two slots may take: Ray's object store lies there too."""

RETRY_S = 60.0
"""Time until room for copies is looked for again, after there was none."""

GOES_BACK = "after a loss, the run goes back to the newest there is, or to storage"

Changed = Callable[[], Collection[int]]
"""Returns the tensors that are known to have changed while they were copied."""


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
    ) -> tuple[MemorySnapshot | None, str]:
        """Write the sidecar of its copy, which is complete, and then the marker; also returns why it could not be.

        A slot without a file has no marker. What has `changed` while it was copied is asked for after the checksum: a
        change that was under way at the end of the copy has been counted by then.
        """
        if not self.file:
            return None, ""
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
            return None, "weights changed while they were copied, and not by the optimizer"
        try:
            self._write_marker(snapshot, sidecar)
        except OSError as error:
            return None, str(error)
        return snapshot, ""

    def accept_copy(self, snapshot: MemorySnapshot, sidecar: bytes) -> bool:
        """Mark what came from another worker's slot; returns whether it is what that worker marked."""
        if self._crc32() != snapshot.crc32 or zlib.crc32(sidecar) != snapshot.sidecar_crc32:
            return False
        try:
            self._write_marker(replace(snapshot, file=str(self.file)), sidecar)
        except OSError:
            return False
        return True

    def _crc32(self) -> int:
        return zlib.crc32(memoryview(self.map)[: self.size])

    def _write_marker(self, snapshot: MemorySnapshot, sidecar: bytes) -> None:
        assert self.file
        self.file.with_suffix(".sidecar").write_bytes(sidecar)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_bytes(with_checksum(asdict(snapshot)))
        temporary.rename(self.file.with_suffix(".json"))


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
                self.directory, self._lock = lock_directory(location)
                self._inherited = keep_newest(self.directory)
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
        if self._making:
            if not needed and not self._making.done():
                return None
            self._pause_without_room(self._making.result())
            self._making = None
        self._drop_unused(size)
        slot = self._find_free(size)
        if needed and not slot:
            self._pause_without_room(self._make_slot(size, None))
            slot = self._find_free(size) or self._add(size, None)
        if not slot or all(Use.UPLOADING in other.uses for other in self._slots if other is not slot):
            self.reserve(size, device)
        return slot

    def reserve(self, size: int, device: torch.device | None) -> None:
        """Make a slot in a thread: its memory, pinned for copies from `device`, takes a second for each GB."""
        if self.shared and not self._making:
            self._making = start_thread(lambda: self._make_slot(size, device), "make-slot")

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
                remove_copy(slot.file)
        self._slots = kept

    def _make_slot(self, size: int, device: torch.device | None) -> str:
        """Add a slot in shared memory, unless there are enough; returns why there is no room."""
        if not self.directory or not self.shared or len(self._slots) >= MAX_SLOTS:
            return ""
        try:
            if not any(slot.file and slot.size == size for slot in self._slots):
                room = room_for_copies(self.directory)
                if self._copies * size > MEMORY_SHARE * room:
                    what = f"{self._copies} of {size / 1e6:.0f} MB"
                    return f"{what} take more than half of the {room / 1e6:.0f} MB that are free"
            slot = self._add(size, self._free_file("slot", self._slots))
        except OSError as error:
            return str(error.strerror or error)
        if device:
            self.pin(slot, device)
        return ""

    def pin(self, slot: Slot, device: torch.device) -> None:
        """Lock a slot's pages for copies from `device`, as far as CUDA lets us."""
        with torch.cuda.device(device):
            refusal = slot.pin()
        if refusal and not self._unpinned:
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
        try:
            snapshot, problem = slot.mark(manifest, sidecar, changed)
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
        with contextlib.suppress(OSError):  # what stays is removed later
            for file in self._inherited:
                remove_copy(file)
            self._inherited = set()
        if first and self.directory:
            remove_others(self.directory)
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
        """Remove the parts that there are, but for those of this checkpoint, which stay until there is a newer copy."""
        slots = {slot.file: slot for slot in self._slots}
        for held in list_snapshots(self.directory) if self.directory else ():
            file, wanted = Path(held.file), held.checkpoint == checkpoint
            if slot := slots.get(file) if held.parts else None:
                if wanted:
                    slot.uses.add(Use.NEWEST)
                else:
                    slot.uses.discard(Use.NEWEST)
                    slot.unmark()
            elif held.parts and wanted:
                self._inherited.add(file)
            elif held.parts:
                remove_copy(file)
                self._inherited.discard(file)

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
