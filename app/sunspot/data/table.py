"""A dataset of any columns, in Parquet on disk or in a bucket: a task declares which it wants, and as what."""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from sunspot.data.columns import read_labels
from sunspot.data.fingerprint import digest
from sunspot.data.parquet_files import absolute, parquet_errors, split_folder
from sunspot.data.row_files import FileSummary, RowFiles, check_files, find_column, number_groups, summarize_file
from sunspot.data.source import check_labels_match
from sunspot.data.table_columns import Column, Lists, Place, check_type, read_column, read_lists
from sunspot.data.table_files import open_table_file
from sunspot.errors import DataError, SettingsError
from sunspot.settings import PREFIX, Settings

LABEL = "label"
"""Whole numbers in a column of this name are classes; anything else there is a value like any other."""


@dataclass(frozen=True)
class TableSource(RowFiles):
    """Rows of the declared columns; a `Source`."""

    columns: dict[str, Column]
    classes: int
    "0 without classes."

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the column `image` if there is one; else how many numbers a row has besides its label."""
        if "image" in self.columns:
            return self.columns["image"].shape
        others = [column for name, column in self.columns.items() if name != LABEL]
        return (sum(column.longest or math.prod(column.shape) for column in others),)

    @cached_property
    def fingerprint(self) -> str:
        declared = {name: column.describe() for name, column in self.columns.items()}
        return self.identify(json.dumps([self.names, self.groups, declared]))

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        chosen, table = self._read_values(group, rows)
        found: dict[str, np.ndarray] = {}
        for name, column in self.columns.items():
            place = Place(name, self.path_of(group), chosen + self.groups[group].first)
            arrays = read_column(column, table[column.of or name], place)
            found |= {name + suffix: array for suffix, array in arrays.items()}
        return found

    def read_lists(self, group: int) -> dict[str, Lists]:
        """The lists of a row group, whole, by column; all columns have as long ones. Raises like `read`."""
        chosen, table = self._read_values(group, None)
        found: dict[str, Lists] = {}
        for name, column in self.columns.items():
            place = Place(name, self.path_of(group), chosen + self.groups[group].first)
            found[name] = read_lists(column, table[column.of or name], place)
            first = next(iter(found))
            if (differs := found[name].lengths != found[first].lengths).any():
                row = int(np.argmax(differs))
                raise place.refuse(
                    row,
                    f"has {found[name].lengths[row]} values, and {first} {found[first].lengths[row]}; they are "
                    "packed alike, so both must have as many",
                )
        return found

    def _read_values(self, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, pa.Table]:
        """Positions in a row group, and the columns there."""
        stored = dict.fromkeys(column.of or name for name, column in self.columns.items())
        table = self.read_table(group, list(stored))
        return (np.arange(len(table)), table) if rows is None else (rows, table.take(rows))


def open_table(settings: Settings, columns: Mapping[str, Column]) -> tuple[TableSource, TableSource | None]:
    """Training and held-out rows of DATASET and TEST_DATASET, with these columns: a task's `find_sources` returns them.

    Raises `SettingsError` for a wrong declaration, `DataError` for what is unfit in the files as far as their types and
    labels tell (the rest, when it is read), or `StorageError`.
    """
    for name, column in columns.items():
        if mistake := column.find_mistake():
            raise SettingsError(f"{PREFIX}TASK={settings.task}: column {name!r} has {mistake}")
    if settings.dataset in ("sample", "mnist"):
        raise DataError(
            f"{PREFIX}DATASET={settings.dataset}: images of digits, but {settings.task} reads the columns "
            f"{', '.join(columns)}; set it to a path or URL of Parquet"
        )
    folder = split_folder(settings.dataset, "train")
    given = settings.test_dataset or (settings.dataset if folder != absolute(settings.dataset) else "")
    train = _open_rows(folder, dict(columns))
    test = _open_rows(split_folder(given, "test"), dict(columns)) if given else None
    if test and train.classes:
        check_labels_match(train, test)
    return train, test


def _open_rows(location: str, columns: dict[str, Column]) -> TableSource:
    location = absolute(location)
    names, _, checked = check_files(location, functools.partial(_check_file, columns=columns))
    files = [file for file, _ in checked]
    return TableSource(
        location=location,
        files=tuple(names),
        groups=number_groups(file.groups for file in files),
        sizes=tuple(file.size for file in files),
        tables=digest(*(file.digest.encode() for file in files)),
        columns=columns,
        classes=max(classes for _, classes in checked),
    )


def _check_file(path: str, columns: dict[str, Column]) -> tuple[FileSummary, int]:
    """What is known of a file, and the number of its classes."""
    with parquet_errors(path):
        file = open_table_file(path)
        for name, column in columns.items():
            check_type(column, name, find_column(file.schema, column.of or name, path).type, path)
        if not sum(file.groups):
            raise DataError(f"{path}: has no rows; remove the file")
        labels = np.empty(0, np.int64)
        if LABEL in columns and columns[LABEL].is_class:
            stored = columns[LABEL].of or LABEL
            labels = read_labels(file.read([stored])[stored], path)
        return summarize_file(path, file, labels), int(labels.max()) + 1 if len(labels) else 0
