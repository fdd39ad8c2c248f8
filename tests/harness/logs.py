"""Records this process's warnings as texts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sunspot.log import ROOT, WARNED, print_logs


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def keep_warnings() -> list[str]:
    """Return a list that receives all warnings until the end of the test."""
    kept = _Kept()
    ROOT.addHandler(kept)
    return kept.texts


@contextmanager
def printed_and_kept() -> Iterator[list[str]]:
    """Print log records, as in a process started by an entry point, and yield the warnings in the context."""
    before = list(ROOT.handlers)
    propagates = ROOT.propagate
    level = ROOT.level
    WARNED.clear()
    print_logs()
    try:
        yield keep_warnings()
    finally:
        ROOT.handlers, ROOT.propagate = before, propagates
        ROOT.setLevel(level)
