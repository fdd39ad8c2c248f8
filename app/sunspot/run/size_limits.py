"""How much of a run is read and shown, whatever lies in its storage: one broken run must not take a reader's memory.

Each limit is several times what a large run of ours has: 200 metrics, 1,000 classes, 5,000 epochs, 100,000 events, and
checkpoints of any size. What is larger is damage, or is left out, and the reader is told how much.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from sunspot.errors import TooLargeError

MAX_OBJECT_BYTES = 16 << 20
"""Largest JSON object that is parsed. Our largest are the confusion matrix of 1,000 classes (6 MB), and the manifest of
a checkpoint in parts by 10,000 ranks (7 MB)."""

MAX_STATUS_BYTES = 1 << 20
"""Largest status, which the list reads of every run. Ours has about 1 kB, and an error's text of at most 10,000
characters."""

MAX_SEGMENT_BYTES = 32 << 20
"""Largest segment of a journal, of the audit or of output. Merged segments stay below 8 MiB, twice the last of
`streams.SIZES`; one that waited for slow storage may have more. One of output has at most 9 MiB (`logs.MAX_WAITING`
twice, once more while it is written)."""

MAX_BYTES_AT_ONCE = 32 << 20
"""Segments of a stream that are held in memory at a time: four of the largest merged ones, or one that is larger."""

MAX_JOURNAL_BYTES = 512 << 20
"""What is read of a journal, from its beginning: a metric history grows by 90 MB a month."""

MAX_DAMAGED_LINES = 1000
"""Lines of a segment that cannot be used, after which the rest of it is left out."""

MAX_NAMES = 1000
"""Metrics of a run that are kept for its report, and columns of its table of metrics."""

MAX_EPOCHS = 100_000
"""Epochs that `audit` proves."""

MAX_AUDIT_ROWS = 16_000_000
"""Rows in one file of the audit. Ours have up to 8 MiB, and a shuffled row takes two bytes or more."""

MAX_TABLE_ROWS, MAX_TABLE_COLUMNS, MAX_TABLE_CELLS = 500, 300, 20_000
"""What a page shows of a table: a setting has a row, and a table of 200 metrics has 40 rows."""

MAX_TRIALS = 500
"""Trials of a search whose curves its report reads and draws: a chart is 360 points wide."""

MAX_PAGE_BYTES = 4 << 20
"""Sections of a page, together. A report has at most 2 MB, half of it pictures."""

MAX_LISTED = 50
"""Lines of a list that only grows when something is wrong."""

Item = TypeVar("Item")


class Budget:
    """The bytes that may be read of objects and segments, by all threads of one reading together."""

    def __init__(self, most: int, what: str) -> None:
        """`what` is read, for messages."""
        self._most, self._what = most, what
        self._left = most
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """Take this many bytes; raises `TooLargeError` if fewer are left."""
        with self._lock:
            self._left -= size
        if self._left < 0:
            raise TooLargeError(f"{self._what}: more than {self._most >> 20} MiB would be read")


CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)
"""The budget of the reading that this thread is part of."""


@contextmanager
def budget(most: int, what: str) -> Iterator[None]:
    """Let the context read `most` bytes of objects and segments: it raises `TooLargeError` for more."""
    token = CURRENT.set(Budget(most, what))
    try:
        yield
    finally:
        CURRENT.reset(token)


def spend(size: int) -> None:
    """Take bytes that are read from the budget of this reading, if it has one. Raises `TooLargeError`."""
    if current := CURRENT.get():
        current.spend(size)


def cut(items: Sequence[Item], most: int, what: str) -> tuple[Sequence[Item], str]:
    """Return the first `most` items, and how many of `what` (in the plural) are left out; empty if none is."""
    more = len(items) - most
    return items[:most], f"{more:,} more {what} are not shown" if more > 0 else ""
