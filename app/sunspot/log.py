"""Where log records of Sunspot go: each module logs below the logger `sunspot`, and an entry point says who reads it.

A process that an entry point begins prints them; a worker also sends its warnings to the driver. In a process of a
library user nothing is installed, and `logging` does there what its owner told it to.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from sunspot.formatting import visible

ROOT = logging.getLogger("sunspot")

WARNED = set[tuple[str, str]]()
"""What this process has warned of once: the logger, and the text."""


def print_logs(stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Have this process print what is logged, one record a line: a warning with that word, INFO as it is."""
    for handler in [each for each in ROOT.handlers if isinstance(each, _Printer)]:
        ROOT.removeHandler(handler)
    ROOT.addHandler(_Printer(stream))
    ROOT.setLevel(logging.INFO)
    ROOT.propagate = False


@contextmanager
def sent_warnings(send: Callable[[str], object]) -> Iterator[None]:
    """Have `send` get each warning while the context lasts; it must neither wait nor log."""
    handler = _Sender(send)
    ROOT.addHandler(handler)
    try:
        yield
    finally:
        ROOT.removeHandler(handler)


def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning, the first time only: what is watched is read every few seconds."""
    if (log.name, text) not in WARNED:
        WARNED.add((log.name, text))
        log.warning("%s", text)


class _Printer(logging.Handler):
    """Prints on a standard stream, whatever that is at the moment: output is copied to storage while a run lasts."""

    def __init__(self, stream: str) -> None:
        super().__init__(logging.INFO)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # nobody reads the stream any more
            print(_line(record, self.format(record)), file=getattr(sys, self._stream), flush=True)


class _Sender(logging.Handler):
    """Hands warnings to a function, whose failure is no reason to end what has logged."""

    def __init__(self, send: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            self._send(_line(record, record.getMessage()))


def _line(record: logging.LogRecord, text: str) -> str:
    return visible(f"warning: {text}" if record.levelno >= logging.WARNING else text)
