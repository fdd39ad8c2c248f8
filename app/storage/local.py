"""A directory as storage, local or NFS."""

import contextlib
import functools
import io
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from app.errors import NotFoundError, StorageError, shorten
from app.storage.base import (
    CHUNK,
    RACE_TRIES,
    Entry,
    ObjectReader,
    Storage,
    Unfinished,
    Writer,
    completed,
)

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
"""A file of `write` or `create` that is not yet, or never became, the object named by the group."""


class LocalStorage(Storage):
    """A directory. Safe on NFS: it relies only on rename and link, which are atomic there."""

    def __init__(self, storage_path: str) -> None:
        self.root = Path(storage_path).expanduser().absolute()

    def locate(self, key: str) -> str:
        return str(self.root / key)

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        errors = functools.partial(_os_errors, self.locate(key), reading=True)
        with errors():
            source = io.FileIO(self.root / key)
            source.seek(offset)
        with io.BufferedReader(ObjectReader(source, errors), CHUNK) as stream:
            yield stream

    def write(self, key: str, data: bytes) -> None:
        with _os_errors(self.locate(key)), self._temporary(key, data) as temporary:
            os.replace(temporary, self.root / key)
            _sync_directory((self.root / key).parent)

    def create(self, key: str, data: bytes) -> bool:
        with _os_errors(self.locate(key)), self._temporary(key, data) as temporary:
            try:
                os.link(temporary, self.root / key)
            except FileExistsError:
                # NFS also raises this when the server made the link and its answer was lost.
                if temporary.stat().st_nlink == 1:
                    return False
            _sync_directory((self.root / key).parent)
            return True

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with completed(_LocalWriter(self.root / key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        return sorted(
            Entry(
                path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime, f"{stat.st_ino}-{stat.st_ctime_ns}"
            )
            for path, stat in self._files(prefix)
            if not TEMPORARY.fullmatch(path.name)
        )

    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        found = []
        for path, stat in self._files(prefix):
            if match := TEMPORARY.fullmatch(path.name):
                key = path.with_name(match[1]).relative_to(self.root).as_posix()
                found.append(Unfinished(key, stat.st_size, stat.st_mtime, str(path)))
        return sorted(found)

    def discard(self, unfinished: Unfinished) -> None:
        with _os_errors(unfinished.token):
            Path(unfinished.token).unlink(missing_ok=True)

    def _files(self, prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
        top = self.root / prefix
        with _os_errors(self.locate(prefix)):
            for path in [top] if top.is_file() else _walk(top):
                with contextlib.suppress(FileNotFoundError):  # deleted since the walk saw it
                    yield path, path.stat()

    def delete(self, key: str) -> None:
        path = self.root / key
        with _os_errors(str(path)), contextlib.suppress(FileNotFoundError):
            path.unlink()
            if path.parent != self.root:
                with contextlib.suppress(OSError):  # not empty yet, or another deletion was first
                    path.parent.rmdir()

    def delete_folders(self, prefix: str) -> None:
        top = self.root / prefix
        for folder in sorted((Path(folder) for folder, _, _ in os.walk(top)), reverse=True):
            if folder != self.root:
                with contextlib.suppress(OSError):  # not empty: another writer's
                    folder.rmdir()

    def exists(self, key: str) -> bool:
        with _os_errors(self.locate(key)):
            return (self.root / key).is_file()

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes) -> Iterator[Path]:
        path = self.root / key
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # TEMPORARY
        try:
            with _open_new(temporary) as sink:
                sink.write(data)
                sink.flush()
                os.fsync(sink.fileno())
            yield temporary
        finally:
            with contextlib.suppress(OSError):  # or it would hide the first error
                temporary.unlink()


class _LocalWriter(Writer):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        with _os_errors(str(path)):
            self._sink = _open_new(path)

    def _store(self, view: memoryview) -> None:
        with _os_errors(str(self._path)):
            self._sink.write(view)

    def complete(self) -> None:
        with _os_errors(str(self._path)):
            with self._sink:
                self._sink.flush()
                os.fsync(self._sink.fileno())
            _sync_directory(self._path.parent)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _open_new(path: Path) -> BinaryIO:
    """Open for writing and make the directory; retried when another process's `delete` removes the empty directory."""
    for _ in range(RACE_TRIES - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "wb")


def _walk(top: Path) -> Iterator[Path]:
    """Every file below `top`. An unreadable directory is an error, or its files would seem not to exist."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # nothing written there yet, or deleted meanwhile
            raise error

    for folder, _, names in os.walk(top, onerror=refuse):
        yield from (Path(folder, name) for name in names)


def _sync_directory(path: Path) -> None:
    """Make a rename or a new name survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _os_errors(location: str, reading: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if reading and isinstance(error, FileNotFoundError):
            raise NotFoundError(f"{location}: not found") from error
        raise StorageError(
            f"{location}: {error.strerror or shorten(error)}; check that STORAGE_PATH can be read and written"
        ) from error
