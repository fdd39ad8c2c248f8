"""Images from files: PNG, JPEG, and NumPy's .npy. Headers are checked before anything of that size is made."""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from sunspot.errors import DataError, SettingsError, shorten
from sunspot.formatting import as_bytes

NPY_MAGIC = b"\x93NUMPY"

FORMATS = ("PNG", "JPEG")
"""Pillow knows forty more, and one of them hands the file to Ghostscript."""

FILE_FORMATS = (*FORMATS, "BMP", "WEBP", "TIFF", "PPM")
"""What is read of files whose names end with one of SUFFIXES, whatever else Pillow would find in them."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

USUAL_SIDE = 64
"""Height and width that pictures of several sizes are scaled to, unless the user names another."""

MAX_BYTES = 10**9
"""Largest file that is read. A device may have no end, and of more the model would be handed too much at once."""

GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}
"""Pillow's modes without colour."""


def read_images(path: Path, shape: tuple[int, ...], scales: bool = False) -> np.ndarray:
    """Read a file as uint8 [B, *shape]: one image, or all B of an array [B, C, H, W].

    A picture of another size or colour is refused, or with `scales` scaled as those of a folder are. Raises
    `SettingsError` naming the file, its content and what was expected.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise SettingsError(
            f"{path}: it has more than {as_bytes(MAX_BYTES)}, the most taken of a file; give several files, or "
            "the images as a dataset (--dataset)"
        )
    return decode_images(content, shape, str(path), scales)


def decode_images(content: bytes, shape: tuple[int, ...], place: str, scales: bool = False) -> np.ndarray:
    """Do as `read_images` for bytes; `place` names them in messages."""
    if content.startswith(NPY_MAGIC):
        return _from_array(content, shape, place)
    try:
        return decode_picture(content, shape, scales)[None]
    except DataError as error:
        raise SettingsError(f"{place}: {error}") from error


def _from_array(content: bytes, shape: tuple[int, ...], place: str) -> np.ndarray:
    stream = io.BytesIO(content)
    try:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(stream)]
        found, in_columns, dtype = read_header(stream)
    except Exception as error:  # of numpy's parsers, all kinds
        raise SettingsError(f"{place}: an array that cannot be read: {shorten(error)}") from error
    if dtype != np.uint8 or found[-3:] != shape or len(found) not in (3, 4) or found[0] < 1:
        raise SettingsError(
            f"{place}: an array of {dtype} {list(found)}, but the model takes uint8 {list(shape)} "
            "(channels, height, width), or several of them as [B, C, H, W]"
        )
    values = np.asarray(memoryview(content)[stream.tell() :])
    if len(values) != math.prod(found):
        raise SettingsError(
            f"{place}: an array of {list(found)}, with {len(values)} bytes instead of {math.prod(found)}; it is "
            "damaged, write it again"
        )
    return values.reshape(found, order="F" if in_columns else "C").reshape(-1, *shape)


def is_picture(name: str) -> bool:
    """Tell by its name whether a file is a picture."""
    return name.lower().endswith(SUFFIXES)


def decode_picture(content: bytes, shape: tuple[int, ...], scales: bool = False) -> np.ndarray:
    """Return uint8 [C, H, W] of an encoded picture; raises `DataError` that says what is wrong with it.

    One of another size or colour is refused, or with `scales` scaled as those of a folder are.
    """
    image = open_image(content, FILE_FORMATS if scales else FORMATS)
    grey = image.mode in GREY_MODES
    if not scales and ((image.height, image.width) != shape[1:] or (shape[0] == 1 and not grey)):
        raise DataError(
            f"is {image.height} x {image.width} (height x width), {'grey' if grey else 'in colour'}, but the model "
            f"takes {shape[1]} x {shape[2]}, {'grey' if shape[0] == 1 else 'in colour'}, as the first of its dataset; "
            "convert it"
        )
    try:
        return fit_pixels(image, *shape) if scales else to_pixels(image, shape[0])
    except Exception as error:  # Pillow's decoders raise all kinds
        raise DataError(f"is damaged: {shorten(error)}") from error


def open_image(content: bytes, formats: tuple[str, ...] = FORMATS) -> Any:
    """Return a Pillow image whose header has been read; raises `DataError`."""
    try:
        return open_checked(io.BytesIO(content), formats)
    except Exception as error:  # Pillow's decoders raise all kinds
        raise DataError(f"is no {', '.join(formats[:-1])} or {formats[-1]}, or damaged: {shorten(error)}") from error


def open_checked(source: Any, formats: tuple[str, ...] = FORMATS) -> Any:
    """Open a Pillow image of one of `formats`, and read its header; raises all kinds of errors.

    Also for one of more pixels than Pillow warns of: a small file may claim any number, and decoding would make them.
    """
    from PIL import Image

    image = Image.open(source, formats=formats)
    if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"{image.width} x {image.height} pixels, of which {Image.MAX_IMAGE_PIXELS} are the most")
    if image.format == "PNG" and getattr(image, "is_animated", False):
        raise ValueError("an animation; give one image")
    return image


def to_pixels(image: Any, channels: int) -> np.ndarray:
    """Turn a Pillow image into uint8 [C, H, W], as grey (1) or RGB (3)."""
    pixels = np.asarray(_convert(image, channels))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def fit_pixels(image: Any, channels: int, height: int, width: int) -> np.ndarray:
    """Scale the central part of a Pillow image to uint8 [C, height, width]."""
    from PIL import Image, ImageOps

    whole = _convert(image, channels)
    return to_pixels(ImageOps.fit(whole, (width, height), Image.Resampling.BICUBIC), channels)


def _convert(image: Any, channels: int) -> Any:
    """Turn a Pillow image into a grey one (1) or one in RGB (3)."""
    from PIL import Image

    if image.mode[0] == "I":  # 16 bits: Pillow's own conversion clips them to 255 instead of scaling
        image = Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))
    return image.convert("L" if channels == 1 else "RGB")


@dataclass(frozen=True)
class Resized:
    """Decodes pictures of any size to one `shape`, [C, H, W], C being 1 or 3: `Column("uint8", SHAPE, decode=...)`."""

    shape: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """What identifies the pixels that come out."""
        return f"resized to {self.shape}"

    def __call__(self, stored: Any) -> np.ndarray:
        """Decode a file's bytes, or a dictionary that has them as `bytes`, to uint8 [C, H, W]; raises `DataError`."""
        return decode_picture(stored["bytes"] if isinstance(stored, dict) else stored, self.shape, scales=True)
