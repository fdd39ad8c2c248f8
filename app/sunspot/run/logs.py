"""The output of a run's processes: shipped to storage every few seconds, so a lost node costs no more than that.

The output of a worker is a file of Ray's; that of the driver a terminal, a pipe, or whatever it was started with. A
stream is the output of one process: `driver-<start time>` or `attempt-0001-rank-0003`. Storage cannot append: a
stream is a series of segments, and only the last is written again, until it has SEGMENT_BYTES. Of a process that prints
without end the first part and the newest are kept.
"""

import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple, TextIO, cast

from sunspot.background import Background, TokenBucket
from sunspot.errors import DamageError, StorageError, SunspotError, format_trace
from sunspot.formatting import COLOUR, as_bytes
from sunspot.run import Run
from sunspot.run.streams import Segment, read_segment, read_segments
from sunspot.standard_streams import mute, print_escapes

SHIP_EVERY_S = 5
"""Seconds of output that a killed process loses; shipping takes one small write, and none without output."""

CHUNK = 1 << 20
"""Bytes read at a time from a worker's output file."""

SEGMENT_BYTES = 128 << 10
"""Bounds the cost of writing the last segment again. One may have more, when much was printed between two writes."""

MAX_WAITING = 4 << 20
"""Bytes waiting for storage; of more than this, the middle is left out."""

FIRST_BYTES, NEWEST_BYTES = 1 << 20, 4 << 20
"""What is kept of a stream, in whole segments."""

BURST, DRIVER_EVERY_S, RANK_EVERY_S = 120, 10.0, 60.0
"""The first writes of a process, and those after a pause, come as often as asked for. One that prints all the time
costs a write every so many seconds from then on: a day of a thousand ranks would cost 86 dollars otherwise."""

TOO_FAST = "more was printed than storage took in time"

STREAM = re.compile(r"driver-[0-9TZ]+|attempt-[0-9]{4,9}-rank-[0-9]{4,9}")

SEGMENT = re.compile(r"(?P<begin>[0-9]{15})\.log")
"""A segment, by where it begins in the stream."""


class LogWriter:
    """One process's output on its way to storage."""

    def __init__(self, run: Run, stream: str) -> None:
        self._run, self._stream = run, stream
        self._begin = 0
        "Where the last segment begins in the stream."
        self._tail = bytearray()
        "That segment, and what is to follow it."
        self._written = 0
        "Bytes of it that are in storage, or on their way."
        self._lost = 0
        "Bytes left out of what is not in storage yet."
        self._later: list[tuple[int, int]] = []
        "Begin and size of the complete segments behind the first FIRST_BYTES that are in storage."
        self._ends = False
        self._pace = TokenBucket(BURST, DRIVER_EVERY_S if stream.startswith("driver") else RANK_EVERY_S)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, data: bytes) -> None:
        """Add output; it is durable after the next `flush`."""
        with self._lock:
            self._tail += data
            begin, end = max(self._written, SEGMENT_BYTES), len(self._tail) - MAX_WAITING // 2
            if end > begin + MAX_WAITING // 2:
                said = len(_describe_gap(self._lost, TOO_FAST)) if self._lost else 0
                self._lost += end - begin - said
                self._tail[begin:end] = _describe_gap(self._lost, TOO_FAST)

    def end(self) -> None:
        """Have every later flush write at once."""
        self._ends = True

    def flush(self) -> None:
        """Write the new output, unless it has to wait; raises `StorageError`, and can then be called again."""
        with self._flushing:
            with self._lock:
                if len(self._tail) == self._written or not (self._ends or self._pace.take()):
                    return
                content, before, lost = bytes(self._tail), self._written, self._lost
                self._written, self._lost = len(content), 0
            try:
                self._run.storage.write(self._key(self._begin), content)
            except BaseException:
                with self._lock:
                    self._written, self._lost = before, self._lost + lost
                raise
            if len(content) >= SEGMENT_BYTES:
                with self._lock:
                    del self._tail[: len(content)]
                    self._written = self._lost = 0
                if self._begin >= FIRST_BYTES:
                    self._later.append((self._begin, len(content)))
                self._begin += len(content)
                self._drop()

    def _drop(self) -> None:
        """Delete the oldest segments behind the first ones, of more than NEWEST_BYTES."""
        old = list[str]()
        while sum(size for _, size in self._later[len(old) + 1 :]) >= NEWEST_BYTES:
            old.append(self._key(self._later[len(old)][0]))
        with suppress(StorageError):  # made up for with the next segment
            self._run.storage.delete_many(old)
            del self._later[: len(old)]

    def _key(self, begin: int) -> str:
        return self._run.key("logs", self._stream, f"{begin:015d}.log")


def _describe_gap(size: int, why: str) -> bytes:
    return f"\n... {as_bytes(size)} of output left out: {why} ...\n".encode()


def driver_stream() -> str:
    """Return the name for the stream of a driver that starts now; names sort by time."""
    now = time.time()
    return f"driver-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}{int(now % 1 * 1000):03d}Z"


def rank_stream(attempt: int, rank: int) -> str:
    """Return the name of a worker's stream."""
    return f"attempt-{attempt:04d}-rank-{rank:04d}"


