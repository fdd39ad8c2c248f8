"""The storage interface (`Storage`), and code shared by all backends.

A key is a path relative to the storage path, with `/` as the separator. Every operation either succeeds completely or
raises `StorageError` with the object's location. The error is a `NotFoundError` if the object does not exist.

To add a backend:

1. Write a module with a subclass of `bucket.Bucket`, like azure.py. Set the class constants that `Bucket` declares,
   such as the service's error codes. Implement `Bucket`'s abstract methods, each of which sends one request or
   classifies an error. `_begin_upload` returns an instance of your own subclass of `PartUpload`. Also implement
   `delete`, `list_unfinished`, `discard`, `keeps_versions` and `drops_unfinished`. Call `_note_clock` with the date of
   each response, because the age of a run's status is measured by the service's clock. `Bucket` does everything else,
   such as streams and parallel reads. Inherit from `Storage` directly only if the service is not an object store.
2. Run every request inside `limits.operation` (`Bucket._request` does this). This context manager stops the requests of
   abandoned work, and counts each response as progress. Without it, storage would seem unresponsive.
3. Count the bytes of long requests with `limits.record_progress`, because a transfer without progress is aborted after
   STORAGE_TIMEOUT_S. `Writer` counts the bytes that are written.
4. Make `create` atomic among all writers, because it decides which process owns a run. `prove.prove` checks it.
5. Add the scheme to BACKENDS in storage/__init__.py, and to BUCKET_URLS and the pattern of STORAGE_PATH in
   settings/definitions.py. For datasets, add the scheme to CLIENTS and the beginning of its errors to CLIENT_ERRORS in
   data/dataset_files.py. For pods without a Secret, add the scheme to SCHEMES, and the cloud's nodes to CLOUDS, in
   submitter/manifest/foreign_storage.py.
6. Add an extra for the cloud's client to pyproject.toml, and to CLOUDS in the Makefile. Add the client's modules to
   mypy's `ignore_missing_imports` list in pyproject.toml and to NETWORK_CLIENTS in elastic/failures.py. Add the
   credentials to docs/storage.md.
7. Add a fixture to tests/harness/clouds.py, so that tests/unit/test_storage.py tests the backend.

`open_storage` rejects schemes that are not in BACKENDS.
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
"""Number of bytes of a large object that are read or written at a time."""

RACE_TRIES = 5
"""Number of attempts to write an object while another process writes or deletes it."""

RACE_PAUSE_S = 0.2
"""Seconds between the first two attempts. Each later pause is longer by the same amount."""

OnUnreadable = Callable[[str, StorageError], Any]
"""A function that is called with the key and the error of each file or folder that cannot be read."""


class Entry(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    "The size in bytes."
    modified: float
    "The time of the last write, in seconds since the Unix epoch."
    version: str
    """An identifier that changes with every write and differs between copies.

    It is S3's ETag and time, or a file's inode and ctime. The time is included because some servers keep the ETag of a
    file that was changed on disk.
    """


class UnfinishedWrite(NamedTuple):
    """A write that is in progress or was interrupted. Its bytes take up space, but readers cannot see them."""

    key: str
    "The key of the object that would have been written."
    size: int
    "The size in bytes."
    modified: float
    "The time at which bytes were last written, or at which the write began, in seconds since the Unix epoch."
    token: str
    "The backend's identifier for the write."


class Writer(ABC):
    """A writer that counts and hashes an object's bytes. After a failure, every further call to `write` fails."""

    verified = False
    "True if the object is complete and storage has verified its checksum. Otherwise, callers must read it back."

    def __init__(self) -> None:
        self.size = 0
        self.failure: Exception | None = None
        self._sha = hashlib.sha256()

    @abstractmethod
    def complete(self) -> None:
        """Publish the object."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the written bytes if possible. Never raises an error."""

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
        """Do nothing, because no bytes are visible before the object is published."""

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()


