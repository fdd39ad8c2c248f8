"""Reads copies of the training state from files in a node's shared memory.

The files outlive the process that wrote them. Each process of a run locks its own directory until it exits. The next
process on the node takes over an unlocked directory, together with the previous process's files. A directory contains:

    slot-0.data      the tensors of a copy, one after the other
    peer-0.data      a part from another node (see part_exchange.py)
    slot-0.sidecar   the rest of the state (`Sidecar`)
    slot-0.json      the marker, written last; a copy counts only if the marker's checksums match
    heartbeat        the last step that the process has taken
"""

import contextlib
import fcntl
import io
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from sunspot.errors import DamageError
from sunspot.log import warn_once
from sunspot.machine.cgroup import memory_left
from sunspot.machine.private_folder import is_own_folder, make_private_folder
from sunspot.machine.shared_pages import Pages, map_pages
from sunspot.run import SHARED_MEMORY, node_memory_directory
from sunspot.run.attempts import checkpoint_name
from sunspot.run.objects import Count, Timestamp, is_count, is_timestamp, parse_verified

log = logging.getLogger(__name__)

MAX_PROCESSES = 64
"""Largest number of a run's processes on a node, including processes that are exiting."""

STALE_S = 24 * 3600
"""Seconds after which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqdqq")
"""Binary format of a `Heartbeat`."""


class Heartbeat(NamedTuple):
    """The last step that a process is known to have taken."""

    attempt: int
    step: int
    time: float
    "Time of the step, in seconds since the Unix epoch."
    shard: int = 0
    "Index of the process's shard of the state."
    shards: int = 1
    "Number of shards of the state."


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete copy in this node's shared memory, as described by its marker."""

    attempt: Count
    step: Count
    evaluated: bool
    "False if an epoch ends at this step, but has not been evaluated."
    time: Timestamp
    "The time at which the step was taken, in seconds since the Unix epoch."
    size: Count
    crc32: Count
    "The checksum of the tensors' bytes, which is the same on all nodes."
    file: str
    nonce: str
    "The attempt's nonce (`Attempt.nonce`)."
    sidecar_crc32: Count = 0
    part: Count = 0
    "The rank to which this part of the state belongs."
    parts: Count = 0
    "The number of parts of the state, or 0 if the copy is the whole state."

    @property
    def checkpoint(self) -> str:
        """The name of this state's checkpoint. The checkpoint might not have been committed."""
        return checkpoint_name(self.step, self.attempt, self.nonce)


