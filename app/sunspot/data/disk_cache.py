"""A cache of data from buckets, in a folder on the node's disk. All processes that use the folder share the cache.

An entry contains one range of one version of a file. Its name is a hash of the file's URL, size and ETag, and of the
range. Rows are always read in the same ranges, so the next epoch finds all of its ranges in the cache.

    3f/3fa91c...    an entry: a checksum and the content, renamed to this name once it is complete
    locks/3fa       locked while a process fetches an entry whose name begins with 3fa, so that it is fetched only once
    size            the total size of all entries in bytes, which is only changed while locks/size is locked

Processes share nothing except these files, so they can run in different pods. A process that is killed, or whose disk
is full, leaves at most one unfinished entry behind. The total size includes this entry until it is replaced or removed.
"""

import hashlib
import io
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout

from sunspot.background import map_parallel
from sunspot.errors import DataError, shorten
from sunspot.log import warn_once
from sunspot.settings import FIELDS, PREFIX, Settings

FOLDER, LIMIT_GB = PREFIX + "DATA_CACHE", PREFIX + "DATA_CACHE_GB"
"""Environment variables of the cache's settings. Processes that read rows inherit them from their pod or driver."""

CHECKSUM = struct.Struct(">I")
"""The beginning of an entry: the CRC-32 of the content."""

DISK_BLOCK = 4096
"""Size in bytes of the blocks in which a disk stores files."""

FREED = 0.1
"""Fraction of the limit that is freed at a time, so that the slow search for the oldest entries is rarely needed."""

WAIT_S = 60.0
"""Seconds to wait while another process reads an entry from the bucket or makes room."""

POLL_S = 0.01
"""Seconds between two attempts to lock a file."""

PART_BYTES = 8 << 20
"""Maximum size in bytes of a request to the bucket. Larger ranges are read in several parts at the same time."""

PARTS_AT_ONCE = 4

log = logging.getLogger(__name__)


