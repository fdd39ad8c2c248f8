"""The output of a run's processes.

A stream is the output of one process: `driver-<start time>` or `attempt-0001-rank-0003`. Storage cannot append: a
stream is a series of segments of at most SEGMENT_BYTES, and only the last is rewritten.
"""

import re
import threading
import time
from collections.abc import Iterator

from app.run import Run
from app.storage.base import READS_IN_FLIGHT, map_parallel

SEGMENT_BYTES = 128 << 10
"""Bounds the cost of rewriting the last segment."""

MOST_WAITING = 64 * SEGMENT_BYTES
"""Bytes waiting for storage; of more than this, the middle is left out."""

STREAM = re.compile(r"driver-[0-9TZ]+|attempt-[0-9]{4,9}-rank-[0-9]{4,9}")

SEGMENT = re.compile(r"[0-9]{6,12}\.log")

LEFT_OUT = b"\n... output left out: storage did not take it in time ...\n"


class LogWriter:
    """One process's output on its way to storage."""

    def __init__(self, run: Run, stream: str) -> None:
        self._run, self._stream = run, stream
        self._tail = bytearray()
        self._segment = 0
        self._dirty = False
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, data: bytes) -> None:
        """Add output; it is durable after the next `flush`."""
        with self._lock:
            self._tail += data
            if len(self._tail) > MOST_WAITING:
                # Keeps the content of the last segment in storage, and the newest output.
                self._tail[SEGMENT_BYTES:] = LEFT_OUT + self._tail[-MOST_WAITING // 2 :]
            self._dirty = self._dirty or bool(data)

    def flush(self) -> None:
        """Write the new output; raises `StorageError`, and can then be called again."""
        with self._flushing:
            while True:
                with self._lock:
                    if not self._dirty:
                        return
                    segment = bytes(self._tail[:SEGMENT_BYTES])
                self._run.storage.write(self._run.key("logs", self._stream, f"{self._segment:06d}.log"), segment)
                with self._lock:
                    if len(segment) == SEGMENT_BYTES:
                        del self._tail[:SEGMENT_BYTES]
                        self._segment += 1
                        self._dirty = bool(self._tail)
                    else:
                        self._dirty = len(self._tail) > len(segment)


def driver_stream() -> str:
    """The name for the stream of a driver that starts now; names sort by time."""
    now = time.time()
    return f"driver-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}{int(now % 1 * 1000):03d}Z"


def rank_stream(attempt: int, rank: int) -> str:
    """The name of a worker's stream."""
    return f"attempt-{attempt:04d}-rank-{rank:04d}"


def list_streams(run: Run) -> dict[str, int]:
    """The streams of a run by name, with their sizes in bytes."""
    sizes: dict[str, int] = {}
    for entry in run.storage.list(run.key("logs")):
        stream, _, segment = entry.key.removeprefix(run.key("logs") + "/").partition("/")
        if STREAM.fullmatch(stream) and SEGMENT.fullmatch(segment):
            sizes[stream] = sizes.get(stream, 0) + entry.size
    return sizes


def read_stream(run: Run, stream: str, offset: int = 0) -> bytes:
    """A stream from byte `offset` on; empty when there is nothing (yet)."""
    return b"".join(read_pieces(run, stream, offset))


def read_pieces(run: Run, stream: str, offset: int = 0) -> Iterator[bytes]:
    """Like `read_stream`, a few megabytes at a time; costs one listing when nothing is new."""
    unread = []
    for entry in run.storage.list(run.key("logs", stream)):
        segment = entry.key.removeprefix(run.key("logs", stream) + "/")
        if not SEGMENT.fullmatch(segment):
            continue
        begins = int(segment.removesuffix(".log")) * SEGMENT_BYTES
        if begins + entry.size > offset:
            unread.append((entry.key, max(0, offset - begins)))
    for first in range(0, len(unread), READS_IN_FLIGHT):
        places = unread[first : first + READS_IN_FLIGHT]
        yield b"".join(map_parallel(lambda place: run.storage.read(place[0])[place[1] :], places))
