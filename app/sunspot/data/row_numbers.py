"""Rows that a library reads by itself: known are their number and what identifies them, and a batch has their ids."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sunspot.data.fingerprint import digest

HELD_OUT = "held_out"
"""The one column, uint8 [n]: whether the ids are those of held-out rows."""

LOOKED_AT = 64
"""Rows, spread evenly over all, whose content is part of the fingerprint."""


@dataclass(frozen=True)
class RowNumbers:
    """A `Source` of the ids of rows that are somewhere else."""

    row_groups: tuple[int, ...]
    shape: tuple[int, ...]
    fingerprint: str
    held_out: bool = False
    classes: int = 0

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        count = self.row_groups[group] if rows is None else len(rows)
        return {HELD_OUT: np.full(count, self.held_out, np.uint8)}

    def where(self, group: int, row: int) -> str:
        return f"row {row} of the {'held-out' if self.held_out else 'training'} rows"


def number_rows(dataset: Any, held_out: bool = False) -> RowNumbers:
    """Number the rows of a dataset that has a length, and rows by number; its `shape` is how many columns they have."""
    count = len(dataset)
    chosen = [dataset[int(number)] for number in np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(int)]
    rows = [dict(row) if isinstance(row, Mapping) else row for row in chosen]
    columns = sorted(rows[0]) if rows and isinstance(rows[0], dict) else []
    layout, content = digest(repr((count, columns)).encode()), digest(*map(pickle.dumps, rows))
    return RowNumbers((count,), (len(columns) or 1,), f"{layout}-{content}", held_out)
