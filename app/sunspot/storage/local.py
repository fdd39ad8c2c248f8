"""A directory as storage, local or NFS."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from sunspot.errors import NotFoundError, SettingsError, StorageError, shorten
from sunspot.storage.base import CHUNK, RACE_TRIES, Entry, LeaveOut, Storage, Unfinished, Writer, completed
from sunspot.storage.limits import OPERATION_S, operation, record_progress, refuse_if_given_up

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
"""A file that is not yet, or never became, the object named by the group."""


class LocalStorage(Storage):
    """A directory. Safe on NFS: it relies only on rename and link, which are atomic there, and on `refresh`."""

    def __init__(self, storage_path: str) -> None:
        self.root = local_path(storage_path)

    def locate(self, key: str) -> str:
        return str(self.root / key)

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        with _os_errors(self.locate(key), reading=True):
            source = io.FileIO(self.root / key, opener=_open_file)
            source.seek(offset)
        with io.BufferedReader(_LocalReader(source), CHUNK) as stream:
            yield stream

    def write(self, key: str, data: bytes) -> None:
        with completed(_LocalWriter(self.root / key)) as writer:
            writer.write(data)

    def create(self, key: str, data: bytes) -> bool:
        writer = _LocalWriter(self.root / key)
        try:
            writer.write(data)
            return writer.complete_new()
        finally:
            writer.abort()

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with completed(_LocalWriter(self.root / key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        return [*self.list_readable(prefix, None)]

    def list_readable(self, prefix: str, leave_out: LeaveOut | None) -> Sequence[Entry]:
        return sorted(
            Entry(self._key(path), stat.st_size, stat.st_mtime, _version_of(stat))
            for path, stat in self._files(prefix, leave_out)
            if not TEMPORARY.fullmatch(path.name)
        )

    def list_folders(self) -> Sequence[str]:
        with _os_errors(self.locate("")), contextlib.suppress(FileNotFoundError), os.scandir(self.root) as found:
            return sorted(each.name for each in found if each.is_dir())
        return []

    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        found = []
        for path, stat in self._files(prefix):
            if match := TEMPORARY.fullmatch(path.name):
                key = self._key(path.with_name(match[1]))
                found.append(Unfinished(key, stat.st_size, stat.st_mtime, str(path)))
        return sorted(found)

    def discard(self, unfinished: Unfinished) -> None:
        with _os_errors(unfinished.token):
            Path(unfinished.token).unlink(missing_ok=True)

    def _files(self, prefix: str, leave_out: LeaveOut | None = None) -> Iterator[tuple[Path, os.stat_result]]:
        """Every file below a prefix. A folder that cannot be read is an error, or its files would seem not to exist."""
        top = self.root / prefix

        def refuse(error: OSError) -> None:
            if isinstance(error, FileNotFoundError):  # nothing written there yet, or deleted since the walk saw it
                return
            refusal = _as_storage_error(error, error.filename)
            if leave_out is None or Path(error.filename) == top:
                raise refusal from error
            leave_out(self._key(Path(error.filename)), refusal)

        with _os_errors(self.locate(prefix)):
            below = (Path(folder, name) for folder, _, names in os.walk(top, onerror=refuse) for name in names)
            for path in [top] if top.is_file() else below:
                try:
                    stat = path.stat()
                except OSError as error:
                    refuse(error)
                else:
                    yield path, stat

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def delete(self, key: str, version: str = "") -> None:
        path = self.root / key
        with _os_errors(str(path)), contextlib.suppress(FileNotFoundError):
            if version and _version_of(path.stat()) != version:
                return
            path.unlink()
            if path.parent != self.root:
                with contextlib.suppress(OSError):  # not empty yet, or another deletion was first
                    path.parent.rmdir()

    def delete_folders(self, prefix: str) -> None:
        top = self.root / prefix
        for folder, below, files in os.walk(top, topdown=False):
            for path in (Path(folder, name) for name in (*below, *files)):
                if path.is_symlink() and not path.is_file():  # to a folder, or to nothing: no listing shows it
                    with contextlib.suppress(OSError):
                        path.unlink()
            if Path(folder) != self.root:
                with contextlib.suppress(OSError):  # not empty: another writer's
                    os.rmdir(folder)

    def exists(self, key: str) -> bool:
        with _os_errors(self.locate(key)):
            return (self.root / key).is_file()

    def refresh(self, prefix: str) -> None:
        # NFS clients cache a directory's names, and that a name is absent, for up to a minute. A change of their own
        # brings the directory's version with the server's answer, and drops what was cached under an older one.
        folder = self.root / prefix
        with _os_errors(str(folder)), contextlib.suppress(FileNotFoundError):  # the run was deleted
            probe = _temporary_name(folder / "refresh")
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.unlink(probe)


class _LocalReader(io.RawIOBase):
    """Reads an open file, at most CHUNK at a time."""

    def __init__(self, source: io.FileIO) -> None:
        super().__init__()
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _os_errors(str(self._source.name), reading=True, gives_s=0):
            size = self._source.readinto(memoryview(buffer)[:CHUNK])
        record_progress(size)
        return size

    def close(self) -> None:
        self._source.close()
        super().close()


class _LocalWriter(Writer):
    """Writes beside the object, and replaces it at the end: a second try never touches what a first one published."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._temporary = path, _temporary_name(path)
        with _os_errors(str(path)):
            self._sink = _open_new(self._temporary)

    def _store(self, view: memoryview) -> None:
        with _os_errors(str(self._path), gives_s=0):
            self._sink.write(view)

    def complete(self) -> None:
        with _os_errors(str(self._path)):
            self._end()
            os.replace(self._temporary, self._path)
            _sync_directory(self._path.parent)

    def complete_new(self) -> bool:
        """Publish what was written if there is no such object; returns whether it is."""
        with _os_errors(str(self._path)):
            self._end()
            try:
                os.link(self._temporary, self._path)
            except FileExistsError:
                # NFS also raises this when the server made the link and its answer was lost.
                if self._temporary.stat().st_nlink == 1:
                    return False
            _sync_directory(self._path.parent)
            return True

    def _end(self) -> None:
        with self._sink:
            self._sink.flush()
            os.fsync(self._sink.fileno())
        refuse_if_given_up(str(self._path))

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


