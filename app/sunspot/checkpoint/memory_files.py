"""Files for copies of the training state in a node's shared memory, which outlive the process that made them.

Each process of a run has its own directory, which it locks until it exits. The next process on the node takes a
directory that is not locked, and finds there the files of the previous process:

    slot-0.data      the tensors of a copy, one after the other; peer-0.data has another node's part (replicas.py)
    slot-0.sidecar   the rest of the state (`Sidecar`)
    slot-0.json      the marker, written last: a copy only counts if it has a marker whose checksums match
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

from sunspot.cgroup import memory_left
from sunspot.errors import DamageError
from sunspot.log import warn_once
from sunspot.private_folder import is_own_folder, make_private_folder
from sunspot.run import SHARED_MEMORY, node_memory_directory
from sunspot.run.attempts import checkpoint_name
from sunspot.run.objects import Count, Timestamp, is_count, is_timestamp, parse_verified
from sunspot.shared_pages import Pages, map_pages

log = logging.getLogger(__name__)

MAX_PROCESSES = 64
"""Largest number of processes of a run on one node, including processes that are just exiting."""

STALE_S = 24 * 3600
"""Seconds after which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqd")
"""Format of a heartbeat: attempt, step, seconds since the epoch."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete copy in this node's shared memory, as its marker describes it."""

    attempt: Count
    step: Count
    evaluated: bool
    "False if an epoch ends at this step that has not been evaluated."
    time: Timestamp
    "Time at which the step had been taken, in seconds since the epoch."
    size: Count
    crc32: Count
    "Checksum of the tensors' bytes, which is the same on every node that has this step."
    file: str
    nonce: str
    "Nonce of the attempt (`Attempt.nonce`)."
    sidecar_crc32: Count = 0
    part: Count = 0
    "Rank whose part of the state it is."
    parts: Count = 0
    "Number of parts of the state, or 0 if the copy is the whole state."

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint with the same state, even if that was never committed."""
        return checkpoint_name(self.step, self.attempt, self.nonce)


@dataclass(frozen=True)
class Sidecar:
    """The data beside the tensors of a copy that a restart needs."""

    structure: Any
    "State with each tensor replaced by an empty one on the meta device."
    manifest_fields: dict[str, Any]
    "Fields of the checkpoint's manifest (`Checkpoint`), except its files."
    places: list[Any]
    "Position of each tensor in the whole tensor (`TensorSlice`), or None if it is whole."
    ledger: list[Any]
    "Windows of consumed rows that were not in storage yet (`LedgerWindow`)."
    names: list[str]
    "Names of the optimizer's parameters (`parameter_names`); empty unless the copy is a part of a state."

    def to_bytes(self) -> bytes:
        """Serialize the sidecar."""
        file = io.BytesIO()
        torch.save(vars(self), file)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sidecar":
        """Return the sidecar that `to_bytes` serialized. Raises `DamageError` for anything else."""
        try:
            return cls(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises errors of any class
            raise DamageError("its sidecar cannot be read") from error


class LoadedSnapshot(NamedTuple):
    """A copy that was read from this node's shared memory and verified."""

    snapshot: MemorySnapshot
    sidecar: Sidecar
    pages: Pages

    @property
    def data(self) -> torch.Tensor:
        """Bytes of its tensors, uint8 [size]. Each caller gets a private mapping, so it may change them."""
        return map_pages(self.pages.path, self.snapshot.size)


# ------------------------------------------------------------------------------------ copies of previous processes


def find_snapshot(location: str) -> LoadedSnapshot | None:
    """Read the newest intact copy of the run's whole state on this node, or return None."""
    found = [snapshot for snapshot in _list_all(location) if not snapshot.parts]
    loaded = (read_if_intact(snapshot) for snapshot in sorted(found, key=_position, reverse=True))
    return next(filter(None, loaded), None)


