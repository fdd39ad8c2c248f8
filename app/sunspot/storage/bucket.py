"""What the object stores share: keys below a prefix, ranges of one version, listings, guarded creation, parts."""

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
from sunspot.storage.base import CHUNK, RACE_PAUSE_S, RACE_TRIES, Entry, Storage, Writer, completed
from sunspot.storage.limits import OPERATION_S, operation

CONNECT_TIMEOUT_S, READ_TIMEOUT_S, REQUEST_TRIES = 5, 20, 4
"""A request fails after about 4 x 20 s of silence plus the client's backoff."""

PART, EVEN_PARTS, GROWTH = 16 << 20, 1000, 136 << 10
"""Bytes of a part, for so many parts (16 GiB); from there on each has GROWTH more than the one before, so that the
10,000 parts which S3 allows make up the 5 TiB which it allows, in parts of at most 1.2 GiB. Other clouds allow more."""

PARTS_IN_FLIGHT = 8
"""Parts of an object sent or read at once, each over a connection of its own, as servers limit the speed of one. With
their size this bounds the memory of one transfer besides the part being filled: 128 MiB, and one percent of an object
of 200 GiB."""

CONNECTIONS = 4 * PARTS_IN_FLIGHT
"""Kept open by a client, for several files whose parts are under way at once."""


class Range(NamedTuple):
    """Some bytes of an object."""

    body: bytes | bytearray
    "As many as were asked for, or up to the object's end."
    total: int
    "Bytes of the whole object, if no version was named."
    version: str


class Page(NamedTuple):
    """A part of a listing, sorted by key."""

    entries: list[Entry]
    more: bool
    "Whether there are other pages after this one."


