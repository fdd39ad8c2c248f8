"""The base class of the object stores, `Bucket`.

A subclass defines its service's error codes, and implements the abstract methods.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, ClassVar, NamedTuple

from sunspot.background import map_parallel, start_thread
from sunspot.errors import NotFoundError, RefusedStorageError, StorageError, shorten
from sunspot.storage.base import CHUNK, RACE_PAUSE_S, RACE_TRIES, Entry, Storage, Writer, complete_or_abort
from sunspot.storage.limits import OPERATION_S, operation

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
REQUEST_TRIES = 4
"""Number of attempts by the service's client. A request without a response fails after about 4 x 20 s plus backoff."""

PART = 16 << 20
"""Size in bytes of each of an object's first EVEN_PARTS parts."""

EVEN_PARTS = 1000
"""Number of parts of equal size, which together hold 16 GiB."""

GROWTH = 136 << 10
"""Bytes by which each later part is larger than the previous part. With parts of at most 1.2 GiB, the 10,000 parts
allowed by S3 then hold an object of 5 TiB, S3's limit. Other clouds allow more."""

PARTS_IN_FLIGHT = 8
"""Number of an object's parts that are transferred at once, because servers limit the speed of each connection.
Together, these parts need 128 MiB of memory, or one percent of the size of a 200 GiB object."""

CONNECTIONS = 4 * PARTS_IN_FLIGHT
"""Number of connections that a client keeps open, enough for the parts of several files."""


class ByteRange(NamedTuple):
    """A range of an object's bytes."""

    body: bytes | bytearray
    "The requested bytes, up to the object's end."
    total: int
    "The size of the whole object in bytes. Only valid if no version was requested."
    version: str


class ListingPage(NamedTuple):
    """A page of a listing, sorted by key."""

    entries: list[Entry]
    more: bool
    "True if more pages follow."


