"""Opens datasets of tables, on disk or in a bucket. The task declares the columns that it reads."""

import difflib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sunspot.background import map_parallel
from sunspot.data.arrow_types import plain_type
from sunspot.data.columns import Column, ColumnOrigin, ImageColumn, Lists, is_encoded
from sunspot.data.dataset_files import (
    PICTURES,
    SUPPORTED,
    DatasetFiles,
    absolute,
    arrow_errors,
    join,
    list_files,
    list_folders,
    read_range,
)
from sunspot.data.fingerprint import digest, sample_ranges
from sunspot.data.iceberg import find_snapshot
from sunspot.data.images import SCALING
from sunspot.data.labels import (
    LABEL,
    NO_LABELS,
    ClassLabels,
    TextLabels,
    merge_labels,
    read_labels,
    refuse_lookalikes,
)
from sunspot.data.source import ModelData, check_labels_match, predicting_model
from sunspot.data.splits import pair_folders
from sunspot.data.table_files import (
    CSV,
    PictureFolder,
    TableFile,
    clear_file_cache,
    open_pictures,
    open_table_file,
)
from sunspot.errors import DataError, SettingsError
from sunspot.formatting import brief, some_of
from sunspot.settings import PREFIX, Settings

PICTURE_DECODING = b"upright"
"""Version of the image decoding. It is in the digest of images, so that a run does not resume with different pixels."""

FIELD_ID = b"PARQUET:field_id"
"""Arrow's metadata key for the ID of a Parquet column."""

FILES_AT_ONCE = 8
"""Number of files that are read concurrently when a dataset is opened."""

LISTS_AT_ONCE = 1024
"""Number of lists of a row group that are converted together."""

MAX_NAMED_COLUMNS = 10
"""Largest number of columns that a message lists."""


class Group(NamedTuple):
    """A row group of `TableSource.files[file]`. `number` is its position in that file, and `first` is its first row."""

    file: int
    number: int
    first: int
    rows: int


