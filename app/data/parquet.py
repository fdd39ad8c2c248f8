"""A dataset in Parquet, on disk or in S3: columns `image` and `label`, rows in the order of the files' paths.

`image` is one of
  - PNG or JPEG bytes (or whatever else Pillow reads);
  - Arrow's fixed_shape_tensor of uint8: [H, W], [H, W, C] or [C, H, W];
  - lists of lists of integers 0 to 255 in the same shapes.

C is 1 or 3, and [H, W, C] is what a shape that could be either is taken for. In bytes, the first row decides: grey
(PNG's 1, 8 and 16 bits, with or without alpha) gives one channel, everything else, palettes too, gives three.
Transparency is dropped, 16 bits are cut to the upper 8, and grey images among coloured ones become RGB.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
import pyarrow.parquet as pq

from app.data.images import GREY_MODES, decode_bytes, open_image
from app.errors import DataError, StorageError, shorten

COLUMNS = ["image", "label"]

FORMS = "PNG or JPEG bytes, fixed_shape_tensor of uint8, or lists of lists of integers"

MOST_LABEL = 2**31 - 1
"""A larger label is a mistake: no model has a score for each class up to it."""

FILES_AT_ONCE = 8
"""Files whose footers and labels are read at the same time when a dataset is opened."""

OPEN_FILES = 128
"""Files kept open, with their footers, by each process."""

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, REQUEST_TRIES = 5, 10, 2
"""An S3 server that does not answer is given up after less than 30 s."""

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
    """What was opened, as an absolute path or as a URL: a file, or a folder."""

    files: tuple[str, ...]
    """Paths relative to `location`; one empty path when `location` is a file."""

    groups: tuple[Group, ...]

    dims: tuple[int, ...]
    """An image as it is stored: [H, W], [H, W, C] or [C, H, W]."""

    classes: int

    labelled: bool = True

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(group.rows for group in self.groups)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return _layout(self.dims, self.location)[0]

    @cached_property
    def fingerprint(self) -> str:
        """Of the names below `location`, not of the location: a copy of a dataset is the same dataset."""
        names = [name or os.path.basename(self.location) for name in self.files]
        content = json.dumps([names, self.groups, self.shape])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def where(self, group: int, row: int) -> str:
        return _row_of(self._path(self.groups[group]), self.groups[group].first + row)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        place = self.groups[group]
        path = self._path(place)
        with _parquet_errors(path):
            file = _open_file(path)
            groups = file.metadata.num_row_groups
            if place.number >= groups or file.metadata.row_group(place.number).num_rows != place.rows:
                raise DataError(f"{path}: has changed since it was opened; start the run again")
            columns = COLUMNS if self.labelled else COLUMNS[:1]
            table = file.read_row_group(place.number, columns=columns, use_threads=False)
        images = _decode(table["image"], self.dims, rows, path, place.first)
        if not self.labelled:
            return {"image": images}
        labels = table["label"].to_numpy().astype(np.int64, copy=False)
        return {"image": images, "label": labels if rows is None else labels[rows]}

    def _path(self, group: Group) -> str:
        return _join(self.location, self.files[group.file])


def open_parquet(location: str, labelled: bool = True) -> ParquetSource:
    """Open a file or a folder (all `*.parquet` below it), local or `s3://`, and check everything but the pixels.

    With `labelled` false the column `label` may be missing, in all files or in none.

    Names that begin with '_' or '.' are passed over. The labels of all files are read. Raises `DataError` naming
    the file, and the row where there is one, or `StorageError` naming the URL.
    """
    location = _absolute(location)
    _keep_open.cache_clear()  # what this process opened before may have been written anew
    names = _list_files(location)
    paths = [_join(location, name) for name in names]
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
    classes = max(file.classes for file in checked)
    return ParquetSource(location, tuple(names), tuple(groups), dims, classes, bool(with_labels))


def open_dataset(
    location: str, test_location: str = "", labelled: bool = True
) -> tuple[ParquetSource, ParquetSource | None]:
    """Training and held-out rows of a dataset; `train` and `test` folders, where there are both, are told apart.

    Held-out rows come from `test_location`, or when it is empty from the `test` folder, or there are none.
    """
    folder = _split_of(location, "train")
    if test_location:
        test_folder = _split_of(test_location, "test")
    else:
        test_folder = _split_of(location, "test") if folder != location else ""
    return open_parquet(folder, labelled), open_parquet(test_folder, labelled) if test_folder else None


def open_sample() -> tuple[ParquetSource, ParquetSource]:
    """The bundled digits: training and held-out rows of one file (see SAMPLE.md)."""
    both = open_parquet(str(SAMPLE))
    split = int(_open_file(str(SAMPLE)).schema_arrow.metadata[TRAIN_GROUPS])
    return replace(both, groups=both.groups[:split]), replace(both, groups=both.groups[split:])


# ------------------------------------------------------------------------------------------------------------- files


def _absolute(location: str) -> str:
    return location.rstrip("/") if "://" in location else os.path.abspath(os.path.expanduser(location))


def _join(location: str, name: str) -> str:
    return f"{location.rstrip('/')}/{name}" if name else location


def _row_of(path: str, row: int) -> str:
    return f"{path}, row {row}"


def _file_system(location: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URL, and the path in it."""
    if "://" not in location:
        return fs.LocalFileSystem(), location
    scheme, _, path = location.partition("://")
    if scheme != "s3" or not path:
        raise DataError(f"{location}: set DATASET to a local path or to s3://bucket/prefix")
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE")
    return _s3(*(os.environ.get(name, "") for name in names)), path


