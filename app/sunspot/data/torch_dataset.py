"""Reads rows from a task's map-style dataset, which is any object with `__len__` and `__getitem__`.

Each process that reads rows calls the task's `build_dataset(settings)` itself, so the dataset can be large and need not
be picklable.
"""

import math
import os
import pkgutil
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from sunspot.data.dataset_rows import (
    IMAGE,
    RowColumn,
    RowName,
    describe_columns,
    describe_difference,
    read_rows,
)
from sunspot.data.fingerprint import digest, digest_array, spread_evenly
from sunspot.data.labels import LABEL
from sunspot.data.source import SAMPLED_ROWS
from sunspot.errors import ConflictError, DataError, SettingsError
from sunspot.formatting import kind_of, some_of
from sunspot.settings import PREFIX, Settings

GROUP_BYTES = 16 << 20
"""Largest size of a row group in bytes.

Changing it or GROUP_ROWS reorders the rows of LOADER=ray, and changes which rows TEST_SHARE holds out.
"""

GROUP_ROWS = 1024
"""Largest number of rows in a row group."""

REREAD_ROWS = 16
"""Number of evenly spaced rows that are read twice to detect random changes."""


class Splits(NamedTuple):
    """The datasets that `build_dataset` returned."""

    train: Any = None
    test: Any = None
    "The held-out rows, or None."
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetSource:
    """A `Source` of the training or held-out rows that `build_dataset` returned."""

    settings: Settings
    folder: str
    "The driver's working directory, to which the task's paths are relative."
    held_out: bool
    rows: int
    columns: dict[str, RowColumn]
    fingerprint: str
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(min(self._group_rows, self.rows - first) for first in range(0, self.rows, self._group_rows))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the column `image`.

        Without this column, the shape is the number of values in a row, not counting the label.
        """
        if IMAGE in self.columns and self.columns[IMAGE].is_picture:
            return self.columns[IMAGE].shape
        return (sum(math.prod(column.shape) for name, column in self.columns.items() if name != LABEL),)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        positions = np.arange(self.row_groups[group]) if rows is None else rows
        numbers = (group * self._group_rows + positions).tolist()
        found = {name: np.empty((len(numbers), *shape), dtype) for name, (dtype, shape) in self.columns.items()}
        name = partial(name_row, self.settings.task, self.held_out)
        for place, row in enumerate(read_rows(_built.get(self), numbers, name)):
            columns = {column: RowColumn.of(value) for column, value in row.items()}
            if columns != self.columns:
                raise DataError(f"{name(numbers[place])}: {describe_difference(columns, self.columns)}")
            for column, value in row.items():
                found[column][place] = value
            self._refuse_label(row, name(numbers[place]))
        return found

    def where(self, group: int, row: int) -> str:
        return name_row(self.settings.task, self.held_out, group * self._group_rows + row)

    @cached_property
    def _group_rows(self) -> int:
        row_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in self.columns.values())
        return max(1, min(GROUP_ROWS, GROUP_BYTES // max(1, row_bytes)))

    def _refuse_label(self, row: Mapping[str, np.ndarray], name: str) -> None:
        """Raise `DataError` if a row's label is not the number of a known class."""
        label = row.get(LABEL)
        if label is None or not self.classes or label.ndim or label.dtype.kind not in "iu":
            return
        if not 0 <= label < self.classes:
            raise DataError(
                f"{name}: label {label} is out of range, because the Dataset declares {self.classes} classes; number "
                f"the labels from 0 to {self.classes - 1}"
            )


def open_datasets(settings: Settings) -> tuple[DatasetSource, DatasetSource | None]:
    """Open the training rows and the held-out rows, if any, that the task's `build_dataset` returns.

    Raises `SettingsError` if `build_dataset` returns anything but datasets, and `DataError` if rows cannot be converted
    to tensors.
    """
    folder = os.getcwd()
    splits = _built.build(settings, folder)
    train = _open(settings, folder, splits, held_out=False)
    test = _open(settings, folder, splits, held_out=True) if splits.test is not None else None
    if test and test.columns != train.columns:
        raise DataError(
            f"SUNSPOT_TASK={settings.task}: build_dataset returned held-out rows with the columns "
            f"{describe_columns(test.columns)}, but training rows with {describe_columns(train.columns)}; return the "
            "same columns for both"
        )
    return train, test


def _open(settings: Settings, folder: str, splits: Splits, held_out: bool) -> DatasetSource:
    dataset = splits.test if held_out else splits.train
    refuse_random(dataset, settings.task, held_out)
    [first] = read_rows(dataset, [0], partial(name_row, settings.task, held_out))
    return DatasetSource(
        settings=settings,
        folder=folder,
        held_out=held_out,
        rows=len(dataset),
        columns={name: RowColumn.of(value) for name, value in first.items()},
        fingerprint=_built.fingerprint(settings.task, held_out),
        class_names=find_class_names(dataset),
        notes=() if held_out else splits.notes,
    )


