"""Assigns rows to optimizer steps, and each step's rows to workers.

Everything here is a pure function of the seed, the epoch and the dataset's row groups. The world size only decides how
a step is divided among the workers. A run therefore takes the same steps with any number of workers, and the number of
steps taken is its position in the data. For example, ten rows with a global batch size of 4 on two workers:

    the epoch's order (`Order`)        7 2 9 0   4 1 8 3   5 6
    cut into steps (`Steps`)          |   0    |    1    |  2  |
    rank 0 takes (`share`)             7 2       4 1       5 6
    rank 1 takes                           9 0       8 3            too few rows for both

Each worker then takes its rows in one or more forward passes (`micro_batches`).
"""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sunspot.data.fingerprint import digest, digest_array

MIN_ROWS = 2
"""Smallest number of rows in a forward pass, because batch norm needs two."""

WINDOW_ROWS = 8192
"""Rows in a shuffle window of LOADER=ray. Changing it reorders all rows, which invalidates stored positions."""

CHECKSUM_ROWS = 1 << 20
"""Largest number of rows that `Order.checksum` permutes."""


@dataclass(frozen=True)
class Steps:
    """Splits an epoch of `rows` rows into optimizer steps of `batch` rows.

    The last step takes the remainder. If only one row remains, the step before it takes that row too.
    """

    rows: int
    batch: int

    @functools.cached_property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        full, rest = divmod(self.rows, self.batch)
        return max(1, full + (rest >= MIN_ROWS))

    @property
    def sizes(self) -> set[int]:
        """The possible numbers of rows in a step. An epoch's last step can have fewer rows than others, or one more."""
        return {end - begin for begin, end in map(self.bounds, (0, self.per_epoch - 1))}

    def total(self, epochs: int, limit: int) -> int:
        """Return the number of steps in `epochs` epochs, but at most `limit`. A `limit` of 0 means no limit."""
        return min(epochs * self.per_epoch, limit or epochs * self.per_epoch)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the start and end positions of a step in the epoch's order. Steps count from 0 in each epoch."""
        return step * self.batch, self.rows if step == self.per_epoch - 1 else (step + 1) * self.batch

    def share(self, step: int, world_size: int, rank: int) -> tuple[int, int]:
        """Return the start and end positions of the rows that `rank` takes in a step."""
        first, last = self.bounds(step)
        begin, end = share(last - first, world_size, rank)
        return first + begin, first + end

    def ranks(self, world_size: int, first: int, last: int) -> np.ndarray:
        """Return the rank that takes each of the positions `first` .. `last` - 1, int64 [last - first]."""
        positions = np.arange(first, last)
        steps = np.minimum(positions // self.batch, self.per_epoch - 1)
        begins = steps * self.batch
        rows = np.where(steps == self.per_epoch - 1, self.rows - begins, self.batch)
        size, longer = np.divmod(rows, np.clip(rows // MIN_ROWS, 1, world_size))
        places = positions - begins
        return np.maximum(places // (size + 1), (places - longer) // size)

    def workers(self, world_size: int) -> int:
        """Return the number of workers that get rows in the largest step. In smaller steps, it can be lower."""
        return max(1, min(world_size, max(self.sizes) // MIN_ROWS))


def share(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the start and end of the slice of a step's `rows` rows that `rank` takes.

    Slices differ in size by at most one row and have at least MIN_ROWS rows. In a step with too few rows, the last
    ranks get no rows.
    """
    workers = max(1, min(world_size, rows // MIN_ROWS))
    if rank >= workers:
        return rows, rows
    size, longer = divmod(rows, workers)
    begin = rank * size + min(rank, longer)
    return begin, begin + size + (rank < longer)


def micro_batches(rows: int, limit: int) -> Iterator[slice]:
    """Split `rows` rows evenly into the fewest slices of at most `limit` rows, or into one slice if `limit` is 0."""
    parts = -(-rows // limit) if limit else 1
    bounds = [rows * part // parts for part in range(parts + 1)]
    return (slice(begin, end) for begin, end in pairwise(bounds))


@functools.cache
def largest_pass(rows: int, world_size: int, limit: int) -> int:
    """Return the number of rows in any worker's largest forward pass, in a step of `rows` rows."""
    sizes = {end - begin for begin, end in (share(rows, world_size, rank) for rank in range(world_size))} - {0}
    # The largest share does not always have the largest pass, because it can be split into one more part.
    return max(part.stop - part.start for size in sizes for part in micro_batches(size, limit))


def forward_passes(rows: int, world_size: int, limit: int) -> int:
    """Return rank 0's number of forward passes in a step of `rows` rows. No rank has more rows than rank 0."""
    begin, end = share(rows, world_size, 0)
    return len(list(micro_batches(end - begin, limit)))


class ShuffleWindow(NamedTuple):
    """Positions `first` .. `last` - 1 of an epoch's order. They contain the rows of a few row groups, permuted."""

    number: int
    groups: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Order:
    """The order in which each epoch visits the rows.

    Row groups are permuted and gathered into windows of at least `window_rows` rows, and the rows of each window are
    permuted. A reader therefore holds at most one window in memory.
    """

    row_groups: tuple[int, ...]
    seed: int
    window_rows: int

    def windows(self, epoch: int) -> list[ShuffleWindow]:
        """Return the windows of an epoch, in order. Epochs count from 1."""
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.row_groups))
        windows: list[ShuffleWindow] = []
        groups: list[int] = []
        first = last = 0
        for group in shuffled.tolist():
            groups.append(group)
            last += self.row_groups[group]
            if last - first >= self.window_rows:
                windows.append(ShuffleWindow(len(windows), tuple(groups), first, last))
                groups = []
                first = last
        if groups:
            windows.append(ShuffleWindow(len(windows), tuple(groups), first, last))
        return windows

    def permutation(self, epoch: int, window: ShuffleWindow, dtype: type[np.signedinteger] = np.int64) -> np.ndarray:
        """Return a window's row numbers in the order in which the epoch visits them, `dtype` [last - first].

        Rows are numbered across the concatenated `window.groups`. `locate_rows` finds their groups.
        """
        rows = np.arange(window.last - window.first, dtype=dtype)
        np.random.default_rng([self.seed, epoch, window.number]).shuffle(rows)
        return rows

    def checksum(self) -> str:
        """Return a digest of the first epoch's windows and of the row order in its first window.

        It reveals whether the same seed still gives the same order, which NumPy does not guarantee across versions.
        """
        windows = self.windows(1)
        first = windows[0]._replace(last=min(windows[0].last, CHECKSUM_ROWS))
        groups = json.dumps([window.groups for window in windows])
        return digest(groups.encode(), digest_array(self.permutation(1, first)).encode())


def run_order(loader: str, row_groups: Sequence[int], seed: int) -> Order:
    """Return the order for a run's LOADER. With `torch`, all rows are in memory and form a single window."""
    rows = sum(row_groups)
    return Order((rows,), seed, rows) if loader == "torch" else Order(tuple(row_groups), seed, WINDOW_ROWS)


def locate_rows(lengths: Sequence[int], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's group, and its position in that group, as int64 arrays.

    Rows are numbered consecutively across all groups. `lengths` contains the number of rows in each group.
    """
    ends = np.cumsum(lengths)
    which = np.searchsorted(ends, rows, side="right")
    return which, rows - (ends - lengths)[which]
