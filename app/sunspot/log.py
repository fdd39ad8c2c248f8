"""Handles Sunspot's log records. All modules log to children of the logger `sunspot`.

A process prints its records if it was started by an entry point. A worker also sends its warnings to the driver. If a
program imports Sunspot as a library, no handler is installed, so the program decides what happens to the records.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from sunspot.formatting import visible

ROOT = logging.getLogger("sunspot")

WARNED = set[tuple[str, str]]()
"""Warnings that this process has logged through `warn_once`, each as the logger's name and the text."""


def print_logs(stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Make this process print its log records, one per line. Warnings get the prefix `warning: `."""
    for handler in [each for each in ROOT.handlers if isinstance(each, _Printer)]:
        ROOT.removeHandler(handler)
    ROOT.addHandler(_Printer(stream))
    ROOT.setLevel(logging.INFO)
    ROOT.propagate = False


@contextmanager
def sent_warnings(send: Callable[[str], object]) -> Iterator[None]:
    """Pass every warning logged inside the context to `send`, which must not block or log."""
    handler = _Sender(send)
    ROOT.addHandler(handler)
    try:
        yield
    finally:
        ROOT.removeHandler(handler)


def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning unless it was logged before. A caller may find the same problem every few seconds."""
    if (log.name, text) not in WARNED:
        WARNED.add((log.name, text))
        log.warning("%s", text)


class _Printer(logging.Handler):
    """Prints records on `sys.stdout` or `sys.stderr`.

    The stream is looked up for each record, because a run replaces the stream to copy its output to storage.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(logging.INFO)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # the stream's reader has exited
            print(_line(record, self.format(record)), file=getattr(sys, self._stream), flush=True)


class _Sender(logging.Handler):
    """Passes warnings to a function. The function's errors never reach the code that logged the warning."""

    def __init__(self, send: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            self._send(_line(record, record.getMessage()))


def _line(record: logging.LogRecord, text: str) -> str:
    return visible(f"warning: {text}" if record.levelno >= logging.WARNING else text)
