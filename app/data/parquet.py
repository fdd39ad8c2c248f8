"""A dataset in Parquet, on disk or in S3: columns `image` and `label`, rows in the order of the files' paths.

`image` is one of
  - PNG or JPEG bytes;
  - Arrow's fixed_shape_tensor of uint8: [H, W], [H, W, C] or [C, H, W];
  - lists of lists of integers 0 to 255 in the same shapes.

C is 1 or 3; a shape that could be either is read as [H, W, C]. For bytes, the first row decides: grey (PNG's 1, 8 and
16 bits, with or without alpha) gives one channel, everything else, palettes too, gives three. Transparency is dropped,
16 bits are cut to the upper 8, and grey images among coloured ones become RGB.
"""

import functools
import hashlib
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.data.columns import decode, dims_of_type, dims_of_value, layout, read_labels, row_of
from app.data.fingerprint import digest, digest_array, sample_ranges
from app.data.parquet_files import (
    absolute,
    file_size,
    forget_open_files,
    join,
    list_files,
    open_file,
    parquet_errors,
    read_range,
    split_folder,
)
from app.errors import DataError

COLUMNS = ["image", "label"]

FILES_AT_ONCE = 8
"""Files whose footers and labels are read at the same time when a dataset is opened."""

SAMPLE = Path(__file__).parent / "sample.parquet"

TRAIN_GROUPS = b"train_row_groups"
"""Key in the sample's metadata: how many of its row groups, from the first, are for training."""


class Group(NamedTuple):
    """A row group: its file (index into `ParquetSource.files`), its number and first row in that file."""

    file: int
    number: int
    first: int
    rows: int


@dataclass(frozen=True)
class ParquetSource:
    """Rows of Parquet files; a `Source`. Holds names and numbers only."""

    location: str
    "The file or folder that was opened, as an absolute path or a URL."
    files: tuple[str, ...]
    "Paths relative to `location`; one empty path when `location` is a file."
    groups: tuple[Group, ...]
    dims: tuple[int, ...]
    "Dimensions of a stored image: [H, W], [H, W, C] or [C, H, W]."
    classes: int
    labelled: bool
    sizes: tuple[int, ...]
    "Bytes of each file."
    tables: str
    "Digest of all labels, and of the sizes of all column chunks."

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(group.rows for group in self.groups)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return layout(self.dims, self.location)[0]

    @cached_property
    def fingerprint(self) -> str:
        """Of the names below `location`, not of the location: a copy of a dataset is the same dataset.

        Then, after a '-', of the content: all labels, the sizes of all column chunks, and samples of the files' bytes.
        Unseen remain images that were changed in place, outside the samples, and take as many bytes as before.
        """
        names = [name or os.path.basename(self.location) for name in self.files]
        layout = json.dumps([names, self.groups, self.shape])
        ranges = zip(self.files, sample_ranges(self.sizes), strict=True)
        places = [(join(self.location, name), offset, length) for name, some in ranges for offset, length in some]
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            samples = pool.map(lambda place: read_range(*place), places)
            content = digest(self.tables.encode(), *samples)
        return f"{hashlib.sha256(layout.encode()).hexdigest()[:16]}-{content}"

    def where(self, group: int, row: int) -> str:
        return row_of(self._path(self.groups[group]), self.groups[group].first + row)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        place = self.groups[group]
        path = self._path(place)
        with parquet_errors(path):
            file = open_file(path)
            groups, size = file.metadata.num_row_groups, file_size(path)
            same = size == self.sizes[place.file] and place.number < groups
            if not same or file.metadata.row_group(place.number).num_rows != place.rows:
                raise DataError(f"{path}: has changed since it was opened; start the run again")
            columns = COLUMNS if self.labelled else COLUMNS[:1]
            table = file.read_row_group(place.number, columns=columns, use_threads=False)
        images = decode(table["image"], self.dims, rows, path, place.first)
        if not self.labelled:
            return {"image": images}
        labels = table["label"].to_numpy().astype(np.int64, copy=False)
        return {"image": images, "label": labels if rows is None else labels[rows]}

    def _path(self, group: Group) -> str:
        return join(self.location, self.files[group.file])


