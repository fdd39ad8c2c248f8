"""What this process has been warned of, as text."""

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
    """A list that gets all warnings from now to the end of the test."""
    kept = _Kept()
    ROOT.addHandler(kept)
    return kept.texts


@contextmanager
def printed_and_kept() -> Iterator[list[str]]:
    """Print what is logged, as in a process that an entry point began, and keep the warnings of the context."""
    before, propagates, level = list(ROOT.handlers), ROOT.propagate, ROOT.level
    WARNED.clear()
    print_logs()
    try:
        yield keep_warnings()
    finally:
        ROOT.handlers, ROOT.propagate = before, propagates
        ROOT.setLevel(level)
