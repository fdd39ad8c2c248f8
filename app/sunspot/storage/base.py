"""What a run needs of its storage, and what all backends share.

Keys are `/`-separated and relative to the storage path. Every operation succeeds as a whole or raises `StorageError`
naming the object (`NotFoundError` when it is not there), within the limits below.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from sunspot.errors import StorageError
from sunspot.storage.limits import record_progress

CHUNK = 1 << 20
"""Bytes of a large object that are read or written at a time."""

RACE_TRIES, RACE_PAUSE_S = 5, 0.2
"""Tries of a write that collides with another process's write, or with its delete of a neighbouring object."""

LeaveOut = Callable[[str, StorageError], Any]
"""Hears of a folder that may not be read: its key, and why."""


class Entry(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    "Bytes."
    modified: float
    "When it was last written, in seconds since the epoch."
    version: str
    """Changes with every write, even of the same size, and differs between copies: S3's ETag and time, or a file's
    inode and ctime. The time is for servers that keep the ETag of a file that was changed underneath them."""


class Unfinished(NamedTuple):
    """What a killed writer left behind: it takes space, but is not an object."""

    key: str
    "The object it would have become."
    size: int
    "Bytes."
    modified: float
    "When it was started or last written, in seconds since the epoch."
    token: str
    "Names it to storage."


class Writer(ABC):
    """An object being written: counts and hashes the bytes on their way; after a failure it accepts no more."""

    verified = False
    """Whether storage has checked the bytes that it got against a checksum sent along, once the object is complete.
    If not, whoever relies on them reads them back."""

    def __init__(self) -> None:
        self.size = 0
        self.failure: Exception | None = None
        self._sha = hashlib.sha256()

    @abstractmethod
    def complete(self) -> None:
        """Publish what was written as the object."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written, as far as storage allows; raises nothing."""

    @abstractmethod
    def _store(self, view: memoryview) -> None: ...

    def write(self, data: Any) -> int:
        if self.failure:
            raise self.failure
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK):
            chunk = view[begin : begin + CHUNK]
            self._sha.update(chunk)
            try:
                self._store(chunk)
            except Exception as error:
                self.failure = error
                raise
            self.size += len(chunk)
            record_progress(len(chunk))
        return len(view)

    def flush(self) -> None:  # noqa: B027  # torch.save calls it
        """Does nothing: an object is complete only when its context ends."""

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()


class Storage(ABC):
    """A place for runs, opened by its storage path."""

    is_bucket = False
    """Whether it is an object store, with versions and lifecycle rules of its own."""

    ahead_s = 0.0
    """Seconds that the storage's clock, which dates its objects, is ahead of this machine's, by its last answer. A
    directory shows it only to `refresh`; until then it is assumed to share this machine's clock."""

    @abstractmethod
    def __init__(self, storage_path: str) -> None: ...

    @abstractmethod
    def locate(self, key: str) -> str:
        """The path or URL of `key`, for messages."""

    @abstractmethod
    def open(self, key: str, offset: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        """A stream of the object's bytes from `offset`, which must lie before its end (or be 0)."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small object atomically: a reader sees the old bytes or the new ones, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write a small object if there is none; False when there is one with other content. Atomic among all writers.

        Writers that must be told apart write different bytes: a retry takes identical content for its own.
        """

    @abstractmethod
    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """Stream a large object; a reader sees what was there before until the context ends without error."""

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """Every object below `prefix`, sorted by key."""

    def list_readable(self, prefix: str, leave_out: LeaveOut) -> Sequence[Entry]:
        """Like `list`, without the folders below `prefix` that this user may not read: `leave_out` hears of each."""
        return self.list(prefix)

    def list_folders(self) -> Sequence[str]:
        """The names of the folders at the top, sorted. Backends need a request for a thousand, whatever they hold."""
        return sorted({entry.key.partition("/")[0] for entry in self.list("") if "/" in entry.key})

    @abstractmethod
    def delete(self, key: str, version: str = "") -> None:
        """Delete one object; no error when it is not there.

        With the `version` of a listing, one that was written again since stays. An S3 server that does not know this
        condition, such as MinIO, deletes what is there.
        """

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; no error for those that are not there. After an error, some may be left."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def delete_folders(self, prefix: str) -> None:
        """Delete the empty folders at and below `prefix`, which no listing shows."""

    def exists(self, key: str) -> bool:
        """Whether the object is there."""
        # Of a bucket not by HEAD: its 404 has no body, so a missing bucket would pass for a missing object.
        return any(entry.key == key for entry in self.list(key))

    def refresh(self, prefix: str) -> None:  # noqa: B027  # most backends have nothing to do
        """Let the next look below `prefix` show what other machines have written there by now."""

    @abstractmethod
    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """Unfinished writes below `prefix`: those of killed writers, and those in progress."""

    @abstractmethod
    def discard(self, unfinished: Unfinished) -> None:
        """Free the space of an unfinished write; no error when it is gone already."""

    def keeps_versions(self) -> bool | None:
        """Whether deleted and replaced objects keep taking space; None: not permitted to ask."""
        return False

    def drops_unfinished(self) -> bool | None:
        """Whether the backend itself removes unfinished writes some day; None: not permitted to ask."""
        return False

    def read(self, key: str) -> bytes:
        """All bytes of an object."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes | bytearray]:
        """All bytes of a large object in their order, as fast as storage gives them; never of two versions of it."""
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK):
                yield chunk

    def digest(self, key: str, copy: Callable[[bytes | bytearray], Any] | None = None) -> tuple[int, str]:
        """Size in bytes and SHA-256 (hex) of an object as storage returns it; `copy` gets the bytes, too."""
        size, sha = 0, hashlib.sha256()
        for chunk in self.chunks(key):
            size += len(chunk)
            sha.update(chunk)
            if copy:
                copy(chunk)
        return size, sha.hexdigest()


@contextlib.contextmanager
def completed(writer: Writer) -> Iterator[Writer]:
    """Complete `writer` at the end of the context, or abort it on any error."""
    try:
        yield writer
        if writer.failure:
            raise writer.failure
        writer.complete()
    except BaseException as error:
        writer.abort()
        # torch.save replaces the error of a write by one of its own that does not mention storage.
        if writer.failure and error is not writer.failure and isinstance(error, Exception):
            raise writer.failure from writer.failure.__cause__
        raise