def find_parts(location: str) -> tuple[MemorySnapshot, ...]:
    """List the copies on this node of parts of states, as their markers describe them."""
    return tuple(snapshot for snapshot in _list_all(location) if snapshot.parts)


def find_heartbeats(location: str) -> list[tuple[int, int, float]]:
    """List the heartbeats of the run's processes on this node: attempt, step, seconds since the epoch."""
    heartbeats = []
    for file in [directory / "heartbeat" for directory in _list_processes(location)]:
        with contextlib.suppress(OSError, struct.error):
            attempt, step, when = HEARTBEAT.unpack(file.read_bytes())
            if attempt and is_count(attempt) and is_count(step) and is_timestamp(when):
                heartbeats.append((attempt, step, when))
    return heartbeats


def read_if_intact(snapshot: MemorySnapshot) -> LoadedSnapshot | None:
    """Read and verify a copy. Return None, with a warning, if it is damaged or has been replaced since."""
    try:
        with open(snapshot.file, "rb") as file:
            if os.fstat(file.fileno()).st_size < snapshot.size:
                raise DamageError("it is truncated")
            pages = Pages(snapshot.size)
            data = map_pages(pages.path, snapshot.size, shared=True)
            file.readinto(as_bytes(data))
        sidecar = Path(snapshot.file).with_suffix(".sidecar").read_bytes()
        if zlib.crc32(as_bytes(data)) != snapshot.crc32 or zlib.crc32(sidecar) != snapshot.sidecar_crc32:
            raise DamageError("its bytes do not match its marker's checksums")
        return LoadedSnapshot(snapshot, Sidecar.from_bytes(sidecar), pages)
    except (OSError, ValueError, DamageError) as error:
        warn_once(log, f"the copy in shared memory {snapshot.file} cannot be used: {error}; it is skipped")
        return None


def as_bytes(data: torch.Tensor) -> memoryview:
    """Return a view of a uint8 tensor's bytes."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer


def list_snapshots(directory: Path) -> Iterator[MemorySnapshot]:
    """Yield the complete copies in a directory, and skip those that are just being replaced."""
    for marker in directory.glob("*.json"):
        try:
            snapshot: MemorySnapshot = parse_verified(MemorySnapshot, marker.read_bytes(), str(marker))
            if snapshot.file != str(marker.with_suffix(".data")):
                raise DamageError(f"{marker} cannot be used: it describes another file")
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
    """Remove all complete copies of the previous process except the newest, and return the files that are left.

    Two copies of a part stay, because the newest copy that all workers have may be the second newest here.
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
    """Remove the files of a slot, its marker first."""
    for suffix in (".json", ".sidecar", ".data"):
        file.with_suffix(suffix).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- directories


def lock_directory(location: str) -> tuple[Path, IO[str]]:
    """Lock the run's first directory that no other process has locked. Return it, and the open file that locks it.

    Raises `OSError` if there is no shared memory.
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
    raise OSError(f"{MAX_PROCESSES} other processes of the run use this node's shared memory, which is the limit")


def _list_processes(location: str) -> list[Path]:
    """List the directories of all processes of the run on this node."""
    root = node_memory_directory(location, SHARED_MEMORY)
    return sorted(root.glob("*")) if is_own_folder(root.parent) else []


def room_for_copies(own: Path) -> int:
    """Return the number of bytes that the run's copies on this node may take, given a process's own directory.

    This is the space of the copies that exist now, which make way for new ones, and what is free. Shared memory counts
    as the container's memory, so no more is free than the container's limit leaves.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    left = memory_left()
    taken = 0
    for file in own.parent.glob("*/*.data"):
        with contextlib.suppress(OSError):  # just removed
            taken += file.stat().st_size
    return taken + (free if left is None else min(free, left))


def remove_others(own: Path) -> None:
    """Remove the directories of processes that have exited: those of this run, and others after STALE_S seconds."""
    with contextlib.suppress(OSError):  # another process may remove the same; the rest is removed later
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