class Storage(ABC):
    """Storage for runs."""

    is_bucket = False
    """True for an object store, which can have versions and lifecycle rules."""

    ahead_s = 0.0
    """Seconds by which the storage's clock is ahead of this machine's clock.

    Buckets update it with every response, and directories with every `refresh`.
    """

    @abstractmethod
    def __init__(self, storage_path: str) -> None: ...

    @abstractmethod
    def locate(self, key: str) -> str:
        """Return the path or URL of `key`, for use in messages."""

    @abstractmethod
    def open(self, key: str, offset: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a stream of an object's bytes from `offset`. A nonzero `offset` must be less than the object's size."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small object atomically. Readers see either the old or the new bytes."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Create a small object atomically, and return True. If several writers try this at once, only one succeeds.

        Returns False if the object exists with different content. Competing writers must write different bytes, because
        a writer that finds identical content assumes that it wrote this content itself.
        """

    @abstractmethod
    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """Context manager that returns a `Writer` for a large object.

        Readers see the old object until the context exits without an error.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """List every object below `prefix`, sorted by key."""

    def list_readable(self, prefix: str, on_unreadable: OnUnreadable) -> Sequence[Entry]:
        """List the objects below `prefix`, and call `on_unreadable` for each file or folder that cannot be read."""
        return self.list(prefix)

    def list_folders(self) -> Sequence[str]:
        """List the names of the top-level folders, sorted.

        This default implementation lists every object. Buckets override it and list only the folders.
        """
        return sorted({entry.key.partition("/")[0] for entry in self.list("") if "/" in entry.key})

    @abstractmethod
    def delete(self, key: str, version: str = "") -> None:
        """Delete an object. A missing object is not an error.

        With a `version` from a listing, the object is kept if it has been written again since. S3 servers without
        support for this condition, such as MinIO, always delete the object.
        """

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing objects are not errors. After an error, some objects can remain."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def delete_folders(self, prefix: str) -> None:
        """Delete the empty folders at and below `prefix`. Listings never include empty folders."""

    def exists(self, key: str) -> bool:
        """Return True if the object exists."""
        # HEAD requests are not used for buckets. Their 404 has no body, so a missing bucket would look like a missing
        # object.
        return any(entry.key == key for entry in self.list(key))

    def refresh(self, prefix: str) -> None:  # noqa: B027  # a no-op in most backends
        """Make later listings and reads below `prefix` include everything that other machines have written so far."""

    @abstractmethod
    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        """List the unfinished writes below `prefix`, whether they are in progress or their writers were killed."""

    @abstractmethod
    def discard(self, unfinished: UnfinishedWrite) -> None:
        """Delete an unfinished write to free its space. A missing write is not an error."""

    def keeps_versions(self) -> bool | None:
        """Return whether deleted objects still use space, or None if the credentials do not allow the check."""
        return False

    def drops_unfinished(self) -> bool | None:
        """Return whether the backend itself deletes unfinished writes, or None if the credentials forbid the check."""
        return False

    def read(self, key: str) -> bytes:
        """Return all bytes of an object."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes | bytearray]:
        """Yield the bytes of a large object in chunks, which all belong to the same version of the object."""
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK):
                yield chunk

    def digest(self, key: str, copy: Callable[[bytes | bytearray], Any] | None = None) -> tuple[int, str]:
        """Read an object, and return its size in bytes and its SHA-256 as a hex string.

        If `copy` is given, it is called with each chunk of the object's bytes.
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
    """Context manager that completes `writer` at the end, or aborts it on any error."""
    try:
        yield writer
        if writer.failure:
            raise writer.failure
        writer.complete()
    except BaseException as error:
        writer.abort()
        # torch.save replaces a write error with its own error, which does not mention storage.
        if writer.failure and error is not writer.failure and isinstance(error, Exception):
            raise writer.failure from writer.failure.__cause__
        raise
