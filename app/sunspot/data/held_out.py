"""Holds out a fraction of a source's rows (TEST_SHARE).

The same rows are held out on every start and with any number of workers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sunspot.data.fingerprint import digest
from sunspot.data.order import MIN_ROWS
from sunspot.data.source import Source, rows_in
from sunspot.errors import DataError

GROUP_STREAM, ROW_STREAM = 2, 3
"""Seed words for the two random orders below. Changing them changes which rows are held out."""


@dataclass(frozen=True)
class RowSubset:
    """A `Source` that contains either the held-out rows of another source or the remaining rows.

    The same fraction of every row group is held out, up to rounding, so no process needs a list of all rows. The seed
    chooses the rows.
    """

    source: Source
    share: float
    seed: int
    held_out: bool

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the underlying source, such as `class_names`."""
        if name.startswith("__") or name == "source":  # unpickling looks these up before `source` is set
            raise AttributeError(name)
        return getattr(self.source, name)

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        counts = zip(self.source.row_groups, self._held_out_counts, strict=True)
        return tuple(held_out if self.held_out else rows - held_out for rows, held_out in counts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def classes(self) -> int:
        return self.source.classes

    @property
    def notes(self) -> tuple[str, ...]:
        """The underlying source's notes. The held-out rows have no notes, so that each note is printed only once."""
        return () if self.held_out else getattr(self.source, "notes", ())

    @property
    def fingerprint(self) -> str:
        layout, _, content = self.source.fingerprint.partition("-")
        subset = repr((layout, self.share, self.seed, self.held_out))
        return f"{digest(subset.encode())}-{content}"

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        chosen = self._positions(group)
        return self.source.read(group, chosen if rows is None else chosen[rows])

    def where(self, group: int, row: int) -> str:
        return self.source.where(group, int(self._positions(group)[row]))

    def _positions(self, group: int) -> np.ndarray:
        rows = self.source.row_groups[group]
        held_out = self._held_out_counts[group]
        return draw_rows(self.seed, group, rows, held_out)[0 if self.held_out else 1]

    @cached_property
    def _held_out_counts(self) -> tuple[int, ...]:
        return count_held_out(self.source.row_groups, self.share, self.seed)


def hold_out(source: Source, share: float, seed: int) -> tuple[RowSubset, RowSubset]:
    """Split a source into training and held-out rows. Raises `DataError` if it has too few rows for both."""
    if rows_in(source) <= MIN_ROWS:
        raise DataError(
            f"SUNSPOT_TEST_SHARE={share:g}: the dataset has only {rows_in(source)} rows, and at least {MIN_ROWS} must "
            "remain for training; set SUNSPOT_TEST_SHARE=0"
        )
    return RowSubset(source, share, seed, held_out=False), RowSubset(source, share, seed, held_out=True)


def count_held_out(row_groups: tuple[int, ...], share: float, seed: int) -> tuple[int, ...]:
    """Return the number of held-out rows in each group.

    The numbers add up to the rounded `share` of all rows, or to 1 if that is 0. At least MIN_ROWS rows remain for
    training.
    """
    sizes = np.array(row_groups, np.int64)
    rows = sum(row_groups)
    wanted = min(max(1, round(share * rows)), rows - MIN_ROWS)
    # The groups are visited in random order. Otherwise, small groups would give held-out rows at regular intervals.
    order = _random_order([seed, GROUP_STREAM], len(sizes))
    counts = np.zeros_like(sizes)
    counts[order] = np.diff([int(end) * wanted // rows for end in np.cumsum(sizes[order])], prepend=0)
    return tuple(counts.tolist())


@functools.lru_cache(maxsize=8)
def draw_rows(seed: int, group: int, rows: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the held-out positions in a row group and the remaining positions, both sorted."""
    order = _random_order([seed, ROW_STREAM, group], rows)
    return np.sort(order[:held_out]), np.sort(order[held_out:])


def _random_order(words: list[int], count: int) -> np.ndarray:
    # NumPy keeps the raw numbers of a bit generator the same in all versions, but not the results of a Generator.
    return np.argsort(np.random.PCG64(words).random_raw(count), kind="stable")
