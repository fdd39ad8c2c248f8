"""Large objects cut into parts: how large they are, how many are in flight, and a writer that sends them."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from sunspot.background import start_thread
from sunspot.storage.base import Writer

PART, EVEN_PARTS, GROWTH = 16 << 20, 1000, 136 << 10
"""Bytes of a part, for so many parts (16 GiB); from there on each has GROWTH more than the one before, so that the
10,000 parts which S3 allows make up the 5 TiB which it allows, in parts of at most 1.2 GiB. Other clouds allow more."""

PARTS_IN_FLIGHT = 8
"""Parts of an object sent or read at once, each over a connection of its own, as servers limit the speed of one. With
their size this bounds the memory of one transfer besides the part being filled: 128 MiB, and one percent of an object
of 200 GiB."""


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

    def __init__(self, begin: Callable[[], PartUpload], put: Callable[[bytearray], None]) -> None:
        super().__init__()
        self._begin, self._put = begin, put
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
        self._upload = self._upload or self._begin()
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
            self._put(self._buffer)
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
