"""Images from files: PNG, JPEG, and NumPy's .npy. Headers are checked before memory of that size is allocated.

Pictures are decoded as by torchvision's ImageFolder (transparency and colour profiles are ignored), with two
differences: they are turned upright according to their EXIF orientation, and 16-bit pixels keep their upper 8 bits. A
picture that would lose more than that is refused.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from sunspot.errors import DataError, SettingsError, shorten
from sunspot.formatting import as_bytes

NPY_MAGIC = b"\x93NUMPY"

FORMATS = ("PNG", "JPEG")
"""Formats that are decoded. Pillow supports forty more, and one of them passes the file to Ghostscript."""

FILE_FORMATS = (*FORMATS, "BMP", "WEBP", "TIFF", "PPM", "GIF")
"""Formats that are decoded if a file's name ends with one of SUFFIXES."""

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".gif", ".mpo"),
)
"""Suffixes of picture files, in lower case."""

USUAL_SIDE = 64
"""Default height and width to which pictures of different sizes are scaled."""

MAX_BYTES = 10**9
"""Largest file that is read. A device may be endless, and a larger file would give the model too much at once."""

GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}
"""Pillow's modes without colour."""

ANIMATED_FORMATS = ("PNG", "WEBP", "GIF")
"""Formats whose further frames are an animation. In a JPEG (MPO), they are previews or depth, which no viewer shows."""

REFUSED_MODES = {
    "F": "holds floating-point numbers; write it with 8 bits, or 16",
    "LAB": "has its colours in LAB; write it in RGB",
}
"""Modes that cannot be converted to grey or RGB without loss, with the message for such a picture."""

ORIENTATION = 0x0112
"""EXIF tag of a picture's orientation (EXIF 2.32, 4.6.4 A)."""

LAST_NOT_ROTATED = 4
"""Last value of ORIENTATION that does not swap height and width."""

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's name for the operation that turns a picture of each orientation upright.

