"""Ships what a process prints to the run's storage every few seconds, so a lost node costs no more than that.

The output of a worker is a file of Ray's; that of the driver a terminal, a pipe, or whatever it was started with.
"""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from sunspot.background import Background
from sunspot.errors import SunspotError, format_trace
from sunspot.formatting import COLOUR
from sunspot.run import Run
from sunspot.run.logs import LogWriter, driver_stream, rank_stream

SHIP_EVERY_S = 5
"""Seconds of output that a killed process loses; shipping takes one small write, and none without output."""

CHUNK = 1 << 20
"""Bytes read at a time from a worker's output file."""


@contextmanager
def shipped_driver_output(run: Run) -> Iterator[None]:
    """Ship what Python prints in this process, and the error that ends the context."""
    log = LogWriter(run, driver_stream())
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(out, log), _Tee(err, log)  # type: ignore[assignment]
    try:
        with Background(SHIP_EVERY_S, log.flush):
            try:
                yield
            except SunspotError as error:
                log.append(f"error: {error}\n".encode())  # the entry point prints it on the terminal
                raise
            except Exception as error:
                log.append(format_trace(error).encode(errors="replace"))
                raise
            finally:
                log.end()
    finally:
        sys.stdout, sys.stderr = out, err


def log_only() -> Callable[[str], None]:
    """Return a function that ships text without printing it, while output is shipped; else it does nothing."""
    return sys.stdout.copy if isinstance(sys.stdout, _Tee) else lambda text: None


@contextmanager
def shipped_worker_output(run: Run, attempt: int, rank: int) -> Iterator[None]:
    """Ship what this worker writes to stdout and stderr, from Python or from a library."""
    log = LogWriter(run, rank_stream(attempt, rank))
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
    """A text stream that also copies what is written to a log."""

    def __init__(self, stream: TextIO, log: LogWriter) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        plain = COLOUR.sub("", text)  # Ray colours what it prints, also where nobody sees colours
        self.copy(plain)
        self._stream.write(text if self._stream.isatty() else plain)
        return len(text)

    def copy(self, text: str) -> None:
        self._log.append(text.encode(errors="replace"))

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