class Bucket(Storage):
    """A prefix of a bucket, opened by `scheme://bucket/prefix`."""

    is_bucket = True

    SCHEME: ClassVar[str]
    FIXES: ClassVar[dict[str, str]]
    "What to do about an error, by the service's code for it or the class of the client's exception."
    REFUSALS: ClassVar[tuple[str, ...]]
    "Codes of a bucket that does not exist, or that contradicts the settings."
    KEY_REFUSALS: ClassVar[tuple[str, ...]]
    """Codes of refused credentials. Those of a pod's own identity may be there a moment later, or in the
    next pod (kubernetes-external-secrets#419, aws-iam-authenticator#285)."""
    KEYS: ClassVar[tuple[str, ...]]
    "Environment variables with credentials, which no retry can change."
    MISSING: ClassVar[str]
    "The code for an object that is not there, in a bucket that is."
    VERSIONS_FIX: ClassVar[str]
    "How to have deleted objects take no more space."
    VERSIONS_RIGHT: ClassVar[str]
    "The permission that `keeps_versions` needs."
    UNFINISHED_FIX: ClassVar[str]
    "How to have unfinished uploads removed."
    UNFINISHED_RIGHT: ClassVar[str]
    "The permission that `drops_unfinished` needs."
    FAILURES: ClassVar[tuple[type[Exception], ...]]
    "The exceptions of the service's client."

    def __init__(self, storage_path: str) -> None:
        self.bucket, _, prefix = storage_path.partition("://")[2].partition("/")
        self.prefix = prefix.strip("/")

    # What each service does in its own way.

    @abstractmethod
    def _read_range(self, key: str, begin: int, size: int, version: str = "") -> Range | None:
        """Some bytes of an object, of this version if one is named; None when it has none there."""

    @abstractmethod
    def _put(self, key: str, data: bytes | bytearray) -> None:
        """Write an object by one request."""

    @abstractmethod
    def _put_new(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False when that was refused."""

    @abstractmethod
    def _begin_upload(self, key: str) -> PartUpload:
        """Begin an upload in parts."""

    @abstractmethod
    def _list_pages(self, prefix: str) -> Iterator[Page]:
        """Pages of all entries whose key in the bucket begins with these letters."""

    @abstractmethod
    def _list_prefixes(self, prefix: str) -> Iterable[str]:
        """The keys in the bucket that begin with these letters, each up to its next '/', once, if it has one."""

    @abstractmethod
    def _code(self, error: Any) -> str:
        """What FIXES calls one of them."""

    # What all do alike.

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

        begins, under_way = deque(range(CHUNK, first.total, PART)), deque[Future[bytes | bytearray]]()
        while begins or under_way:
            while begins and len(under_way) < PARTS_IN_FLIGHT:
                under_way.append(start_thread(functools.partial(read_part, begins.popleft()), "storage-part"))
            yield under_way.popleft().result()

    def write(self, key: str, data: bytes) -> None:
        with self._errors("write", key):
            self._put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        for tries in range(RACE_TRIES):
            with self._errors("create", key):
                if self._put_new(key, data):
                    return True
            # It is ours when an earlier try was carried out and only its answer was lost.
            with contextlib.suppress(NotFoundError):  # another writer was busy with it, or has deleted it
                return self.read(key) == data
            time.sleep(RACE_PAUSE_S * (tries + 1))
        raise StorageError(f"{self.locate(key)}: cannot create: refused {RACE_TRIES} times, though no object is there")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with completed(PartWriter(self, key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        # Keys ending in '/' are folders made by bucket browsers.
        return sorted(entry for entry in self._entries(prefix) if not entry.key.endswith("/"))

    def list_folders(self) -> Sequence[str]:
        with self._errors("list", ""):
            return sorted(self._relative(key).rstrip("/") for key in self._list_prefixes(self._full("")))

    def _entries(self, prefix: str) -> Sequence[Entry]:
        """Like `list`, with everything that takes space there."""
        with self._errors("list", prefix):
            return [e for page in self._pages(self._full(prefix)) for e in page.entries if is_below(e.key, prefix)]

    def _pages(self, prefix: str) -> Iterator[Page]:
        """Pages of a listing with the object `prefix` and its folder, and others beside them on two pages at most.

        Buckets go by the first letters: a listing of `search` would read its way through `search-01/` and all others.
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
        """Compare the server's clock, to the second, with this machine's: of an answer that has just arrived."""
        with contextlib.suppress(TypeError, ValueError):  # no date, or none that can be read
            self.ahead_s = parsedate_to_datetime(date or "").timestamp() + 0.5 - time.time()

    def delete_many(self, keys: Sequence[str]) -> None:
        map_parallel(self.delete, keys)

    def delete_folders(self, prefix: str) -> None:
        keys = [entry.key for entry in self._entries(prefix)]
        held = [key for key in keys if not key.endswith("/")]
        empty = [key for key in keys if key.endswith("/") and not any(each.startswith(key) for each in held)]
        self.delete_many(empty)

    @contextlib.contextmanager
    def _errors(self, action: str, key: str, gives_s: float = OPERATION_S) -> Iterator[None]:
        """An operation whose errors become a `StorageError`; `gives_s` as in `operation`."""
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
    """An object's bytes from an offset, in ranges of one version, each twice as long as the one before."""

    def __init__(self, ask: Callable[[int, int, str], Range | None], offset: int) -> None:
        super().__init__()
        self._ask, self._next, self._size = ask, offset, CHUNK
        self._left = memoryview(b"")
        first = ask(offset, CHUNK, "")  # so that an object that is not there is missed at once
        self._version, self._total = (first.version, first.total) if first else ("", 0)
        if first:
            self._take(first)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left and self._next < self._total:
            following = self._ask(self._next, self._size, self._version)
            assert following
            self._take(following)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size

    def _take(self, got: Range) -> None:
        self._left = memoryview(got.body)
        self._next += len(self._left)
        self._size = min(2 * self._size, PART)


def is_below(key: str, prefix: str) -> bool:
    """Whether `key` is the object `prefix` or lies in the folder `prefix`; buckets themselves have no folders."""
    return not prefix or key == prefix or key.startswith(prefix.rstrip("/") + "/")


# -------------------------------------------------------------------------------------------------------- large objects


class Part(NamedTuple):
    """A part that storage has."""

    number: int
    "Counted from 1."
    version: str
    "What storage calls this content of the part: S3's ETag, Google's generation."
    crc32: int = 0
    "Of its bytes, where the service wants it again in the end (S3)."


class PartUpload(ABC):
    """A large object on its way in parts."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._errors = functools.partial(bucket._errors, "upload", key)

    @abstractmethod
    def send(self, number: int, body: bytes | bytearray) -> Part:
        """Send one part; a part of the same number is replaced."""

    @abstractmethod
    def complete(self, parts: Sequence[Part], size: int) -> bool:
        """Publish the object of `size` bytes; whether storage has verified what it got, as `Writer.verified`."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the parts; raises `StorageError`."""


class PartWriter(Writer):
    """Writes an upload in parts, a few at once; what fits into one part is written by one request.

    The clouds' clients pull from a file and torch.save pushes into one; joining them would take a temporary file
    or a second copy of the state in memory.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket, self._key = bucket, key
        self._buffer, self._filled = bytearray(), 0
        self._sent: list[bytearray] = []
        "Buffers of parts that have arrived, to be filled again: the pages of a new one cost as much as filling it."
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
            self._parts[-PARTS_IN_FLIGHT].result()  # bounds the memory, and stops at the first part that failed
        number, body = len(self._parts) + 1, self._buffer
        del body[self._filled :]
        self._parts.append(start_thread(functools.partial(self._send, number, body), "storage-part"))
        self._buffer, self._filled = self._sent.pop() if self._sent else bytearray(), 0

    def _send(self, number: int, body: bytearray) -> Part:
        assert self._upload
        part = self._upload.send(number, body)
        self._sent.append(body)
        return part

    def complete(self) -> None:
        if self._upload is None:
            with self._bucket._errors("upload", self._key):
                self._bucket._put(self._key, self._buffer)
            return
        self._send_part()
        self.verified = self._upload.complete([part.result() for part in self._parts], self.size)

    def abort(self) -> None:
        wait(self._parts)  # one that arrives after the upload's end would stay
        if self._upload:
            with contextlib.suppress(Exception):  # then `list_unfinished` shows it, and a lifecycle rule removes it
                self._upload.abort()


def part_size(number: int) -> int:
    """Bytes of a part, counted from 1; the last one may have fewer."""
    return PART + max(0, number - EVEN_PARTS) * GROWTH
