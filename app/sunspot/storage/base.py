"""The interface of storage (`Storage`), and the code that all backends share.

Keys are separated by `/` and relative to the storage path. Every operation either succeeds completely or raises
`StorageError`, which names the object (`NotFoundError` if the object does not exist).

To add a backend:

1. Write a module with a subclass of `bucket.Bucket`, as azure.py does. It names the service's error codes and
   implements one request each for reading a range, writing, creating and listing. Everything else is shared: keys,
   streams, parallel reads, uploads in parts. Inherit `Storage` itself only for something that is not an object store.
2. Run every request inside `limits.operation` (`Bucket._request` does that). It turns an abandoned try into an error,
   and counts each answer as progress. A request without it looks like storage that does not answer.
3. Count the bytes of long requests with `limits.record_progress`, because a transfer that counts none of its bytes is
   given up after STORAGE_TIMEOUT_S. `Writer` counts what is written.
4. Make `create` atomic among all writers, because it decides which process owns a run. `prove.prove` checks it.
5. Add the scheme to BACKENDS in storage/__init__.py, and to the pattern and the text of STORAGE_PATH in settings.py.
   For datasets, add it to CLIENTS in data/parquet_files.py.
6. Add an extra for the cloud's client to pyproject.toml, and the credentials to docs/storage.md.
7. Add a fixture to tests/harness/clouds.py, with which tests/unit/test_storage.py tests the backend.

`open_storage` refuses any other scheme.
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

RACE_TRIES = 5
"""Number of tries for a write that collides with another process's write, or with its delete of a nearby object."""

RACE_PAUSE_S = 0.2
"""Seconds between the first two of these tries; each later pause is longer by the same amount."""

OnUnreadable = Callable[[str, StorageError], Any]
"""Function that is called for each folder that the user may not read, with the folder's key and the error."""


class Entry(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    "Size in bytes."
    modified: float
    "Time of the last write, in seconds since the epoch."
    version: str
    """Identifier that changes with every write, even of the same size, and differs between copies: S3's ETag and time,
    or a file's inode and ctime. The time covers servers that keep the ETag of a file that was changed underneath them.
    """


class UnfinishedWrite(NamedTuple):
    """An unfinished write, as a killed writer leaves it: it takes space, but is not an object."""

    key: str
    "Key of the object that it would have become."
    size: int
    "Size in bytes."
    modified: float
    "Time of the last write to it, or of its beginning, in seconds since the epoch."
    token: str
    "Name by which storage knows it."


class Writer(ABC):
    """An object that is being written. Counts and hashes its bytes, and accepts no more bytes after a failure."""

    verified = False
    """True if the object is complete and storage has compared its bytes with a checksum. If it is False, callers that
    rely on the bytes read them back."""

    def __init__(self) -> None:
        self.size = 0
        self.failure: Exception | None = None
        self._sha = hashlib.sha256()

    @abstractmethod
    def complete(self) -> None:
        """Publish the object."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written, as far as storage allows. Never raises an error."""

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
        """Do nothing, because an object is only complete when its context ends."""

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()


class Storage(ABC):
    """Storage for runs, opened by its storage path."""

    is_bucket = False
    """True for an object store, which has versions and lifecycle rules of its own."""

    ahead_s = 0.0
    """Seconds by which the storage's clock, which dates its objects, is ahead of this machine's, as of its last answer.
    A directory learns it only in `refresh`; until then it is assumed to share this machine's clock."""

    @abstractmethod
    def __init__(self, storage_path: str) -> None: ...

    @abstractmethod
    def locate(self, key: str) -> str:
        """Return the path or URL of `key`, for messages."""

    @abstractmethod
    def open(self, key: str, offset: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a stream of the object's bytes from `offset`, which must lie before its end (or be 0)."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small object atomically: a reader sees all the old bytes or all the new ones."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write a small object unless it exists, atomically among all writers.

        Returns False if the object exists with other content. Writers that compete must write different bytes, because
        a retry takes identical content for its own.
        """

    @abstractmethod
    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """Stream a large object. Readers see the old object until the context ends without an error."""

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """List every object below `prefix`, sorted by key."""

    def list_readable(self, prefix: str, on_unreadable: OnUnreadable) -> Sequence[Entry]:
        """List the objects below `prefix`, except in folders that this user may not read.

        `on_unreadable` is called for each such folder.
        """
        return self.list(prefix)

    def list_folders(self) -> Sequence[str]:
        """List the names of the top folders, sorted.

        A backend sends one request per thousand folders, regardless of how many objects they contain.
        """
        return sorted({entry.key.partition("/")[0] for entry in self.list("") if "/" in entry.key})

    @abstractmethod
    def delete(self, key: str, version: str = "") -> None:
        """Delete one object. An object that does not exist is not an error.

        With a `version` from a listing, the object stays if it was written again since then. An S3 server that does not
        support this condition, such as MinIO, deletes the object in any case.
        """

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects. Objects that do not exist are not errors. After an error, some objects may be left."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def delete_folders(self, prefix: str) -> None:
        """Delete the empty folders at and below `prefix`, which no listing shows."""

    def exists(self, key: str) -> bool:
        """Return True if the object exists."""
        # Buckets are not asked by HEAD: its 404 has no body, so a missing bucket would look like a missing object.
        return any(entry.key == key for entry in self.list(key))

    def refresh(self, prefix: str) -> None:  # noqa: B027  # most backends have nothing to do
        """Make the next listing or read below `prefix` see what other machines have written so far."""

    @abstractmethod
    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        """List the unfinished writes below `prefix`: those of killed writers, and those still in progress."""

    @abstractmethod
    def discard(self, unfinished: UnfinishedWrite) -> None:
        """Free the space of an unfinished write. A write that is already gone is not an error."""

    def keeps_versions(self) -> bool | None:
        """Return True if deleted and replaced objects keep taking space, or None if this identity may not find out."""
        return False

    def drops_unfinished(self) -> bool | None:
        """Return True if the backend removes unfinished writes by itself, or None if this identity may not find out."""
        return False

    def read(self, key: str) -> bytes:
        """Return all bytes of an object."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes | bytearray]:
        """Yield all bytes of a large object in order, as fast as storage sends them. All are of the same version."""
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK):
                yield chunk

    def digest(self, key: str, copy: Callable[[bytes | bytearray], Any] | None = None) -> tuple[int, str]:
        """Return the size in bytes and the SHA-256 (hex) of an object as storage returns it.

        `copy` is called with each chunk of its bytes.
        """
        size = 0
        sha = hashlib.sha256()
        for chunk in self.chunks(key):
            size += len(chunk)
            sha.update(chunk)
            if copy:
                copy(chunk)
        return size, sha.hexdigest()


@contextlib.contextmanager
def complete_or_abort(writer: Writer) -> Iterator[Writer]:
    """Complete `writer` when the context ends, or abort it on any error."""
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