`ImageOps.exif_transpose` also rewrites the EXIF data, and fails if a value in them is invalid
(python-pillow/Pillow#8965).
"""

SUBFILE_TYPE = 254
BITS_PER_SAMPLE = 258
PHOTOMETRIC = 262
EXTRA_SAMPLES = 338
"""TIFF tags (TIFF 6.0, section 8)."""

WHITE_IS_ZERO = 0
"""Value of PHOTOMETRIC in negatives. Pillow only inverts them if they have 8 bits."""

REDUCED_OR_MASK = 0b101
"""Bits of SUBFILE_TYPE for a page that is a mask or a smaller version of another page."""

UNSPECIFIED_CHANNEL = 0
"""Value of EXTRA_SAMPLES for an additional channel that is not transparency, such as infrared."""


def read_images(path: Path, shape: tuple[int, ...], scales: bool = False) -> np.ndarray:
    """Read a file as uint8 [B, *shape]: a single image, or an array [B, C, H, W] of several.

    A picture of another size or colour is refused, unless `scales` is set: then its middle is scaled to `shape`. Raises
    `SettingsError`, which names the file, its content and what was expected.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise SettingsError(
            f"{path}: has more than {as_bytes(MAX_BYTES)}, the most that a file may have; give several files, "
            "or the images as a dataset (--dataset)"
        )
    return decode_images(content, shape, str(path), scales)


def decode_images(content: bytes, shape: tuple[int, ...], place: str, scales: bool = False) -> np.ndarray:
    """Decode the content of a file like `read_images`; `place` is its name in messages."""
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
    except Exception as error:  # NumPy's parsers raise all kinds
        raise SettingsError(f"{place}: cannot be read as a NumPy array: {shorten(error)}") from error
    if dtype != np.uint8 or found[-3:] != shape or len(found) not in (3, 4) or found[0] < 1:
        raise SettingsError(
            f"{place}: an array of {dtype} {list(found)}, but the model takes uint8 {list(shape)} "
            "(channels, height, width), or several of them as [B, C, H, W]"
        )
    values = np.asarray(memoryview(content)[stream.tell() :])
    if len(values) != math.prod(found):
        raise SettingsError(
            f"{place}: an array of {list(found)}, with {len(values)} bytes instead of {math.prod(found)}; it is "
            "damaged; write it again"
        )
    return values.reshape(found, order="F" if in_columns else "C").reshape(-1, *shape)


def is_picture(name: str) -> bool:
    """Return True if a file name has the suffix of a picture."""
    return name.lower().endswith(SUFFIXES)


def decode_picture(content: bytes, shape: tuple[int, ...], scales: bool = False) -> np.ndarray:
    """Return uint8 [C, H, W] of an encoded picture; raises `DataError`, which says what is wrong with it.

    A picture of another size or colour is refused, unless `scales` is set: then its middle is scaled to `shape`.
    """
    image = open_image(io.BytesIO(content), FILE_FORMATS if scales else FORMATS)
    grey = image.mode in GREY_MODES
    height, width = upright_size(image)
    if not scales and ((height, width) != shape[1:] or (shape[0] == 1 and not grey)):
        raise DataError(
            f"is {height} x {width} (height x width), {'grey' if grey else 'in colour'}, but the model takes "
            f"{shape[1]} x {shape[2]}, {'grey' if shape[0] == 1 else 'in colour'}, like the first picture of its "
            "dataset; convert it"
        )
    try:
        return fit_pixels(image, *shape) if scales else to_pixels(image, shape[0])
    except Exception as error:  # Pillow's decoders raise all kinds
        raise DataError(f"is damaged: {shorten(error)}") from error


def open_image(file: BinaryIO, formats: tuple[str, ...] = FORMATS) -> Any:
    """Return a Pillow image of one of `formats`, of which only the header has been read.

    Raises `DataError` for any other file, and for a picture that cannot be read without loss.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=formats)
        obstacle = _find_obstacle(image)
    except Exception as error:  # Pillow's decoders raise all kinds
        reason = shorten(error)
        if isinstance(error, UnidentifiedImageError):  # its message only has the repr of `file`
            reason = _describe_beginning(file)
        raise DataError(f"is not a {', '.join(formats[:-1])} or {formats[-1]}, or is damaged: {reason}") from error
    if obstacle:
        raise DataError(obstacle)
    return image


def upright_size(image: Any) -> tuple[int, int]:
    """Return the height and width at which viewers show a picture, from its header alone."""
    # Pillow itself swaps height and width of a TIFF. In a PNG, it would decode the pixels to find EXIF data after them.
    in_header = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    turned = in_header and _find_orientation(image) > LAST_NOT_ROTATED
    return (image.width, image.height) if turned else (image.height, image.width)


def to_pixels(image: Any, channels: int) -> np.ndarray:
    """Convert a Pillow image to uint8 [C, H, W], as grey (1 channel) or RGB (3 channels)."""
    return _to_array(_convert(image, channels))


def fit_pixels(image: Any, channels: int, height: int, width: int) -> np.ndarray:
    """Scale the central part of a Pillow image to uint8 [C, height, width]."""
    from PIL import Image, ImageOps

    return _to_array(ImageOps.fit(_convert(image, channels), (width, height), Image.Resampling.BICUBIC))


def _convert(image: Any, channels: int) -> Any:
    """Turn a Pillow image upright, and convert it to grey (1 channel) or RGB (3 channels)."""
    from PIL import Image

    image.load()
    turn = TURNS.get(_find_orientation(image))
    if turn:
        image = image.transpose(Image.Transpose[turn])
    if image.mode[0] == "I":  # 16 bits: Pillow's own conversion clips them to 255 instead of scaling
        image = Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))
    return image.convert("L" if channels == 1 else "RGB")


def _to_array(image: Any) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _find_orientation(image: Any) -> int:
    """Return the EXIF orientation of a picture, 1 to 8; 1 (upright) if its EXIF data cannot be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # Pillow's decoders raise all kinds
        return 1


def _find_obstacle(image: Any) -> str:
    """Return why a picture cannot be read as 8-bit grey or RGB without loss, and the fix; empty if it can.

    Pillow's pixel limit is checked as well: a small file may claim any number of pixels, and decoding would allocate
    them.
    """
    from PIL import Image

    most = Image.MAX_IMAGE_PIXELS
    if most and image.width * image.height > most:
        return f"has {image.width} x {image.height} pixels, more than the limit of {most}; scale it down"
    if image.format in ANIMATED_FORMATS and getattr(image, "is_animated", False):
        return f"is an animation; give one image instead of its {image.n_frames} frames"
    if image.mode in REFUSED_MODES:
        return REFUSED_MODES[image.mode]
    return _find_obstacle_of_tiff(image) if image.format == "TIFF" else ""


def _find_obstacle_of_tiff(image: Any) -> str:
    """Return the same as `_find_obstacle` for features that only a TIFF has."""
    pages = range(image.n_frames)
    full_pages = [page for page in pages if not _read_tag(image, page, SUBFILE_TYPE, 0) & REDUCED_OR_MASK]
    if len(pages) > 1 and full_pages != [0]:
        return f"has {len(pages)} pages, but only the first would be read; write each to its own file"
    if UNSPECIFIED_CHANNEL in _read_tag(image, 0, EXTRA_SAMPLES, ()):
        return "has channels besides its colours and transparency; write it without them"
    bits = _read_tag(image, 0, BITS_PER_SAMPLE, (1,))[0]
    if image.mode == "I" or 8 < bits < 16:
        return f"has pixels of {bits} bits that are neither 0 to 255 nor 0 to 65535; write them in one of these ranges"
    if bits == 16 and _read_tag(image, 0, PHOTOMETRIC, None) == WHITE_IS_ZERO:
        return "is a negative of 16 bits (photometric interpretation WhiteIsZero); write it as BlackIsZero"
    return ""


def _read_tag(image: Any, page: int, tag: int, default: Any) -> Any:
    """Read a tag from a page of a TIFF, then return to its first page."""
    image.seek(page)
    found = image.tag_v2.get(tag, default)
    image.seek(0)
    return found


def _describe_beginning(file: BinaryIO) -> str:
    file.seek(0)
    beginning = file.read(16)
    return f"its content begins with {beginning!r}" if beginning else "the file is empty"


@dataclass(frozen=True)
class Resized:
    """Decodes pictures of any size to one `shape`, [C, H, W], C being 1 or 3: `Column("uint8", SHAPE, decode=...)`."""

    shape: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """Text that identifies the resulting pixels."""
        return f"resized to {self.shape}, upright"

    def __call__(self, stored: Any) -> np.ndarray:
        """Decode a file's bytes, or a dictionary with the bytes as `bytes`, to uint8 [C, H, W]; raises `DataError`."""
        return decode_picture(stored["bytes"] if isinstance(stored, dict) else stored, self.shape, scales=True)
