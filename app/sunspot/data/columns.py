"""Columns of a table as a task declares them: checking their types, and turning their values into arrays.

A column of images (`ImageColumn`) takes three forms. An image is one of

  - PNG or JPEG bytes, also as `datasets` stores them, or a file of its own in a folder of pictures;
  - Arrow's fixed_shape_tensor of uint8: [H, W], [H, W, C] or [C, H, W];
  - lists of lists of integers 0 to 255 in the same shapes.

C is 1 or 3; a shape that could be either is read as [H, W, C]. For encoded images, the first row decides: greyscale PNG
(1, 8 or 16 bits, with or without alpha) gives one channel, and everything else, palettes included, gives three.
Transparency is dropped, 16-bit values keep their upper 8 bits, and grey images among colour images become RGB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sunspot.data.images import decode_picture
from sunspot.data.numeric import describe_inexact, find_inexact, read_numbers
from sunspot.data.table_files import TableFile
from sunspot.errors import DataError, shorten

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Types that both loaders and PyTorch support."""

SCALED = b"scaled"
"""Metadata key of a file whose images were cropped from their middle and scaled to one size."""

IS_NULL = "is null; fill it in, or remove the row"
"""Message about a missing value."""

IMAGE_FORMS = "PNG or JPEG bytes, fixed_shape_tensor of uint8, or lists of lists of integers"
"""The three forms of an image, for messages."""


class Lists(NamedTuple):
    """Lists of numbers of any length, laid end to end."""

    values: np.ndarray
    lengths: np.ndarray
    "Length of each list, int64 [n]."


class ColumnOrigin(NamedTuple):
    """File and row numbers that a column's values come from, for messages."""

    name: str
    file: TableFile
    rows: np.ndarray
    "Row number in the file for each value."

    def error(self, index: int, what: str) -> DataError:
        """Return an error that names a row, by its index in the column, and says what is wrong with it."""
        return DataError(f"{self.file.name_row(int(self.rows[index]))}: {self.name} {what}")


