"""Copies the training state to the node's shared memory. memory_files.py describes the files."""

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
    Heartbeat,
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
"""Maximum number of slots. There is one each for the newest complete copy, the copy in progress, the copy being
uploaded, and the copy waiting for its upload."""

MEMORY_FRACTION = 0.5
"""Maximum fraction of the free shared memory for a node's first two slots. Ray's object store also needs some."""

RETRY_S = 60.0
"""Seconds after which a process that found no memory for copies tries again."""

FALLBACK = "if a worker is lost, the run continues from the newest existing copy, or from storage"

Changed = Callable[[], Collection[int]]
"""A function that returns the tensors known to have changed while they were being copied."""


class Use(Enum):
    """A reason why a slot is not free."""

    SEALING = "its copy is being made, or marked as complete"
    UPLOADING = "the commit thread reads it"
    NEWEST = "it has the newest complete copy"


class Slot:
    """Memory for one copy, either a file in shared memory or memory that is private to this process."""

    def __init__(self, size: int, file: Path | None) -> None:
        self.size = size
        self.file = file
        self.uses: set[Use] = set()
        if file is None:
            self.map = mmap.mmap(-1, max(1, size))
        else:
            with file.open("a+b") as opened:
                # Reserve the pages, because writing to a full file system through a map would end the process (SIGBUS).
                os.posix_fallocate(opened.fileno(), 0, max(1, size))
                self.map = mmap.mmap(opened.fileno(), max(1, size))
        self._pinned = False

    def pin(self) -> str:
        """Pin the slot's memory, so that a GPU can copy to it without the CPU. Later calls do nothing.

        Returns CUDA's error, or an empty string.
        """
        if self._pinned:
            return ""
        self._pinned = True
        address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        cudart = torch.cuda.cudart()
        refusal = cudart.cudaHostRegister(address, self.size, 0)
        if not int(refusal):
            return ""
        with contextlib.suppress(RuntimeError):  # clears the error, which the next kernel would otherwise report
            torch.zeros(1, device="cuda")
        return str(cudart.cudaGetErrorString(refusal))

    def unmark(self) -> None:
        """Remove the slot's marker before its content changes."""
        if self.file:
            self.file.with_suffix(".json").unlink(missing_ok=True)

    def mark(
        self, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple, part: int = 0, parts: int = 0
    ) -> tuple[MemorySnapshot | None, str]:
        """Write the sidecar and then the marker for the complete copy in this slot.

        Returns the copy and an empty string, or None and the reason why the copy could not be marked. For a slot
        without a file, the result is None and an empty string. `changed` returns the tensors that changed while they
        were copied. Because a change might still be in progress when the copy ends, `changed` is only called after the
        checksum has been computed.
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
            return None, "weights changed while they were being copied, but not by the optimizer"
        try:
            self._write_marker(snapshot, sidecar)
        except OSError as error:
            return None, str(error)
        return snapshot, ""

    def accept_copy(self, snapshot: MemorySnapshot, sidecar: bytes) -> bool:
        """Make a copy received from another worker usable by writing its marker.

        Returns False if the checksums do not match, or if the marker cannot be written.
        """
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
    """This process's slots in its node's shared memory, for the run at `location`.

    If `location` is None, or a directory cannot be created, slots are private to the process, and no copy outlives the
    process.
    """

    def __init__(self, location: str | None, warns: bool = True) -> None:
        """Lock a directory for this run, and find the previous process's copies in it.

        Problems are logged as warnings if `warns` is True. Only one process per node should set it, because all
        processes of a node have the same problems.
        """
        self._level = logging.WARNING if warns else logging.INFO
        self._slots: list[Slot] = []
        self._copies = 2
        "The number of copies for which the node must have memory, including those of other processes."
        self._inherited: set[Path] = set()
        "The files of the previous process's copies, which are kept until there is a newer copy."
        self._making: Future[str] | None = None
        "The creation of a slot. Its result is the reason why there is no memory, or an empty string."
        self._failing = False
        "True if the last log message reported that copies cannot be kept."
        self._unpinned = False
        "True once it has been logged that copies are not pinned."
        self._paused_until = -math.inf
        "The time until which no copies are made, in `time.monotonic` seconds."
        self.directory: Path | None = None
        try:
            if location:
                self.directory, self._lock = lock_directory(location)
                self._inherited = keep_newest(self.directory)
        except OSError as error:
            self._log(f"the state is not copied to shared memory: {error}")
        self._heartbeat = self._open_heartbeat()

    @property
    def shared(self) -> bool:
        """True while this process makes copies that outlive it."""
        return self.directory is not None and time.monotonic() >= self._paused_until

    @property
    def newest(self) -> Slot | None:
        """The slot with the newest complete copy, or None."""
        return next((slot for slot in self._slots if Use.NEWEST in slot.uses), None)

    def heartbeat(self, attempt: int, step: int, shard: int = 0, shards: int = 1) -> None:
        """Record in shared memory that this worker, which has one of the state's `shards`, has taken `step`."""
        if self._heartbeat is not None:
            HEARTBEAT.pack_into(self._heartbeat, 0, *Heartbeat(attempt, step, time.time(), shard, shards))

    # Slots, in the training thread.

    def expect_copies(self, count: int) -> None:
        """Expect `count` copies on this node.

        The first slot in shared memory is created only if the node has memory for this many copies.
        """
        self._copies = count

    def free_slot(self, size: int, needed: bool, device: torch.device | None = None) -> Slot | None:
        """Return a free slot of `size` bytes, or None if all slots are in use or a slot is still being created.

        If `needed` is set, a missing slot is created at once, so the result is never None. If the result is None, or if
        uploads use all other slots, a slot for a later copy is created in the background (`reserve`).
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
        """Create a slot in a thread, because pinning its memory for copies from `device` takes a second per GB."""
        if self.shared and not self._making:
            self._making = start_thread(lambda: self._make_slot(size, device), "make-slot")

    def _find_free(self, size: int) -> Slot | None:
        for slot in self._slots:
            if slot.size == size and not slot.uses:
                slot.unmark()
                return slot
        return None

    def _drop_unused(self, size: int) -> None:
        """Remove slots that no copy will use again.

        A slot is removed if the size of the state has changed, or if the slot is private and shared memory is now
        available.
        """
        kept = []
        for slot in self._slots:
            if slot.uses or (slot.size == size and (slot.file or not self.shared)):
                kept.append(slot)
            elif slot.file:
                remove_copy(slot.file)
        self._slots = kept

    def _make_slot(self, size: int, device: torch.device | None) -> str:
        """Add a slot if shared memory is in use and there are fewer than MAX_SLOTS.

        Returns the reason why a slot could not be added, or an empty string if it was added or is not needed.
        """
        if not self.directory or not self.shared or len(self._slots) >= MAX_SLOTS:
            return ""
        try:
            if not any(slot.file and slot.size == size for slot in self._slots):
                room = room_for_copies(self.directory)
                if self._copies * size > MEMORY_FRACTION * room:
                    copies = f"{self._copies} copies of {size / 1e6:.0f} MB"
                    return f"{copies} need more than half of the {room / 1e6:.0f} MB of free memory"
            slot = self._add(size, self._free_file("slot", self._slots))
        except OSError as error:
            return str(error.strerror or error)
        if device:
            self.pin(slot, device)
        return ""

    def pin(self, slot: Slot, device: torch.device) -> None:
        """Pin a slot's memory for copies from `device`. Log a warning the first time that CUDA refuses this."""
        with torch.cuda.device(device):
            refusal = slot.pin()
        if refusal and not self._unpinned:
            self._log(f"copies of the state are slower, because their memory is not pinned: {refusal}")
            self._unpinned = True

    def _add(self, size: int, file: Path | None) -> Slot:
        slot = Slot(size, file)
        self._slots.append(slot)
        return slot

    def _pause_without_room(self, problem: str) -> None:
        if problem and sum(slot.file is not None for slot in self._slots) < 2:
            self.pause(problem)

    def _free_file(self, kind: str, slots: Sequence[Slot]) -> Path:
        """Return a file name that neither the `slots` nor the previous process's copies use."""
        assert self.directory
        taken = {slot.file for slot in slots} | self._inherited
        files = (self.directory / f"{kind}-{number}.data" for number in itertools.count())
        return next(file for file in files if file not in taken)

    # Complete copies, in the seal thread.

    def make_peer_slot(self, size: int, others: Sequence[Slot]) -> Slot:
        """Create a slot for a part from another node. Raises `OSError` if shared memory is full."""
        if not self.shared:
            raise OSError("no shared memory")
        return Slot(size, self._free_file("peer", others))

    def complete(self, slot: Slot, manifest: Checkpoint, sidecar: bytes, changed: Changed = tuple) -> None:
        """Mark the copy in `slot` as complete, and as the newest.

        The previous copy stays the newest if the marker cannot be written, or if `changed()` returns tensors
        that changed during the copy.
        """
        try:
            snapshot, problem = slot.mark(manifest, sidecar, changed)
            if snapshot or problem:
                self.finish_copy(slot, manifest.step, problem)
        finally:
            slot.uses.discard(Use.SEALING)

    def finish_copy(self, slot: Slot, step: int, problem: str) -> None:
        """Make the copy in `slot` the newest, or log the `problem` if there is one."""
        if problem:
            if not self._failing:
                self._failing = True
                self._log(
                    f"the copy at step {step} is not kept in shared memory: {problem}; "
                    "if a worker is lost before a copy succeeds, the run returns to the previous copy or checkpoint"
                )
            return
        first = not self.newest
        for other in list(self._slots):
            other.uses.discard(Use.NEWEST)
        slot.uses.add(Use.NEWEST)
        with contextlib.suppress(OSError):  # remaining files are removed later
            for file in self._inherited:
                remove_copy(file)
            self._inherited = set()
        if first and self.directory:
            remove_others(self.directory)
        if self._failing:
            self._failing = False
            self._log(f"copying to shared memory has resumed at step {step}")

    def pause(self, why: str) -> None:
        """Stop making copies that outlive this process. Existing copies are kept.

        Copying can resume after RETRY_S seconds.
        """
        self._paused_until = max(self._paused_until, time.monotonic() + RETRY_S)
        if not self._failing:
            self._failing = True
            self._log(f"copying to shared memory is paused: {why}; {FALLBACK}")

    def keep_parts_of(self, checkpoint: str | None) -> None:
        """Remove this process's copies of parts, except those of the state that `checkpoint` names.

        If `checkpoint` is None, all copies of parts are removed. Otherwise, those of the named state are kept until
        there is a newer copy.
        """
        slots = {slot.file: slot for slot in self._slots}
        for held in list_snapshots(self.directory) if self.directory else ():
            if not held.parts:
                continue
            file = Path(held.file)
            wanted = held.checkpoint == checkpoint
            slot = slots.get(file)
            if slot and wanted:
                slot.uses.add(Use.NEWEST)
            elif slot:
                slot.uses.discard(Use.NEWEST)
                slot.unmark()
            elif wanted:
                self._inherited.add(file)
            else:
                remove_copy(file)
                self._inherited.discard(file)

    def remove(self) -> None:
        """Remove this process's copies. Call this if no process will resume from them."""
        if self._making:
            wait([self._making])
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process of the run still has a directory
                self.directory.parent.rmdir()

    def _open_heartbeat(self) -> mmap.mmap | None:
        if not self.directory:
            return None
        try:
            with (self.directory / "heartbeat").open("a+b") as file:  # the old heartbeat is kept until the first step
                os.posix_fallocate(file.fileno(), 0, HEARTBEAT.size)  # reserves the page, as a slot does
                return mmap.mmap(file.fileno(), HEARTBEAT.size)
        except OSError as error:
            self._log(f"steps are not recorded in shared memory, so receipts might count too few lost steps: {error}")
            return None

    def _log(self, text: str) -> None:
        log.log(self._level, text)