def _version_of(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_ctime_ns}"


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # TEMPORARY


def local_path(path: str) -> Path:
    """A local path made absolute, `~` and `~user` included; raises `SettingsError` for what can be none."""
    try:
        if "\0" in path:
            raise ValueError("there is a NUL in it")
        os.fsencode(path)
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {shorten(error)}; write the path without '~'") from error
    except ValueError as error:
        raise SettingsError(f"{path}: no path: {shorten(error)}; give one of letters") from error


def _open_file(path: str, flags: int) -> int:
    """Open a file for reading; a FIFO would never answer, and a device never end."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def _open_new(path: Path) -> BinaryIO:
    """Open for writing and make the directory; retried when another process's `delete` removes the empty directory."""
    for _ in range(RACE_TRIES - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "wb")


def _sync_directory(path: Path) -> None:
    """Make a rename or a new name survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _os_errors(location: str, reading: bool = False, gives_s: float = OPERATION_S) -> Iterator[None]:
    """An operation whose `OSError` becomes a `StorageError`; `gives_s` as in `operation`.

    For calls of this module alone: a caller's `FileNotFoundError` would pass for a missing object.
    """
    try:
        with operation(location, gives_s):
            yield
    except OSError as error:
        if reading and isinstance(error, FileNotFoundError):
            raise NotFoundError(f"{location}: not found") from error
        raise _as_storage_error(error, location) from error


def _as_storage_error(error: OSError, location: str) -> StorageError:
    fix = "check that STORAGE_PATH can be read and written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free space: `sunspot checkpoints gc RUN` shows what of a run is of no use"
    return StorageError(f"{location}: {error.strerror or shorten(error)}; {fix}")
