"""A read-only view of a storage location. The view caches objects until they change."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NoReturn

from sunspot.errors import StorageError
from sunspot.storage.base import Entry, Storage

MAX_ONE = 16 << 20
"""Largest size in bytes of a cached object."""

MAX_OPENED = 128 << 10
"""Largest size in bytes of an opened object that is cached. Larger objects are often read only in part."""

MAX_VERSIONS = 200_000
"""Largest number of remembered object versions. Beyond that number, the cache is cleared."""


class ReadOnlyStorage(Storage):
    """A read-only view of another storage. The view reads an object again only if a listing shows a new version.

    `refresh` does nothing, because it would have to write to storage to invalidate an NFS client's cache.
    """

    def __init__(self, storage: Storage, most: int = 16 << 20) -> None:
        """Cache at most `most` bytes. The default suffices for about 10,000 statuses."""
        self._most = most
        self._storage = storage
        self.is_bucket = storage.is_bucket
        self._listed: dict[str, Entry] = {}
        self._kept = OrderedDict[str, tuple[str, bytes]]()
        "An LRU cache of object versions and contents, keyed by object, with the newest last."
        self._bytes = 0
        self._lock = threading.Lock()

    def locate(self, key: str) -> str:
        return self._storage.locate(key)

    def exists(self, key: str) -> bool:
        return self._storage.exists(key)

    def list_folders(self) -> Sequence[str]:
        return self._storage.list_folders()

    def list(self, prefix: str) -> list[Entry]:
        found = self._storage.list(prefix)
        self.ahead_s = self._storage.ahead_s
        with self._lock:
            if len(self._listed) > MAX_VERSIONS:
                self._listed.clear()
            self._listed.update((entry.key, entry) for entry in found)
        return found

    def read(self, key: str) -> bytes:
        entry = self._listed.get(key)
        if entry is None or entry.size > MAX_ONE:
            return self._storage.read(key)
        with self._lock:
            version, content = self._kept.get(key, ("", b""))
            if version == entry.version:
                self._kept.move_to_end(key)
                return content
        content = self._storage.read(key)
        with self._lock:
            self._bytes += len(content) - len(self._kept.pop(key, ("", b""))[1])
            self._kept[key] = entry.version, content
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1][1])
        return content

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        entry = self._listed.get(key)
        if offset or entry is None or entry.size > MAX_OPENED:
            with self._storage.open(key, offset) as stream:
                yield stream
        else:
            yield io.BytesIO(self.read(key))

    def _refuse(self, *_: Any) -> NoReturn:
        raise StorageError(f"{self._storage.locate('')} was opened read-only")

    write = create = writer = delete = delete_many = _refuse  # type: ignore[assignment]
    delete_folders = list_unfinished = discard = _refuse  # type: ignore[assignment]
