"""The directories in a node's shared memory in which processes of a run keep copies of the training state.

Each process locks one of its own below that of the run; the next process on the node finds what the one before left.
"""

import contextlib
import fcntl
import logging
import os
import pickle
import shutil
import stat
import struct
import time
from pathlib import Path
from typing import IO

from sunspot.cgroup import memory_left
from sunspot.checkpoint.slots import LoadedSnapshot, MemorySnapshot, list_snapshots, position, read_snapshot
from sunspot.errors import DamageError, shorten
from sunspot.log import warn_once
from sunspot.run import SHARED_MEMORY, node_memory_directory
from sunspot.run.objects import is_count, is_moment

log = logging.getLogger(__name__)

MAX_PROCESSES = 64
"""Of a run on one node, those included that are just ending."""

STALE_S = 24 * 3600
"""Age at which copies of other runs are removed."""

HEARTBEAT = struct.Struct("<qqd")
"""Attempt, step, seconds since the epoch."""


def lock_directory(location: str) -> tuple[Path, IO[str]]:
    """The run's first directory that no living process has locked, and what keeps it locked until that is closed.

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


def room_for_copies(own: Path) -> int:
    """Bytes that the run's copies on this node may take, given a process's own directory.

    What is free may still be written to shared memory, which counts as the container's, and copies that are there make
    way for new ones: whether there is room does not depend on whether there was before.
    """
    free, left = shutil.disk_usage(SHARED_MEMORY).free, memory_left()
    taken = 0
    for file in own.parent.glob("*/*.data"):
        with contextlib.suppress(OSError):  # removed meanwhile
            taken += file.stat().st_size
    return taken + (free if left is None else min(free, left))


def keep_newest(directory: Path) -> set[Path]:
    """Remove all but the newest complete copy that the process before left, and return what is left.

    Of parts, the newest that all workers have may be the one before.
    """
    found = sorted(list_snapshots(directory), key=position, reverse=True)
    steps = sorted({position(held) for held in found if held.parts}, reverse=True)[:2]
    whole = next((held for held in found if not held.parts), None)
    kept = {Path(held.file) for held in found if held == whole or (held.parts and position(held) in steps)}
    for file in directory.glob("*-*"):
        if file.with_suffix(".data") not in kept:
            file.unlink()
    return kept


def remove_copy(file: Path) -> None:
    """Remove a slot with what stands beside it, the marker first."""
    for suffix in (".json", ".rest", ".data"):
        file.with_suffix(suffix).unlink(missing_ok=True)


def find_snapshot(location: str) -> LoadedSnapshot | None:
    """The newest usable copy of the run on this machine."""
    found = [snapshot for snapshot in _list_all(location) if not snapshot.parts]
    for snapshot in sorted(found, key=position, reverse=True):
        try:
            return read_snapshot(snapshot)
        except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, DamageError) as error:
            warn_once(log, f"the copy in shared memory {snapshot.file} cannot be used: {shorten(error)}")
    return None


def find_parts(location: str) -> tuple[MemorySnapshot, ...]:
    """The copies on this machine of the parts of states, as their markers describe them."""
    return tuple(snapshot for snapshot in _list_all(location) if snapshot.parts)


def _list_all(location: str) -> list[MemorySnapshot]:
    return [snapshot for directory in _list_processes(location) for snapshot in list_snapshots(directory)]


def find_heartbeats(location: str) -> list[tuple[int, int, float]]:
    """The last step of each process of the run on this machine: attempt, step, seconds since the epoch."""
    heartbeats = []
    for file in [directory / "heartbeat" for directory in _list_processes(location)]:
        with contextlib.suppress(OSError, struct.error):
            attempt, step, when = HEARTBEAT.unpack(file.read_bytes())
            if attempt and is_count(attempt) and is_count(step) and is_moment(when):
                heartbeats.append((attempt, step, when))
    return heartbeats


def _root(location: str) -> Path:
    """The directory of a run's copies on this machine."""
    return node_memory_directory(location, SHARED_MEMORY)


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


def _remove_if_free(directory: Path) -> None:
    """Remove a directory whose process is gone."""
    with contextlib.suppress(OSError), (directory / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
