"""Declarations of table columns, which check types and convert values to arrays.

An image in an `ImageColumn` has one of three forms:

  - PNG or JPEG bytes, including the form in which `datasets` stores them, or an image file in a folder;
  - Arrow's fixed_shape_tensor of uint8, with shape [H, W], [H, W, C] or [C, H, W];
  - lists of lists of integers from 0 to 255, with the same shapes.

C is 1 or 3. An ambiguous shape is read as [H, W, C]. For encoded images, the first row determines the number of
channels. A grayscale image has one channel, with or without alpha. Any other image has three, even a palette image.
Transparency is dropped, 16-bit values keep their upper 8 bits, and gray images among color images become RGB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sunspot.background import map_parallel
from sunspot.data.images import Resized, Unscaled
from sunspot.data.numeric import describe_inexact, find_inexact, read_numbers
from sunspot.data.table_files import TableFile
from sunspot.errors import DataError, shorten

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""The types that PyTorch and both loaders support."""

SCALED = b"scaled"
"""Metadata key of files with images that were cropped and scaled to one size."""

IS_NULL = "is null; fill it in, or remove the row"
"""The error for a missing value."""

IMAGE_FORMS = "PNG or JPEG bytes, fixed_shape_tensor of uint8, or lists of lists of integers"
"""The three forms of an image, for messages."""


class Lists(NamedTuple):
    """Concatenated lists of numbers. The lists can have any length."""

    values: np.ndarray
    lengths: np.ndarray
    "The length of each list, int64 [n]."


class ColumnOrigin(NamedTuple):
    """The file and the row numbers of a column's values, for error messages."""

    name: str
    file: TableFile
    rows: np.ndarray
    "The row number of each value in the file."

    def error(self, index: int, what: str) -> DataError:
        """Return an error about the value at `index`. `what` follows the column's name in the message."""
        return DataError(f"{self.file.name_row(int(self.rows[index]))}: {self.name} {what}")


