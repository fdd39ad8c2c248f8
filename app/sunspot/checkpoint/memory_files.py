"""The files of copies of the training state in a node's shared memory, which outlive the process that made them.

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
"""Processes of a run on one node, those included that are just ending."""

STALE_S = 24 * 3600
"""Age at which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqd")
"""Attempt, step, seconds since the epoch."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete copy in this node's shared memory, as its marker describes it."""

    attempt: Count
    step: Count
    evaluated: bool
    "Whether an epoch that ends at this step has been evaluated."
    time: Timestamp
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
            if attempt and is_count(attempt) and is_count(step) and is_timestamp(when):
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


def keep_newest(directory: Path) -> set[Path]:
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


def remove_copy(file: Path) -> None:
    """Remove a slot with what stands beside it, the marker first."""
    for suffix in (".json", ".sidecar", ".data"):
        file.with_suffix(suffix).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- directories


def lock_directory(location: str) -> tuple[Path, IO[str]]:
    """Lock the run's first directory that no living process has locked; returns it, and what keeps it locked.

    Raises `OSError` when there is no shared memory.
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
    raise OSError(f"{MAX_PROCESSES} processes of the run are on this node")


def _list_processes(location: str) -> list[Path]:
    """List the directories of all processes of the run on this node."""
    root = node_memory_directory(location, SHARED_MEMORY)
    return sorted(root.glob("*")) if is_own_folder(root.parent) else []


def room_for_copies(own: Path) -> int:
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


def remove_others(own: Path) -> None:
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
