"""This process's copies of the training state in shared memory, where they outlive it: in slots (slots.py), which get a
marker, with step and checksum, once the copy in them is complete.
"""

import contextlib
import itertools
import logging
import math
import mmap
import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from sunspot.background import start_thread
from sunspot.checkpoint.neighbours import PartExchange
from sunspot.checkpoint.shared_memory import (
    HEARTBEAT,
    keep_newest,
    lock_directory,
    remove_copy,
    remove_others,
    room_for_copies,
)
from sunspot.checkpoint.slots import Slot, list_snapshots
from sunspot.errors import DamageError, shorten
from sunspot.run.checkpoints import Checkpoint

log = logging.getLogger(__name__)

MAX_SLOTS = 4
"""The newest complete copy, the one being made, and where copies are uploaded, that one and the one waiting for it."""

MEMORY_SHARE = 0.5
"""Part of the free shared memory that a node's first two slots may take: Ray's object store lies there too."""

RETRY_S = 60.0
"""Until room for copies is looked for again, after there was none."""


GOES_BACK = "after a loss, the run goes back to the newest there is, or to storage"


class NodeMemory:
    """This process's directory in shared memory for the run at `location`.

    Without one (`location` None, or no room), slots are private to the process and nothing outlives it.
    """

    def __init__(self, location: str | None, told: bool = True) -> None:
        """What holds for one process of a node holds for all: one is enough to be `told` of as a warning."""
        self._level = logging.WARNING if told else logging.INFO
        self._slots: list[Slot] = []
        self._newest: Slot | None = None
        self.copies = 2
        "How many as large as this process's the node has to have room for, for all of its processes."
        self._inherited: set[Path] = set()
        "The copies of the process before, kept until there is a newer one."
        self._making: Future[str] | None = None
        "The slot that is being made, and in the end why it could not be."
        self._failing = self._unpinned = self._stopped = False
        "Whether the user has been told that copies cannot be kept, that they are not pinned, and that there are none."
        self._paused_until = -math.inf
        "By the monotonic clock: there was no room for copies."
        self.directory: Path | None = None
        try:
            if location:
                self.directory, self._lock = lock_directory(location)
                self._inherited = keep_newest(self.directory)
        except OSError as error:
            log.log(self._level, f"no copies in shared memory: {error}")
        self._heartbeat = self._open_heartbeat()

    @property
    def shared(self) -> bool:
        """Whether copies are made that outlive this process."""
        return self.directory is not None and not self._stopped and time.monotonic() >= self._paused_until

    def heartbeat(self, attempt: int, step: int) -> None:
        """Record that `step` was taken: a write to memory, which outlives the process."""
        if self._heartbeat is not None:
            HEARTBEAT.pack_into(self._heartbeat, 0, attempt, step, time.time())

    def free_slot(self, size: int, needed: bool, device: torch.device | None = None) -> Slot | None:
        """A slot of `size` bytes that nobody needs; None when there is none, unless it is `needed`.

        Then another one is made meanwhile (`reserve`), and so it is when none will be free after this copy. One that is
        needed, and not there yet, is made at once.
        """
        slot = self._choose_slot(size, needed, device)
        if slot and all(other.uploading for other in self._slots if other is not slot):
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
            if slot.size == size and slot is not self._newest and not slot.busy:
                slot.unmark()
                return slot
        return None

    def _drop_unused(self, size: int) -> None:
        """Let go of slots that no copy goes to any more: of another size, as a state may grow, and private ones once
        there is room for others. The newest copy stays until there is a newer one.
        """
        kept = []
        for slot in self._slots:
            if slot is self._newest or slot.busy or (slot.size == size and (slot.file or not self.shared)):
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
                if self.copies * size > MEMORY_SHARE * room:
                    what = f"{self.copies} of {size / 1e6:.0f} MB"
                    return f"{what} take more than half of the {room / 1e6:.0f} MB that are free"
            slot = self._add(size, self._free_file("slot", [slot.file for slot in self._slots]))
        except OSError as error:
            return str(error.strerror or error)
        if device:
            with torch.cuda.device(device):
                self.pin(slot)
        return ""

    def _pause_without_room(self, problem: str) -> None:
        if problem and sum(slot.file is not None for slot in self._slots) < 2:
            self.pause(problem)

    def make_ward_slot(self, size: int, taken: list[Slot]) -> Slot:
        """Room for the part of another node's worker; raises `OSError` when there is none."""
        if not self.shared:
            raise OSError("no shared memory")
        return Slot(size, self._free_file("ward", [slot.file for slot in taken]))

    def _free_file(self, kind: str, taken: list[Path | None]) -> Path:
        assert self.directory
        files = (self.directory / f"{kind}-{number}.data" for number in itertools.count())
        return next(file for file in files if file not in taken and file not in self._inherited)

    def pin(self, slot: Slot) -> None:
        """Lock a slot's pages, as far as CUDA lets us."""
        try:
            slot.pin()
        except OSError as error:
            if not self._unpinned:
                log.log(self._level, f"copies of the state go to memory that is not pinned, and take longer: {error}")
            self._unpinned = True

    def complete(
        self,
        slot: Slot,
        manifest: Checkpoint,
        rest: bytes,
        exchange: PartExchange | None = None,
        changed: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Mark the copy in `slot` as complete, and as the newest; without room for the mark, the one before stays, and
        so it does when something has `changed` while it was copied.

        Of a state in parts, it is the newest only once all workers have theirs, as `exchange` finds out.
        """
        snapshot, problem = None, ""
        try:
            if slot.file and self.directory:
                part, parts = (exchange.rank, exchange.world_size) if exchange else (0, 0)
                snapshot = slot.mark(manifest, rest, part, parts, changed)
        except (OSError, DamageError) as error:
            problem = str(error)
        try:
            if exchange and not exchange.share(slot, snapshot, rest):
                problem = problem or "a worker could not keep its part, or its neighbour's"
            if snapshot or problem:
                self._settle(slot, manifest.step, problem)
        except RuntimeError as error:
            self.stop(f"parts cannot be exchanged: {shorten(error)}")
        finally:
            slot.sealing = False

    def _settle(self, slot: Slot, step: int, problem: str) -> None:
        """The copy in `slot` is the newest, unless there is a `problem`."""
        if not problem:
            first, self._newest = self._newest is None, slot
            if first and self.directory:
                with contextlib.suppress(OSError):  # what stays is removed later
                    for file in self._inherited:
                        remove_copy(file)
                    self._inherited = set()
                remove_others(self.directory)
            if self._failing:
                self._failing = False
                log.log(self._level, f"copies in shared memory go on at step {step}")
        elif not self._failing:
            self._failing = True
            log.log(
                self._level,
                f"the copy at step {step} is not kept in shared memory: {problem}; "
                "until one is, a loss takes the run back to the copy or the checkpoint before",
            )

    def pause(self, why: str) -> None:
        """Make no copies that outlive this process for RETRY_S; those there are stay."""
        self._paused_until = time.monotonic() + RETRY_S
        if not self._failing:
            self._failing = True
            log.log(self._level, f"no copies in shared memory until there is room: {why}; {GOES_BACK}")

    def stop(self, why: str) -> None:
        """Make no more copies that outlive this process; those there are stay."""
        if self.shared:
            log.log(self._level, f"no more copies in shared memory: {why}; {GOES_BACK}")
        self._stopped = True

    def keep(self, checkpoint: str | None) -> None:
        """Of the parts that the process before left, remove those that are not of this checkpoint."""
        for held in list_snapshots(self.directory) if self.directory else ():
            if held.parts and held.checkpoint != checkpoint:
                remove_copy(Path(held.file))
                self._inherited.discard(Path(held.file))

    def remove(self) -> None:
        """Remove this process's copies: nobody will resume from them."""
        if self._making:
            wait([self._making])
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process of the run is still there
                self.directory.parent.rmdir()

    def _add(self, size: int, file: Path | None) -> Slot:
        slot = Slot(size, file)
        self._slots.append(slot)
        return slot

    def _open_heartbeat(self) -> mmap.mmap | None:
        if not self.directory:
            return None
        try:
            with (self.directory / "heartbeat").open("a+b") as file:  # the last process's stays until the first step
                os.posix_fallocate(file.fileno(), 0, HEARTBEAT.size)  # as for a slot
                return mmap.mmap(file.fileno(), HEARTBEAT.size)
        except OSError as error:
            log.log(
                self._level,
                f"steps are not recorded in shared memory, so a receipt may count too few lost ones: {error}",
            )
            return None
