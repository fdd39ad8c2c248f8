"""What a process prints, carried to the run's storage while it goes on: a lost node takes no more than seconds of it.

A worker's output is a file that Ray made of it; the driver's is whatever its starter chose, a terminal or a pipe.
"""

from __future__ import annotations

import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from app.background import Background
from app.errors import SunspotError
from app.run import Run
from app.run.logs import LogWriter, driver_stream, rank_stream

SHIP_EVERY_S = 5
"""The most that a process which is killed takes with it; each time costs one small write, and only after output."""

CHUNK = 1 << 20
"""Bytes read at a time from a worker's output file."""


@contextmanager
def shipped_driver_output(run: Run) -> Iterator[None]:
    """Carry what Python prints in this process, and the error it ends in, to the run's storage."""
    log = LogWriter(run, driver_stream())
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Copied(out, log), _Copied(err, log)  # type: ignore[assignment]
    try:
        with Background(SHIP_EVERY_S, log.flush):
            try:
                yield
            except SunspotError as error:
                log.append(f"error: {error}\n".encode())  # for the terminal, the entry point prints it
                raise
            except Exception:
                log.append(traceback.format_exc().encode())
                raise
    finally:
        sys.stdout, sys.stderr = out, err


def only_shipped() -> Callable[[str], None]:
    """Carries text to storage that the terminal shows in a way of its own; for as long as output is shipped now."""
    return sys.stdout.copy if isinstance(sys.stdout, _Copied) else lambda text: None


@contextmanager
def shipped_worker_output(run: Run, attempt: int, rank: int) -> Iterator[None]:
    """Carry what this worker writes, be it Python or a library of its, to the run's storage."""
    log = LogWriter(run, rank_stream(attempt, rank))
    tails = [_Tail(descriptor, log) for descriptor in (1, 2) if stat.S_ISREG(os.fstat(descriptor).st_mode)]
    with Background(SHIP_EVERY_S, *(tail.read for tail in tails), log.flush):
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


class _Copied:
    """A text stream that also copies what is written to a log; in all else it is the stream."""

    def __init__(self, stream: TextIO, log: LogWriter) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self.copy(text)
        return self._stream.write(text)

    def copy(self, text: str) -> None:
        self._log.append(text.encode(errors="replace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Tail:
    """The new bytes of the file that a descriptor of this process writes to."""

    def __init__(self, descriptor: int, log: LogWriter) -> None:
        self._log = log
        self._file = open(f"/proc/self/fd/{descriptor}", "rb")  # noqa: SIM115  # read until the process ends
        self._file.seek(0, os.SEEK_END)  # the process may have done other work before

    def read(self) -> None:
        """Append what is new to the log."""
        while data := self._file.read(CHUNK):
            self._log.append(data)
