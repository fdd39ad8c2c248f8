"""Packs lists of any length, such as documents of tokens, into rows of one length.

The lists of a row group are laid end to end and cut into rows. Each row group is packed independently, so a reader
needs no other group, and every value is in exactly one row. Only the last row of a group is padded.
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
"""Column that separates lists: int32 [n, length], the position of each value in its list, from 0 in every row."""


@dataclass(frozen=True)
class PackedSource:
    """Rows of `length` values; a `Source`.

    Its columns are the declared columns, [n, length], and `position`. For each declared column, NAME_length is the
    number of values that are not padding, int64 [n].
    """

    table: TableSource
    length: int
    row_groups: tuple[int, ...]
    classes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values in a row."""
        return (self.length,)

    @cached_property
    def fingerprint(self) -> str:
        layout, _, content = self.table.fingerprint.partition("-")
        packed = json.dumps([layout, self.length, self.row_groups])
        return f"{hashlib.sha256(packed.encode()).hexdigest()[:16]}-{content}"

    def where(self, group: int, row: int) -> str:
        return f"{self.table.where(group, 0)} and those after it, packed row {row}"

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        lists = self.table.read_lists(group)
        lengths = next(iter(lists.values())).lengths
        used = int(lengths.sum())
        count = -(-used // self.length)
        if count != self.row_groups[group]:
            raise DataError(f"{self.table.where(group, 0)}: has changed since it was opened; start the run again")
        chosen = np.arange(count) if rows is None else rows
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
    """Open a table like `open_table`, but pack its lists into rows of `length` values.

    All columns are cut at the same positions. All lists are read once, to count their values.
    """
    wrong = [name for name, column in columns.items() if column.shape or column.longest or name == POSITION]
    if wrong:
        raise SettingsError(
            f"{PREFIX}TASK={settings.task}: column {wrong[0]!r} cannot be packed; declare it without shape and "
            f"longest, and not with the name {POSITION!r}"
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