class DiskCache:
    """A cache in a folder. Its entries take at most `limit` bytes on the disk.

    The cache itself never raises errors. If an entry cannot be written, for example because the disk is full, the
    cache logs one warning and adds no more entries in this process.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._folder = Path(folder)
        self._limit = limit
        self._writable = True

    def read(self, identity: str, fetch: Callable[[], bytes]) -> bytes | memoryview:
        """Return the content of the entry for `identity`, or the result of `fetch`, which is stored as a new entry.

        Raises whatever `fetch` raises.
        """
        name = hashlib.sha256(identity.encode()).hexdigest()
        entry = self._folder / name[:2] / name
        content: bytes | memoryview | None = self._find(entry)
        if content is None and self._writable:
            with self._lock(name[:3]) as locked:
                content = self._find(entry)  # another process might have added it in the meantime
                if content is None:
                    content = fetch()
                    if locked:
                        self._add(entry, content)
        return fetch() if content is None else content

    def _find(self, entry: Path) -> memoryview | None:
        """Return the content of an entry, or None if it does not exist or is damaged."""
        try:
            data = memoryview(entry.read_bytes())
        except OSError:
            return None
        content = data[CHECKSUM.size :]
        intact = data[: CHECKSUM.size] == CHECKSUM.pack(zlib.crc32(content))
        with suppress(OSError):  # the folder can be read-only
            if intact:
                os.utime(entry)  # disks are often mounted so that reading does not change the access time
            else:
                entry.unlink()
        if not intact:
            self._warn("an entry is damaged, so its content is read from the bucket again; check the node's disk")
        return content if intact else None

    def _add(self, entry: Path, content: bytes) -> None:
        size = -(-(CHECKSUM.size + len(content)) // DISK_BLOCK) * DISK_BLOCK
        with self._stop_adding_on_error():
            if size <= self._limit and self._make_room(size):
                entry.parent.mkdir(exist_ok=True)
                unfinished = entry.with_suffix(".new")
                with unfinished.open("wb") as file:
                    file.write(CHECKSUM.pack(zlib.crc32(content)))
                    file.write(content)
                unfinished.replace(entry)

    def _make_room(self, size: int) -> bool:
        """Add `size` to the total size of all entries, after removing the least recently used entries if necessary.

        Returns False if the file with the total size cannot be locked.
        """
        record = self._folder / "size"
        with self._lock("size") as locked:
            if locked:
                recorded = record.read_text() if record.exists() else ""
                total = int(recorded) if recorded.isdigit() else self._limit
                if total + size > self._limit:
                    total = self._remove_oldest(int(self._limit * (1 - FREED)) - size)
                record.write_text(str(total + size))
        return locked

    def _remove_oldest(self, left: int) -> int:
        """Remove the least recently used entries until the rest take at most `left` bytes, and return the new total."""
        entries = []
        for path in self._folder.glob("??/*"):
            with suppress(FileNotFoundError):  # another process has just removed or renamed it
                found = path.stat()
                entries.append((found.st_mtime, -(-found.st_size // DISK_BLOCK) * DISK_BLOCK, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= left:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    @contextmanager
    def _lock(self, name: str) -> Iterator[bool]:
        """Context manager that holds a lock. It yields False if the lock cannot be acquired within WAIT_S."""
        with ExitStack() as held:
            locked = False
            with self._stop_adding_on_error():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                (self._folder / "locks").mkdir(exist_ok=True)
                held.enter_context(FileLock(self._folder / "locks" / name, WAIT_S, poll_interval=POLL_S))
                locked = True
            yield locked

    @contextmanager
    def _stop_adding_on_error(self) -> Iterator[None]:
        """Context manager that turns errors into warnings. After a disk error, no more entries are added."""
        try:
            yield
        except Timeout as error:
            warn_once(log, f"{error.lock_file} has been locked by another process for {WAIT_S:g} s; stop that process")
        except OSError as error:
            self._writable = False
            fix = f"set it to a writable folder with {self._limit / 1e9:g} GB of free space, or lower {LIMIT_GB}"
            self._warn(f"no more entries will be added to the cache: {error.strerror or shorten(error)}; {fix}")

    def _warn(self, text: str) -> None:
        warn_once(log, f"{FOLDER}={self._folder}: {text}")


class CachedFile(io.RawIOBase):
    """A file in a bucket that is read through a cache.

    It is safe to use from several threads, because Arrow holds a lock while it calls `seek` and `read`.
    """

    def __init__(self, open_file: Callable[[], pa.NativeFile], url: str, cache: DiskCache) -> None:
        self._open = open_file
        self._url = url
        self._cache = cache
        self._file = open_file()
        self._etag = find_etag(self._file)
        self._size = self._file.size()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes | memoryview:  # type: ignore[override]
        begin = self._position
        end = self._size if size < 0 else min(self._size, begin + size)
        if begin >= end:
            return b""
        self._position = end
        if not self._etag:
            return self._fetch(begin, end)
        identity = f"{self._url} {self._size} {self._etag!r} {begin} {end}"
        return self._cache.read(identity, lambda: self._fetch(begin, end))

    def _fetch(self, begin: int, end: int) -> bytes:
        parts = [(min(PART_BYTES, end - first), first) for first in range(begin, end, PART_BYTES)]
        content = b"".join(map_parallel(lambda part: self._file.read_at(*part), parts, PARTS_AT_ONCE))
        if find_etag(self._open()) != self._etag:  # Arrow reads whatever is in the bucket now
            raise DataError(f"{self._url} has changed since it was opened; restart the run")
        return content


def find_etag(file: pa.NativeFile) -> bytes:
    """Return the ETag that identifies the version of a file in a bucket. It is empty if the bucket sends no ETag."""
    headers: dict[str, bytes] = {name.lower(): value for name, value in (file.metadata() or {}).items()}
    return headers.get("etag", b"")


def read_through_cache(open_file: Callable[[], pa.NativeFile], url: str) -> pa.NativeFile:
    """Open a file with `open_file`. If DATA_CACHE is set in the environment, the file is read through the cache."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return open_file()
    limit_gb = float(os.environ.get(LIMIT_GB) or FIELDS["data_cache_gb"].default)
    return pa.PythonFile(CachedFile(open_file, url, _open_cache(folder, int(limit_gb * 1e9))), mode="r")


@lru_cache
def _open_cache(folder: str, limit: int) -> DiskCache:
    return DiskCache(folder, limit)


def export_cache(settings: Settings) -> None:
    """Set the cache's environment variables in this process, so that processes of a local Ray session inherit them."""
    os.environ |= {name: value for name, value in settings.environment().items() if name in (FOLDER, LIMIT_GB)}
