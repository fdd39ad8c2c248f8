"""Rows that are made from a seed, for benchmarks that do not measure reading."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GROUP_ROWS = 8192


@dataclass(frozen=True)
class MadeRows:
    """A `Source` of rows that a subclass makes. Whole groups hold GROUP_ROWS rows."""

    rows: int
    shape: tuple[int, ...]
    classes: int
    fingerprint: str = "made"

    @property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(min(GROUP_ROWS, self.rows - begin) for begin in range(0, self.rows, GROUP_ROWS))

    def make(self, generator: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Return the columns of this number of rows."""
        raise NotImplementedError

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        columns = self.make(np.random.default_rng(group), self.row_groups[group])
        return columns if rows is None else {name: column[rows] for name, column in columns.items()}

    def where(self, group: int, row: int) -> str:
        return f"made row {group * GROUP_ROWS + row}"
