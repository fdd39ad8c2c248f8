"""Columns of any table, as a task declares them: their types checked, and their values turned into arrays."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sunspot.data.columns import row_of
from sunspot.errors import DataError, shorten

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""What both loaders and PyTorch know."""


@dataclass(frozen=True)
class Column:
    """How a column of the files becomes a tensor: numbers, or lists of them, or whatever `decode` makes numbers of."""

    dtype: str = "float32"
    "One of DTYPES. Those of whole numbers take integers and booleans, the others any number but NaN and infinity."
    shape: tuple[int, ...] = ()
    "Of each value: () for a number, (3,) for lists of three, (2, 3) for lists of lists."
    longest: int = 0
    "For lists of any length up to this one: filled up to it, and their lengths, int64 [n], are the column NAME_length."
    fill: float = 0
    "What lists are filled up with."
    cut: bool = False
    "Whether longer lists lose their end, instead of being refused."
    decode: Callable[[Any], Any] | None = None
    "Makes an array, or nested lists, of the value as Python has it: bytes, str, dict. Picklable."
    of: str = ""
    "The column in the files, if it has another name there."

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are whole."""
        return np.dtype(self.dtype).kind in "iu"

    @property
    def is_class(self) -> bool:
        """Whether its values may be classes."""
        return self.is_whole and not (self.shape or self.longest or self.decode)

    def find_mistake(self) -> str:
        """Why this declares nothing that can be read; empty when it is well."""
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r}; it must be one of {', '.join(DTYPES)}"
        if any(length < 1 for length in self.shape) or self.longest < 0:
            return f"shape {self.shape}, longest {self.longest}; lengths are whole numbers from 1"
        if self.longest and self.shape:
            return f"shape {self.shape} and longest {self.longest}; a list has one or the other"
        return ""

    def describe(self) -> list[Any]:
        """What identifies the declaration; of `decode`, its attribute `fingerprint`, or else its name."""
        named = getattr(self.decode, "__qualname__", type(self.decode).__qualname__) if self.decode else ""
        identity = getattr(self.decode, "fingerprint", named)
        return [self.dtype, self.shape, self.longest, self.fill, self.cut, self.of, identity]


class Lists(NamedTuple):
    """Lists of numbers of any length, laid end to end."""

    values: np.ndarray
    lengths: np.ndarray
    "int64 [n]"


class Place(NamedTuple):
    """Where the rows of a column come from, for messages."""

    name: str
    path: str
    rows: np.ndarray
    "The position in the file of each row."

    def refuse(self, index: int, what: str) -> DataError:
        """The error that says what is wrong with the row at an index."""
        return DataError(f"{row_of(self.path, int(self.rows[index]))}: {self.name} {what}")


def check_type(column: Column, name: str, stored: pa.DataType, path: str) -> None:
    """Raise `DataError` if no value of a type can be what the column declares."""
    if column.decode:
        return
    depth, inner = 0, stored
    if isinstance(stored, pa.FixedShapeTensorType):
        depth, inner = len(stored.shape), stored.value_type
    while hasattr(inner, "value_type") and not isinstance(stored, pa.FixedShapeTensorType):
        depth, inner = depth + 1, inner.value_type
    numbers = pa.types.is_integer(inner) or pa.types.is_boolean(inner)
    if not column.is_whole:
        numbers |= pa.types.is_floating(inner)
    if not numbers or depth != (1 if column.longest else len(column.shape)):
        raise DataError(
            f"{path}: {name} is {stored}, but the task declares {_describe_type(column)}; change the one or the other, "
            "or give the column a function that decodes it"
        )


def read_column(column: Column, values: pa.ChunkedArray, place: Place) -> dict[str, np.ndarray]:
    """The arrays of a column by their suffix: '' [n, *shape], and of lists '_length'; raises `DataError`."""
    if not column.longest:
        return {"": _read_fixed(column, values, place)}
    lists = read_lists(column, values, place)
    too_long = lists.lengths > column.longest
    if too_long.any() and not column.cut:
        index = int(np.argmax(too_long))
        raise place.refuse(
            index, f"has {lists.lengths[index]} values; the task takes at most {column.longest}, or with cut=True more"
        )
    kept = np.minimum(lists.lengths, column.longest)
    filled = np.full((len(kept), column.longest), column.fill, column.dtype)
    positions = np.arange(len(lists.values)) - np.repeat(np.cumsum(lists.lengths) - lists.lengths, lists.lengths)
    filled[np.arange(column.longest) < kept[:, None]] = lists.values[positions < column.longest]
    return {"": filled, "_length": kept}


def read_lists(column: Column, values: pa.ChunkedArray, place: Place) -> Lists:
    """The lists of a column, whole; raises `DataError`."""
    if column.decode:
        decoded = [_decode(column, value, place, index) for index, value in enumerate(values)]
        for index, each in enumerate(decoded):
            if each.ndim != 1:
                raise place.refuse(index, f"is decoded to an array of shape {list(each.shape)}; it must be a list")
        lengths = np.array([len(each) for each in decoded], np.int64)
        return Lists(np.concatenate([*decoded, np.empty(0, column.dtype)]), lengths)
    array = _without_nulls(values, place)
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    return Lists(_fit(array.flatten(), column, place, np.repeat(np.arange(len(lengths)), lengths)), lengths)


def _read_fixed(column: Column, values: pa.ChunkedArray, place: Place) -> np.ndarray:
    """[n, *shape]"""
    if column.decode:
        images = np.empty((len(values), *column.shape), column.dtype)
        for index, value in enumerate(values):
            decoded = _decode(column, value, place, index)
            if decoded.shape != column.shape:
                raise place.refuse(
                    index, f"is decoded to an array of shape {list(decoded.shape)}; it must be {list(column.shape)}"
                )
            images[index] = decoded
        return images
    array = _without_nulls(values, place)
    if isinstance(array, pa.FixedShapeTensorArray):
        if tuple(array.type.shape) != column.shape:
            raise place.refuse(0, f"is {array.type}; the task declares {_describe_type(column)}")
        array, per_row = array.storage.flatten(), math.prod(column.shape)
    else:
        per_row = 1
        for length in column.shape:
            lengths = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
            if (bad := lengths != length).any():
                first = int(np.argmax(bad))
                found = f"a list of {lengths[first]}" if lengths[first] >= 0 else "a null"
                raise place.refuse(first // per_row, f"has {found}; the task declares {_describe_type(column)}")
            array, per_row = array.flatten(), per_row * length
    rows = np.repeat(np.arange(len(values)), per_row)
    return _fit(array, column, place, rows).reshape(len(values), *column.shape)


def _without_nulls(values: pa.ChunkedArray, place: Place) -> pa.Array:
    if values.null_count:
        raise place.refuse(int(np.argmax(np.asarray(pc.is_null(values)))), "is null")
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)


def _fit(values: pa.Array, column: Column, place: Place, rows: np.ndarray) -> np.ndarray:
    """Numbers as the column's dtype; `rows` has the index of the row that each belongs to."""
    if values.null_count:
        raise place.refuse(int(rows[np.argmax(np.asarray(pc.is_null(values)))]), "has a null")
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    return _cast(values.to_numpy(zero_copy_only=False), column, place, rows)


