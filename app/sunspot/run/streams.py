"""Streams of records (history.py), audit rows (audit.py) or output (logs.py).

Because storage cannot append to an object, a stream consists of segments. Each segment's name contains its range of
lines or steps. New lines are written as a small segment. Once small segments together reach one of SIZES, they are
merged into one segment, and are then deleted. Each line is thus written at most 1 + len(SIZES) times, and the number of
small objects is bounded. A reader ignores segments that were merged but not deleted yet.
"""

import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, islice, takewhile
from typing import NamedTuple

from sunspot.background import AT_ONCE, map_parallel
from sunspot.errors import DamageError, NotFoundError, StorageError
from sunspot.formatting import as_bytes
from sunspot.run.objects import read_if_exists
from sunspot.run.size_limits import MAX_BYTES_AT_ONCE, MAX_SEGMENT_BYTES, spend
from sunspot.storage.base import Entry, Storage

SIZES = (16 << 10, 256 << 10, 4 << 20)
"""Sizes in bytes at which segments are merged into one.

A segment of the last size is neither merged again nor kept in memory.
"""

READ_TRIES = 5
"""Number of times to list a stream that keeps changing while it is read."""

NAME = re.compile(
    r"(?P<stream>attempt-(?P<attempt>[0-9]{4,9})-[0-9a-f]{16})-(?P<first>[0-9]{10})-(?P<last>[0-9]{10})\.jsonl"
)


class Segment(NamedTuple):
    """A segment, as found in a listing."""

    attempt: int
    stream: str
    first: int
    "The number of the first line, counted from 0, or the first step."
    last: int
    "The number of the last line, or the last step."
    entry: Entry


def new_stream(attempt: int) -> str:
    """Return a unique name for a stream. An attempt's streams sort by creation time."""
    return f"attempt-{attempt:04d}-{time.time_ns() // 1000:013x}{uuid.uuid4().hex[:3]}"


def list_segments(storage: Storage, folder: str) -> list[Segment]:
    """Return the segments in a folder, sorted by attempt, stream and line.

    Segments that are contained in another segment, because they were merged into it, are left out.
    """
    return without_merged_parts(list_all(storage, folder))


def list_all(storage: Storage, folder: str, name: re.Pattern[str] = NAME) -> list[Segment]:
    """Return a folder's segments with names that match `name`, including segments that were merged into another."""
    found = []
    for entry in storage.list(folder):
        match = name.fullmatch(entry.key.removeprefix(f"{folder}/"))
        if match:
            found.append(
                Segment(int(match["attempt"]), match["stream"], int(match["first"]), int(match["last"]), entry)
            )
    return found