@dataclass(frozen=True)
class TableSource:
    """A `Source` that reads the declared columns from files on demand."""

    location: str
    "The absolute path or URL of the dataset."
    files: tuple[str, ...]
    "Paths relative to `location`, or a single empty path if `location` is a file."
    groups: tuple[Group, ...]
    sizes: tuple[int, ...]
    "The size of each file in bytes."
    labels_digest: str
    "A digest of all labels, and of the values that identify each file's other content (`TableFile.identity`)."
    columns: dict[str, Column]
    classes: int
    "The number of classes, or 0 if the rows have no classes."
    class_names: tuple[str, ...] = ()
    "Class names in label order, from text labels, class folders or the files' metadata."
    classes_seen: int = 0
    "The number of classes that have rows, if labels are numbers."
    notes: tuple[str, ...] = ()
    "Notes for the user about how the rows are read."

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(group.rows for group in self.groups)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the column `image`.

        If there is no such column, this is the number of values in a row, without the label.
        """
        if "image" in self.columns:
            return self.columns["image"].shape
        others = [column for name, column in self.columns.items() if name != LABEL]
        return (sum(column.longest or math.prod(column.shape) for column in others),)

    @property
    def scales(self) -> bool:
        """True if images of any size are scaled to `shape`."""
        image = self.columns.get("image")
        return isinstance(image, ImageColumn) and image.scales

    @cached_property
    def fingerprint(self) -> str:
        """Two digests joined by '-': a digest of the file names, row groups and columns, and a digest of the content.

        The digest of the content covers all labels, the sizes of all row groups, and samples of the files' bytes. It
        does not show a change outside these samples if the file's size stays the same. The fingerprint does not depend
        on the location.
        """
        names = [name or os.path.basename(self.location) for name in self.files]
        image = self.columns.get("image")
        described = {name: column.describe() for name, column in self.columns.items()}
        layout = json.dumps([names, self.groups, image.describe() if isinstance(image, ImageColumn) else described])
        parts = dict(zip(self.files, self.sizes, strict=True))
        if PICTURES in parts:
            parts = PictureFolder(join(self.location, PICTURES)).sizes
        ranges = zip(parts, sample_ranges(list(parts.values())), strict=True)
        samples = [(join(self.location, name), offset, length) for name, some in ranges for offset, length in some]
        sampled = map_parallel(lambda sample: read_range(*sample), samples, FILES_AT_ONCE)
        content = digest(self.labels_digest.encode(), *sampled)
        return f"{hashlib.sha256(layout.encode()).hexdigest()[:16]}-{content}"

    def where(self, group: int, row: int) -> str:
        return open_table_file(self._path_of(group)).name_row(self.groups[group].first + row)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, values, origin in self._read_columns(group, rows):
            found |= {name + suffix: array for suffix, array in self.columns[name].read(values, origin).items()}
        return found

    def read_lists(self, group: int, enough: int | None = None) -> dict[str, Lists]:
        """Return a row group's lists at full length, keyed by column.

        If `enough` is set, reading stops once each column has at least that many values, so later lists are missing.
        Raises the same errors as `read`, and `DataError` if the lists in a row differ in length.
        """
        columns = self._read_columns(group, None)
        parts = []
        found = 0
        for first in range(0, self.groups[group].rows, LISTS_AT_ONCE):
            some = slice(first, first + LISTS_AT_ONCE)
            part = self._convert_lists(
                [(name, values[some], origin._replace(rows=origin.rows[some])) for name, values, origin in columns]
            )
            parts.append(part)
            found += int(next(iter(part.values())).lengths.sum())
            if enough is not None and found >= enough:
                break
        return {
            name: Lists(*map(np.concatenate, zip(*(part[name] for part in parts), strict=True)))
            for name in self.columns
        }

    def _convert_lists(self, columns: list[tuple[str, pa.ChunkedArray, ColumnOrigin]]) -> dict[str, Lists]:
        found: dict[str, Lists] = {}
        for name, values, origin in columns:
            found[name] = self.columns[name].read_lists(values, origin)
            first = next(iter(found))
            differs = found[name].lengths != found[first].lengths
            if differs.any():
                row = int(np.argmax(differs))
                raise origin.error(
                    row,
                    f"has {found[name].lengths[row]} values, but {first} has {found[first].lengths[row]}; packed "
                    "columns must have the same number of values in each row",
                )
        return found

    def _read_columns(self, group: int, rows: np.ndarray | None) -> list[tuple[str, pa.ChunkedArray, ColumnOrigin]]:
        """Return each column's name, values and origin. `rows` are positions in the group, or None for all rows."""
        stored = {name: column.of or name for name, column in self.columns.items()}
        file, table = self._read_table(group, list(dict.fromkeys(stored.values())))
        if rows is None:
            rows = np.arange(len(table))
        else:
            table = table.take(rows)
        in_file = rows + self.groups[group].first
        return [(name, table[column], ColumnOrigin(name, file, in_file)) for name, column in stored.items()]

    def _read_table(self, group: int, columns: Sequence[str]) -> tuple[TableFile, pa.Table]:
        """Return the `columns` of a row group. Raises `DataError` if the file has changed since it was opened."""
        wanted = self.groups[group]
        path = self._path_of(group)
        with arrow_errors(path):
            file = open_table_file(path)
            if file.size != self.sizes[wanted.file] or file.groups[wanted.number :][:1] != [wanted.rows]:
                raise DataError(f"{path} has changed since it was opened; restart the run")
            return file, file.read(columns, wanted.number)

    def _path_of(self, group: int) -> str:
        return join(self.location, self.files[self.groups[group].file])


def open_table(settings: Settings, columns: Mapping[str, Column]) -> tuple[TableSource, TableSource | None]:
    """Open the training rows of DATASET and the held-out rows, if any, with the given columns.

    Raises `SettingsError` if a column is declared incorrectly, `DataError` if the types or labels in a file do not
    match the columns, and `StorageError` if storage cannot be reached. Other values are checked when they are read.
    """
    for name, column in columns.items():
        mistake = column.find_mistake()
        if mistake:
            raise SettingsError(f"{PREFIX}TASK={settings.task}: column {name!r} has {mistake}")
    if settings.dataset in ("sample", "mnist"):
        raise DataError(
            f"{PREFIX}DATASET={settings.dataset} contains images of digits, but {settings.task} reads the columns "
            f"{some_of(list(columns))}; set {PREFIX}DATASET to {SUPPORTED}"
        )
    model = predicting_model(settings)
    locations = locate_splits(settings.dataset, settings.test_dataset)
    train = open_rows(find_files(locations.train), dict(columns), model=model)
    train = check_training_rows(train, locations, model)
    if not locations.test:
        return train, None
    has_names = isinstance(train.columns.get(LABEL), TextLabels)
    test = open_rows(find_files(locations.test), dict(columns), has_names, model)
    if model is None:
        test = match_classes(train, test)
        if train.classes:
            check_labels_match(train, test)
    return train, test