@dataclass(frozen=True)
class Sidecar:
    """The data that a restart needs in addition to a copy's tensors."""

    structure: Any
    "The state with each tensor replaced by an empty tensor on the meta device."
    manifest_fields: dict[str, Any]
    "The fields of the checkpoint's manifest (`Checkpoint`), except its files."
    places: list[Any]
    "The position of each tensor in its whole tensor (`TensorSlice`), or None if it is whole."
    ledger: list[Any]
    "The windows of consumed rows that were not in storage yet (`LedgerWindow`)."
    names: list[str]
    "The names of the optimizer's parameters (`parameter_names`). Empty if the copy is a whole state."

    def to_bytes(self) -> bytes:
        """Serialize the sidecar."""
        file = io.BytesIO()
        torch.save(vars(self), file)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sidecar":
        """Deserialize a sidecar. Raises `DamageError` if `content` is damaged."""
        try:
            return cls(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises many kinds of errors
            raise DamageError("the sidecar cannot be read") from error


class LoadedSnapshot(NamedTuple):
    """A verified copy from this node's shared memory."""

    snapshot: MemorySnapshot
    sidecar: Sidecar
    pages: Pages

    @property
    def data(self) -> torch.Tensor:
        """The bytes of the tensors, uint8 [size], in a private mapping that can be changed."""
        return map_pages(self.pages.path, self.snapshot.size)


# ----------------------------------------------------------------------------------------- copies of previous processes


def find_snapshot(location: str) -> LoadedSnapshot | None:
    """Return the newest intact copy of the run's whole state on this node, or None."""
    found = [snapshot for snapshot in _list_all(location) if not snapshot.parts]
    loaded = (read_if_intact(snapshot) for snapshot in sorted(found, key=_position, reverse=True))
    return next(filter(None, loaded), None)


def find_parts(location: str) -> tuple[MemorySnapshot, ...]:
    """Return this node's copies of parts of a sharded state. They are not verified."""
    return tuple(snapshot for snapshot in _list_all(location) if snapshot.parts)


def find_heartbeats(location: str) -> list[Heartbeat]:
    """Return the heartbeats of the run's processes on this node."""
    heartbeats = []
    for file in [directory / "heartbeat" for directory in _list_processes(location)]:
        with contextlib.suppress(OSError, struct.error):
            found = Heartbeat(*HEARTBEAT.unpack(file.read_bytes()))
            counts = (found.attempt, found.step, found.shard, found.shards)
            if found.attempt and all(is_count(each) for each in counts) and is_timestamp(found.time):
                heartbeats.append(found)
    return heartbeats


def read_if_intact(snapshot: MemorySnapshot) -> LoadedSnapshot | None:
    """Read and verify a copy. Return None, with a warning, if it is damaged or has been replaced."""
    try:
        with open(snapshot.file, "rb") as file:
            if os.fstat(file.fileno()).st_size < snapshot.size:
                raise DamageError("it is truncated")
            pages = Pages(snapshot.size)
            data = map_pages(pages.path, snapshot.size, shared=True)
            file.readinto(as_bytes(data))
        sidecar = Path(snapshot.file).with_suffix(".sidecar").read_bytes()
        if zlib.crc32(as_bytes(data)) != snapshot.crc32 or zlib.crc32(sidecar) != snapshot.sidecar_crc32:
            raise DamageError("the bytes do not match the marker's checksums")
        return LoadedSnapshot(snapshot, Sidecar.from_bytes(sidecar), pages)
    except (OSError, ValueError, DamageError) as error:
        warn_once(log, f"the copy in shared memory {snapshot.file} cannot be used: {error}; it is skipped")
        return None


def as_bytes(data: torch.Tensor) -> memoryview:
    """Return a view of a uint8 tensor's bytes."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs do not declare that an array is a buffer


def list_snapshots(directory: Path) -> Iterator[MemorySnapshot]:
    """Yield the complete copies in a directory. Copies that are being replaced are skipped."""
    for marker in directory.glob("*.json"):
        try:
            snapshot: MemorySnapshot = parse_verified(MemorySnapshot, marker.read_bytes(), str(marker))
            if snapshot.file != str(marker.with_suffix(".data")):
                raise DamageError(f"{marker} cannot be used: it describes a different file")
        except OSError:
            continue
        except DamageError as error:
            warn_once(log, f"{error}; it is skipped")
        else:
            yield snapshot


def _list_all(location: str) -> list[MemorySnapshot]:
    return [snapshot for directory in _list_processes(location) for snapshot in list_snapshots(directory)]


def _position(snapshot: MemorySnapshot) -> tuple[int, int]:
    """Return a sort key that is larger for newer copies."""
    return snapshot.attempt, snapshot.step


def keep_newest(directory: Path) -> set[Path]:
    """Remove the previous process's copies except the newest complete ones, and return the remaining data files.

    For a sharded state, the parts of the two newest steps are kept, because another worker might lack the newest step.
    """
    found = sorted(list_snapshots(directory), key=_position, reverse=True)
    steps = sorted({_position(held) for held in found if held.parts}, reverse=True)[:2]
    whole = next((held for held in found if not held.parts), None)
    kept = {Path(held.file) for held in found if held == whole or (held.parts and _position(held) in steps)}
    for file in directory.glob("*-*"):
        if file.with_suffix(".data") not in kept:
            file.unlink()
    return kept


def remove_copy(file: Path) -> None:
    """Remove a slot's files, beginning with the marker."""
    for suffix in (".json", ".sidecar", ".data"):
        file.with_suffix(suffix).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- directories


def lock_directory(location: str) -> tuple[Path, IO[str]]:
    """Lock the run's first unlocked directory, and return it with the open lock file.

    Raises `OSError` if there is no shared memory, or if MAX_PROCESSES directories are already locked.
    """
    root = node_memory_directory(location, SHARED_MEMORY)
    make_private_folder(SHARED_MEMORY)
    for number in range(MAX_PROCESSES):
        directory = root / str(number)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return directory, lock
    raise OSError(f"the maximum of {MAX_PROCESSES} processes of this run already use this node's shared memory")


def _list_processes(location: str) -> list[Path]:
    """Return the directories of all processes of the run on this node."""
    root = node_memory_directory(location, SHARED_MEMORY)
    return sorted(root.glob("*")) if is_own_folder(root.parent) else []


def room_for_copies(own: Path) -> int:
    """Return the number of bytes available for the run's copies on this node. `own` is this process's directory.

    This is the free space plus the space of existing copies, which new copies replace. Shared memory counts toward the
    container's memory limit, so this limit applies too.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    left = memory_left()
    taken = 0
    for file in own.parent.glob("*/*.data"):
        with contextlib.suppress(OSError):  # it was just removed
            taken += file.stat().st_size
    return taken + (free if left is None else min(free, left))


def remove_others(own: Path) -> None:
    """Remove the directories of exited processes, if they belong to this run or to a stale run.

    A run is stale if its files on this node have not changed for STALE_S seconds. `own` is this process's directory.
    """
    with contextlib.suppress(OSError):  # another process might remove the same directory
        for directory in own.parent.iterdir():
            _remove_if_free(directory)
        for run in own.parent.parent.iterdir():
            if time.time() - max(path.stat().st_mtime for path in (run, *run.rglob("*"))) > STALE_S:
                for directory in run.iterdir():
                    _remove_if_free(directory)
                with contextlib.suppress(OSError):
                    run.rmdir()


def _remove_if_free(directory: Path) -> None:
    """Remove a directory if its process has exited."""
    with contextlib.suppress(OSError), (directory / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
