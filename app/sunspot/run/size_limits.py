"""Size limits on the data of a run, so that a broken run cannot use up the memory of a process that reads it.

Each limit is several times what Sunspot writes for a large run, with 200 metrics, 1,000 classes, 5,000 epochs, 100,000
events, and checkpoints of any size. Data that exceeds a limit counts as damaged, or is left out with a note of how much
is missing.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from sunspot.errors import TooLargeError

MAX_OBJECT_BYTES = 16 << 20
"""Largest JSON object that is parsed. The largest that Sunspot writes are the confusion matrix of 1,000 classes (6 MB)
and the manifest of a checkpoint written in parts by 10,000 ranks (7 MB)."""

MAX_STATUS_BYTES = 1 << 20
"""Largest status, which `list` reads for every run. A status has about 1 kB, and an error's text of at most 10,000
characters."""

MAX_SEGMENT_BYTES = 32 << 20
"""Largest segment of a journal, of the audit or of output. Merged segments stay below 8 MiB, twice the last of
`streams.SIZES`. A segment that waited for slow storage may be larger. A segment of output has at most 9 MiB: twice
`logs.MAX_WAITING`, because more output may come while it is written."""

MAX_BYTES_AT_ONCE = 32 << 20
"""Bytes of a stream's segments that are held in memory at a time: four of the largest merged ones, or a single
larger one."""

MAX_JOURNAL_BYTES = 512 << 20
"""Bytes of a journal that are read, from its beginning. A metric history grows by 90 MB a month."""

MAX_DAMAGED_LINES = 1000
"""Number of unusable lines in a segment after which the rest of the segment is left out."""

MAX_NAMES = 1000
"""Largest number of metrics in a run's report, and of columns in its table of metrics."""

MAX_EPOCHS = 100_000
"""Largest number of epochs that `audit` proves."""

MAX_AUDIT_ROWS = 16_000_000
"""Largest number of rows in one file of the audit. The files have up to 8 MiB, and a shuffled row takes at least two
bytes."""

MAX_TABLE_ROWS = 500
"""Largest number of rows in a table of a page. The table of settings has a row for each setting."""

MAX_TABLE_COLUMNS = 300
"""Largest number of columns in a table of a page."""

MAX_TABLE_CELLS = 20_000
"""Largest number of cells in a table of a page. A table of 200 metrics in 40 rows has 8,000."""

MAX_TRIALS = 500
"""Largest number of trials whose curves a search's report reads and draws. A chart is 360 points wide."""

MAX_PAGE_BYTES = 4 << 20
"""Largest size of a page's sections together. Reports of large runs have up to 2 MB, half of it pictures."""

MAX_LISTED = 50
"""Largest number of lines shown from a list of faults."""

Item = TypeVar("Item")


class Budget:
    """The number of bytes of objects and segments that the threads of one reader may read together."""

    def __init__(self, most: int, what: str) -> None:
        """`what` names in messages what is being read."""
        self._most, self._what = most, what
        self._left = most
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """Take `size` bytes from the budget. Raises `TooLargeError` if fewer are left."""
        with self._lock:
            self._left -= size
        if self._left < 0:
            raise TooLargeError(f"{self._what}: more than {self._most >> 20} MiB would be read")


CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)
"""The budget of the reader that this thread belongs to, if it has one."""


@contextmanager
def budget(most: int, what: str) -> Iterator[None]:
    """Limit the bytes of objects and segments that are read in this context. Reading more raises `TooLargeError`."""
    token = CURRENT.set(Budget(most, what))
    try:
        yield
    finally:
        CURRENT.reset(token)


def spend(size: int) -> None:
    """Take `size` bytes from the current budget, if there is one. Raises `TooLargeError` if fewer are left."""
    current = CURRENT.get()
    if current:
        current.spend(size)


def cut(items: Sequence[Item], most: int, what: str) -> tuple[Sequence[Item], str]:
    """Return the first `most` items, and a note of how many are left out, which is empty if none is.

    `what` names the items in the note, in the plural.
    """
    more = len(items) - most
    return items[:most], f"{more:,} more {what} are not shown" if more > 0 else ""