class Bucket(Storage):
    """A prefix in a bucket, `scheme://bucket/prefix`."""

    is_bucket = True

    SCHEME: ClassVar[str]
    FIXES: ClassVar[dict[str, str]]
    "The fix for each error, keyed by the service's code or the class of the client's exception."
    REFUSALS: ClassVar[tuple[str, ...]]
    "Error codes for a bucket that does not exist or does not match the settings."
    KEY_REFUSALS: ClassVar[tuple[str, ...]]
    """Error codes for rejected credentials. A pod identity's credentials can become valid a moment later, or in the
    next pod (kubernetes-external-secrets#419, aws-iam-authenticator#285)."""
    KEYS: ClassVar[tuple[str, ...]]
    "Environment variables with credentials. If one of them is set, a retry would send the same credentials again."
    MISSING: ClassVar[str]
    "The error code for a missing object in an existing bucket."
    VERSIONS_FIX: ClassVar[str]
    "Advice on how to make the service free the space of deleted objects."
    VERSIONS_RIGHT: ClassVar[str]
    "The permission that `keeps_versions` needs."
    UNFINISHED_FIX: ClassVar[str]
    "Advice on how to make the service delete unfinished uploads."
    UNFINISHED_RIGHT: ClassVar[str]
    "The permission that `drops_unfinished` needs."
    FAILURES: ClassVar[tuple[type[Exception], ...]]
    "The exceptions of the service's client."

    def __init__(self, storage_path: str) -> None:
        self.bucket, _, prefix = storage_path.partition("://")[2].partition("/")
        self.prefix = prefix.strip("/")

    # Requests that each service implements in its own way.

    @abstractmethod
    def _read_range(self, key: str, begin: int, size: int, version: str = "") -> ByteRange | None:
        """Return a range of an object's bytes, or None if the object ends before the range.

        With a `version`, raises an error if the object now has a different version.
        """

    @abstractmethod
    def _put(self, key: str, data: bytes | bytearray) -> None:
        """Write an object in one request."""

    @abstractmethod
    def _put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists. Return False if the service reports that it exists or is being written."""

    @abstractmethod
    def _begin_upload(self, key: str) -> PartUpload:
        """Start a multipart upload of an object."""

    @abstractmethod
    def _list_pages(self, prefix: str) -> Iterator[ListingPage]:
        """Yield the pages of a listing of all keys in the bucket that begin with the string `prefix`."""

    @abstractmethod
    def _list_prefixes(self, prefix: str) -> Iterable[str]:
        """Return the keys of all folders that begin with the string `prefix`. Each key ends with '/'."""

    @abstractmethod
    def _code(self, error: Any) -> str:
        """Return the service's code for an exception, or the name of the exception's class if it has no code."""

    # Code shared by all services.

    def locate(self, key: str) -> str:
        return f"{self.SCHEME}://{self.bucket}/{self._full(key)}"

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _relative(self, full: str) -> str:
        return full[len(self.prefix) + 1 :] if self.prefix else full

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        with io.BufferedReader(_RangeReader(functools.partial(self._read_range, key), offset), CHUNK) as stream:
            yield stream

    def chunks(self, key: str) -> Iterator[bytes | bytearray]:
        first = self._read_range(key, 0, CHUNK)
        if first is None:
            return
        yield first.body

        def read_part(begin: int) -> bytes | bytearray:
            part = self._read_range(key, begin, PART, first.version)
            assert part
            return part.body

        begins = deque(range(CHUNK, first.total, PART))
        under_way = deque[Future[bytes | bytearray]]()
        while begins or under_way:
            while begins and len(under_way) < PARTS_IN_FLIGHT:
                under_way.append(start_thread(functools.partial(read_part, begins.popleft()), "storage-part"))
            yield under_way.popleft().result()

    def write(self, key: str, data: bytes) -> None:
        with self._request("write", key):
            self._put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        for tries in range(RACE_TRIES):
            with self._request("create", key):
                if self._put_new(key, data):
                    return True
            # If an earlier attempt succeeded but its response was lost, the object is this writer's own.
            with contextlib.suppress(NotFoundError):  # another writer is creating it, or has deleted it
                return self.read(key) == data
            time.sleep(RACE_PAUSE_S * (tries + 1))
        raise StorageError(
            f"cannot create {self.locate(key)}: the service reported {RACE_TRIES} times that the object exists "
            "or is being written, but no object was found"
        )

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with complete_or_abort(PartWriter(self, key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        # Keys that end with '/' are folders created by bucket browsers.
        return sorted(entry for entry in self._entries(prefix) if not entry.key.endswith("/"))

    def list_folders(self) -> Sequence[str]:
        with self._request("list", ""):
            return sorted(self._relative(key).rstrip("/") for key in self._list_prefixes(self._full("")))

    def _entries(self, prefix: str) -> Sequence[Entry]:
        """Return all entries at and below `prefix`, including objects that stand for folders."""
        with self._request("list", prefix):
            return [e for page in self._pages(self._full(prefix)) for e in page.entries if is_below(e.key, prefix)]

    def _pages(self, prefix: str) -> Iterator[ListingPage]:
        """Yield pages that list the object `prefix` and all objects in the folder `prefix`.

        Services list all keys that begin with a string, so a plain listing of `search` would also include every key in
        `search-01/`. In this method's result, at most two pages contain such keys.
        """
        folder = prefix.rstrip("/") + "/"
        for page in self._list_pages(prefix):
            yield page
            last = self._full(page.entries[-1].key) if page.entries else ""
            if prefix in ("", folder) or last.startswith(folder):
                continue
            if page.more and last < folder:
                yield from self._list_pages(folder)
            return

    def _note_clock(self, date: str | None) -> None:
        """Estimate the clock difference `ahead_s` from the date of a response that has just arrived."""
        with contextlib.suppress(TypeError, ValueError):  # the date is missing or cannot be parsed
            self.ahead_s = (
                parsedate_to_datetime(date or "").timestamp() + 0.5 - time.time()
            )  # the date has whole seconds

    def delete_many(self, keys: Sequence[str]) -> None:
        map_parallel(self.delete, keys)

    def delete_folders(self, prefix: str) -> None:
        keys = [entry.key for entry in self._entries(prefix)]
        held = [key for key in keys if not key.endswith("/")]
        empty = [key for key in keys if key.endswith("/") and not any(each.startswith(key) for each in held)]
        self.delete_many(empty)

    @contextlib.contextmanager
    def _request(self, action: str, key: str, gives_s: float = OPERATION_S) -> Iterator[None]:
        """Context manager like `limits.operation` that turns the client's errors into a `StorageError`."""
        try:
            with operation(self.locate(key), gives_s):
                yield
        except self.FAILURES as error:
            code = self._code(error)
            if code == self.MISSING:
                raise NotFoundError(f"{self.locate(key)} was not found") from error
            said = "; ".join(filter(None, (self._text(error), self._fix(code))))
            text = f"cannot {action} {self.locate(key)}: {said}"
            if code not in (*self.REFUSALS, *self.KEY_REFUSALS):
                raise StorageError(text) from error
            refusal = RefusedStorageError(text)
            refusal.final = code in self.REFUSALS or any(os.environ.get(name) for name in self.KEYS)
            raise refusal from error

    def _text(self, error: Exception) -> str:
        return shorten(error)

    def _fix(self, code: str) -> str:
        return self.FIXES.get(code, "")


