"""Base of the object stores: keys below a prefix, ranges of one version, listings, creation, uploads in parts.

A subclass of `Bucket` names its service's error codes, and implements one request for each abstract method.
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
"""Number of tries of the service's client: a request fails after about 4 x 20 s of silence, plus its backoff."""

PART = 16 << 20
"""Bytes of each of the first EVEN_PARTS parts of an object."""

EVEN_PARTS = 1000
"""Number of parts of the same size, which hold 16 GiB."""

GROWTH = 136 << 10
"""Bytes that each later part has more than the one before. With it, the 10,000 parts that S3 allows hold the 5 TiB that
it allows, in parts of at most 1.2 GiB. Other clouds allow more."""

PARTS_IN_FLIGHT = 8
"""Number of an object's parts that are sent or read at once, each over its own connection, because servers limit the
speed of a connection. With their size this bounds the memory of one transfer, besides the part that is being filled, to
128 MiB, or to one percent of an object of 200 GiB."""

CONNECTIONS = 4 * PARTS_IN_FLIGHT
"""Number of connections that a client keeps open, enough to transfer the parts of several files at once."""


class ByteRange(NamedTuple):
    """A range of an object's bytes."""

    body: bytes | bytearray
    "The bytes requested, or those up to the object's end."
    total: int
    "Size of the whole object in bytes; only valid if no version was requested."
    version: str


class ListingPage(NamedTuple):
    """One page of a listing, sorted by key."""

    entries: list[Entry]
    more: bool
    "True if other pages follow this one."