class _BuiltDatasets:
    """The datasets that this process has built most recently. Only one task's datasets are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[Settings, str] | None = None
        self._splits = Splits()
        self._fingerprints: dict[bool, str] = {}
        "The computed fingerprints of the held-out rows (key True) and the training rows (key False)."

    def build(self, settings: Settings, folder: str) -> Splits:
        """Build a task's datasets, even if they were built before."""
        with self._lock:
            return self._build(settings, folder)

    def get(self, source: DatasetSource) -> Any:
        """Return a source's dataset, and build it if necessary.

        Raises `ConflictError` if its rows differ from those on the driver.
        """
        settings = source.settings
        held_out = source.held_out
        with self._lock:
            if self._key != (settings, source.folder):
                self._build(settings, source.folder)
            dataset = self._splits.test if held_out else self._splits.train
            if self._fingerprint(settings.task, held_out) != source.fingerprint:
                raise ConflictError(
                    f"{PREFIX}TASK={settings.task}: build_dataset returned different rows here than on the driver; "
                    "seed any splitting or shuffling, sort lists of files, and use the same files on all nodes"
                )
            return dataset

    def fingerprint(self, task: str, held_out: bool) -> str:
        """Return the fingerprint of the most recently built training or held-out rows."""
        with self._lock:
            return self._fingerprint(task, held_out)

    def _fingerprint(self, task: str, held_out: bool) -> str:
        if held_out not in self._fingerprints:
            dataset = self._splits.test if held_out else self._splits.train
            self._fingerprints[held_out] = fingerprint(dataset, partial(name_row, task, held_out))
        return self._fingerprints[held_out]

    def _build(self, settings: Settings, folder: str) -> Splits:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._key = None
        self._fingerprints = {}
        self._splits = build_splits(settings)
        self._key = settings, folder
        return self._splits


_built = _BuiltDatasets()


def build_splits(settings: Settings) -> Splits:
    """Call the task's `build_dataset`, with all random generators seeded from SEED.

    Raises `SettingsError` if it returns anything but datasets.
    """
    build = pkgutil.resolve_name(f"{settings.task}:build_dataset")
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    return find_splits(build(settings), settings.task)


def find_splits(returned: Any, task: str) -> Splits:
    """Return the datasets that `build_dataset` returned. Raises `SettingsError` for an invalid return value."""
    who = f"{PREFIX}TASK={task}: build_dataset returned"
    notes: tuple[str, ...] = ()
    train = returned
    test = None
    if isinstance(returned, Mapping):
        if "train" not in returned:
            raise SettingsError(
                f"{who} a dict with {some_of([str(name) for name in returned]) or 'no keys'}; use the key 'train' for "
                "the training rows and 'test' for the held-out rows"
            )
        train = returned["train"]
        test = returned.get("test")
        unread = [str(name) for name in returned if name not in ("train", "test")]
        if unread:
            notes = (f"build_dataset: {', '.join(unread)} not used; return held-out rows under the key 'test'",)
    elif isinstance(returned, tuple) or is_list_of_datasets(returned):
        if len(returned) != 2:
            raise SettingsError(f"{who} {len(returned)} datasets; return two, the training rows and the held-out rows")
        train, test = returned
    for dataset in (train,) if test is None else (train, test):
        fault = find_fault(dataset)
        if fault:
            raise SettingsError(f"{who} {fault}")
    return Splits(train, test, notes)


def is_list_of_datasets(returned: Any) -> bool:
    """Return True for a list of datasets, such as the result of `random_split`, but not for a list of rows."""
    return isinstance(returned, list) and bool(returned) and all(isinstance(each, Dataset) for each in returned)


def find_fault(dataset: Any) -> str:
    """Return why a dataset cannot be used and how to fix this, or an empty string if the dataset is valid."""
    if isinstance(dataset, DataLoader):
        return "a DataLoader; return its dataset, because Sunspot creates the batches"
    if hasattr(dataset, "row_groups"):
        return f"{kind_of(dataset)}, which is a Source; return it from find_sources(settings)"
    try:
        rows = len(dataset) if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset) else None
    except TypeError:
        rows = None
    if rows is None:
        return (
            f"{kind_of(dataset)}, which does not return rows by number, so a run could not resume; return a map-style "
            "Dataset, with __len__ and __getitem__ (for Hugging Face data, call load_dataset without streaming=True)"
        )
    return "" if rows else f"{kind_of(dataset)} without rows; return at least one row"


def find_class_names(dataset: Any) -> tuple[str, ...]:
    """Return the names in a Hugging Face dataset's `label` feature or a torchvision dataset's `classes`, if any."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    features = getattr(dataset, "features", None)
    label = features.get(LABEL) if isinstance(features, Mapping) else None
    names = getattr(label, "names", None) or getattr(dataset, "classes", None)
    are_names = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return tuple(names) if names and are_names else ()


def fingerprint(dataset: Any, name: RowName) -> str:
    """Return two digests joined by '-': one of the row count and the columns, and one of some rows' content."""
    rows = list(read_rows(dataset, spread_evenly(len(dataset), SAMPLED_ROWS), name))
    columns = sorted((column, *RowColumn.of(value)) for column, value in rows[0].items())
    content = [digest_array(row[column]).encode() for row in rows for column in sorted(row)]
    return f"{digest(repr((len(dataset), columns)).encode())}-{digest(*content)}"


def refuse_random(dataset: Any, task: str, held_out: bool) -> None:
    """Raise `SettingsError` if a row differs when it is read again, for example because of random augmentation."""
    row_name = partial(name_row, task, held_out)
    numbers = spread_evenly(len(dataset), REREAD_ROWS)
    first, again = (list(read_rows(dataset, numbers, row_name)) for _ in range(2))
    for number, before, after in zip(numbers, first, again, strict=True):
        changed = [name for name in before if name not in after or before[name].tobytes() != after[name].tobytes()]
        if changed:
            raise SettingsError(
                f"{PREFIX}TASK={task}: {row_name(number)} has a different {changed[0]} each time it is read, but a run "
                "might read the row only once for all epochs; move random transforms to augment_row(row), which is "
                "called for each training row in each epoch (docs/tasks.md#augmentation)"
            )


def name_row(task: str, held_out: bool, number: int) -> str:
    """Return a row's name for messages."""
    return f"row {number} of the {'held-out' if held_out else 'training'} rows of {task}.build_dataset"