class SplitLocations(NamedTuple):
    """The locations of the training and held-out rows."""

    train: str
    test: str
    "The location of the held-out rows, or an empty string."
    notes: tuple[str, ...]


def locate_splits(dataset: str, test_dataset: str) -> SplitLocations:
    """Return where the training and held-out rows are, given DATASET and TEST_DATASET.

    If a location contains the folders `train` and `test`, the matching folder is used. TEST_DATASET takes precedence
    over a `test` folder in DATASET.
    """
    location = absolute(dataset)
    given = absolute(test_dataset) if test_dataset else ""
    pair = pair_folders(list_folders(location))
    train = join(location, pair.train) if pair else location
    if given:
        beside = pair_folders(list_folders(given))
        return SplitLocations(train, join(given, beside.test) if beside else given, ())
    if not pair:
        return SplitLocations(train, "", ())
    unread = ", ".join(f"{name}/" for name in pair.others)
    note = f"{location}: {unread} not read; to use it instead of {pair.test}/, set SUNSPOT_TEST_DATASET"
    return SplitLocations(train, join(location, pair.test), (note,) if unread else ())


def check_training_rows(train: TableSource, locations: SplitLocations, model: ModelData | None) -> TableSource:
    """Return `train` with the notes in `locations` added.

    Raises `DataError` if the class folders are at a deeper level than expected. This is not checked for predictions,
    where `model` is set.
    """
    if PICTURES in train.files and LABEL in train.columns and model is None:
        open_pictures(train.location).folders.refuse_wrong_level()
    return replace(train, notes=(*train.notes, *locations.notes))


def find_files(location: str) -> DatasetFiles:
    """Return a dataset's files, and clear the cache of open files."""
    clear_file_cache()
    return find_snapshot(location) or list_files(location)


def open_rows(
    found: DatasetFiles,
    columns: dict[str, Column],
    has_class_names: bool = False,
    model: ModelData | None = None,
) -> TableSource:
    """Open a dataset's files, and check their types, labels and CSV cells.

    If `has_class_names` is set, numbers in a CSV file's labels are class names. If `model` is given, it will predict
    classes for these rows, so they need no labels.
    """
    location = found.location
    paths = [join(location, name) for name in found.names]
    if model is not None and LABEL in columns:
        with arrow_errors(paths[0]):
            if (columns[LABEL].of or LABEL) not in open_table_file(paths[0]).schema.names:
                columns = {name: column for name, column in columns.items() if name != LABEL}
    files = map_parallel(lambda path: _check_file(path, columns, model, found), paths, FILES_AT_ONCE)
    labels = merge_labels([file.labels for file in files if file.labels], location, has_class_names, model)
    if labels.text:
        dtype = columns[LABEL].dtype
        if labels.classes > np.iinfo(dtype).max + 1:
            raise DataError(f"{location}: {labels.classes} classes do not fit in {dtype}; declare label as int64")
        columns = columns | {LABEL: TextLabels(dtype, of=columns[LABEL].of, names=labels.names)}
        if not labels.names:
            del columns[LABEL]
    return TableSource(
        location=location,
        files=tuple(found.names),
        groups=_number_groups(file.groups for file in files),
        sizes=tuple(file.size for file in files),
        labels_digest=digest(*(file.digest.encode() for file in files)),
        columns=columns,
        classes=labels.classes,
        class_names=labels.names,
        classes_seen=len(labels.numbers),
        notes=(*found.notes, *(note for file in files for note in file.notes)),
    )


class _FileSummary(NamedTuple):
    """The row groups, labels and other facts that `open_rows` needs about a file."""

    groups: list[int]
    "The number of rows in each row group."
    size: int
    "The size in bytes."
    digest: str
    "A digest of the labels, and of the values that identify the other content (`TableFile.identity`)."
    labels: ClassLabels | None
    "The file's class labels, or None."
    notes: tuple[str, ...]


