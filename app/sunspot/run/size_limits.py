"""Size limits on a run's data, so that a process that reads a broken run does not run out of memory.

Each limit is several times the size that Sunspot writes for a large run with 200 metrics, 1,000 classes, 5,000 epochs
and 100,000 events. Data beyond a limit counts as damaged, or is omitted with a note of how much is missing.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from sunspot.errors import TooLargeError

MAX_OBJECT_BYTES = 16 << 20
"""Largest JSON object to parse, in bytes. The largest that Sunspot writes are the confusion matrix of 1,000 classes
(6 MB) and the manifest of a checkpoint written in parts by 10,000 ranks (7 MB)."""

MAX_STATUS_BYTES = 1 << 20
"""Largest status in bytes. A status has about 1 kB, plus an error text of at most 10,000 characters."""

MAX_SEGMENT_BYTES = 32 << 20
"""Largest segment of a journal, the audit or the output, in bytes. Merged segments stay below 8 MiB, twice the last of
`streams.SIZES`. A segment that waited for slow storage can be larger. A segment of output has at most 9 MiB, because up
to twice `logs.MAX_WAITING` can accumulate during a write."""

MAX_BYTES_AT_ONCE = 32 << 20
"""Largest number of bytes of a stream to hold in memory at a time, unless a single segment is larger."""

MAX_JOURNAL_BYTES = 512 << 20
"""Largest number of bytes of a journal to read, from its beginning. A metric history grows by 90 MB a month."""

MAX_DAMAGED_LINES = 1000
"""Number of damaged lines in a segment after which the rest of the segment is not read."""

MAX_NAMES = 1000
"""Largest number of metrics in a run's report, and of columns in its table of metrics."""

MAX_EPOCHS = 100_000
"""Largest number of epochs that `sunspot audit` checks."""

MAX_AUDIT_ROWS = 16_000_000
"""Largest number of rows in one audit file. A file has up to 8 MiB, and a shuffled row takes at least two bytes."""

MAX_TABLE_ROWS = 500
"""Largest number of rows in a table on a page. The table of settings has one row per setting."""

MAX_TABLE_COLUMNS = 300
"""Largest number of columns in a table on a page."""

MAX_TABLE_CELLS = 20_000
"""Largest number of cells in a table on a page. A table of 200 metrics with 40 rows has 8,000."""

MAX_TRIALS = 500
"""Largest number of trials with a curve in a search's report. A chart is 360 points wide."""

MAX_PAGE_BYTES = 4 << 20
"""Largest total size of a page's sections in bytes. Reports of large runs have up to 2 MB, half of it images."""

MAX_LISTED = 50
"""Largest number of lines to show from a list of faults."""

Item = TypeVar("Item")


class Budget:
    """A limit on the total number of bytes that all threads of one reader can read."""

    def __init__(self, most: int, what: str) -> None:
        """Create a budget of `most` bytes. `what` describes the data in messages."""
        self._most, self._what = most, what
        self._left = most
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """Take `size` bytes from the budget. Raises `TooLargeError` if fewer bytes remain."""
        with self._lock:
            self._left -= size
        if self._left < 0:
            raise TooLargeError(f"{self._what}: the limit of {self._most >> 20} MiB was exceeded")


CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)
"""The budget of the reader that the current thread belongs to, if any."""


@contextmanager
def budget(most: int, what: str) -> Iterator[None]:
    """Context manager that limits the bytes read inside it. Reading more raises `TooLargeError`."""
    token = CURRENT.set(Budget(most, what))
    try:
        yield
    finally:
        CURRENT.reset(token)


def spend(size: int) -> None:
    """Take `size` bytes from the current budget, if there is one. Raises `TooLargeError` if fewer bytes remain."""
    current = CURRENT.get()
    if current:
        current.spend(size)


def cut(items: Sequence[Item], most: int, what: str) -> tuple[Sequence[Item], str]:
    """Return the first `most` items, and a note with the number of omitted items.

    The note is empty if no items are omitted. `what` is the plural noun for the items in the note.
    """
    more = len(items) - most
    return items[:most], f"{more:,} more {what} are not shown" if more > 0 else ""