@dataclass(frozen=True)
class Column:
    """The declaration of a column of numbers or lists. `decode` can convert other values to numbers or lists."""

    dtype: str = "float32"
    "One of DTYPES. Integer types accept integers and booleans. Float types accept any finite number."
    shape: tuple[int, ...] = ()
    "The shape of each value, such as () for a number, (3,) for a list of three, or (2, 3) for a list of lists."
    longest: int = 0
    "The length to which lists are padded. Their own lengths are in NAME_length, int64 [n]."
    fill: float = 0
    "The number with which lists are padded."
    cut: bool = False
    "True to truncate longer lists, which are rejected by default."
    decode: Callable[[Any], Any] | None = None
    """A picklable function that converts a Python value (bytes, str or dict) to an array or nested lists.

    If it has a true attribute `thread_safe`, it runs in as many threads as the process has cores."""
    of: str = ""
    "The column's name in the files, if it is different there."

    @property
    def is_integer(self) -> bool:
        """True if the column's numbers are integers."""
        return np.dtype(self.dtype).kind in "iu"

    @property
    def is_number(self) -> bool:
        """True if each value is stored as a single number."""
        return not (self.shape or self.longest or self.decode)

    @property
    def is_class(self) -> bool:
        """True if the column can contain class labels."""
        return self.is_integer and not (self.shape or self.longest)

    def find_mistake(self) -> str:
        """Return what is wrong with the declaration, or an empty string."""
        if self.dtype not in DTYPES:
            return f"the dtype {self.dtype!r}, which must be one of {', '.join(DTYPES)}"
        if any(length < 1 for length in self.shape) or self.longest < 0:
            return f"shape {self.shape} and longest {self.longest}; lengths must be positive integers"
        if self.longest and self.shape:
            return f"shape {self.shape} and longest {self.longest}; declare only one of them"
        limits: Any = np.iinfo(self.dtype) if self.is_integer else np.finfo(self.dtype)
        if not float(limits.min) <= self.fill <= float(limits.max) or (self.is_integer and self.fill % 1):
            return f"fill {self.fill}, which {self.dtype} cannot represent"
        return ""

    def describe(self) -> Any:
        """Return the parts of the declaration that go into the fingerprint, as JSON values."""
        named = getattr(self.decode, "__qualname__", type(self.decode).__qualname__) if self.decode else ""
        identity = getattr(self.decode, "fingerprint", named)
        return [self.dtype, self.shape, self.longest, self.fill, self.cut, self.of, identity]

    def takes(self, stored: pa.DataType) -> bool:
        """Return True if a stored type fits the declaration."""
        if self.decode:
            return True
        if isinstance(stored, pa.FixedShapeTensorType):
            inner = stored.value_type
            shape = tuple(stored.shape)
            fits = shape == self.shape and not is_permuted(stored)
        else:
            inner, depth = innermost(stored)
            fits = depth == (1 if self.longest else len(self.shape))
        is_empty = pa.types.is_null(inner) and stored != inner  # the type of empty lists
        is_number = pa.types.is_integer(inner) or pa.types.is_boolean(inner) or is_empty
        return fits and (is_number or (pa.types.is_floating(inner) and not self.is_integer))

    def check_type(self, stored: pa.DataType, place: str) -> None:
        """Raise `DataError` if a stored type does not fit the declaration."""
        if not self.takes(stored):
            raise DataError(
                f"{place} is {stored}, but the task declares {self._describe_type()}; change one of them, or declare "
                "the column with a decode function"
            )

    def read(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> dict[str, np.ndarray]:
        """Return the column's arrays, keyed by name suffix. Raises `DataError` for invalid values.

        The values, [n, *shape], have the suffix ''. The lengths of lists, int64 [n], have the suffix '_length'.
        """
        if not self.longest:
            return {"": self._read_fixed(values, origin)}
        lists = self.read_lists(values, origin)
        too_long = lists.lengths > self.longest
        if too_long.any() and not self.cut:
            index = int(np.argmax(too_long))
            raise origin.error(
                index,
                f"has {lists.lengths[index]} values, but at most {self.longest} are allowed; set cut=True to "
                "truncate lists",
            )
        kept = np.minimum(lists.lengths, self.longest)
        padded = np.full((len(kept), self.longest), self.fill, self.dtype)
        positions = np.arange(len(lists.values)) - np.repeat(np.cumsum(lists.lengths) - lists.lengths, lists.lengths)
        padded[np.arange(self.longest) < kept[:, None]] = lists.values[positions < self.longest]
        return {"": padded, "_length": kept}

    def read_lists(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> Lists:
        """Return the column's lists at full length. Raises `DataError` for invalid values."""
        if self.decode:

            def decode(index: int) -> np.ndarray:
                each = self._decode(values[index], origin, index)
                if each.ndim != 1:
                    raise origin.error(
                        index, f"was decoded to an array of shape {list(each.shape)}; it must have one dimension"
                    )
                return each

            decoded = map_parallel(decode, range(len(values)), self._decoding_threads)
            lengths = np.array([len(each) for each in decoded], np.int64)
            return Lists(np.concatenate([*decoded, np.empty(0, self.dtype)]), lengths)
        array = _without_nulls(values, origin)
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(lengths)
        numbers = self._fit(array.flatten(), origin, lambda index: int(np.searchsorted(ends, index, side="right")))
        return Lists(numbers, lengths)

    def _read_fixed(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> np.ndarray:
        """Return an array [n, *shape]. If the dtype matches, the array is a view of Arrow's memory."""
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
                    raise origin.error(first // per_row, f"contains {found}, not {self._describe_type()}")
                array = array.flatten()
                per_row *= length
        return self._fit(array, origin, lambda index: index // per_row).reshape(len(values), *self.shape)

    def _decode_all(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> np.ndarray:
        found = np.empty((len(values), *self.shape), self.dtype)

        def decode(index: int) -> None:
            decoded = self._decode(values[index], origin, index)
            if decoded.shape != self.shape:
                raise origin.error(
                    index, f"was decoded to an array of shape {list(decoded.shape)} instead of {list(self.shape)}"
                )
            found[index] = decoded

        map_parallel(decode, range(len(values)), self._decoding_threads)
        return found

    @property
    def _decoding_threads(self) -> int:
        """The number of threads that decode values. It is 1 if `decode` is not thread-safe.

        Otherwise, it is the number of cores that this worker or Ray Data task can use.
        """
        if not getattr(self.decode, "thread_safe", False):
            return 1
        from torch import get_num_threads  # torch is slow to import, and most columns do not need it

        return get_num_threads()

    def _decode(self, value: pa.Scalar, origin: ColumnOrigin, index: int) -> np.ndarray:
        """Return the decoded value in the column's dtype."""
        assert self.decode
        if not value.is_valid:
            raise origin.error(index, IS_NULL)
        try:
            decoded = np.asarray(self.decode(value.as_py()))
        except DataError as error:
            raise origin.error(index, str(error)) from error
        except Exception as error:  # a task's function can raise anything
            raise origin.error(index, f"cannot be decoded: {type(error).__name__}: {shorten(error)}") from error
        if decoded.size and decoded.dtype.kind not in ("iub" if self.is_integer else "iubf"):
            raise origin.error(index, f"was decoded to {decoded.dtype}, but the task declares {self.dtype}")
        return self._cast(decoded.reshape(-1), origin, lambda _: index).reshape(decoded.shape)

    def _fit(self, values: pa.Array, origin: ColumnOrigin, row_of: Callable[[int], int]) -> np.ndarray:
        """Return `values` as numbers of the column's dtype. `row_of` maps a number's index to its row's index."""
        if values.null_count:
            raise origin.error(row_of(first_true(pc.is_null(values))), "contains a null")
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
            raise origin.error(row_of(first), f"has the value {numbers[first]}, but {self.dtype} allows only {allowed}")
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
    """A column of images of one size. They are read as C-contiguous uint8 [n, C, H, W].

    The docstring of this module lists the forms in which images can be stored.
    """

    dims: tuple[int, ...] = ()
    "The stored dimensions of an image, [H, W], [H, W, C] or [C, H, W]."
    scales: bool = False
    "True to crop and scale images of a different size or color to `shape`, which are rejected by default."

    @classmethod
    def of_dims(cls, dims: tuple[int, ...], place: str, scales: bool = False) -> "ImageColumn":
        """Return the column for images with the stored dimensions `dims`. Raises `DataError` if they are invalid."""
        return cls("uint8", order_dims(dims, place)[0], dims=dims, scales=scales)

    def describe(self) -> Any:
        return [*self.shape, "scaled"] if self.scales else self.shape

    def check_type(self, stored: pa.DataType, place: str) -> None:
        if isinstance(stored, pa.FixedShapeTensorType) and stored.value_type == pa.uint8():
            if is_permuted(stored):
                raise DataError(f"{place} is {stored}; write it without a permutation, from a C-contiguous array")
            if order_dims(tuple(stored.shape), place)[0] != self.shape or tuple(stored.shape) != self.dims:
                raise DataError(f"{place} has the shape {list(stored.shape)}, {self._describe_first()}")
        elif not is_encoded(stored) and not Column("uint8", self.dims).takes(stored):
            raise DataError(f"{place} is {stored}, {self._describe_first()} and be {IMAGE_FORMS}")

    def _describe_first(self) -> str:
        return f"but the dataset's first image has the shape {list(self.dims)}; all images must have the same size"

    def read(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> dict[str, np.ndarray]:
        if is_encoded(values.type):
            decode = Resized(self.shape) if self.scales else Unscaled(self.shape)
            return Column("uint8", self.shape, decode=decode).read(encoded(values), origin)
        images = Column("uint8", self.dims).read(values, origin)[""]
        _, axes = order_dims(self.dims, origin.file.path)
        return {"": np.ascontiguousarray(images.transpose(axes) if axes else images).reshape(-1, *self.shape)}


def innermost(stored: pa.DataType) -> tuple[pa.DataType, int]:
    """Return the type of the values in nested lists, and the nesting depth."""
    depth = 0
    while hasattr(stored, "value_type"):
        stored = stored.value_type
        depth += 1
    return stored, depth


def is_permuted(stored: pa.FixedShapeTensorType) -> bool:
    """Return True if the dimensions of tensors are permuted in memory.

    Such tensors are rejected, because pyarrow 26 writes a shape that contradicts the permutation, and cannot read the
    file again.
    """
    order = list(range(len(stored.shape)))
    return list(stored.permutation or order) != order


def order_dims(dims: tuple[int, ...], place: str) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Return an image's channels, height and width, and the axes that transpose [n, *dims] to [n, C, H, W]."""
    if len(dims) == 2 and all(dims):
        return (1, dims[0], dims[1]), ()
    if len(dims) == 3 and all(dims) and dims[2] in (1, 3):
        return (dims[2], dims[0], dims[1]), (0, 3, 1, 2)
    if len(dims) == 3 and all(dims) and dims[0] in (1, 3):
        return (dims[0], dims[1], dims[2]), ()
    raise DataError(
        f"{place}: the image has the shape {list(dims)}; it must be [H, W], [H, W, C] or [C, H, W] with C = 1 or 3"
    )


def is_bytes(stored: pa.DataType) -> bool:
    """Return True if an Arrow type contains bytes."""
    return bool(pa.types.is_binary(stored) or pa.types.is_large_binary(stored))


def is_encoded(stored: pa.DataType) -> bool:
    """Return True if a type can contain encoded images: bytes, or the struct with `bytes` that `datasets` writes."""
    return is_bytes(stored) or (
        pa.types.is_struct(stored) and stored.get_field_index("bytes") >= 0 and is_bytes(stored.field("bytes").type)
    )


def encoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the bytes of encoded images. Other columns are returned unchanged."""
    return pc.struct_field(values, "bytes") if is_encoded(values.type) and not is_bytes(values.type) else values


def first_true(mask: np.ndarray | pa.Array | pa.ChunkedArray) -> int:
    """Return the index of the first true value."""
    return int(np.argmax(np.asarray(mask)))


def _without_nulls(values: pa.ChunkedArray, origin: ColumnOrigin) -> pa.Array:
    if values.null_count:
        raise origin.error(first_true(pc.is_null(values)), IS_NULL)
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