@contextmanager
def shipped_driver_output(run: Run) -> Iterator[None]:
    """Ship what Python prints in this process, and the error that ends the context."""
    log = LogWriter(run, driver_stream())
    out, err = cast(TextIO, _Tee(sys.stdout, log)), cast(TextIO, _Tee(sys.stderr, log))
    with redirect_stdout(out), redirect_stderr(err), Background(SHIP_EVERY_S, log.flush):
        try:
            yield
        except SunspotError as error:
            log.append(f"error: {error}\n".encode())  # the entry point prints it on the terminal
            raise
        except Exception as error:
            log.append(format_trace(error).encode(errors="backslashreplace"))
            raise
        finally:
            log.end()


def log_shipper() -> Callable[[str], None]:
    """Return a function that ships text without printing it, while output is shipped; else it does nothing."""
    return sys.stdout.copy if isinstance(sys.stdout, _Tee) else lambda text: None


@contextmanager
def shipped_worker_output(run: Run, attempt: int, rank: int) -> Iterator[None]:
    """Ship what this worker writes to stdout and stderr, from Python or from a library."""
    log = LogWriter(run, rank_stream(attempt, rank))
    for stream in (sys.stdout, sys.stderr):
        print_escapes(stream)
    tails = [_Tail(descriptor, log) for descriptor in (1, 2) if stat.S_ISREG(os.fstat(descriptor).st_mode)]
    with Background(SHIP_EVERY_S, *(tail.read for tail in tails), log.flush):
        try:
            yield
        except Exception as error:
            print(format_trace(error), end="", file=sys.stderr)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            log.end()


class _Tee:
    """A text stream that also copies its output to a log. If the stream fails, the run continues."""

    def __init__(self, stream: TextIO, log: LogWriter) -> None:
        self._stream, self._log = stream, log
        self._failed = False
        print_escapes(stream)

    def write(self, text: str) -> int:
        plain = COLOUR.sub("", text)  # Ray colours what it prints, also where nobody sees colours
        self.copy(plain)
        if not self._failed:
            try:
                self._stream.write(text if self._stream.isatty() else plain)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._failed:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write only to the log from now on, because the reader of the stream has gone or its disk is full."""
        self._failed = True
        mute(self._stream)
        why = error.strerror or error
        told = "the run continues, and `sunspot logs` shows its output"
        print(f"warning: its output cannot be written here ({why}); {told}", file=sys.stderr)

    def copy(self, text: str) -> None:
        self._log.append(text.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Tail:
    """Reads the new bytes of the file that a descriptor of this process writes to."""

    def __init__(self, descriptor: int, log: LogWriter) -> None:
        self._log = log
        self._file = open(f"/proc/self/fd/{descriptor}", "rb")  # noqa: SIM115  # open until the process ends
        self._file.seek(0, os.SEEK_END)  # the process may have worked for another run before

    def read(self) -> None:
        """Append the new bytes to the log."""
        while data := self._file.read(CHUNK):
            self._log.append(data)


def list_streams(run: Run) -> dict[str, int]:
    """Return the streams of a run by name, with their sizes in bytes."""
    sizes: dict[str, int] = {}
    for path, entry in run.entries("logs"):
        stream, _, segment = path.partition("/")
        if STREAM.fullmatch(stream) and SEGMENT.fullmatch(segment):
            sizes[stream] = sizes.get(stream, 0) + entry.size
    return sizes


class LogPart(NamedTuple):
    """A part of a stream."""

    data: bytes
    end: int
    "Where it ends in the stream: the offset to read on from."


def read_stream(run: Run, stream: str, offset: int = 0) -> bytes:
    """Return a stream from byte `offset` on; empty when there is nothing (yet)."""
    return b"".join(piece.data for piece in read_parts(run, stream, offset))


def read_parts(run: Run, stream: str, offset: int = 0) -> Iterator[LogPart]:
    """Yield a stream by segments, each with a note of what was left out before it. Nothing new costs one listing."""

    def find_unread() -> list[Segment]:
        return [segment for segment in _list_segments(run, stream) if segment.last >= offset]

    for segment, text, _ in read_segments(run.storage, run.key("logs", stream), find_unread):
        begin = segment.first
        gap = _describe_gap(begin - offset, "of long output, the first and the newest part are kept")
        if isinstance(text, DamageError):
            end, new = segment.last + 1, _describe_gap(segment.entry.size, str(text))
        else:
            end, new = begin + len(text), text[max(0, offset - begin) :]
        data = (gap if begin > offset else b"") + new
        offset = end
        yield LogPart(data, offset)


def read_tail(run: Run, stream: str, size: int) -> bytes:
    """Return the last `size` bytes of a stream, or a little more; empty when it has none."""
    tail = b""
    for segment in reversed(_list_segments(run, stream)):
        if len(tail) < size:
            try:
                tail = read_segment(run.storage, segment) + tail
            except DamageError as error:
                tail = _describe_gap(segment.entry.size, str(error)) + tail
    return tail[-size:]


def _list_segments(run: Run, stream: str) -> list[Segment]:
    """Return the segments of a stream, by where they begin in it."""
    listed = [(SEGMENT.fullmatch(file), entry) for file, entry in run.entries(f"logs/{stream}")]
    begins = [(int(name["begin"]), entry) for name, entry in listed if name]
    return [Segment(0, stream, begin, begin + entry.size - 1, entry) for begin, entry in begins]