class _RangeReader(io.RawIOBase):
    """Reads one version of an object from an offset, in ranges of growing size."""

    def __init__(self, read_range: Callable[[int, int, str], ByteRange | None], offset: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._next = offset
        self._size = CHUNK
        self._left = memoryview(b"")
        first = read_range(offset, CHUNK, "")  # read now, so that a missing object raises an error at once
        self._version, self._total = (first.version, first.total) if first else ("", 0)
        if first:
            self._take(first)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left and self._next < self._total:
            following = self._read_range(self._next, self._size, self._version)
            assert following
            self._take(following)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size

    def _take(self, got: ByteRange) -> None:
        self._left = memoryview(got.body)
        self._next += len(self._left)
        self._size = min(2 * self._size, PART)


def is_below(key: str, prefix: str) -> bool:
    """Return True if `key` is the object `prefix` or is in the folder `prefix`."""
    return not prefix or key == prefix or key.startswith(prefix.rstrip("/") + "/")


# -------------------------------------------------------------------------------------------------------- large objects


class Part(NamedTuple):
    """An uploaded part of a large object."""

    number: int
    "The part's number, counted from 1."
    version: str
    "The identifier of the part's content: S3's ETag or Google's generation."
    crc32: int = 0
    "The checksum of the bytes, which S3 needs again when the upload is completed."


class PartUpload(ABC):
    """An upload of a large object in parts."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._request = functools.partial(bucket._request, "upload", key)

    @abstractmethod
    def send(self, number: int, body: bytes | bytearray) -> Part:
        """Upload a part. It replaces an earlier part with the same number."""

    @abstractmethod
    def complete(self, parts: Sequence[Part], size: int) -> bool:
        """Publish the object of `size` bytes, and return whether storage has verified it (`Writer.verified`)."""

    @abstractmethod
    def abort(self) -> None:
        """Delete the parts. Raises `StorageError` if that fails."""


class PartWriter(Writer):
    """Uploads an object in parts, several at once, or in a single request if it fits into one part.

    The upload functions of the clouds' own clients are not used, because they read from a file, but torch.save writes
    to a file. Combining the two would require a temporary file or a second copy of the state in memory.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._key = key
        self._buffer = bytearray()
        self._filled = 0
        self._sent: list[bytearray] = []
        "Buffers of uploaded parts. They are reused, because allocating a buffer costs as much as filling it."
        self._upload: PartUpload | None = None
        self._parts: list[Future[Part]] = []

    def _store(self, view: memoryview) -> None:
        while len(view):
            size = part_size(len(self._parts) + 1)
            if self._filled == size:
                self._send_part()
                continue
            taken = min(len(view), size - self._filled)
            end = self._filled + taken
            self._buffer[self._filled : end] = view[:taken]
            self._filled, view = end, view[taken:]

    def _send_part(self) -> None:
        self._upload = self._upload or self._bucket._begin_upload(self._key)
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()  # limits memory use, and raises a failed part's error
        number = len(self._parts) + 1
        body = self._buffer
        del body[self._filled :]
        self._parts.append(start_thread(functools.partial(self._send, number, body), "storage-part"))
        self._buffer = self._sent.pop() if self._sent else bytearray()
        self._filled = 0

    def _send(self, number: int, body: bytearray) -> Part:
        assert self._upload
        part = self._upload.send(number, body)
        self._sent.append(body)
        return part

    def complete(self) -> None:
        if self._upload is None:
            with self._bucket._request("upload", self._key):
                self._bucket._put(self._key, self._buffer)
            return
        self._send_part()
        self.verified = self._upload.complete([part.result() for part in self._parts], self.size)

    def abort(self) -> None:
        wait(self._parts)  # a part that arrives after the upload was aborted would be left over
        if self._upload:
            with contextlib.suppress(Exception):  # otherwise, `list_unfinished` and a lifecycle rule find it
                self._upload.abort()


def part_size(number: int) -> int:
    """Return the size in bytes of part `number`, counted from 1. The last part can be smaller."""
    return PART + max(0, number - EVEN_PARTS) * GROWTH