def open_parquet(location: str, labelled: bool = True) -> ParquetSource:
    """Open a file or a folder (all `*.parquet` below it), local or in a bucket, and check everything but the pixels.

    Unless `labelled`, the column `label` may be missing, in all files or in none. Names that begin with '_' or '.' are
    skipped. The labels of all files are read. Raises `DataError` naming the file, and the row where there is one, or
    `StorageError` naming the URL.
    """
    location = absolute(location)
    forget_open_files()
    names = list_files(location)
    paths = [join(location, name) for name in names]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        checked = list(pool.map(functools.partial(_check_file, labelled=labelled), paths))
    with_labels = [path for path, file in zip(paths, checked, strict=True) if file.classes]
    if with_labels and len(with_labels) < len(paths):
        without = next(path for path in paths if path not in with_labels)
        raise DataError(f"{without}: no column 'label', but {with_labels[0]} has one; all files need it, or none")
    dims = _first_dims(paths[0])
    groups: list[Group] = []
    for index, (path, file) in enumerate(zip(paths, checked, strict=True)):
        if file.dims and file.dims != dims:
            raise DataError(
                f"{path}: images of shape {list(file.dims)}, but {list(dims)} in {paths[0]}; one size fits all"
            )
        firsts = itertools.accumulate(file.groups, initial=0)
        places = enumerate(zip(firsts, file.groups, strict=False))
        groups += [Group(index, number, first, rows) for number, (first, rows) in places if rows]
    return ParquetSource(
        location=location,
        files=tuple(names),
        groups=tuple(groups),
        dims=dims,
        classes=max(file.classes for file in checked),
        labelled=bool(with_labels),
        sizes=tuple(file.size for file in checked),
        tables=digest(*(file.digest.encode() for file in checked)),
    )


def open_dataset(
    location: str, test_location: str = "", labelled: bool = True
) -> tuple[ParquetSource, ParquetSource | None]:
    """Training and held-out rows of a dataset, from its folders `train` and `test` if it has both.

    Held-out rows come from `test_location` if given, else from the folder `test` if there is one.
    """
    folder = split_folder(location, "train")
    if test_location:
        test_folder = split_folder(test_location, "test")
    else:
        test_folder = split_folder(location, "test") if folder != location else ""
    return open_parquet(folder, labelled), open_parquet(test_folder, labelled) if test_folder else None


def open_sample() -> tuple[ParquetSource, ParquetSource]:
    """The bundled digits: training and held-out rows of one file (see SAMPLE.md)."""
    both = open_parquet(str(SAMPLE))
    split = int(open_file(str(SAMPLE)).schema_arrow.metadata[TRAIN_GROUPS])
    return replace(both, groups=both.groups[:split]), replace(both, groups=both.groups[split:])


class _FileSummary(NamedTuple):
    """A file's footer and labels; `dims` is () if its types do not tell, `classes` is 0 without labels."""

    groups: list[int]
    dims: tuple[int, ...]
    classes: int
    size: int
    "Bytes."
    digest: str
    "Of the labels and the sizes of the column chunks."


def _check_file(path: str, labelled: bool) -> _FileSummary:
    with parquet_errors(path):
        file = open_file(path)
        schema, metadata = file.schema_arrow, file.metadata
        for name in COLUMNS if labelled else COLUMNS[:1]:
            found = ", ".join(schema.names) or "none"
            if name not in schema.names:
                raise DataError(f"{path}: no column {name!r} among its columns ({found}); rename the one that holds it")
            if schema.names.count(name) > 1:
                raise DataError(f"{path}: several columns {name!r} among its columns ({found}); rename the others")
        if not metadata.num_rows:
            raise DataError(f"{path}: has no rows; remove the file")
        dims = dims_of_type(schema.field("image").type, path)
        labels = np.empty(0, np.int64)
        if "label" in schema.names:
            labels = read_labels(file.read(columns=["label"], use_threads=False)["label"], path)
        size = file_size(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number).total_compressed_size for group in groups for number in range(group.num_columns)]
    return _FileSummary(
        groups=[group.num_rows for group in groups],
        dims=dims,
        classes=int(labels.max()) + 1 if len(labels) else 0,
        size=size,
        digest=digest(digest_array(labels).encode(), json.dumps(chunks).encode()),
    )


def _first_dims(path: str) -> tuple[int, ...]:
    """The dimensions of a file's first image."""
    with parquet_errors(path):
        file = open_file(path)
        if dims := dims_of_type(file.schema_arrow.field("image").type, path):
            return dims
        first = next(file.iter_batches(batch_size=1, columns=["image"], use_threads=False), None)
    if first is None:
        raise DataError(f"{path}: damaged: its footer tells of rows that are not there")
    return dims_of_value(first["image"][0], row_of(path, 0))
