"""Which rows each optimizer step consumes, and which of them each worker takes.

All of it is a function of the seed, the epoch, and the data's row groups. The world size only cuts a step into
shares, so that the sequence of steps is the same on any number of workers, and a position in it is one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

LEAST_ROWS = 2
"""Batch norm needs two rows in a forward pass."""


@dataclass(frozen=True)
class Steps:
    """How an epoch of `rows` rows is cut into optimizer steps of `batch` rows.

    The last step takes what is left, and a single row left over joins the step before it.
    """

    rows: int
    batch: int

    @property
    def per_epoch(self) -> int:
        full, rest = divmod(self.rows, self.batch)
        return max(1, full + (rest >= LEAST_ROWS))

    def total(self, epochs: int, most: int) -> int:
        """Steps of so many epochs, and of them not more than `most` (0: no limit)."""
        return min(epochs * self.per_epoch, most or epochs * self.per_epoch)

    def bounds(self, step: int) -> tuple[int, int]:
        """First and last-plus-one position, in the epoch's order, of step 0 .. per_epoch - 1."""
        return step * self.batch, self.rows if step == self.per_epoch - 1 else (step + 1) * self.batch

    def share(self, step: int, world_size: int, rank: int) -> tuple[int, int]:
        """The positions of `step` that `rank` takes."""
        first, last = self.bounds(step)
        begin, end = share(last - first, world_size, rank)
        return first + begin, first + end

    def positions(self, world_size: int, rank: int, first: int, last: int) -> np.ndarray:
        """All positions in `first` .. `last` - 1 that `rank` takes, in order; int64."""
        steps = range(
            min(first // self.batch, self.per_epoch - 1), min((last - 1) // self.batch, self.per_epoch - 1) + 1
        )
        shares = (self.share(step, world_size, rank) for step in steps)
        return np.concatenate(
            [np.arange(max(begin, first), max(begin, first, min(end, last))) for begin, end in shares]
        )


def share(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The slice of a step's `rows` rows that `rank` takes.

    Shares differ by at most one row among the workers that have any, and none has fewer than LEAST_ROWS: a step too
    small for all goes to the first of them.
    """
    workers = max(1, min(world_size, rows // LEAST_ROWS))
    if rank >= workers:
        return rows, rows
    size, longer = divmod(rows, workers)
    begin = rank * size + min(rank, longer)
    return begin, begin + size + (rank < longer)


def micro_batches(rows: int, most: int) -> Iterator[slice]:
    """Cut `rows` rows evenly into the fewest slices of at most `most` rows (0: one slice)."""
    parts = -(-rows // most) if most else 1
    bounds = [rows * part // parts for part in range(parts + 1)]
    return (slice(begin, end) for begin, end in pairwise(bounds))


def passes(rows: int, world_size: int, most: int) -> int:
    """Forward passes that a step of `rows` rows takes on the worker with the largest share, the first."""
    begin, end = share(rows, world_size, 0)
    return len(list(micro_batches(end - begin, most)))


class ShuffleWindow(NamedTuple):
    """A stretch of an epoch's order: the rows of a few row groups, permuted."""

    number: int
    groups: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Order:
    """The order in which each epoch visits the rows.

    Row groups are permuted, and the rows of each `window_rows` of them are permuted again: a reader never has to hold
    more than a window. With one window, the order is a permutation of all rows.
    """

    row_groups: tuple[int, ...]
    seed: int
    window_rows: int

    def windows(self, epoch: int) -> list[ShuffleWindow]:
        """The windows of an epoch (from 1), in order; together they cover the positions 0 .. rows - 1."""
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.row_groups))
        windows: list[ShuffleWindow] = []
        groups: list[int] = []
        first = last = 0
        for group in shuffled.tolist():
            groups.append(group)
            last += self.row_groups[group]
            if last - first >= self.window_rows:
                windows.append(ShuffleWindow(len(windows), tuple(groups), first, last))
                groups, first = [], last
        if groups:
            windows.append(ShuffleWindow(len(windows), tuple(groups), first, last))
        return windows

    def permutation(self, epoch: int, window: ShuffleWindow) -> np.ndarray:
        """The rows of a window in the order they are visited, int64 [last - first].

        A number below counts through the rows of `window.groups`, laid end to end.
        """
        return np.random.default_rng([self.seed, epoch, window.number]).permutation(window.last - window.first)


def row_ids(row_groups: Sequence[int], groups: Sequence[int], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows numbered through `groups` laid end to end lie.

    Returns which of `groups` each is in (index into `groups`), and its row id in the dataset; both int64.
    """
    starts = np.array([0, *accumulate(row_groups)])
    lengths = np.array([row_groups[group] for group in groups])
    ends = np.cumsum(lengths)
    which = np.searchsorted(ends, rows, side="right")
    return which, rows - (ends - lengths)[which] + starts[list(groups)][which]