def _cast(numbers: np.ndarray, column: Column, place: Place, rows: np.ndarray) -> np.ndarray:
    """The numbers, [m], as the column's dtype; `rows` as in `_fit`."""
    if column.is_whole:
        limits = np.iinfo(column.dtype)
        fits, takes = (numbers >= limits.min) & (numbers <= limits.max), f"{limits.min} to {limits.max}"
        result = numbers.astype(column.dtype)
    else:
        with np.errstate(over="ignore"):
            result = numbers.astype(column.dtype)
        fits, takes = np.isfinite(result), "finite numbers"
    if not fits.all():
        first = int(np.argmin(fits))
        raise place.refuse(int(rows[first]), f"has {numbers[first]}; {column.dtype} takes {takes}")
    return result


def _decode(column: Column, value: pa.Scalar, place: Place, index: int) -> np.ndarray:
    """What `decode` makes of a value, as the column's dtype."""
    assert column.decode
    if not value.is_valid:
        raise place.refuse(index, "is null")
    try:
        decoded = np.asarray(column.decode(value.as_py()))
    except DataError as error:
        raise place.refuse(index, str(error)) from error
    except Exception as error:  # of a task's own function, all kinds
        raise place.refuse(index, f"cannot be decoded: {type(error).__name__}: {shorten(error)}") from error
    if decoded.size and decoded.dtype.kind not in ("iub" if column.is_whole else "iubf"):
        raise place.refuse(index, f"is decoded to {decoded.dtype}; the task declares {column.dtype}")
    one_row = np.full(decoded.size, index)
    return _cast(decoded.reshape(-1), column, place, one_row).reshape(decoded.shape)


def _describe_type(column: Column) -> str:
    if column.longest:
        return f"lists of up to {column.longest} {column.dtype}"
    if column.shape:
        return f"{column.dtype} of shape {list(column.shape)}"
    return f"a number for {column.dtype}"
