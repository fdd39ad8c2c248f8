"""The operations that a run needs of a place to be kept in, and what every such place shares.

Keys are `/`-separated and relative to the storage path. Every operation either does the whole of what it says or
raises `StorageError` naming the object (`NotFoundError` when it is not there), within the limits below.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from app.errors import StorageError

CHUNK = 1 << 20
"""Bytes read at a time when an object is hashed."""

READS_IN_FLIGHT = 16
"""Small objects read at once by whoever needs many of them: each waits for an answer, not for bytes."""

RACE_TRIES, RACE_PAUSE_S = 5, 0.2
"""Tries of a write that another process's write or delete of a neighbour got in the way of."""

Item = TypeVar("Item")

Result = TypeVar("Result")

Errors = Callable[[], contextlib.AbstractContextManager[None]]
"""Turns the errors of one object's storage into `StorageError`. Goes around storage's own calls, never around a
caller's: a `FileNotFoundError` of theirs would pass for a missing object."""


class Entry(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    "Bytes."
    modified: float
    "When it was last written, in seconds since the epoch."
    version: str
    """Another one after every write, also of the same number of bytes, and for every copy: S3's ETag and time, or a
    file's number and time of change. The time is for servers that keep the ETag of a file which changed under them."""


class Unfinished(NamedTuple):
    """What a writer left behind that was killed: it takes space, and is no object."""

    key: str
    "The object that it would have become."
    size: int
    "Bytes."
    modified: float
    "When it was begun or last written, in seconds since the epoch."
    token: str
    "Names it to storage."


class Writer(Protocol):
    """An object being written: bytes go in, and its size and SHA-256 come out."""

    size: int

    def write(self, data: Any) -> int: ...

    def flush(self) -> None: ...

    @property
    def sha256(self) -> str: ...


class Storage(ABC):
    """The operations that a run needs of the place it is kept in."""

    @abstractmethod
    def locate(self, key: str) -> str:
        """The path or URL of `key`, for messages."""

    @abstractmethod
    def open(self, key: str, offset: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        """A stream of the object's bytes from `offset` on, which must lie before its end (or be 0)."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small object whole: a reader sees the old bytes or the new ones, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write a small object if there is none; False when other content is there. Atomic among all writers.

        Writers that must be told apart write different bytes: content that is there already may pass for one's own.
        """

    @abstractmethod
    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """Stream a large object; it may be visible half-written, or absent, until the context ends without error."""

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """Every object below `prefix`, in the order of the keys."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; not being there is no error."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; not being there is no error. After an error, some may be left."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def delete_folders(self, prefix: str) -> None:
        """Remove the folders in and at `prefix` that hold no object: what no listing shows. Others stay."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the object is there."""

    @abstractmethod
    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """What killed writers left below `prefix`, and what living ones are at."""

    @abstractmethod
    def discard(self, unfinished: Unfinished) -> None:
        """Give back the space of what a killed writer left; being gone already is no error."""

    def keeps_versions(self) -> bool | None:
        """Whether deleted and replaced objects go on taking space; None: this user may not know."""
        return False

    def drops_unfinished(self) -> bool | None:
        """Whether the place itself removes what killed writers left, some day; None: this user may not know."""
        return False

    def read(self, key: str) -> bytes:
        """All bytes of an object."""
        with self.open(key) as stream:
            return stream.read()

    def digest(self, key: str) -> tuple[int, str]:
        """Size in bytes and SHA-256 (hex) of what storage gives back for an object."""
        size, sha = 0, hashlib.sha256()
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK):
                size += len(chunk)
                sha.update(chunk)
        return size, sha.hexdigest()

    def prove(self, prefix: str) -> None:
        """Prove that objects below `prefix` can be created, read, listed and deleted, and that a second create fails.

        The last is what keeps two processes from owning one run. Raises `StorageError`.
        """
        key, content = f"{prefix}/probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        created = self.create(key, content)
        try:
            # Before the second create, which would replace the content where it is not refused.
            found = self.read(key) == content and [entry.key for entry in self.list(key)] == [key]
            again = self.create(key, b"another writer")
        finally:
            self.delete(key)
        if not created or not found:
            raise StorageError(
                f"{self.locate(key)}: written, but not found again; check that STORAGE_PATH is one consistent store"
            )
        if self.exists(key):
            raise StorageError(f"{self.locate(key)}: deleted, but still there; allow deleting below STORAGE_PATH")
        if again:
            raise StorageError(
                f"{self.locate(key)}: created twice; this store ignores 'If-None-Match: *', without which two "
                "processes could write one run. Use a server that supports conditional writes"
            )


def map_parallel(act: Callable[[Item], Result], items: Iterable[Item], at_once: int = READS_IN_FLIGHT) -> list[Result]:
    """What `act` returns for each item, in their order. The first error ends it: what has not begun never does."""
    with ThreadPoolExecutor(at_once, thread_name_prefix="storage") as pool:
        return list(pool.map(act, items))


class HashingWriter:
    """Counts and hashes the bytes on their way to storage; after a failure it takes no more."""

    def __init__(self) -> None:
        self.size = 0
        self.failure: Exception | None = None
        self._sha = hashlib.sha256()

    def write(self, data: Any) -> int:
        if self.failure:
            raise self.failure
        view = memoryview(data).cast("B")
        self._sha.update(view)
        try:
            self._store(view)
        except Exception as error:
            self.failure = error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing to do before the end: an object is complete when its context is."""

    def complete(self) -> None:
        """Make the object what was written."""
        raise NotImplementedError

    def abort(self) -> None:
        """Leave nothing behind, as far as storage allows; raises nothing."""
        raise NotImplementedError

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()

    def _store(self, view: memoryview) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def completed(writer: HashingWriter) -> Iterator[Writer]:
    """Complete `writer` at the end of the context, or abort it on any error."""
    try:
        yield writer
        if writer.failure:
            raise writer.failure
        writer.complete()
    except Exception as error:
        writer.abort()
        # torch.save turns the error of a write into one of its own, which says nothing of storage.
        if writer.failure and error is not writer.failure:
            raise writer.failure from writer.failure.__cause__
        raise
    except BaseException:
        writer.abort()
        raise


class ObjectReader(io.RawIOBase):
    """Bytes of an object: `errors` names it in the errors of reading, and in those only."""

    def __init__(self, source: Any, errors: Errors) -> None:
        super().__init__()
        self._source, self._errors = source, errors

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            return self._source.readinto(buffer)

    def readall(self) -> bytes:
        with self._errors():
            return self._source.read()

    def close(self) -> None:
        self._source.close()
        super().close()


BACKOFF_S = (1, 2, 4, 8, 16, 30)
"""Pauses between tries; the last one is repeated until the limit."""


def pause_after(tries: int) -> float:
    """Seconds to wait after so many tries, from 0."""
    return BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]


def retry_storage(act: Callable[[], Result], limit_s: float, what: str, warn: Callable[[str], Any]) -> Result:
    """The result of `act`, tried again while storage refuses; raises `StorageError` after about `limit_s` seconds."""
    began = time.monotonic()
    tries = 0
    while True:
        try:
            return act()
        except StorageError as error:
            failing_for = time.monotonic() - began
            if failing_for >= limit_s:
                raise StorageError(
                    f"{what}: storage has refused for {failing_for:.0f} s "
                    f"(SUNSPOT_STORAGE_TIMEOUT_S={limit_s:g}): {error}"
                ) from error
            warn(f"{what}: {error}; trying again in {pause_after(tries):g} s")
        time.sleep(pause_after(tries))
        tries += 1
