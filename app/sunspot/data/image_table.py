"""Opens image datasets, which are tables with the columns `image` and `label`.

All images of a dataset have the same shape, which the first table or the folder of images determines.
"""

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
from sunspot.data.images import GRAY_MODES, open_image, upright_size
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
"""Metadata key in the bundled sample, with the number of row groups for training. The remaining groups are held out."""


def open_images(
    location: str, side: int = 0, like: ImageColumn | None = None, model: ModelData | None = None
) -> TableSource:
    """Open an image dataset, on disk or in a bucket, and check everything except the pixels.

    Images in separate files are scaled to one size (`PictureFolder.find_dims`). If `side` is set, encoded images in
    tables are scaled to that size as well. If `like` is a column of scaled images, its size takes precedence. Raises
    `DataError` or `StorageError`.
    """
    files = find_files(absolute(location))
    path = join(files.location, files.names[0])
    with arrow_errors(path):
        scaled = like and like.scales and is_encoded(find_images(path).type)
        image = like if like and scaled else _declare_images(path, side)
    return open_rows(files, {IMAGE: image, LABEL: Column("int64")}, model=model)


def open_image_splits(
    dataset: str, test_dataset: str = "", side: int = 0, model: ModelData | None = None
) -> tuple[TableSource, TableSource | None]:
    """Open the training rows of DATASET and the held-out rows, if any.

    If `model` is given, it will predict classes for these rows, so they need no labels.
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
    """Open the training and held-out rows of the bundled digits. SAMPLE.md describes their file."""
    both = open_images(str(SAMPLE))
    split = int(open_file(str(SAMPLE)).schema_arrow.metadata[TRAIN_GROUPS])
    return replace(both, groups=both.groups[:split]), replace(both, groups=both.groups[split:])


def find_images(path: str) -> pa.Field:
    """Return a file's `image` column. Raises `DataError` if it has none."""
    schema = open_table_file(path).schema
    if IMAGE not in schema.names:
        raise DataError(
            f"{path} has no column 'image' {describe_columns(schema, IMAGE)}; set {PREFIX}TASK to a "
            "task that declares these columns (`sunspot init table` creates one, docs/data.md), or rename the column "
            "that contains images"
        )
    return find_column(schema, IMAGE, path)


def _declare_images(path: str, side: int) -> ImageColumn:
    """Return the declaration of a file's `image` column, based on its type or on the first image."""
    file = open_table_file(path)
    if isinstance(file, PictureFolder):
        return ImageColumn.of_dims(file.find_dims(side), path, scales=True)
    stored = find_images(path).type
    if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
        return ImageColumn.of_dims(tuple(stored.shape), path, scales=SCALED in (file.schema.metadata or {}))
    inner, depth = innermost(stored)
    if not is_encoded(stored) and (depth not in (2, 3) or not pa.types.is_integer(inner)):
        raise DataError(
            f"{path}: image is {stored}; it must be {IMAGE_FORMS} (if the column contains file names, "
            "put the images of each class into a separate folder instead)"
        )
    filled = next((number for number, rows in enumerate(file.groups) if rows), None)
    if filled is None:
        raise DataError(f"{path} has no rows; add rows, or remove the file")
    first = encoded(file.read([IMAGE], filled)[IMAGE])
    if not len(first):
        raise DataError(f"{path} is damaged: its footer declares more rows than the file contains")
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
        color = () if image.mode in GRAY_MODES else (3,)
        return ImageColumn.of_dims((*upright_size(image), *color), place)
    dims: tuple[int, ...] = ()
    nested = value.as_py()
    while isinstance(nested, list):
        dims = (*dims, len(nested))
        nested = nested[0] if nested else None
    return ImageColumn.of_dims(dims, place)
