"""The output of a run's processes, shipped to storage every few seconds so that little is lost if a node dies.

A stream is the output of one process, and is called `driver-<start time>` or `attempt-0001-rank-0003`. Storage cannot
append to an object, so a stream consists of segments. Only the last segment is rewritten, until it reaches
SEGMENT_BYTES. If a process prints endlessly, only its first and its newest output are kept.
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
from sunspot.formatting import COLOR, as_bytes
from sunspot.run import Run
from sunspot.run.streams import Segment, read_segment, read_segments
from sunspot.standard_streams import mute, print_escapes

SHIP_EVERY_S = 5
"""Seconds between two writes of new output. A killed process loses at most the output of this time."""

CHUNK = 1 << 20
"""Number of bytes to read at a time from a worker's output file."""

SEGMENT_BYTES = 128 << 10
"""Size at which a segment is complete, which limits the cost of rewriting it. A segment can be larger if much was
printed between two writes."""

MAX_WAITING = 4 << 20
"""Maximum number of bytes that can wait for storage. If there are more, bytes in the middle are left out."""

FIRST_BYTES, NEWEST_BYTES = 1 << 20, 4 << 20
"""Number of bytes to keep of a stream's first and newest segments."""

BURST = 120
"""Number of writes that a process can make without waiting, at first and after a pause."""

DRIVER_EVERY_S, RANK_EVERY_S = 10.0, 60.0
"""Seconds between two writes by a driver and by a rank, after they have used up BURST. Without this limit, the writes
of a thousand ranks that print all day would cost 86 dollars."""

TOO_FAST = "the process printed faster than storage could take it"

STREAM = re.compile(r"driver-[0-9TZ]+|attempt-[0-9]{4,9}-rank-[0-9]{4,9}")

SEGMENT = re.compile(r"(?P<begin>[0-9]{15})\.log")
"""Pattern for the name of a segment, which is its position in the stream."""


class LogWriter:
    """Writes one process's output to storage."""

    def __init__(self, run: Run, stream: str) -> None:
        self._run = run
        self._stream = stream
        self._begin = 0
        "The position of the last segment in the stream."
        self._tail = bytearray()
        "The last segment, followed by output that is not in a segment yet."
        self._written = 0
        "The number of bytes of the tail that are in storage or being written."
        self._lost = 0
        "The number of bytes that were dropped from the unwritten part of the tail."
        self._later: list[tuple[int, int]] = []
        "The position and size of each complete segment in storage after the first FIRST_BYTES."
        self._ending = False
        self._pace = TokenBucket(BURST, DRIVER_EVERY_S if stream.startswith("driver") else RANK_EVERY_S)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, data: bytes) -> None:
        """Add output. It is durable after the next `flush`."""
        with self._lock:
            self._tail += data
            begin = max(self._written, SEGMENT_BYTES)
            end = len(self._tail) - MAX_WAITING // 2
            if end > begin + MAX_WAITING // 2:
                earlier_note = len(_describe_gap(self._lost, TOO_FAST)) if self._lost else 0
                self._lost += end - begin - earlier_note
                self._tail[begin:end] = _describe_gap(self._lost, TOO_FAST)

    def end(self) -> None:
        """Make every later call of `flush` write immediately."""
        self._ending = True

    def flush(self) -> None:
        """Write the new output if a write is due. Can be called again after a `StorageError`."""
        with self._flushing:
            with self._lock:
                if len(self._tail) == self._written or not (self._ending or self._pace.take()):
                    return
                content = bytes(self._tail)
                before, lost = self._written, self._lost
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
        """Delete old segments, but keep the first FIRST_BYTES and at least the newest NEWEST_BYTES of the output."""
        old = list[str]()
        while sum(size for _, size in self._later[len(old) + 1 :]) >= NEWEST_BYTES:
            old.append(self._key(self._later[len(old)][0]))
        with suppress(StorageError):  # these deletions are tried again with the next segment
            self._run.storage.delete_many(old)
            del self._later[: len(old)]

    def _key(self, begin: int) -> str:
        return self._run.key("logs", self._stream, f"{begin:015d}.log")


def _describe_gap(size: int, why: str) -> bytes:
    return f"\n... {as_bytes(size)} of output left out: {why} ...\n".encode()


def driver_stream() -> str:
    """Return the stream name for a driver that starts now. These names sort by time."""
    now = time.time()
    return f"driver-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}{int(now % 1 * 1000):03d}Z"


