"""Storage in a directory, local or on NFS."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, BinaryIO

from sunspot.errors import (
    NotFoundError,
    OutsideStorageError,
    RefusedStorageError,
    SettingsError,
    StorageError,
    shorten,
)
from sunspot.storage.base import (
    CHUNK,
    RACE_TRIES,
    Entry,
    OnUnreadable,
    Storage,
    UnfinishedWrite,
    Writer,
    complete_or_abort,
)
from sunspot.storage.limits import OPERATION_S, operation, record_progress, refuse_if_given_up

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
"""The name of a file that is not yet an object. The group is the object's name."""

FoundFiles = list[tuple[str, os.stat_result]]
"""Keys of files, and the result of `stat` for each."""


class LocalStorage(Storage):
    """A directory, local or on NFS. Renaming and linking are atomic on both, and `refresh` drops NFS caches.

    The storage path can be a link. Links inside it are followed only if they do not point outside the storage path.
    Otherwise, anyone who can write to a run's folder could make other users' commands read or delete files elsewhere.
    Each file is opened before its location is checked, so changing a link between the two steps has no effect.
    """

    def __init__(self, storage_path: str, follow_links: bool = False) -> None:
        """Create the storage. `follow_links` is documented in `open_storage`."""
        self.root = local_path(storage_path)
        self._follow_links = follow_links
        self._real_root: str | None = None
        "The storage path with all links resolved, or None before the first operation."

    def locate(self, key: str) -> str:
        return str(self.root / key)

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        with _os_operation(self.locate(key), reading=True):
            source = io.FileIO(self.root / key, opener=self._open_file)
            source.seek(offset)
        with io.BufferedReader(_LocalReader(source), CHUNK) as stream:
            yield stream

    def write(self, key: str, data: bytes) -> None:
        with complete_or_abort(_LocalWriter(self, key)) as writer:
            writer.write(data)

    def create(self, key: str, data: bytes) -> bool:
        writer = _LocalWriter(self, key)
        try:
            writer.write(data)
            return writer.complete_new()
        finally:
            writer.abort()

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with complete_or_abort(_LocalWriter(self, key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        return [*self.list_readable(prefix, None)]

    def list_readable(self, prefix: str, on_unreadable: OnUnreadable | None) -> Sequence[Entry]:
        return sorted(
            Entry(key, stat.st_size, stat.st_mtime, _version_of(stat))
            for key, stat in self._files(prefix, on_unreadable)
            if not TEMPORARY.fullmatch(_split(key)[1])
        )

    def list_folders(self) -> Sequence[str]:
        with _os_operation(self.locate("")), contextlib.suppress(FileNotFoundError), os.scandir(self.root) as found:
            return sorted(each.name for each in found if each.is_dir())
        return []

    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        found = []
        for key, stat in self._files(prefix):
            folder, name = _split(key)
            match = TEMPORARY.fullmatch(name)
            if match:
                found.append(UnfinishedWrite(_join(folder, match[1]), stat.st_size, stat.st_mtime, key))
        return sorted(found)

    def discard(self, unfinished: UnfinishedWrite) -> None:
        folder, name = _split(unfinished.token)
        location = self.locate(unfinished.token)
        with _os_operation(location), contextlib.suppress(FileNotFoundError), self.enter(folder) as descriptor:
            os.unlink(name, dir_fd=descriptor)

    def delete(self, key: str, version: str = "") -> None:
        folder, name = _split(key)
        with _os_operation(self.locate(key)), contextlib.suppress(FileNotFoundError):
            with self.enter(folder) as descriptor:
                if version and _version_of(self._stat(descriptor, key)) != version:
                    return
                os.unlink(name, dir_fd=descriptor)
            self._remove_if_empty(folder)

    def delete_folders(self, prefix: str) -> None:
        above, name = _split(prefix)
        with contextlib.suppress(OSError, StorageError), self.enter(above) as descriptor:
            _remove_link(name, descriptor)
        folders = [prefix]
        for folder in folders:
            with contextlib.suppress(OSError, StorageError), self.enter(folder) as descriptor:
                with os.scandir(descriptor) as found:
                    below = {each.name: each.is_dir(follow_symlinks=False) for each in found}
                folders += [_join(folder, name) for name, is_folder in below.items() if is_folder]
                for name in below:
                    _remove_link(name, descriptor)
        for folder in reversed(folders):
            self._remove_if_empty(folder)

    def _remove_if_empty(self, folder: str) -> None:
        above, name = _split(folder)
        if name:  # the storage path itself is kept
            with contextlib.suppress(OSError, StorageError), self.enter(above) as descriptor:
                os.rmdir(name, dir_fd=descriptor)

    def exists(self, key: str) -> bool:
        folder, _ = _split(key)
        absent = (FileNotFoundError, NotADirectoryError)
        with _os_operation(self.locate(key)), contextlib.suppress(*absent), self.enter(folder) as descriptor:
            mode = self._stat(descriptor, key).st_mode
            return S_ISREG(mode) or S_ISLNK(mode)  # a link that points outside exists, although it cannot be read
        return False

    def refresh(self, prefix: str) -> None:
        # An NFS client caches a directory's names, including missing names, for up to a minute. If the client itself
        # changes the directory, the server's response contains a new version, and the client drops its cache.
        location = self.locate(prefix)
        # If the run was deleted, the folder does not exist.
        with _os_operation(location), contextlib.suppress(FileNotFoundError), self.enter(prefix) as descriptor:
            name = _temporary_name("refresh")
            probe = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=descriptor)
            self.ahead_s = os.fstat(probe).st_mtime - time.time()
            os.close(probe)
            os.unlink(name, dir_fd=descriptor)

    @contextlib.contextmanager
    def enter(self, folder: str, create: bool = False) -> Iterator[int]:
        """Context manager that opens a folder, and returns its descriptor for use as `dir_fd`.

        If `create` is True, a missing folder is created. Raises `OutsideStorageError` if the folder is outside the
        storage path, and `OSError` if it cannot be opened.
        """
        path = self.root / folder
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if not create:
                raise
            self._make_folder(folder)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._require_inside(descriptor, path)
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_folder(self, folder: str) -> None:
        if not folder:
            self.root.mkdir(parents=True, exist_ok=True)
            return
        above, name = _split(folder)
        with self.enter(above, create=True) as descriptor, contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=descriptor)

    def _require_inside(self, descriptor: int, path: Path) -> None:
        real = _resolve(descriptor)
        if not self._is_inside(real):
            self._real_root = _real_path(self.root)  # the storage path might have been created or moved since
        if not self._is_inside(real):
            raise OutsideStorageError(
                f"{path} resolves through a symbolic link to {real}, which is outside the storage path {self.root}. "
                "Such links are not followed; replace the link with the files themselves, or with a mount of the folder"
            )

    def _is_inside(self, real: str) -> bool:
        inside = self._real_root is not None and f"{real}/".startswith(f"{self._real_root.rstrip('/')}/")
        return inside or self._follow_links

    def _open_file(self, path: str, flags: int) -> int:
        """Open a regular file for reading. FIFOs and devices are rejected, because reading them might never end."""
        descriptor = os.open(path, flags | os.O_NONBLOCK)
        try:
            if not S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            self._require_inside(descriptor, Path(path))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _stat(self, folder: int, key: str) -> os.stat_result:
        """Return the `stat` result of a key in its open folder.

        If the key is a link to a file outside the storage path, and such links are not followed, the result describes
        the link itself.
        """
        name = _split(key)[1]
        own = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not S_ISLNK(own.st_mode):
            return own
        target = os.stat(name, dir_fd=folder)
        inside = S_ISDIR(target.st_mode) or self._is_inside(os.path.realpath(self.root / key))
        return target if inside else own

    def _files(self, prefix: str, on_unreadable: OnUnreadable | None = None) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every file below a prefix.

        Calls `on_unreadable` for each file or folder below the prefix that cannot be read. Without `on_unreadable`,
        raises an error, because the files would otherwise seem to be missing.
        """
        top = prefix.rstrip("/")

        def refuse(key: str, error: StorageError) -> None:
            if on_unreadable is None or key == top:
                raise error
            on_unreadable(key, error)

        folders = [top]
        while folders:
            folder = folders.pop()
            files: FoundFiles = []
            try:
                with _os_operation(self.locate(folder)):
                    files, below = self._scan(folder, refuse)
                    folders += below
            except StorageError as error:
                refuse(folder, error)
            yield from files

    def _scan(self, folder: str, refuse: Callable[[str, StorageError], None]) -> tuple[FoundFiles, Sequence[str]]:
        """Return the files and the folders in `folder`. If `folder` is the key of a file, return only that file."""
        files: FoundFiles = []
        folders = []
        try:
            with self.enter(folder) as descriptor, os.scandir(descriptor) as found:
                for each in found:
                    key = _join(folder, each.name)
                    if each.is_dir(follow_symlinks=False):
                        folders.append(key)
                        continue
                    try:
                        stat = self._stat(descriptor, key)
                    except FileNotFoundError:  # removed since, or a broken link
                        continue
                    except OSError as error:
                        refuse(key, _as_storage_error(error, self.locate(key)))
                        continue
                    if not S_ISDIR(stat.st_mode):
                        files.append((key, stat))
        except FileNotFoundError:  # nothing has been written yet, or the folder was just deleted
            return [], []
        except NotADirectoryError:
            with self.enter(_split(folder)[0]) as descriptor:
                return [(folder, self._stat(descriptor, folder))], []
        return files, folders


class _LocalReader(io.RawIOBase):
    """Reads an open file, at most CHUNK bytes at a time."""

    def __init__(self, source: io.FileIO) -> None:
        super().__init__()
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _os_operation(str(self._source.name), reading=True, gives_s=0):
            size = self._source.readinto(memoryview(buffer)[:CHUNK])
        record_progress(size)
        return size

    def close(self) -> None:
        self._source.close()
        super().close()


class _LocalWriter(Writer):
    """Writes a temporary file next to the object, and replaces the object with it at the end."""

    def __init__(self, storage: LocalStorage, key: str) -> None:
        super().__init__()
        self._storage = storage
        self._location = storage.locate(key)
        self._folder, self._name = _split(key)
        self._temporary = _temporary_name(self._name)
        with _os_operation(self._location):
            self._sink = self._open_temporary()

    def _open_temporary(self) -> BinaryIO:
        """Create the object's folder, and open a new file in it.

        Tries again if another process deletes the folder while it is still empty.
        """
        for _ in range(RACE_TRIES - 1):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                return self._try_to_open()
        return self._try_to_open()

    def _try_to_open(self) -> BinaryIO:
        with self._storage.enter(self._folder, create=True) as folder:
            return open(self._temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o666, dir_fd=folder))

    def _store(self, view: memoryview) -> None:
        with _os_operation(self._location, gives_s=0):
            self._sink.write(view)

    def complete(self) -> None:
        with _os_operation(self._location), self._storage.enter(self._folder) as folder:
            self._end()
            os.replace(self._temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)  # the new name survives a power loss

    def complete_new(self) -> bool:
        """Publish the object unless it exists already, and return True if it was published."""
        with _os_operation(self._location), self._storage.enter(self._folder) as folder:
            self._end()
            try:
                os.link(self._temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                # NFS also raises this error if the server created the link, but its response was lost.
                if os.stat(self._temporary, dir_fd=folder).st_nlink == 1:
                    return False
            os.fsync(folder)
            return True

    def _end(self) -> None:
        with self._sink:
            self._sink.flush()
            os.fsync(self._sink.fileno())
        refuse_if_given_up(self._location)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()
        with contextlib.suppress(OSError, StorageError), self._storage.enter(self._folder) as folder:
            os.unlink(self._temporary, dir_fd=folder)


def _version_of(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_ctime_ns}"


def _temporary_name(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex}.tmp"  # TEMPORARY


def _split(key: str) -> tuple[str, str]:
    """Return a key's folder and name."""
    folder, _, name = key.rpartition("/")
    return folder, name


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _resolve(descriptor: int) -> str:
    """Return the path of an open file with all links resolved, even if a link has changed since it was opened."""
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _real_path(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _resolve(descriptor)
    finally:
        os.close(descriptor)


def _remove_link(name: str, folder: int) -> None:
    """Remove a link that is broken or leads to a folder.

    Listings do not include such links, so deleting all listed objects leaves them behind.
    """
    if S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        with contextlib.suppress(OSError):
            if S_ISREG(os.stat(name, dir_fd=folder).st_mode):
                return
        os.unlink(name, dir_fd=folder)


def local_path(path: str) -> Path:
    """Return an absolute path with `~` and `~user` expanded. Raises `SettingsError` for an invalid path."""
    try:
        if "\0" in path:
            raise ValueError("it contains a NUL")
        os.fsencode(path)
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {shorten(error)}; write the path without '~'") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not a valid path: {shorten(error)}") from error


@contextlib.contextmanager
def _os_operation(location: str, reading: bool = False, gives_s: float = OPERATION_S) -> Iterator[None]:
    """Context manager like `limits.operation` that turns an `OSError` into a `StorageError`.

    Use this only around this module's own calls, because a caller's `FileNotFoundError` would look like a missing
    object.
    """
    try:
        with operation(location, gives_s):
            yield
    except OSError as error:
        if reading and isinstance(error, FileNotFoundError):
            raise NotFoundError(f"{location} was not found") from error
        raise _as_storage_error(error, location) from error


def _as_storage_error(error: OSError, location: str) -> StorageError:
    fix = "check that SUNSPOT_STORAGE_PATH can be read and written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free space: `sunspot checkpoints gc RUN` lists the files of a run that are no longer needed"
    kind = RefusedStorageError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
    return kind(f"{location}: {error.strerror or shorten(error)}; {fix}")