@lru_cache(maxsize=4)
def _s3(endpoint_s3: str, endpoint: str, region: str, default_region: str, authorities: str) -> fs.S3FileSystem:
    """Arrow's S3 client for the usual AWS environment; it finds the credentials by itself."""
    scheme, _, host = (endpoint_s3 or endpoint).rpartition("://")
    return fs.S3FileSystem(
        region=region or default_region or "us-east-1",
        endpoint_override=host or None,
        scheme=scheme or "https",
        tls_ca_file_path=authorities or None,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=REQUEST_TRIES),
    )


@contextlib.contextmanager
def _parquet_errors(path: str) -> Iterator[None]:
    """Arrow's errors as ours. It raises OSError for storage that fails and for files that are damaged."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; check DATASET and TEST_DATASET") from error
    except (OSError, pa.ArrowException) as error:
        of_storage = isinstance(error, OSError) and (error.errno or "AWS Error" in str(error))
        if of_storage:
            raise StorageError(f"{path}: cannot be read: {shorten(error)}") from error
        raise DataError(f"{path}: not a Parquet file, or damaged: {shorten(error)}") from error


def _list_files(location: str) -> list[str]:
    """Names of the Parquet files below a folder, sorted; [""] when `location` is a file."""
    system, path = _file_system(location)
    with _parquet_errors(location):
        kind = system.get_file_info(path).type
        if kind == fs.FileType.File:
            return [""]
        if kind == fs.FileType.NotFound:
            raise DataError(
                f"{location}: not found; set DATASET to sample, mnist, or a path or URL of Parquet that exists"
            )
        found = system.get_file_info(fs.FileSelector(path, recursive=True))
    names = [os.path.relpath(info.path, path) for info in found if info.type == fs.FileType.File]
    names = sorted(name for name in names if name.endswith(".parquet") and not _is_hidden(name))
    if not names:
        raise DataError(f"{location}: no *.parquet file in it (names that begin with '_' or '.' are passed over)")
    return names


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _split_of(location: str, split: str) -> str:
    """The folder of a split when `location` has folders `train` and `test`, else `location` as it is."""
    location = _absolute(location)
    system, path = _file_system(location)
    folders = [_join(path, name) for name in ("train", "test")]
    with _parquet_errors(location):
        both = all(info.type == fs.FileType.Directory for info in system.get_file_info(folders))
    return _join(location, split) if both else location


class _OpenFile(NamedTuple):
    """A file kept open with its footer. A reader is made for each use: readers have state, these have none."""

    handle: pa.NativeFile
    metadata: pq.FileMetaData


@lru_cache(maxsize=OPEN_FILES)
def _keep_open(path: str) -> _OpenFile:
    system, inner = _file_system(path)
    handle = system.open_input_file(inner)
    return _OpenFile(handle, pq.ParquetFile(handle).metadata)


def _open_file(path: str) -> pq.ParquetFile:
    kept = _keep_open(path)
    return pq.ParquetFile(kept.handle, metadata=kept.metadata, pre_buffer=True)


# ----------------------------------------------------------------------------------------------- checks before training


class _Checked(NamedTuple):
    """What is known of a file when it is opened; `dims` of its images only where their type tells, and no `classes`
    where it has no labels."""

    groups: list[int]
    dims: tuple[int, ...]
    classes: int


def _check_file(path: str, labelled: bool) -> _Checked:
    with _parquet_errors(path):
        file = _open_file(path)
        schema, metadata = file.schema_arrow, file.metadata
        for name in COLUMNS if labelled else COLUMNS[:1]:
            if name not in schema.names:
                found = ", ".join(schema.names) or "none"
                raise DataError(f"{path}: no column {name!r} among its columns ({found}); rename the one that holds it")
        if not metadata.num_rows:
            raise DataError(f"{path}: has no rows; remove the file")
        dims = _dims_of_type(schema.field("image").type, path)
        classes = 0
        if "label" in schema.names:
            classes = _check_labels(file.read(columns=["label"], use_threads=False)["label"], path) + 1
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return _Checked(groups, dims, classes)


def _check_labels(column: pa.ChunkedArray, path: str) -> int:
    """The largest label of a file."""
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}, row 0: label is {column.type} ({column[0]}); it must be an integer from 0")
    if column.null_count:
        raise DataError(f"{_row_of(path, _first(pc.is_null(column)))}: label is null; it must be an integer from 0")
    labels = column.to_numpy()
    wrong = (labels < 0) | (labels > MOST_LABEL)
    if wrong.any():
        row = _first(wrong)
        raise DataError(f"{_row_of(path, row)}: label {labels[row]}; it must be an integer from 0 to {MOST_LABEL}")
    return int(labels.max())


def _dims_of_type(stored: pa.DataType, path: str) -> tuple[int, ...]:
    """The dimensions of an image when its type gives them, else (); raises on a type that cannot hold one."""
    if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
        dims = tuple(stored.shape)
        if list(stored.permutation or range(len(dims))) != list(range(len(dims))):
            # pyarrow 26 writes shapes that contradict the permutation, and cannot read them back itself.
            raise DataError(f"{path}: image is {stored}; write it from a C-contiguous array, without a permutation")
        _layout(dims, path)
        return dims
    depth, inner = 0, stored
    while _is_list(inner):
        depth, inner = depth + 1, inner.value_type
    if not _is_bytes(stored) and (depth not in (2, 3) or not pa.types.is_integer(inner)):
        raise DataError(f"{path}: image is {stored}; it must be {FORMS}")
    return ()


def _first_dims(path: str) -> tuple[int, ...]:
    """The dimensions of a file's first image, as it is stored."""
    with _parquet_errors(path):
        file = _open_file(path)
        stored = file.schema_arrow.field("image").type
        if dims := _dims_of_type(stored, path):
            return dims
        first = next(file.iter_batches(batch_size=1, columns=["image"], use_threads=False))["image"][0]
    if not first.is_valid:
        raise DataError(f"{_row_of(path, 0)}: image is null")
    if _is_bytes(stored):
        image = open_image(first.as_py(), _row_of(path, 0))
        return (image.height, image.width) if image.mode in GREY_MODES else (image.height, image.width, 3)
    dims, values = (), first.as_py()
    while isinstance(values, list):
        dims, values = (*dims, len(values)), values[0] if values else None
    _layout(dims, _row_of(path, 0))
    return dims


