"""Assigns rows to optimizer steps, and each step's rows to workers.

Everything here is a pure function of the seed, the epoch, and the sources' row groups and weights. The world size only
decides how a step is divided among the workers. A run therefore takes the same steps with any number of workers, and
the number of steps taken is its position in the data. For example, ten rows with a global batch size of 4 on two
workers:

    the epoch's order (`RunOrder`)     7 2 9 0   4 1 8 3   5 6
    cut into steps (`Steps`)          |   0    |    1    |  2  |
    rank 0 takes (`share`)             7 2       4 1       5 6
    rank 1 takes                           9 0       8 3            too few rows for both

Each worker then processes its rows in one or more forward passes (`micro_batches`).

An epoch has as many rows as all sources together. With a single source, it is a pass through that source (`Order`). In
a mixture, `RunOrder` first assigns a source to each position of the run. The rows of each source are taken in the order
of the source's own passes, which continue across epochs. For example, with two small sources a and b:

    rows of a (weight 2), pass by pass       2 0   1 2   1 0   0 1
    rows of b (weight 1), pass by pass     1     0     0     1
"""

import functools
import itertools
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sunspot.data.fingerprint import digest, digest_array
from sunspot.settings.mixture import count_by_source

MIN_ROWS = 2
"""Smallest number of rows in a forward pass, because batch norm needs two."""

WINDOW_ROWS = 8192
"""Rows in a shuffle window of LOADER=ray. Changing it reorders all rows, which invalidates stored positions."""

CHECKSUM_ROWS = 1 << 20
"""Largest number of rows that `Order.checksum` permutes."""

MIXED_AT_ONCE = 1 << 16
"""Number of positions whose sources are computed together. The limit saves memory."""


@dataclass(frozen=True)
class Steps:
    """Splits an epoch of `rows` rows into optimizer steps of `batch` rows.

    The last step takes the remaining rows. A single remaining row is added to the last full step instead.
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
        """The numbers of rows that a step can have.

        Every step has `batch` rows, except that an epoch's last step can have fewer rows or `batch` + 1.
        """
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
        """Return the ranks that take the positions `first` .. `last` - 1, one per position, int64 [last - first]."""
        positions = np.arange(first, last)
        steps = np.minimum(positions // self.batch, self.per_epoch - 1)
        begins = steps * self.batch
        rows = np.where(steps == self.per_epoch - 1, self.rows - begins, self.batch)
        size, longer = np.divmod(rows, np.clip(rows // MIN_ROWS, 1, world_size))
        places = positions - begins
        return np.maximum(places // (size + 1), (places - longer) // size)

    def workers(self, world_size: int) -> int:
        """Return the number of workers that get rows in the largest step. Smaller steps can have fewer workers."""
        return max(1, min(world_size, max(self.sizes) // MIN_ROWS))


def share(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the start and end of `rank`'s slice of a step with `rows` rows.

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
    """Return the size in rows of the largest forward pass that any worker runs in a step of `rows` rows."""
    sizes = {end - begin for begin, end in (share(rows, world_size, rank) for rank in range(world_size))} - {0}
    # The largest share does not always have the largest pass, because it can be split into one more part.
    return max(part.stop - part.start for size in sizes for part in micro_batches(size, limit))


def forward_passes(rows: int, world_size: int, limit: int) -> int:
    """Return the number of forward passes that rank 0, which has the largest share, runs in a step of `rows` rows."""
    begin, end = share(rows, world_size, 0)
    return len(list(micro_batches(end - begin, limit)))


class ShuffleWindow(NamedTuple):
    """Positions `first` .. `last` - 1 of an epoch's order, which contain the shuffled rows of a few row groups."""

    number: int
    groups: tuple[int, ...]
    first: int
    last: int


class Visit(NamedTuple):
    """A window of one pass through a source."""

    source: int
    epoch: int
    "The number of the pass, counted from 1."
    window: ShuffleWindow
    "The window. Its positions are counted across all passes through the source."