def rank_stream(attempt: int, rank: int) -> str:
    """Return the stream name for a worker."""
    return f"attempt-{attempt:04d}-rank-{rank:04d}"


@contextmanager
def shipped_driver_output(run: Run) -> Iterator[None]:
    """Context manager that ships the output of this process's Python code, and any error raised in the context."""
    log = LogWriter(run, driver_stream())
    out = cast(TextIO, _Tee(sys.stdout, log))
    err = cast(TextIO, _Tee(sys.stderr, log))
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
    """Return a function that ships text without printing it. It does nothing if no driver output is being shipped."""
    return sys.stdout.copy if isinstance(sys.stdout, _Tee) else lambda text: None


@contextmanager
def shipped_worker_output(run: Run, attempt: int, rank: int) -> Iterator[None]:
    """Context manager that ships everything this worker writes to stdout and stderr."""
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
    """A text stream that also copies its output to a log. If the stream fails, only the log is written."""

    def __init__(self, stream: TextIO, log: LogWriter) -> None:
        self._stream, self._log = stream, log
        self._failed = False
        print_escapes(stream)

    def write(self, text: str) -> int:
        plain = COLOR.sub("", text)  # Ray colors its output even if it does not go to a terminal
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
        """Write only to the log from now on, because the stream's reader is gone or the disk is full."""
        self._failed = True
        mute(self._stream)
        why = error.strerror or error
        hint = "the run continues, and `sunspot logs` shows its output"
        print(f"warning: the output can no longer be written here ({why}); {hint}", file=sys.stderr)

    def copy(self, text: str) -> None:
        self._log.append(text.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Tail:
    """Reads the file that this process's stdout or stderr writes to. Earlier output is skipped."""

    def __init__(self, descriptor: int, log: LogWriter) -> None:
        self._log = log
        self._file = open(f"/proc/self/fd/{descriptor}", "rb")  # noqa: SIM115  # open until the process ends
        self._file.seek(0, os.SEEK_END)  # the process can have worked for another run before this one

    def read(self) -> None:
        """Append the new bytes to the log."""
        while data := self._file.read(CHUNK):
            self._log.append(data)


def list_streams(run: Run) -> dict[str, int]:
    """Return a mapping from the names of a run's streams to their sizes in bytes."""
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
    "The position of the part's end in the stream. Reading continues from there."


def read_stream(run: Run, stream: str, offset: int = 0) -> bytes:
    """Return the bytes of a stream from `offset` on, or empty bytes if there is no output yet."""
    return b"".join(piece.data for piece in read_parts(run, stream, offset))


def read_parts(run: Run, stream: str, offset: int = 0) -> Iterator[LogPart]:
    """Yield the parts of a stream from `offset` on. Each gap in the output is replaced by a note.

    If there is no new output, this costs one listing.
    """

    def find_unread() -> list[Segment]:
        return [segment for segment in _list_segments(run, stream) if segment.last >= offset]

    for segment, text, _ in read_segments(run.storage, run.key("logs", stream), find_unread):
        begin = segment.first
        gap = _describe_gap(begin - offset, "only the first and the newest part of long output are kept")
        if isinstance(text, DamageError):
            end, new = segment.last + 1, _describe_gap(segment.entry.size, str(text))
        else:
            end, new = begin + len(text), text[max(0, offset - begin) :]
        data = (gap if begin > offset else b"") + new
        offset = end
        yield LogPart(data, offset)


def read_tail(run: Run, stream: str, size: int) -> bytes:
    """Return the last `size` bytes of a stream, or fewer if it is shorter."""
    tail = b""
    for segment in reversed(_list_segments(run, stream)):
        if len(tail) < size:
            try:
                tail = read_segment(run.storage, segment) + tail
            except DamageError as error:
                tail = _describe_gap(segment.entry.size, str(error)) + tail
    return tail[-size:]


def _list_segments(run: Run, stream: str) -> list[Segment]:
    """Return the segments of a stream, sorted by position."""
    listed = [(SEGMENT.fullmatch(file), entry) for file, entry in run.entries(f"logs/{stream}")]
    begins = [(int(name["begin"]), entry) for name, entry in listed if name]
    return [Segment(0, stream, begin, begin + entry.size - 1, entry) for begin, entry in begins]