def without_merged_parts(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments that are not contained in another segment, sorted by attempt, stream and line."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda each: (each.attempt, each.stream, each.first, -each.last)):
        if not found or found[-1].stream != segment.stream or segment.last > found[-1].last:
            found.append(segment)
    return found


def read_segments(
    storage: Storage, folder: str, find: Callable[[], list[Segment]], listed: Sequence[Segment] | None = None
) -> Iterator[tuple[Segment, bytes | DamageError, int]]:
    """Yield the segments that `find` returns, each with its content and the number of its first new line.

    Lines before the first new line were in an earlier segment. If a segment is too large, its content is a
    `DamageError`. Only a few segments are read at a time, so a long stream need not fit in memory. If a segment was
    merged in the meantime, `find` is called again. If `listed` is given, only these segments are read, and `find` is
    not called. Raises `StorageError` if a segment in `listed` has disappeared, or if segments keep disappearing.
    """
    todo = deque(find() if listed is None else listed)
    tries = READ_TRIES
    given = dict[str, int]()
    while todo:
        part = first_few(todo)
        contents = map_parallel(lambda each: read_if_exists(lambda: _read_or_damage(storage, each)), part)
        for segment, content in zip(part, contents, strict=True):
            if content is None:  # merged or deleted since it was listed
                break
            tries = READ_TRIES
            yield segment, content, given.get(segment.stream, segment.first)
            given[segment.stream] = segment.last + 1
            todo.popleft()
        if None in contents:
            tries -= 1
            if listed is not None or not tries:
                raise StorageError(f"{storage.locate(folder)} keeps changing while it is being read; try again")
            todo = deque(each for each in list_again(storage, folder, find) if each.last >= given.get(each.stream, 0))


def first_few(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments to read in parallel: at least one, and more if they fit in MAX_BYTES_AT_ONCE."""
    few = list(islice(segments, AT_ONCE))
    sizes = accumulate(min(each.entry.size, MAX_SEGMENT_BYTES) for each in few)
    return few[: max(1, sum(size <= MAX_BYTES_AT_ONCE for size in sizes))]


def read_segment(storage: Storage, segment: Segment) -> bytes:
    """Read a segment. Raises `DamageError` if it is larger than MAX_SEGMENT_BYTES, without reading it."""
    if segment.entry.size > MAX_SEGMENT_BYTES:
        place = storage.locate(segment.entry.key)
        size = as_bytes(segment.entry.size)
        raise DamageError(f"{place} cannot be used: its size is {size}, but the limit is {MAX_SEGMENT_BYTES >> 20} MiB")
    spend(segment.entry.size)
    return storage.read(segment.entry.key)


def _read_or_damage(storage: Storage, segment: Segment) -> bytes | DamageError:
    try:
        return read_segment(storage, segment)
    except DamageError as error:
        return error


def list_again(storage: Storage, folder: str, find: Callable[[], list[Segment]]) -> list[Segment]:
    """Return the result of `find` after a segment has disappeared, bypassing an NFS client's cache."""
    with suppress(StorageError):  # this user might not be allowed to write
        storage.refresh(folder)
    return find()


class _Written(NamedTuple):
    """A segment that its writer can still merge."""

    first: int
    last: int
    content: bytes
    key: str


Join = Callable[[Sequence[bytes]], bytes]
"""A function that joins the contents of several segments into one."""


class StreamWriter:
    """Appends segments to a stream, and merges small segments."""

    def __init__(
        self,
        storage: Storage,
        key: Callable[[int, int, bytes], str],
        join: Join = b"".join,
        downsample: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Create a writer. `key` returns a segment's storage key, given its first line, last line and content.

        `downsample` shortens the content of the stream. It is called whenever the stream's size has doubled.
        """
        self._storage = storage
        self._key = key
        self._join = join
        self._downsample = downsample
        self._thin_at = SIZES[-1]
        self.open: list[_Written] = []
        "Segments that can still be merged."
        self._merged: list[str] = []
        "Keys of segments that were merged into another, and have to be deleted."

    def write(self, first: int, last: int, content: bytes) -> None:
        """Write the next segment. If this raises `StorageError`, the segment is not part of the stream."""
        self.open.append(self._write(first, last, content))

    def merge(self) -> None:
        """Merge small segments. Storage errors are ignored, because the next call tries again."""
        with suppress(StorageError):
            self._merge()
            if self._merged:
                self._storage.delete_many(self._merged)
                self._merged = []

    def _merge(self) -> None:
        for size in SIZES[:-1] if self._downsample else SIZES:
            small = list(takewhile(lambda each: len(each.content) < size, reversed(self.open)))[::-1]  # noqa: B023
            if len(small) > 1 and sum(len(each.content) for each in small) >= size:
                self._replace(small, self._join([each.content for each in small]))
        if not self._downsample:
            self.open = [each for each in self.open if len(each.content) < SIZES[-1]]
        elif sum(len(each.content) for each in self.open) >= self._thin_at:
            text = self._downsample(self._join([each.content for each in self.open]))
            self._replace(self.open, text)
            self._thin_at = max(SIZES[-1], 2 * len(text))

    def _replace(self, parts: Sequence[_Written], content: bytes) -> None:
        """Replace the newest segments with one segment."""
        merged = self._write(parts[0].first, parts[-1].last, content)
        self._merged += [each.key for each in parts if each.key != merged.key]
        self.open[-len(parts) :] = [merged]

    def _write(self, first: int, last: int, content: bytes) -> _Written:
        key = self._key(first, last, content)
        self._storage.write(key, content)
        return _Written(first, last, content, key)


class LineWriter:
    """Writes a stream of lines."""

    def __init__(self, storage: Storage, key: str, downsample: Callable[[bytes], bytes] | None = None) -> None:
        """Create a writer. `key` is the storage key of the stream, and `downsample` is passed to `StreamWriter`."""
        self._segments = StreamWriter(storage, lambda first, last, _: _name(key, first, last), downsample=downsample)
        self._lines: list[bytes] = []
        "Lines that are not in storage yet."
        self._next = 0
        "The number of the first line that is not in storage yet."
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, line: bytes) -> None:
        """Add a line. It is durable after the next `flush`."""
        with self._lock:
            self._lines.append(line + b"\n")

    def flush(self) -> None:
        """Write the new lines. Can be called again after a `StorageError`."""
        with self._flushing:
            with self._lock:
                count = len(self._lines)
                text = b"".join(self._lines)
            if count:
                self._segments.write(self._next, self._next + count - 1, text)
                self._next += count
                with self._lock:
                    del self._lines[:count]
            self._segments.merge()


def _name(stream: str, first: int, last: int) -> str:
    return f"{stream}-{first:010d}-{last:010d}.jsonl"


def tidy_lines(storage: Storage, folder: str, before: int) -> None:
    """Merge the segments of `LineWriter` streams in a folder, for attempts older than `before`.

    Raises `StorageError`.
    """
    tidy(
        storage,
        [segment for segment in list_all(storage, folder) if segment.attempt < before],
        lambda stream, first, last, _: _name(f"{folder}/{stream}", first, last),
    )


def tidy(
    storage: Storage,
    listed: Sequence[Segment],
    key: Callable[[str, int, int, bytes], str],
    join: Join = b"".join,
    read: Callable[[Segment], bytes] | None = None,
) -> None:
    """Merge small segments of attempts that have ended. Raises `StorageError` if storage fails.

    If a frozen process of such an attempt wakes up, it can merge the same segments again. Their lines are then
    stored twice, which is harmless. `read` returns the content of a segment, or raises `DamageError`.
    """
    read = read or (lambda segment: read_segment(storage, segment))
    current = without_merged_parts(listed)
    storage.delete_many([segment.entry.key for segment in listed if segment not in set(current)])
    for group in _neighbors(each for each in current if each.entry.size < SIZES[-1]):
        # Another process can have merged the segments, or a segment can be damaged. Readers report the damage.
        with suppress(NotFoundError, DamageError):
            content = join(map_parallel(read, group))
            first, last = group[0], group[-1]
            storage.write(key(first.stream, first.first, last.last, content), content)
            storage.delete_many([each.entry.key for each in group])


def _neighbors(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Return groups of segments to merge, each with contiguous lines of one stream."""
    groups: list[list[Segment]] = []
    for segment in segments:
        newest = groups[-1][-1] if groups else None
        size = sum(each.entry.size for each in groups[-1]) if groups else 0
        if newest and (newest.stream, newest.last + 1) == (segment.stream, segment.first) and size < SIZES[-1]:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return [group for group in groups if len(group) > 1]
