"""Images with labels in a table: the columns `image` and `label`, declared by what the first file holds.

`image` is one of
  - PNG or JPEG bytes;
  - Arrow's fixed_shape_tensor of uint8: [H, W], [H, W, C] or [C, H, W];
  - lists of lists of integers 0 to 255 in the same shapes.

C is 1 or 3; a shape that could be either is read as [H, W, C]. For bytes, the first row decides: grey (PNG's 1, 8 and
16 bits, with or without alpha) gives one channel, everything else, palettes too, gives three. Transparency is dropped,
16 bits are cut to the upper 8, and grey images among coloured ones become RGB.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from sunspot.data.columns import Column, Place, innermost, is_permuted, name_row
from sunspot.data.images import GREY_MODES, decode_bytes, open_image
from sunspot.data.parquet_files import absolute, join, open_file, parquet_errors
from sunspot.data.table import LABEL, TableSource, find_column, find_files, locate_splits, open_rows
from sunspot.data.table_files import open_table_file
from sunspot.errors import DataError

IMAGE = "image"

FORMS = "PNG or JPEG bytes, fixed_shape_tensor of uint8, or lists of lists of integers"

SAMPLE = Path(__file__).parent / "sample.parquet"

TRAIN_GROUPS = b"train_row_groups"
"""Key in the sample's metadata: how many of its row groups, from the first, are for training."""


@dataclass(frozen=True)
class ImageColumn(Column):
    """A column of images in any of the three forms, all of one size; read as uint8 [n, C, H, W], C-contiguous."""

    dims: tuple[int, ...] = ()
    "Dimensions of an image in tensors and lists: [H, W], [H, W, C] or [C, H, W]."

    @classmethod
    def of_dims(cls, dims: tuple[int, ...], place: str) -> "ImageColumn":
        return cls("uint8", order_dims(dims, place)[0], dims=dims)

    def check_type(self, stored: pa.DataType, place: str) -> None:
        if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
            if is_permuted(stored):
                raise DataError(f"{place} is {stored}; write it from a C-contiguous array, without a permutation")
            if self.of_dims(tuple(stored.shape), place) != self:
                raise DataError(f"{place} of shape {list(stored.shape)}, {self._describe_first()}")
        elif not is_bytes(stored) and not Column("uint8", self.dims).takes(stored):
            raise DataError(f"{place} is {stored}, {self._describe_first()}, as {FORMS}")

    def _describe_first(self) -> str:
        return f"and the first of the dataset has the shape {list(self.dims)}; all images must have one size"

    def read(self, values: pa.ChunkedArray, place: Place) -> dict[str, np.ndarray]:
        if is_bytes(values.type):
            return Column("uint8", self.shape, decode=partial(decode_bytes, shape=self.shape)).read(values, place)
        images = Column("uint8", self.dims).read(values, place)[""]
        _, axes = order_dims(self.dims, place.path)
        return {"": np.ascontiguousarray(images.transpose(axes) if axes else images).reshape(-1, *self.shape)}


def open_images(location: str, labelled: bool = True) -> TableSource:
    """Open a file or a folder (all `*.parquet` below it), local or in a bucket, and check everything but the pixels.

    Unless `labelled`, the first file may lack the column `label`; the dataset then has no labels. Names that begin with
    '_' or '.' are skipped. Raises `DataError` naming the file, and the row where there is one, or `StorageError` naming
    the URL.
    """
    location = absolute(location)
    names = find_files(location)
    path = join(location, names[0])
    with parquet_errors(path):
        schema = open_table_file(path).schema
        columns: dict[str, Column] = {IMAGE: _declare_images(path)}
        if labelled or LABEL in schema.names:
            columns[LABEL] = Column("int64")
    return replace(open_rows(location, names, columns), declared=False)


def open_image_splits(
    dataset: str, test_dataset: str = "", labelled: bool = True
) -> tuple[TableSource, TableSource | None]:
    """Open the training rows and, if there are any, the held-out rows of DATASET and TEST_DATASET."""
    train, test = locate_splits(dataset, test_dataset)
    return open_images(train, labelled), open_images(test, labelled) if test else None


def open_sample() -> tuple[TableSource, TableSource]:
    """Open the bundled digits: training and held-out rows of one file (see SAMPLE.md)."""
    both = open_images(str(SAMPLE))
    split = int(open_file(str(SAMPLE)).schema_arrow.metadata[TRAIN_GROUPS])
    return replace(both, groups=both.groups[:split]), replace(both, groups=both.groups[split:])


def _declare_images(path: str) -> ImageColumn:
    """Return the column of the images in a file, by their type or else by the first of them."""
    file = open_table_file(path)
    stored = find_column(file.schema, IMAGE, path).type
    if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
        return ImageColumn.of_dims(tuple(stored.shape), path)
    inner, depth = innermost(stored)
    if not is_bytes(stored) and (depth not in (2, 3) or not pa.types.is_integer(inner)):
        raise DataError(f"{path}: image is {stored}; it must be {FORMS}")
    filled = next((number for number, rows in enumerate(file.groups) if rows), None)
    if filled is None:
        raise DataError(f"{path}: has no rows; remove the file")
    first = file.read([IMAGE], filled)[IMAGE]
    if not len(first):
        raise DataError(f"{path}: damaged: its footer tells of rows that are not there")
    return _declare_image(first[0], name_row(path, 0))


def _declare_image(value: pa.Scalar, place: str) -> ImageColumn:
    if not value.is_valid:
        raise DataError(f"{place}: image is null")
    if is_bytes(value.type):
        try:
            image = open_image(value.as_py())
        except DataError as error:
            raise DataError(f"{place}: image {error}") from error
        colour = () if image.mode in GREY_MODES else (3,)
        return ImageColumn.of_dims((image.height, image.width, *colour), place)
    dims: tuple[int, ...] = ()
    nested = value.as_py()
    while isinstance(nested, list):
        dims, nested = (*dims, len(nested)), nested[0] if nested else None
    return ImageColumn.of_dims(dims, place)


def order_dims(dims: tuple[int, ...], place: str) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Return channels, height and width of an image stored as `dims`, and how to transpose [n, *dims] to them."""
    if len(dims) == 2 and all(dims):
        return (1, dims[0], dims[1]), ()
    if len(dims) == 3 and all(dims) and dims[2] in (1, 3):
        return (dims[2], dims[0], dims[1]), (0, 3, 1, 2)
    if len(dims) == 3 and all(dims) and dims[0] in (1, 3):
        return (dims[0], dims[1], dims[2]), ()
    raise DataError(f"{place}: image of shape {list(dims)}; it must be [H, W], [H, W, C] or [C, H, W], C being 1 or 3")


def is_bytes(stored: pa.DataType) -> bool:
    types = pa.types
    return any(test(stored) for test in (types.is_binary, types.is_large_binary, types.is_binary_view))
