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
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sunspot.data.columns import decode, dims_of_type, dims_of_value, layout, read_labels, row_of
from sunspot.data.fingerprint import digest
from sunspot.data.parquet_files import absolute, open_file, parquet_errors, split_folder
from sunspot.data.row_files import FileSummary, RowFiles, check_files, find_column, number_groups, summarize_file
from sunspot.data.table_files import open_table_file
from sunspot.errors import DataError

COLUMNS = ["image", "label"]

SAMPLE = Path(__file__).parent / "sample.parquet"

TRAIN_GROUPS = b"train_row_groups"
"""Key in the sample's metadata: how many of its row groups, from the first, are for training."""


@dataclass(frozen=True)
class ParquetSource(RowFiles):
    """Images with labels; a `Source`."""

    dims: tuple[int, ...]
    "Dimensions of a stored image: [H, W], [H, W, C] or [C, H, W]."
    classes: int
    labelled: bool

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return layout(self.dims, self.location)[0]

    @cached_property
    def fingerprint(self) -> str:
        return self.identify(json.dumps([self.names, self.groups, self.shape]))

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        table = self.read_table(group, COLUMNS if self.labelled else COLUMNS[:1])
        images = decode(table["image"], self.dims, rows, self.path_of(group), self.groups[group].first)
        if not self.labelled:
            return {"image": images}
        labels = table["label"].to_numpy().astype(np.int64, copy=False)
        return {"image": images, "label": labels if rows is None else labels[rows]}


def open_parquet(location: str, labelled: bool = True) -> ParquetSource:
    """Open a file or a folder (all `*.parquet` below it), local or in a bucket, and check everything but the pixels.

    Unless `labelled`, the column `label` may be missing, in all files or in none. Names that begin with '_' or '.' are
    skipped. The labels of all files are read. Raises `DataError` naming the file, and the row where there is one, or
    `StorageError` naming the URL.
    """
    location = absolute(location)
    names, paths, checked = check_files(location, functools.partial(_check_file, labelled=labelled))
    with_labels = [path for path, file in zip(paths, checked, strict=True) if file.classes]
    if with_labels and len(with_labels) < len(paths):
        without = next(path for path in paths if path not in with_labels)
        raise DataError(f"{without}: no column 'label', but {with_labels[0]} has one; all files need it, or none")
    dims = _first_dims(paths[0])
    for path, file in zip(paths, checked, strict=True):
        if file.dims and file.dims != dims:
            raise DataError(
                f"{path}: images of shape {list(file.dims)}, but {list(dims)} in {paths[0]}; one size fits all"
            )
    return ParquetSource(
        location=location,
        files=tuple(names),
        groups=number_groups(each.file.groups for each in checked),
        dims=dims,
        classes=max(each.classes for each in checked),
        labelled=bool(with_labels),
        sizes=tuple(each.file.size for each in checked),
        tables=digest(*(each.file.digest.encode() for each in checked)),
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

    file: FileSummary
    dims: tuple[int, ...]
    classes: int


def _check_file(path: str, labelled: bool) -> _FileSummary:
    with parquet_errors(path):
        file = open_table_file(path)
        schema = file.schema
        for name in COLUMNS if labelled else COLUMNS[:1]:
            find_column(schema, name, path)
        if not sum(file.groups):
            raise DataError(f"{path}: has no rows; remove the file")
        dims = dims_of_type(schema.field("image").type, path)
        labels = np.empty(0, np.int64)
        if "label" in schema.names:
            labels = read_labels(file.read(["label"])["label"], path)
        summary = summarize_file(path, file, labels)
    return _FileSummary(summary, dims, int(labels.max()) + 1 if len(labels) else 0)


def _first_dims(path: str) -> tuple[int, ...]:
    """The dimensions of a file's first image."""
    with parquet_errors(path):
        file = open_table_file(path)
        if dims := dims_of_type(file.schema.field("image").type, path):
            return dims
        first = file.read(["image"], next(number for number, rows in enumerate(file.groups) if rows))["image"]
    if not len(first):
        raise DataError(f"{path}: damaged: its footer tells of rows that are not there")
    return dims_of_value(first[0], row_of(path, 0))
