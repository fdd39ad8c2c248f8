"""Datasets of images: tables with the columns `image` and `label`, whose form the first file determines."""

import io
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from sunspot.data.columns import (
    IMAGE_FORMS,
    IS_NULL,
    SCALED,
    Column,
    ImageColumn,
    encoded,
    innermost,
    is_bytes,
    is_encoded,
)
from sunspot.data.dataset_files import absolute, arrow_errors, join, open_file
from sunspot.data.images import GREY_MODES, open_image, upright_size
from sunspot.data.labels import LABEL
from sunspot.data.source import ModelData
from sunspot.data.table import (
    TableSource,
    check_training_rows,
    describe_columns,
    find_column,
    find_files,
    locate_splits,
    match_classes,
    open_rows,
)
from sunspot.data.table_files import PictureFolder, open_table_file
from sunspot.errors import DataError
from sunspot.settings import PREFIX

IMAGE = "image"

SAMPLE = Path(__file__).parent / "sample.parquet"

TRAIN_GROUPS = b"train_row_groups"
"""Metadata key in the bundled sample. Its value is the number of row groups for training; the others are held out."""


def open_images(
    location: str, side: int = 0, like: ImageColumn | None = None, model: ModelData | None = None
) -> TableSource:
    """Open a dataset of images, on disk or in a bucket, and check everything except the pixels.

    Pictures in files of their own are scaled to one size (`PictureFolder.find_dims`). With a `side`, pictures within
    Parquet or Arrow are scaled to it, too. If `like` scales pictures, its size is used instead. Raises `DataError`,
    which names the file and, if possible, the row, or `StorageError`, which names the URL.
    """
    location = absolute(location)
    files = find_files(location)
    path = join(location, files.names[0])
    with arrow_errors(path):
        scaled = like and like.scales and is_encoded(find_images(path).type)
        image = like if like and scaled else _declare_images(path, side)
    return open_rows(location, files, {IMAGE: image, LABEL: Column("int64")}, model=model)


def open_image_splits(
    dataset: str, test_dataset: str = "", side: int = 0, model: ModelData | None = None
) -> tuple[TableSource, TableSource | None]:
    """Open the training rows and, if there are any, the held-out rows of DATASET and TEST_DATASET.

    With the data of a `model`, the rows are opened for prediction with it and need no labels.
    """
    locations = locate_splits(dataset, test_dataset)
    scaled = ImageColumn("uint8", model.shape, dims=model.shape, scales=True) if model and model.scales else None
    rows = open_images(locations.train, side, scaled, model)
    rows = check_training_rows(rows, locations, model)
    if not locations.test:
        return rows, None
    image = rows.columns[IMAGE]
    assert isinstance(image, ImageColumn)
    held_out = open_images(locations.test, side, image, model)
    return rows, match_classes(rows, held_out) if model is None else held_out


def open_sample() -> tuple[TableSource, TableSource]:
    """Open the training and held-out rows of the bundled digits, which are in one file (see SAMPLE.md)."""
    both = open_images(str(SAMPLE))
    split = int(open_file(str(SAMPLE)).schema_arrow.metadata[TRAIN_GROUPS])
    return replace(both, groups=both.groups[:split]), replace(both, groups=both.groups[split:])


def find_images(path: str) -> pa.Field:
    """Return a file's column of images; raises `DataError` if the file has no such column."""
    schema = open_table_file(path).schema
    if IMAGE not in schema.names:
        raise DataError(
            f"{path}: no column 'image' {describe_columns(schema, IMAGE)}; set {PREFIX}TASK to a "
            "task that declares these columns (`sunspot init table` writes one, docs/data.md), or rename the column "
            "that holds pictures"
        )
    return find_column(schema, IMAGE, path)


def _declare_images(path: str, side: int) -> ImageColumn:
    """Return the column for a file's images, which depends on the column's type or else on the first image."""
    file = open_table_file(path)
    if isinstance(file, PictureFolder):
        return ImageColumn.of_dims(file.find_dims(side), path, scales=True)
    stored = find_images(path).type
    if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
        return ImageColumn.of_dims(tuple(stored.shape), path, scales=SCALED in (file.schema.metadata or {}))
    inner, depth = innermost(stored)
    if not is_encoded(stored) and (depth not in (2, 3) or not pa.types.is_integer(inner)):
        raise DataError(
            f"{path}: image is {stored}; it must be {IMAGE_FORMS} (file names are not followed: put "
            "the pictures of each class into a folder of its own)"
        )
    filled = next((number for number, rows in enumerate(file.groups) if rows), None)
    if filled is None:
        raise DataError(f"{path}: has no rows; add rows, or remove it")
    first = encoded(file.read([IMAGE], filled)[IMAGE])
    if not len(first):
        raise DataError(f"{path}: damaged: its footer counts rows that are missing")
    found = _declare_image(first[0], file.name_row(0))
    if side and is_bytes(first.type):
        return ImageColumn.of_dims((side, side, *found.dims[2:]), path, scales=True)
    return found


def _declare_image(value: pa.Scalar, place: str) -> ImageColumn:
    if not value.is_valid:
        raise DataError(f"{place}: image {IS_NULL}")
    if is_bytes(value.type):
        try:
            image = open_image(io.BytesIO(value.as_py()))
        except DataError as error:
            raise DataError(f"{place}: image {error}") from error
        colour = () if image.mode in GREY_MODES else (3,)
        return ImageColumn.of_dims((*upright_size(image), *colour), place)
    dims: tuple[int, ...] = ()
    nested = value.as_py()
    while isinstance(nested, list):
        dims = (*dims, len(nested))
        nested = nested[0] if nested else None
    return ImageColumn.of_dims(dims, place)
