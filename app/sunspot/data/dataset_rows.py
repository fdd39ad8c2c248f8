"""Converts each item of a `torch.utils.data.Dataset` to arrays, keyed by column.

An item is a tuple, a dict or a single value. A value is a tensor, an array, a number or a Pillow image. Numbers are
never changed. A value that is not numeric, or whose shape differs from the shape in row 0, raises an error with the
row's number.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from sunspot.data.columns import DTYPES
from sunspot.data.labels import LABEL
from sunspot.errors import DataError, shorten
from sunspot.formatting import kind_of, some_of

IMAGE, INPUT = "image", "input"
"""Column names for the unnamed input of a row: IMAGE if it is an image, otherwise INPUT."""

PICTURE_MODES = ("L", "RGB")
"""Pillow modes of 8-bit images: grayscale and RGB."""

RowName = Callable[[int], str]
"""A function that returns a row's name for messages, given the row's number."""


class RowColumn(NamedTuple):
    """The dtype and shape of a column, which are the same in all rows."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: np.ndarray) -> "RowColumn":
        """Return the dtype and shape of a value."""
        return cls(value.dtype.name, value.shape)

    @property
    def is_picture(self) -> bool:
        """True if the values are images: uint8 [C, H, W] with one or three channels."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[0] in (1, 3)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_rows(dataset: Any, numbers: list[int], name: RowName) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows with these numbers, as arrays keyed by column.

    Raises `DataError` with the row's name if a row cannot be read or converted.
    """
    for number, item in zip(numbers, fetch(dataset, numbers, name), strict=True):
        yield to_columns(item, name(number))


def fetch(dataset: Any, numbers: list[int], name: RowName) -> list[Any]:
    """Return the items with these numbers. Raises `DataError` if the dataset raises any exception."""
    fetch_together = getattr(dataset, "__getitems__", None)
    if fetch_together:
        with suppress(Exception):  # the failing item is found below
            return list(fetch_together(numbers))
    items = []
    for number in numbers:
        try:
            items.append(dataset[number])
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {shorten(error)}, at {frame.filename}:{frame.lineno}"
            raise DataError(f"{name(number)} cannot be read: {reason}") from error
    return items


def to_columns(item: Any, row: str) -> dict[str, np.ndarray]:
    """Return an item's arrays, keyed by column. Raises `DataError` if the item cannot be converted."""
    named = item._asdict() if hasattr(item, "_asdict") else item
    if isinstance(named, Mapping):
        wrong = [name for name in named if not isinstance(name, str) or name == "row"]
        if wrong or not named:
            fault = f"has a column {wrong[0]!r}" if wrong else "is an empty dict"
            raise DataError(f"{row} {fault}; column names must be strings other than 'row', which is reserved")
        return {name: to_array(value, f"{row}: {name}") for name, value in named.items()}
    if isinstance(named, list) or (isinstance(named, tuple) and len(named) not in (1, 2)):
        raise DataError(
            f"{row} is {kind_of(named)} of {len(named)} values; return a dict of named columns, or a tuple of "
            f"two values: the input (column {IMAGE} or {INPUT}) and the {LABEL}"
        )
    values = named if isinstance(named, tuple) else (named,)
    given = to_array(values[0], f"{row}: the input")
    columns = {IMAGE if RowColumn.of(given).is_picture else INPUT: given}
    if len(values) == 2:
        columns[LABEL] = to_array(values[1], f"{row}: {LABEL}")
    return columns


def to_array(value: Any, place: str) -> np.ndarray:
    """Return a value as an array. Raises `DataError` if it is not numeric. The message begins with `place`."""
    if isinstance(value, Image.Image):
        if value.mode not in PICTURE_MODES:
            raise DataError(f"{place} is an image of mode {value.mode}; convert it to {' or '.join(PICTURE_MODES)}")
        pixels = np.asarray(value)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    shown = "None" if value is None else kind_of(value)
    if isinstance(value, str):
        raise DataError(f"{place} is text, but batches contain only numbers; tokenize it, or number the classes")
    if value is None or isinstance(value, (bytes, Mapping)):
        raise DataError(f"{place} is {shown}, but batches contain only numbers; return a tensor, or omit the column")
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place} is {shown}, which is not numeric: {shorten(error)}; return a tensor") from error
    if array.dtype.name not in (*DTYPES, "bool"):
        raise DataError(f"{place} is {shown} of {array.dtype}; return a tensor of type {', '.join(DTYPES)} or bool")
    return array


def describe_columns(columns: Mapping[str, RowColumn]) -> str:
    """Return the columns' names, dtypes and shapes for a message."""
    return ", ".join(f"{name} {column}" for name, column in columns.items())


def describe_difference(columns: Mapping[str, RowColumn], first: Mapping[str, RowColumn]) -> str:
    """Explain how a row's columns differ from those of row 0, and how to fix this."""
    if columns.keys() != first.keys():
        return (
            f"the columns are {some_of(list(columns))}, but row 0 has {some_of(list(first))}; return the same columns "
            "for all rows"
        )
    name = next(name for name in first if columns[name] != first[name])
    return (
        f"{name} is {columns[name]}, but it is {first[name]} in row 0; crop, pad or convert it in the Dataset, because "
        "all rows must have the same dtype and shape"
    )
