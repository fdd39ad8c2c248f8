"""Packs lists of any length, such as tokenized documents, into rows of equal length.

The lists of a row group are concatenated and cut into rows, so every value is in exactly one row. Row groups are packed
independently, so that each can be read alone. Only the last row of a group is padded.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sunspot.background import map_parallel
from sunspot.data.columns import Column
from sunspot.data.table import FILES_AT_ONCE, TableSource, open_table
from sunspot.errors import DataError, SettingsError
from sunspot.formatting import some_of
from sunspot.settings import PREFIX, Settings

POSITION = "position"
"""Name of the column with each value's position in its list, int32 [n, length]. A list continued from the previous row
starts at 0 again."""


@dataclass(frozen=True)
class PackedSource:
    """A `Source` of rows with `length` values each.

    The columns are the declared columns, [n, length], and `position`. For each declared column, NAME_length has the
    number of values without padding, int64 [n].
    """

    table: TableSource
    length: int
    row_groups: tuple[int, ...]
    classes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row, which has one axis with `length` values."""
        return (self.length,)

    @cached_property
    def fingerprint(self) -> str:
        layout, _, content = self.table.fingerprint.partition("-")
        packed = json.dumps([layout, self.length, self.row_groups])
        return f"{hashlib.sha256(packed.encode()).hexdigest()[:16]}-{content}"

    def where(self, group: int, row: int) -> str:
        return f"packed row {row} of the rows from {self.table.where(group, 0)}"

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        chosen = np.arange(self.row_groups[group]) if rows is None else rows
        end = int(chosen.max(initial=-1)) + 1
        lists = self.table.read_lists(group, None if rows is None else end * self.length)
        lengths = next(iter(lists.values())).lengths
        used = int(lengths.sum())
        count = -(-used // self.length)
        if count < end or (rows is None and count != end):
            raise DataError(f"{self.table.location} has changed since it was opened; restart the run")
        found: dict[str, np.ndarray] = {}
        for name, (values, _) in lists.items():
            column = self.table.columns[name]
            filled = np.full(count * self.length, column.fill, column.dtype)
            filled[:used] = values
            found[name] = filled.reshape(count, self.length)[chosen]
            found[f"{name}_length"] = np.minimum(used - chosen * self.length, self.length)
        begins = np.zeros(count * self.length, np.int64)
        begins[:used] = np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = np.arange(len(begins))
        begins[used:] = places[used:]  # padding belongs to no list
        in_list = places - np.maximum(begins, places // self.length * self.length)
        return found | {POSITION: in_list.astype(np.int32).reshape(count, self.length)[chosen]}


def open_packed(
    settings: Settings, columns: Mapping[str, Column], length: int
) -> tuple[PackedSource, PackedSource | None]:
    """Open tables like `open_table`, and pack their lists into rows of `length` values.

    All columns are cut at the same positions. Every list is read once to count its values.
    """
    wrong = [name for name, column in columns.items() if column.shape or column.longest or name == POSITION]
    if wrong:
        raise SettingsError(
            f"{PREFIX}TASK={settings.task}: column {wrong[0]!r} cannot be packed; declare it without the "
            f"arguments shape and longest, and do not name it {POSITION!r}"
        )
    train, test = open_table(settings, {name: replace(column, longest=length) for name, column in columns.items()})
    return _pack(train, length), _pack(test, length) if test else None


def _pack(table: TableSource, length: int) -> PackedSource:
    def count(group: int) -> int:
        return -(-int(next(iter(table.read_lists(group).values())).lengths.sum()) // length)

    rows = tuple(map_parallel(count, range(len(table.groups)), FILES_AT_ONCE))
    if not any(rows):
        raise DataError(f"{table.location}: all lists of {some_of(list(table.columns))} are empty")
    return PackedSource(table, length, rows)
