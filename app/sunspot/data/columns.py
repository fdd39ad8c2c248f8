"""The columns `image` and `label` of a Parquet file: checking their types and values, and decoding them to NumPy."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sunspot.data.images import GREY_MODES, decode_bytes, open_image
from sunspot.errors import DataError

FORMS = "PNG or JPEG bytes, fixed_shape_tensor of uint8, or lists of lists of integers"

MAX_LABEL = 2**31 - 1
"""A larger label is a mistake: no model has a score for each class up to it."""


def row_of(path: str, row: int) -> str:
    return f"{path}, row {row}"


def read_labels(column: pa.ChunkedArray, path: str) -> np.ndarray:
    """The labels of a file, int64 [n]; raises `DataError` naming the first bad row."""
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}, row 0: label is {column.type} ({column[0]}); it must be an integer from 0")
    if column.null_count:
        row = _first_true(pc.is_null(column))
        raise DataError(f"{row_of(path, row)}: label is null; it must be an integer from 0")
    labels = column.to_numpy()
    bad = (labels < 0) | (labels > MAX_LABEL)
    if bad.any():
        row = _first_true(bad)
        raise DataError(f"{row_of(path, row)}: label {labels[row]}; it must be an integer from 0 to {MAX_LABEL}")
    return labels.astype(np.int64, copy=False)


def dims_of_type(stored: pa.DataType, path: str) -> tuple[int, ...]:
    """The dimensions of an image if its type gives them, else (); raises `DataError` for a type that holds no images.

    Dimensions are those in the file: [H, W], [H, W, C] or [C, H, W].
    """
    if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
        dims = tuple(stored.shape)
        if list(stored.permutation or range(len(dims))) != list(range(len(dims))):
            # pyarrow 26 writes shapes that contradict the permutation, and cannot read them back itself.
            raise DataError(f"{path}: image is {stored}; write it from a C-contiguous array, without a permutation")
        layout(dims, path)
        return dims
    depth, inner = 0, stored
    while _is_list(inner):
        depth, inner = depth + 1, inner.value_type
    if not _is_bytes(stored) and (depth not in (2, 3) or not pa.types.is_integer(inner)):
        raise DataError(f"{path}: image is {stored}; it must be {FORMS}")
    return ()


def dims_of_value(value: pa.Scalar, place: str) -> tuple[int, ...]:
    """The dimensions of one image of bytes or lists."""
    if not value.is_valid:
        raise DataError(f"{place}: image is null")
    if _is_bytes(value.type):
        image = open_image(value.as_py(), place)
        return (image.height, image.width) if image.mode in GREY_MODES else (image.height, image.width, 3)
    dims: tuple[int, ...] = ()
    nested = value.as_py()
    while isinstance(nested, list):
        dims, nested = (*dims, len(nested)), nested[0] if nested else None
    layout(dims, place)
    return dims


def layout(dims: tuple[int, ...], place: str) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Channels, height and width of an image stored as `dims`, and the transposition of [n, *dims] to that order."""
    if len(dims) == 2 and all(dims):
        return (1, dims[0], dims[1]), ()
    if len(dims) == 3 and all(dims) and dims[2] in (1, 3):
        return (dims[2], dims[0], dims[1]), (0, 3, 1, 2)
    if len(dims) == 3 and all(dims) and dims[0] in (1, 3):
        return (dims[0], dims[1], dims[2]), ()
    raise DataError(f"{place}: image of shape {list(dims)}; it must be [H, W], [H, W, C] or [C, H, W], C being 1 or 3")


def decode(
    column: pa.ChunkedArray, dims: tuple[int, ...], rows: np.ndarray | None, path: str, first: int
) -> np.ndarray:
    """The chosen rows of a row group whose first row is row `first` of its file: uint8 [n, C, H, W], C-contiguous.

    Tensors and lists become one array, without a copy where Arrow allows it; all later work is on the chosen rows only.
    """
    if column.null_count:
        raise DataError(f"{row_of(path, first + _first_true(pc.is_null(column)))}: image is null")
    shape, axes = layout(dims, path)
    if _is_bytes(column.type):
        chosen = range(len(column)) if rows is None else rows.tolist()
        images = np.empty((len(chosen), *shape), np.uint8)
        for image, row in zip(images, chosen, strict=True):
            image[:] = decode_bytes(column[row].as_py(), shape, row_of(path, first + row))
        return images
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    is_tensor = isinstance(array, pa.FixedShapeTensorArray)
    images = _tensors(array, path, first) if is_tensor else _lists(array, dims, path, first)
    if images.shape[1:] != dims:
        raise DataError(f"{path}: has changed since it was opened; start the run again")
    images = images if rows is None else images[rows]
    if images.dtype != np.uint8:
        bad = ((images < 0) | (images > 255)).reshape(len(images), math.prod(dims))
        if bad.any():
            index = _first_true(bad.any(axis=1))
            row, value = index if rows is None else int(rows[index]), images[index].flat[_first_true(bad[index])]
            raise DataError(f"{row_of(path, first + row)}: image has a pixel of {value}; pixels are 0 to 255")
        images = images.astype(np.uint8)
    return np.ascontiguousarray(images.transpose(axes) if axes else images).reshape(len(images), *shape)


def _tensors(array: pa.FixedShapeTensorArray, path: str, first: int) -> np.ndarray:
    """[n, *dims] of a tensor column: a view of Arrow's memory."""
    values = array.storage.flatten()
    _refuse_null_pixels(values, len(values) // max(1, len(array)), path, first)
    return values.to_numpy().reshape(len(array), *array.type.shape)


def _lists(array: pa.Array, dims: tuple[int, ...], path: str, first: int) -> np.ndarray:
    """[n, *dims] of nested lists: a view of Arrow's memory."""
    values, per_image = array, 1
    for length in dims:
        lengths = pc.list_value_length(values).fill_null(-1).to_numpy()
        bad = lengths != length
        if bad.any():
            row, found = _first_true(bad) // per_image, lengths[bad][0]
            raise DataError(
                f"{row_of(path, first + row)}: image has {f'a list of {found}' if found >= 0 else 'a null'} where the "
                f"first of the dataset has a list of {length}; every image must be of shape {list(dims)}"
            )
        values, per_image = values.flatten(), per_image * length
    _refuse_null_pixels(values, per_image, path, first)
    return values.to_numpy().reshape(len(array), *dims)


def _refuse_null_pixels(values: pa.Array, per_image: int, path: str, first: int) -> None:
    if values.null_count:
        raise DataError(f"{row_of(path, first + _first_true(pc.is_null(values)) // per_image)}: image has a null")


def _is_bytes(stored: pa.DataType) -> bool:
    types = pa.types
    return any(test(stored) for test in (types.is_binary, types.is_large_binary, types.is_binary_view))


def _is_list(stored: pa.DataType) -> bool:
    types = pa.types
    return any(test(stored) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _first_true(mask: np.ndarray | pa.Array | pa.ChunkedArray) -> int:
    return int(np.argmax(np.asarray(mask)))