@dataclass(frozen=True)
class Order:
    """The order in which each pass through a source visits its rows. In this class, an epoch is one pass.

    Row groups are permuted and gathered into windows of at least `window_rows` rows, and the rows of each window are
    permuted. A reader therefore holds at most one window in memory.
    """

    row_groups: tuple[int, ...]
    seed: int
    window_rows: int
    source: int = 0
    "The number of the source in a mixture, so that each source is shuffled differently."

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows in all groups."""
        return sum(self.row_groups)

    def windows(self, epoch: int) -> list[ShuffleWindow]:
        """Return the windows of an epoch, in order. Epochs count from 1."""
        shuffled = self._random(epoch).permutation(len(self.row_groups))
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

    def visits(self, begin: int) -> Iterator[Visit]:
        """Yield windows endlessly, pass after pass, starting with the window that contains position `begin`."""
        for epoch in itertools.count(begin // self.rows + 1):
            before = (epoch - 1) * self.rows
            for window in self.windows(epoch):
                if before + window.last > begin:
                    shifted = window._replace(first=before + window.first, last=before + window.last)
                    yield Visit(self.source, epoch, shifted)

    def permutation(self, epoch: int, window: ShuffleWindow, dtype: type[np.signedinteger] = np.int64) -> np.ndarray:
        """Return a window's row numbers in the order in which the epoch visits them, as an array of `dtype`.

        Rows are numbered across the concatenated `window.groups`. `locate_rows` finds their groups.
        """
        rows = np.arange(window.last - window.first, dtype=dtype)
        self._random(epoch, window.number).shuffle(rows)
        return rows

    def checksum(self) -> str:
        """Return a digest of the first epoch's windows and of the row order in its first window.

        The digest shows whether a seed still gives the same order, which NumPy does not guarantee across versions.
        """
        windows = self.windows(1)
        first = windows[0]._replace(last=min(windows[0].last, CHECKSUM_ROWS))
        groups = json.dumps([window.groups for window in windows])
        return digest(groups.encode(), digest_array(self.permutation(1, first)).encode())

    def _random(self, epoch: int, window: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, epoch, window, self.source])  # zeros at the end change nothing


@dataclass(frozen=True)
class RunOrder:
    """The order in which a run visits the rows of all its sources. Positions count from 0 at the run's first row."""

    orders: tuple[Order, ...]
    weights: tuple[int, ...] = (1,)

    @functools.cached_property
    def starts(self) -> list[int]:
        """The ID of each source's first row, followed by the total number of rows."""
        return [0, *itertools.accumulate(order.rows for order in self.orders)]

    @property
    def rows(self) -> int:
        """The number of rows in all sources, which is also the number of rows in an epoch."""
        return self.starts[-1]

    def count(self, position: int) -> list[int]:
        """Return the number of rows that each source provides before a position."""
        return count_by_source(self.weights, position)

    def sources(self, first: int, last: int) -> np.ndarray:
        """Return the number of the source at each of the positions `first` .. `last` - 1, as an int16 array."""
        found = np.zeros(last - first, np.int16)
        if len(self.orders) > 1:
            for begin in range(first, last, MIXED_AT_ONCE):
                positions = np.arange(begin, min(begin + MIXED_AT_ONCE, last) + 1)
                counts = np.stack(count_by_source(self.weights, positions))
                found[begin - first :][: len(positions) - 1] = np.argmax(np.diff(counts), axis=0)
        return found

    def rounds(self, first: int, last: int, rows: int) -> Iterator[tuple[int, int, list[Visit]]]:
        """Cut the positions `first` .. `last` - 1 into rounds of at least `rows` positions, except for the last round.

        Yield each round's bounds and the visits that contain its rows. The main source is the one with the largest
        weight. Each round ends where a window of the main source ends, so no window of this source is in two rounds.
        """
        main = int(np.argmax(self.weights))
        ahead = [order.visits(begin) for order, begin in zip(self.orders, self.count(first), strict=True)]
        newest = [next(visits) for visits in ahead]

        def take(source: int, begin: int, end: int) -> Iterator[Visit]:
            """Yield the visits to a source that contain any of the source's rows `begin` .. `end` - 1."""
            while begin < end:
                if newest[source].window.last <= begin:
                    newest[source] = next(ahead[source])
                yield newest[source]
                begin = newest[source].window.last

        while first < last:
            begins = self.count(first)
            least = self.count(min(first + rows, last))[main]
            visits = list(take(main, begins[main], max(begins[main] + 1, least)))
            end = min(self._position_after(main, visits[-1].window.last), last)
            for source, until in enumerate(self.count(end)):
                if source != main:
                    visits += take(source, begins[source], until)
            yield first, end, visits
            first = end

    def _position_after(self, source: int, given: int) -> int:
        """Return the lowest position by which a source has provided `given` rows."""
        # A count differs from the exact share by less than the number of sources.
        around = (given - len(self.weights), given + len(self.weights))
        low, high = (max(0, each * sum(self.weights) // self.weights[source]) for each in around)
        return low + bisect_left(range(low, high), given, key=lambda position: self.count(position)[source])

    def row_ids(self, epoch: int, dtype: type[np.signedinteger] = np.int64) -> np.ndarray:
        """Return an epoch's row IDs in the order in which the run visits the rows, as an array of `dtype`.

        Use this only with LOADER=torch, whose windows contain all rows of a source.
        """
        first, last = (epoch - 1) * self.rows, epoch * self.rows
        sources = self.sources(first, last)
        ids = np.empty(self.rows, dtype)
        for order, begin, end in zip(self.orders, self.count(first), self.count(last), strict=True):
            parts = [np.empty(0, dtype)]
            for _, number, window in order.visits(begin):
                if window.first >= end:
                    break
                rows = order.permutation(number, window, dtype)
                parts.append(rows[max(begin - window.first, 0) : end - window.first])
            if len(self.orders) == 1:
                return parts[-1]  # a pass is an epoch
            ids[sources == order.source] = self.starts[order.source] + np.concatenate(parts)
        return ids

    def checksum(self) -> str:
        """Return a digest of the weights and of the sources' orders (`Order.checksum`)."""
        checksums = [order.checksum() for order in self.orders]
        return checksums[0] if len(checksums) == 1 else digest(repr((self.weights, checksums)).encode())


def mixed_order(loader: str, row_groups: Sequence[Sequence[int]], weights: tuple[int, ...], seed: int) -> RunOrder:
    """Return the order for a run's LOADER, given the row groups and the weight of each source.

    With `torch`, all rows are in memory, and each source is a single window. With `ray`, the windows
    that are read at the same time, one per source, have about WINDOW_ROWS rows in total. A mixture therefore needs
    about as much memory as a single source.
    """
    orders = []
    for source, (groups, weight) in enumerate(zip(row_groups, weights, strict=True)):
        rows = sum(groups)
        window_rows = max(1, WINDOW_ROWS * weight // sum(weights))
        order = (
            Order((rows,), seed, rows, source) if loader == "torch" else Order(tuple(groups), seed, window_rows, source)
        )
        orders.append(order)
    return RunOrder(tuple(orders), weights)


def run_order(loader: str, row_groups: Sequence[int], seed: int) -> RunOrder:
    """Return the order of a run with a single source."""
    return mixed_order(loader, [row_groups], (1,), seed)


def locate_rows(lengths: Sequence[int], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's group, and its position in that group, as int64 arrays.

    Rows are numbered consecutively across all groups. `lengths` contains the number of rows in each group.
    """
    ends = np.cumsum(lengths)
    which = np.searchsorted(ends, rows, side="right")
    return which, rows - (ends - lengths)[which]