# ------------------------------------------------------------------------------------------------------------- decoding


def _is_bytes(stored: pa.DataType) -> bool:
    types = pa.types
    return any(test(stored) for test in (types.is_binary, types.is_large_binary, types.is_binary_view))


def _is_list(stored: pa.DataType) -> bool:
    types = pa.types
    return any(test(stored) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _layout(dims: tuple[int, ...], place: str) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Channels, height and width of an image stored with these dimensions, and the axes that bring [n, *dims] there."""
    if len(dims) == 2 and all(dims):
        return (1, dims[0], dims[1]), ()
    if len(dims) == 3 and all(dims) and dims[2] in (1, 3):
        return (dims[2], dims[0], dims[1]), (0, 3, 1, 2)
    if len(dims) == 3 and all(dims) and dims[0] in (1, 3):
        return (dims[0], dims[1], dims[2]), ()
    raise DataError(f"{place}: image of shape {list(dims)}; it must be [H, W], [H, W, C] or [C, H, W], C being 1 or 3")


def _decode(
    column: pa.ChunkedArray, dims: tuple[int, ...], rows: np.ndarray | None, path: str, first: int
) -> np.ndarray:
    """uint8 [n, C, H, W], C-contiguous: the chosen rows of a row group that begins at row `first` of its file.

    Tensors and lists become one array without a copy where Arrow allows it; what follows touches chosen rows only.
    """
    if column.null_count:
        raise DataError(f"{_row_of(path, first + _first(pc.is_null(column)))}: image is null")
    shape, axes = _layout(dims, path)
    if _is_bytes(column.type):
        chosen = range(len(column)) if rows is None else rows.tolist()
        images = np.empty((len(chosen), *shape), np.uint8)
        for image, row in zip(images, chosen, strict=True):
            image[:] = decode_bytes(column[row].as_py(), shape, _row_of(path, first + row))
        return images
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    images = (
        _tensors(array, path, first)
        if isinstance(array, pa.FixedShapeTensorArray)
        else _lists(array, dims, path, first)
    )
    if images.shape[1:] != dims:
        raise DataError(f"{path}: has changed since it was opened; start the run again")
    images = images if rows is None else images[rows]
    if images.dtype != np.uint8:
        wrong = ((images < 0) | (images > 255)).reshape(len(images), math.prod(dims))
        if wrong.any():
            bad = _first(wrong.any(axis=1))
            row, value = bad if rows is None else int(rows[bad]), images[bad].flat[_first(wrong[bad])]
            raise DataError(f"{_row_of(path, first + row)}: image has a pixel of {value}; pixels are 0 to 255")
        images = images.astype(np.uint8)
    return np.ascontiguousarray(images.transpose(axes) if axes else images).reshape(len(images), *shape)


def _tensors(array: pa.FixedShapeTensorArray, path: str, first: int) -> np.ndarray:
    """[n, *dims] of a tensor column: a view of Arrow's memory."""
    stored = array.type
    values = array.storage.flatten()
    if values.null_count:
        raise DataError(
            f"{_row_of(path, first + _first(pc.is_null(values)) * len(array) // len(values))}: image has a null"
        )
    return values.to_numpy().reshape(len(array), *stored.shape)


def _lists(array: pa.Array, dims: tuple[int, ...], path: str, first: int) -> np.ndarray:
    """[n, *dims] of nested lists: a view of Arrow's memory."""
    values, lists_per_image = array, 1
    for length in dims:
        lengths = pc.list_value_length(values).fill_null(-1).to_numpy()
        wrong = lengths != length
        if wrong.any():
            row, found = _first(wrong) // lists_per_image, lengths[wrong][0]
            raise DataError(
                f"{_row_of(path, first + row)}: image has {f'a list of {found}' if found >= 0 else 'a null'} where the "
                f"first of the dataset has a list of {length}; every image must be of shape {list(dims)}"
            )
        values, lists_per_image = values.flatten(), lists_per_image * length
    if values.null_count:
        raise DataError(f"{_row_of(path, first + _first(pc.is_null(values)) // lists_per_image)}: image has a null")
    return values.to_numpy().reshape(len(array), *dims)


def _first(mask: np.ndarray | pa.Array | pa.ChunkedArray) -> int:
    """Where the first True is."""
    return int(np.argmax(np.asarray(mask)))
