"""A column of images with its three forms.

An image is one of
  - PNG or JPEG bytes, also as `datasets` stores them; a file of its own in a folder of pictures;
  - Arrow's fixed_shape_tensor of uint8: [H, W], [H, W, C] or [C, H, W];
  - lists of lists of integers 0 to 255 in the same shapes.

C is 1 or 3; a shape that could be either is read as [H, W, C]. For bytes, the first row decides: grey (PNG's 1, 8 and
16 bits, with or without alpha) gives one channel, everything else, palettes too, gives three. Transparency is dropped,
16 bits are cut to the upper 8, and grey images among coloured ones become RGB.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sunspot.data.columns import Column, Place, is_permuted
from sunspot.data.images import decode_picture
from sunspot.errors import DataError

SCALED = b"scaled"
"""Key in a file's metadata: its images were scaled to one size, from their middle."""

FORMS = "PNG or JPEG bytes, fixed_shape_tensor of uint8, or lists of lists of integers"


@dataclass(frozen=True)
class ImageColumn(Column):
    """A column of images in any of the three forms, all of one size; read as uint8 [n, C, H, W], C-contiguous."""

    dims: tuple[int, ...] = ()
    "Dimensions of an image in tensors and lists: [H, W], [H, W, C] or [C, H, W]."
    scales: bool = False
    "Whether pictures of another size or colour are scaled to `shape`, from their middle, instead of being refused."

    @classmethod
    def of_dims(cls, dims: tuple[int, ...], place: str, scales: bool = False) -> "ImageColumn":
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
            raise DataError(f"{place} is {stored}, {self._describe_first()}, as {FORMS}")

    def _describe_first(self) -> str:
        return f"and the first of the dataset has the shape {list(self.dims)}; all images must have one size"

    def read(self, values: pa.ChunkedArray, place: Place) -> dict[str, np.ndarray]:
        if is_encoded(values.type):
            decode = partial(decode_picture, shape=self.shape, scales=self.scales)
            return Column("uint8", self.shape, decode=decode).read(encoded(values), place)
        images = Column("uint8", self.dims).read(values, place)[""]
        _, axes = order_dims(self.dims, place.file.path)
        return {"": np.ascontiguousarray(images.transpose(axes) if axes else images).reshape(-1, *self.shape)}


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


def is_encoded(stored: pa.DataType) -> bool:
    """Tell whether a column holds files: their bytes, or as `datasets` has them, a struct of `bytes` and `path`."""
    return is_bytes(stored) or (
        pa.types.is_struct(stored) and stored.get_field_index("bytes") >= 0 and is_bytes(stored.field("bytes").type)
    )


def encoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the bytes of such a column; any other as it is."""
    return pc.struct_field(values, "bytes") if is_encoded(values.type) and not is_bytes(values.type) else values