class Bucket(Storage):
    """A prefix in a bucket, opened by `scheme://bucket/prefix`."""

    is_bucket = True

    SCHEME: ClassVar[str]
    FIXES: ClassVar[dict[str, str]]
    "Fix for each error, by the service's code or by the class of the client's exception."
    REFUSALS: ClassVar[tuple[str, ...]]
    "Error codes that mean that the bucket does not exist or contradicts the settings."
    KEY_REFUSALS: ClassVar[tuple[str, ...]]
    """Error codes that mean that the credentials were refused. The credentials of a pod's own identity may become valid
    a moment later, or in the next pod (kubernetes-external-secrets#419, aws-iam-authenticator#285)."""
    KEYS: ClassVar[tuple[str, ...]]
    "Environment variables that hold credentials. If one is set, a retry would send the same credentials again."
    MISSING: ClassVar[str]
    "Error code for a missing object in a bucket that exists."
    VERSIONS_FIX: ClassVar[str]
    "Instruction for the user: make the service free the space of deleted objects."
    VERSIONS_RIGHT: ClassVar[str]
    "Permission that `keeps_versions` needs."
    UNFINISHED_FIX: ClassVar[str]
    "Instruction for the user: make the service remove unfinished uploads."
    UNFINISHED_RIGHT: ClassVar[str]
    "Permission that `drops_unfinished` needs."
    FAILURES: ClassVar[tuple[type[Exception], ...]]
    "Exceptions of the service's client."

    def __init__(self, storage_path: str) -> None:
        self.bucket, _, prefix = storage_path.partition("://")[2].partition("/")
        self.prefix = prefix.strip("/")

    # Requests that each service has in its own form.

    @abstractmethod
    def _read_range(self, key: str, begin: int, size: int, version: str = "") -> ByteRange | None:
        """Return a range of an object's bytes, or None if the object ends before it.

        With a `version`, raise an error if the object has another one by now.
        """

    @abstractmethod
    def _put(self, key: str, data: bytes | bytearray) -> None:
        """Write an object in one request."""

    @abstractmethod
    def _put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists. Return False if the service refused because it does."""

    @abstractmethod
    def _begin_upload(self, key: str) -> PartUpload:
        """Begin an upload in parts."""

    @abstractmethod
    def _list_pages(self, prefix: str) -> Iterator[ListingPage]:
        """Yield the pages of a listing of all entries whose key in the bucket begins with the string `prefix`."""

    @abstractmethod
    def _list_prefixes(self, prefix: str) -> Iterable[str]:
        """Return the keys of all folders that begin with the string `prefix`, each including its final '/'."""

    @abstractmethod
    def _code(self, error: Any) -> str:
        """Return the code of one of the FAILURES, as in FIXES."""

    # Code that all services share.

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
            # It is this writer's if an earlier try was carried out and only its answer was lost.
            with contextlib.suppress(NotFoundError):  # another writer is just creating it, or has deleted it
                return self.read(key) == data
            time.sleep(RACE_PAUSE_S * (tries + 1))
        raise StorageError(
            f"{self.locate(key)}: cannot create: refused {RACE_TRIES} times, although there is no such object"
        )

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with complete_or_abort(PartWriter(self, key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        # Keys that end in '/' are folders made by bucket browsers.
        return sorted(entry for entry in self._entries(prefix) if not entry.key.endswith("/"))

    def list_folders(self) -> Sequence[str]:
        with self._request("list", ""):
            return sorted(self._relative(key).rstrip("/") for key in self._list_prefixes(self._full("")))

    def _entries(self, prefix: str) -> Sequence[Entry]:
        """List every entry that takes space, folders included."""
        with self._request("list", prefix):
            return [e for page in self._pages(self._full(prefix)) for e in page.entries if is_below(e.key, prefix)]

    def _pages(self, prefix: str) -> Iterator[ListingPage]:
        """Yield the pages of a listing that contain the object `prefix` and its folder.

        Buckets only compare the first letters of keys, so a plain listing of `search` would read its way through
        `search-01/` and all others. At most two of these pages contain such other keys.
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
        """Compare the server's clock, as dated in an answer that has just arrived, with this machine's clock."""
        with contextlib.suppress(TypeError, ValueError):  # the date is missing or cannot be parsed
            self.ahead_s = parsedate_to_datetime(date or "").timestamp() + 0.5 - time.time()  # whole seconds

    def delete_many(self, keys: Sequence[str]) -> None:
        map_parallel(self.delete, keys)

    def delete_folders(self, prefix: str) -> None:
        keys = [entry.key for entry in self._entries(prefix)]
        held = [key for key in keys if not key.endswith("/")]
        empty = [key for key in keys if key.endswith("/") and not any(each.startswith(key) for each in held)]
        self.delete_many(empty)

    @contextlib.contextmanager
    def _request(self, action: str, key: str, gives_s: float = OPERATION_S) -> Iterator[None]:
        """Track an operation like `limits.operation`, and turn the client's errors into a `StorageError`."""
        try:
            with operation(self.locate(key), gives_s):
                yield
        except self.FAILURES as error:
            code = self._code(error)
            if code == self.MISSING:
                raise NotFoundError(f"{self.locate(key)}: not found") from error
            said = "; ".join(filter(None, (self._text(error), self._fix(code))))
            text = f"{self.locate(key)}: cannot {action}: {said}"
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
    """Reads an object's bytes from an offset, in ranges of one version, each twice as long as the one before."""

    def __init__(self, read_range: Callable[[int, int, str], ByteRange | None], offset: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._next = offset
        self._size = CHUNK
        self._left = memoryview(b"")
        first = read_range(offset, CHUNK, "")  # here, so that a missing object is noticed at once
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
    """Return True if `key` is the object `prefix` or lies in the folder `prefix`."""
    return not prefix or key == prefix or key.startswith(prefix.rstrip("/") + "/")


# -------------------------------------------------------------------------------------------------------- large objects


class Part(NamedTuple):
    """A part that storage has received."""

    number: int
    "Number of the part, counted from 1."
    version: str
    "Identifier of the part's content in storage: S3's ETag or Google's generation."
    crc32: int = 0
    "Checksum of its bytes, for S3, which wants it again when the upload is completed."


class PartUpload(ABC):
    """A large object that is being uploaded in parts."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._request = functools.partial(bucket._request, "upload", key)

    @abstractmethod
    def send(self, number: int, body: bytes | bytearray) -> Part:
        """Send one part, which replaces a part with the same number."""

    @abstractmethod
    def complete(self, parts: Sequence[Part], size: int) -> bool:
        """Publish the object of `size` bytes, and return whether storage has verified its bytes (`Writer.verified`)."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the parts. Raises `StorageError` if that fails."""


class PartWriter(Writer):
    """Uploads an object in parts, a few at once, or in one request if it fits into one part.

    The clouds' own clients cannot do that here: they read from a file, but torch.save writes into one. Joining the two
    would take a temporary file, or a second copy of the state in memory.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._key = key
        self._buffer = bytearray()
        self._filled = 0
        self._sent: list[bytearray] = []
        "Buffers of parts that have arrived, for further parts: allocating a new buffer costs as much as filling it."
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
            self._parts[-PARTS_IN_FLIGHT].result()  # bounds the memory, and raises the error of the first failed part
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
        wait(self._parts)  # a part that arrives after the upload was aborted would stay
        if self._upload:
            with contextlib.suppress(Exception):  # then `list_unfinished` shows it, and a lifecycle rule removes it
                self._upload.abort()


def part_size(number: int) -> int:
    """Return the size in bytes of the part with this number, counted from 1. The last part may be smaller."""
    return PART + max(0, number - EVEN_PARTS) * GROWTH