def _check_file(path: str, columns: dict[str, Column], model: ModelData | None, found: DatasetFiles) -> _FileSummary:
    with arrow_errors(path):
        file = open_table_file(path)
        fields = {name: find_column(file.schema, column.of or name, path) for name, column in columns.items()}
        for field in fields.values():
            stored = (field.metadata or {}).get(FIELD_ID)  # files that were added to a table can lack IDs
            if stored and found.field_ids and int(stored) != found.field_ids.get(field.name):
                raise DataError(
                    f"{path}: {field.name} was a different column of the Iceberg table when this file was written; run "
                    "Iceberg's rewrite_data_files with the option rewrite-all=true"
                )
        if not sum(file.groups):
            raise DataError(f"{path} has no rows; add rows, or remove the file")
        if isinstance(file, PictureFolder) and LABEL in columns and model is None:
            file.folders.refuse_lost_classes()
        labels = None
        for name, column in columns.items():
            if name == LABEL and column.is_class:
                values = file.read([fields[name].name])[0]
                labels = read_labels(column, values, file, to_predict=model is not None)
            elif file.has_types or not column.is_number:
                column.check_type(fields[name].type, f"{path}: {name}")
            else:
                cells = file.read([fields[name].name])[0]
                column.read(cells, ColumnOrigin(name, file, np.arange(len(cells))))
        parts = [(labels or NO_LABELS).digest.encode(), json.dumps(file.identity).encode()]
        images = [columns[name] for name, field in fields.items() if is_encoded(field.type)]
        if any(isinstance(image, ImageColumn) for image in images):
            parts.append(PICTURE_DECODING)
        if any(isinstance(image, ImageColumn) and image.scales for image in images):
            parts.append(SCALING.encode())
        return _FileSummary(file.groups, file.size, digest(*parts), labels, file.notes)


def match_classes(train: TableSource, test: TableSource) -> TableSource:
    """Return the held-out rows, with classes numbered as in the training rows.

    Raises `DataError` for a class that the training rows do not have.
    """
    known = some_of(train.class_names) or "numbers"
    ours = train.columns.get(LABEL)
    theirs = test.columns.get(LABEL)
    if not isinstance(ours, TextLabels) or not isinstance(theirs, TextLabels):
        alike = type(ours) is type(theirs) and not (train.class_names and test.class_names)
        if not alike and train.class_names != test.class_names:
            raise DataError(
                f"{test.location}: the classes are {some_of(test.class_names) or 'numbers'}, but those of the training "
                f"rows are {known}; use the same class names and numbers"
            )
        return test
    refuse_lookalikes({*ours.names, *theirs.names}, test.location)
    unknown = sorted(set(theirs.names) - set(ours.names))
    if unknown:
        raise DataError(
            f"{test.location}: label {brief(unknown[0])!r} is not one of the classes in the training data ({known})"
        )
    return replace(test, columns=test.columns | {LABEL: ours}, classes=train.classes, class_names=train.class_names)


def find_column(schema: pa.Schema, name: str, path: str) -> pa.Field:
    """Return the column `name`. Raises `DataError` unless the file has exactly one such column."""
    if name not in schema.names:
        raise DataError(
            f"{path} has no column {name!r} {describe_columns(schema, name)}; {_how_to_name(schema, name, path)}"
        )
    if schema.names.count(name) > 1:
        raise DataError(f"{path} has several columns named {name!r}; rename all but one")
    field = schema.field(name)
    return field.with_type(plain_type(field.type))


def describe_columns(schema: pa.Schema, name: str) -> str:
    """Return a list of a file's columns for a message. If there are many, names similar to `name` come first."""
    names = schema.names
    if len(names) > MAX_NAMED_COLUMNS:
        nearest = difflib.get_close_matches(name, names, n=3)
        names = [*nearest, *(other for other in names if other not in nearest)]
    return f"among its columns ({some_of(names, MAX_NAMED_COLUMNS) or 'none'})"


def _how_to_name(schema: pa.Schema, name: str, path: str) -> str:
    """Return the part of an error message that says how to fix a file without the column `name`."""
    if name in (other.strip() for other in schema.names):
        return "remove the spaces around the column's name"
    if f"/{name}=" in path:
        return f"a folder name {name}=... is not read as a column, so write the column into the files"
    first_line = "; the first line must contain the column names" if path.lower().endswith(CSV) else ""
    return f"rename the column that contains these values{first_line}"


def _number_groups(files: Iterable[Sequence[int]]) -> tuple[Group, ...]:
    """Return the row groups of all files, given the sizes of each file's groups. Empty groups are omitted."""
    return tuple(
        Group(index, number, first, rows)
        for index, sizes in enumerate(files)
        for number, (first, rows) in enumerate(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
        if rows
    )