@dataclass(frozen=True)
class Column:
    """Declaration of a column: how its values become a tensor of numbers, of lists, or of what `decode` returns."""

    dtype: str = "float32"
    "One of DTYPES. Integer types take integers and booleans; floats take any number except NaN and infinity."
    shape: tuple[int, ...] = ()
    "Shape of each value: () for a number, (3,) for lists of three, (2, 3) for lists of lists."
    longest: int = 0
    "Maximum length of lists. They are padded to it, and NAME_length has their lengths, int64 [n]."
    fill: float = 0
    "Number that pads lists."
    cut: bool = False
    "True to truncate longer lists instead of refusing them."
    decode: Callable[[Any], Any] | None = None
    "Function that turns a Python value (bytes, str, dict) into an array or nested lists. It must be picklable."
    of: str = ""
    "Name of the column in the files, if it differs there."

    @property
    def is_integer(self) -> bool:
        """True if the column's numbers are integers."""
        return np.dtype(self.dtype).kind in "iu"

    @property
    def is_number(self) -> bool:
        """True if each value is a single number that the files store as such."""
        return not (self.shape or self.longest or self.decode)

    @property
    def is_class(self) -> bool:
        """True if the values may be classes."""
        return self.is_integer and not (self.shape or self.longest)

    def find_mistake(self) -> str:
        """Return why the declaration is invalid; empty if it is valid."""
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r}; it must be one of {', '.join(DTYPES)}"
        if any(length < 1 for length in self.shape) or self.longest < 0:
            return f"shape {self.shape}, longest {self.longest}; lengths must be integers from 1"
        if self.longest and self.shape:
            return f"shape {self.shape} and longest {self.longest}; declare only one of them"
        limits: Any = np.iinfo(self.dtype) if self.is_integer else np.finfo(self.dtype)
        if not float(limits.min) <= self.fill <= float(limits.max) or (self.is_integer and self.fill % 1):
            return f"fill {self.fill}, which {self.dtype} cannot hold"
        return ""

    def describe(self) -> Any:
        """Return the parts of the declaration that belong to the fingerprint, as JSON values."""
        named = getattr(self.decode, "__qualname__", type(self.decode).__qualname__) if self.decode else ""
        identity = getattr(self.decode, "fingerprint", named)
        return [self.dtype, self.shape, self.longest, self.fill, self.cut, self.of, identity]

    def takes(self, stored: pa.DataType) -> bool:
        """Return True if a type in the files fits the declaration."""
        if self.decode:
            return True
        if isinstance(stored, pa.FixedShapeTensorType):
            inner = stored.value_type
            shape = tuple(stored.shape)
            fits = shape == self.shape and not is_permuted(stored)
        else:
            inner, depth = innermost(stored)
            fits = depth == (1 if self.longest else len(self.shape))
        is_empty = pa.types.is_null(inner) and stored != inner  # the type of lists without values
        is_number = pa.types.is_integer(inner) or pa.types.is_boolean(inner) or is_empty
        return fits and (is_number or (pa.types.is_floating(inner) and not self.is_integer))

    def check_type(self, stored: pa.DataType, place: str) -> None:
        """Raise `DataError` if a type in the files does not fit the declaration."""
        if not self.takes(stored):
            raise DataError(
                f"{place} is {stored}, but the task declares {self._describe_type()}; change either of them, or give "
                "the column a function that decodes it"
            )

    def read(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> dict[str, np.ndarray]:
        """Return the arrays of a column by name suffix; raises `DataError`.

        The suffix '' has the values, [n, *shape]. For lists, '_length' has their lengths, int64 [n].
        """
        if not self.longest:
            return {"": self._read_fixed(values, origin)}
        lists = self.read_lists(values, origin)
        too_long = lists.lengths > self.longest
        if too_long.any() and not self.cut:
            index = int(np.argmax(too_long))
            raise origin.error(
                index,
                f"has {lists.lengths[index]} values, but at most {self.longest} are declared; cut=True truncates lists",
            )
        kept = np.minimum(lists.lengths, self.longest)
        padded = np.full((len(kept), self.longest), self.fill, self.dtype)
        positions = np.arange(len(lists.values)) - np.repeat(np.cumsum(lists.lengths) - lists.lengths, lists.lengths)
        padded[np.arange(self.longest) < kept[:, None]] = lists.values[positions < self.longest]
        return {"": padded, "_length": kept}

    def read_lists(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> Lists:
        """Return the lists of a column at their full length; raises `DataError`."""
        if self.decode:
            decoded = [self._decode(value, origin, index) for index, value in enumerate(values)]
            for index, each in enumerate(decoded):
                if each.ndim != 1:
                    raise origin.error(index, f"is decoded to an array of shape {list(each.shape)}; it must be a list")
            lengths = np.array([len(each) for each in decoded], np.int64)
            return Lists(np.concatenate([*decoded, np.empty(0, self.dtype)]), lengths)
        array = _without_nulls(values, origin)
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(lengths)
        numbers = self._fit(array.flatten(), origin, lambda index: int(np.searchsorted(ends, index, side="right")))
        return Lists(numbers, lengths)

    def _read_fixed(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> np.ndarray:
        """Return [n, *shape]. Tensors and lists that have the declared dtype give a view of Arrow's memory."""
        if self.decode:
            return self._decode_all(values, origin)
        if not origin.file.has_types:
            values = read_numbers(values, self.dtype, origin.error)
        self.check_type(values.type, f"{origin.file.path}: {origin.name}")
        array = _without_nulls(values, origin)
        per_row = 1
        if isinstance(array, pa.FixedShapeTensorArray):
            array = array.storage.flatten()
            per_row = math.prod(self.shape)
        else:
            for length in self.shape:
                lengths = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
                wrong = lengths != length
                if wrong.any():
                    first = int(np.argmax(wrong))
                    found = f"a list of {lengths[first]}" if lengths[first] >= 0 else "a null"
                    raise origin.error(first // per_row, f"has {found}; it must be {self._describe_type()}")
                array = array.flatten()
                per_row *= length
        return self._fit(array, origin, lambda index: index // per_row).reshape(len(values), *self.shape)

    def _decode_all(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> np.ndarray:
        found = np.empty((len(values), *self.shape), self.dtype)
        for index, value in enumerate(values):
            decoded = self._decode(value, origin, index)
            if decoded.shape != self.shape:
                raise origin.error(
                    index, f"is decoded to an array of shape {list(decoded.shape)}; it must be {list(self.shape)}"
                )
            found[index] = decoded
        return found

    def _decode(self, value: pa.Scalar, origin: ColumnOrigin, index: int) -> np.ndarray:
        """Return a value as `decode` returns it, in the column's dtype."""
        assert self.decode
        if not value.is_valid:
            raise origin.error(index, IS_NULL)
        try:
            decoded = np.asarray(self.decode(value.as_py()))
        except DataError as error:
            raise origin.error(index, str(error)) from error
        except Exception as error:  # a task's own function may raise anything
            raise origin.error(index, f"cannot be decoded: {type(error).__name__}: {shorten(error)}") from error
        if decoded.size and decoded.dtype.kind not in ("iub" if self.is_integer else "iubf"):
            raise origin.error(index, f"is decoded to {decoded.dtype}; the task declares {self.dtype}")
        return self._cast(decoded.reshape(-1), origin, lambda _: index).reshape(decoded.shape)

    def _fit(self, values: pa.Array, origin: ColumnOrigin, row_of: Callable[[int], int]) -> np.ndarray:
        """Return numbers in the column's dtype; `row_of` maps the index of a number to the index of its row."""
        if values.null_count:
            raise origin.error(row_of(first_true(pc.is_null(values))), "has a null")
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8())
        return self._cast(values.to_numpy(zero_copy_only=False), origin, row_of)

    def _cast(self, numbers: np.ndarray, origin: ColumnOrigin, row_of: Callable[[int], int]) -> np.ndarray:
        if self.is_integer:
            if np.can_cast(numbers.dtype, self.dtype):
                return numbers.astype(self.dtype, copy=False)
            limits = np.iinfo(self.dtype)
            fits = (numbers >= limits.min) & (numbers <= limits.max)
            allowed = f"{limits.min} to {limits.max}"
            result = numbers.astype(self.dtype)
        else:
            with np.errstate(over="ignore"):
                result = numbers.astype(self.dtype)
            fits = np.isfinite(result)
            allowed = "finite numbers"
        if not fits.all():
            first = int(np.argmin(fits))
            raise origin.error(row_of(first), f"has {numbers[first]}; {self.dtype} takes {allowed}")
        if not self.is_integer and numbers.dtype.kind in "iu":
            inexact = find_inexact(numbers, self.dtype)
            if inexact is not None:
                raise origin.error(row_of(inexact), describe_inexact(numbers[inexact], self.dtype))
        return result

    def _describe_type(self) -> str:
        if self.longest:
            return f"lists of up to {self.longest} {self.dtype} values"
        if self.shape:
            return f"{self.dtype} of shape {list(self.shape)}"
        return f"numbers of type {self.dtype}"


@dataclass(frozen=True)
class ImageColumn(Column):
    """A column of images of one size, in any of the three forms; read as uint8 [n, C, H, W], C-contiguous."""

    dims: tuple[int, ...] = ()
    "Dimensions of an image in tensors and lists: [H, W], [H, W, C] or [C, H, W]."
    scales: bool = False
    "True to scale the middle of pictures of another size or colour to `shape` instead of refusing them."

    @classmethod
    def of_dims(cls, dims: tuple[int, ...], place: str, scales: bool = False) -> "ImageColumn":
        """Return the column for images stored as `dims`; raises `DataError` for an invalid shape."""
        return cls("uint8", order_dims(dims, place)[0], dims=dims, scales=scales)

    def describe(self) -> Any:
        return [*self.shape, "scaled"] if self.scales else self.shape

    def check_type(self, stored: pa.DataType, place: str) -> None:
        if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
            if is_permuted(stored):
                raise DataError(f"{place} is {stored}; write it from a C-contiguous array, without a permutation")
            if order_dims(tuple(stored.shape), place)[0] != self.shape or tuple(stored.shape) != self.dims:
                raise DataError(f"{place} of shape {list(stored.shape)}, {self._describe_first()}")
        elif not is_encoded(stored) and not Column("uint8", self.dims).takes(stored):
            raise DataError(f"{place} is {stored}, {self._describe_first()}, given as {IMAGE_FORMS}")

    def _describe_first(self) -> str:
        return f"but the first image of the dataset has the shape {list(self.dims)}; all images must have one size"

    def read(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> dict[str, np.ndarray]:
        if is_encoded(values.type):
            decode = partial(decode_picture, shape=self.shape, scales=self.scales)
            return Column("uint8", self.shape, decode=decode).read(encoded(values), origin)
        images = Column("uint8", self.dims).read(values, origin)[""]
        _, axes = order_dims(self.dims, origin.file.path)
        return {"": np.ascontiguousarray(images.transpose(axes) if axes else images).reshape(-1, *self.shape)}


def innermost(stored: pa.DataType) -> tuple[pa.DataType, int]:
    """Return the type of the values in nested lists, and the depth of nesting."""
    depth = 0
    while hasattr(stored, "value_type"):
        stored = stored.value_type
        depth += 1
    return stored, depth


def is_permuted(stored: pa.FixedShapeTensorType) -> bool:
    """Return True if tensors lie in memory in another order than that of their dimensions.

    pyarrow 26 writes shapes that contradict the permutation, and cannot read them back itself.
    """
    order = list(range(len(stored.shape)))
    return list(stored.permutation or order) != order


def order_dims(dims: tuple[int, ...], place: str) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Return channels, height and width of an image stored as `dims`, and how to transpose [n, *dims] to that order."""
    if len(dims) == 2 and all(dims):
        return (1, dims[0], dims[1]), ()
    if len(dims) == 3 and all(dims) and dims[2] in (1, 3):
        return (dims[2], dims[0], dims[1]), (0, 3, 1, 2)
    if len(dims) == 3 and all(dims) and dims[0] in (1, 3):
        return (dims[0], dims[1], dims[2]), ()
    raise DataError(f"{place}: image of shape {list(dims)}; it must be [H, W], [H, W, C] or [C, H, W], C being 1 or 3")


def is_bytes(stored: pa.DataType) -> bool:
    """Return True if an Arrow type holds bytes."""
    return bool(pa.types.is_binary(stored) or pa.types.is_large_binary(stored))


def is_encoded(stored: pa.DataType) -> bool:
    """Return True if a column holds encoded images: bytes, or as in `datasets` a struct of `bytes` and `path`."""
    return is_bytes(stored) or (
        pa.types.is_struct(stored) and stored.get_field_index("bytes") >= 0 and is_bytes(stored.field("bytes").type)
    )


def encoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the bytes of encoded images; other columns are returned unchanged."""
    return pc.struct_field(values, "bytes") if is_encoded(values.type) and not is_bytes(values.type) else values


def first_true(mask: np.ndarray | pa.Array | pa.ChunkedArray) -> int:
    """Return the index of the first true value."""
    return int(np.argmax(np.asarray(mask)))


def _without_nulls(values: pa.ChunkedArray, origin: ColumnOrigin) -> pa.Array:
    if values.null_count:
        raise origin.error(first_true(pc.is_null(values)), IS_NULL)
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
