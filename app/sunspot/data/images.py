"""Decodes image files and NumPy's .npy files. Headers are checked before any memory for pixels is allocated.

Images are decoded as in torchvision's ImageFolder, which ignores transparency and color profiles. In addition,
the EXIF orientation is applied, and 16-bit pixels keep their upper 8 bits. Images that would lose other information are
rejected.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.lib import format as npy

from sunspot.errors import DataError, SettingsError, shorten
from sunspot.formatting import as_bytes

NPY_MAGIC = b"\x93NUMPY"

FORMATS = ("PNG", "JPEG")
"""Formats that are always decoded. Pillow supports forty more, and one of them passes the file to Ghostscript."""

FILE_FORMATS = (*FORMATS, "BMP", "WEBP", "TIFF", "PPM", "GIF")
"""Formats that are decoded in image files, which are recognized by SUFFIXES."""

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".gif", ".mpo"),
)
"""Suffixes of image files, in lower case."""

USUAL_SIDE = 64
"""Default height and width to which images of different sizes are scaled."""

MAX_BYTES = 10**9
"""Largest size of a file in bytes. The limit also stops reads from endless devices."""

GRAY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}
"""Pillow modes without color."""

ANIMATED_FORMATS = ("PNG", "WEBP", "GIF")
"""Formats in which further frames are an animation. In a JPEG (MPO), they are previews or depth maps."""

REFUSED_MODES = {
    "F": "has floating-point pixels; write it with 8 or 16 bits",
    "LAB": "has LAB colors; write it in RGB",
}
"""Errors for modes that cannot be converted to gray or RGB without loss, keyed by mode."""

ORIENTATION = 0x0112
"""The EXIF tag for an image's orientation (EXIF 2.32, 4.6.4 A)."""

LAST_NOT_ROTATED = 4
"""The last value of ORIENTATION that does not swap height and width."""

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The names of Pillow's operations that turn an image upright, keyed by orientation.

`ImageOps.exif_transpose` is not used, because it also rewrites the EXIF data and fails if they are invalid
(python-pillow/Pillow#8965).
"""

DRAFT_SCALE = 2
"""A JPEG may be reduced while it is decoded, but only to a size of at least this many times the final size."""

SCALING = "scaled by torch"
"""Version of the scaling. It is in the fingerprint of scaled images, so a run does not resume with other pixels."""

SUBFILE_TYPE = 254
BITS_PER_SAMPLE = 258
PHOTOMETRIC = 262
EXTRA_SAMPLES = 338
"""TIFF tags (TIFF 6.0, section 8)."""

WHITE_IS_ZERO = 0
"""The value of PHOTOMETRIC in negatives. Pillow only inverts 8-bit negatives."""

REDUCED_OR_MASK = 0b101
"""The bits of SUBFILE_TYPE for a page that is a mask or a smaller version of another page."""

UNSPECIFIED_CHANNEL = 0
"""The value of EXTRA_SAMPLES for an additional channel other than transparency, such as infrared."""


def read_images(path: Path, shape: tuple[int, ...], scales: bool = False) -> np.ndarray:
    """Read an image, or an .npy array of images, as uint8 [B, *shape].

    If `scales` is set, an image of a different size or color is cropped and scaled to `shape`. Otherwise, it is
    rejected. Raises `SettingsError` if the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise SettingsError(
            f"{path} is larger than {as_bytes(MAX_BYTES)}, the limit for a file; split it into several files, or "
            "pass the images as a dataset (--dataset)"
        )
    return decode_images(content, shape, str(path), scales)


def decode_images(content: bytes, shape: tuple[int, ...], place: str, scales: bool = False) -> np.ndarray:
    """Decode a file's content in the same way as `read_images`. `place` is the file's name in messages."""
    if content.startswith(NPY_MAGIC):
        return _from_array(content, shape, place)
    try:
        return decode_picture(content, shape, scales)[None]
    except DataError as error:
        raise SettingsError(f"{place} {error}") from error


def _from_array(content: bytes, shape: tuple[int, ...], place: str) -> np.ndarray:
    stream = io.BytesIO(content)
    try:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(stream)]
        found, in_columns, dtype = read_header(stream)
    except Exception as error:  # NumPy's parsers raise many kinds of errors
        raise SettingsError(f"{place} cannot be read as a NumPy array: {shorten(error)}") from error
    if dtype != np.uint8 or found[-3:] != shape or len(found) not in (3, 4) or found[0] < 1:
        raise SettingsError(
            f"{place} contains an array of {dtype} {list(found)}, but the model needs uint8 {list(shape)} "
            "(channels, height, width), or several images as [B, C, H, W]"
        )
    values = np.asarray(memoryview(content)[stream.tell() :])
    if len(values) != math.prod(found):
        raise SettingsError(
            f"{place} is damaged: its array of shape {list(found)} has {len(values)} bytes instead of "
            f"{math.prod(found)}; write the file again"
        )
    return values.reshape(found, order="F" if in_columns else "C").reshape(-1, *shape)


def is_picture(name: str) -> bool:
    """Return True if a file name has an image suffix."""
    return name.lower().endswith(SUFFIXES)


def decode_picture(content: bytes, shape: tuple[int, ...], scales: bool = False) -> np.ndarray:
    """Decode an image to uint8 [C, H, W]. Raises `DataError` with a message such as "is damaged".

    If `scales` is set, an image of a different size or color is cropped and scaled to `shape`. Otherwise, it is
    rejected.
    """
    image = open_image(io.BytesIO(content), FILE_FORMATS if scales else FORMATS)
    gray = image.mode in GRAY_MODES
    height, width = upright_size(image)
    if not scales and ((height, width) != shape[1:] or (shape[0] == 1 and not gray)):
        raise DataError(
            f"is {height} x {width} (height x width) and {'gray' if gray else 'in color'}, but the model needs "
            f"{'gray' if shape[0] == 1 else 'color'} images of {shape[1]} x {shape[2]}, like the first training image; "
            "convert this image"
        )
    try:
        return fit_pixels(image, *shape) if scales else to_pixels(image, shape[0])
    except Exception as error:  # Pillow's decoders raise many kinds of errors
        raise DataError(f"is damaged: {shorten(error)}") from error


def open_image(file: BinaryIO, formats: tuple[str, ...] = FORMATS) -> Any:
    """Open an image of one of `formats` with Pillow, which reads only the header.

    Raises `DataError` for other formats, and for images that cannot be read without loss.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=formats)
        obstacle = _find_obstacle(image)
    except Exception as error:  # Pillow's decoders raise many kinds of errors
        reason = shorten(error)
        if isinstance(error, UnidentifiedImageError):  # its message only contains the repr of `file`
            reason = _describe_beginning(file)
        raise DataError(f"is not a {', '.join(formats[:-1])} or {formats[-1]}, or is damaged: {reason}") from error
    if obstacle:
        raise DataError(obstacle)
    return image


def upright_size(image: Any) -> tuple[int, int]:
    """Return the height and width at which viewers display an image. Only the header is read."""
    # Pillow swaps the height and width of a TIFF itself. In a PNG, it would decode the pixels to look for EXIF data.
    in_header = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    turned = in_header and _find_orientation(image) > LAST_NOT_ROTATED
    return (image.width, image.height) if turned else (image.height, image.width)


def to_pixels(image: Any, channels: int) -> np.ndarray:
    """Return a Pillow image as uint8 [C, H, W], in gray (1 channel) or RGB (3 channels)."""
    pixels = np.asarray(_convert(image, channels))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def fit_pixels(image: Any, channels: int, height: int, width: int) -> np.ndarray:
    """Crop and scale a Pillow image, and return it as uint8 [C, height, width].

    The image is cropped at its center to the target's proportions, and scaled with a bicubic filter.
    """
    import torch
    from torch.nn.functional import interpolate

    # JPEG decoders can halve an image at almost no cost. Both sides get the same limit, as the image may be rotated.
    image.draft(None, (DRAFT_SCALE * max(height, width),) * 2)
    pixels = to_pixels(image, channels)
    found_height, found_width = pixels.shape[1:]
    scale = min(found_height / height, found_width / width)
    top = int((found_height - scale * height) / 2)
    left = int((found_width - scale * width) / 2)
    cropped = pixels[None, :, top : found_height - top, left : found_width - left]
    if cropped.shape[2:] == (height, width):
        return cropped[0]
    # PyTorch's filter is several times as fast as Pillow's, and its results hardly differ. Order "K" keeps the channels
    # of a pixel together, which is faster as well.
    scaled = interpolate(torch.from_numpy(cropped.copy(order="K")), (height, width), mode="bicubic", antialias=True)
    return scaled[0].numpy()


def _convert(image: Any, channels: int) -> Any:
    """Turn a Pillow image upright by its EXIF orientation, and convert it to gray (1 channel) or RGB (3 channels)."""
    from PIL import Image

    image.load()
    turn = TURNS.get(_find_orientation(image))
    if turn:
        image = image.transpose(Image.Transpose[turn])
    if image.mode[0] == "I":  # Pillow's own conversion clips 16-bit pixels to 255 instead of scaling them
        image = Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))
    return image.convert("L" if channels == 1 else "RGB")


def _find_orientation(image: Any) -> int:
    """Return an image's EXIF orientation, 1 to 8, or 1 (upright) if its EXIF data cannot be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # Pillow's decoders raise many kinds of errors
        return 1


def _find_obstacle(image: Any) -> str:
    """Explain why an image cannot be read as 8-bit gray or RGB without loss. Returns an empty string if it can.

    Pillow's pixel limit is checked too. A small file can claim any number of pixels, and decoding would allocate memory
    for all of them.
    """
    from PIL import Image

    most = Image.MAX_IMAGE_PIXELS
    if most and image.width * image.height > most:
        return f"has {image.width} x {image.height} pixels, more than the limit of {most}; scale it down"
    if image.format in ANIMATED_FORMATS and getattr(image, "is_animated", False):
        return f"is an animation of {image.n_frames} frames; use a single image instead"
    if image.mode in REFUSED_MODES:
        return REFUSED_MODES[image.mode]
    return _find_obstacle_of_tiff(image) if image.format == "TIFF" else ""


def _find_obstacle_of_tiff(image: Any) -> str:
    """Explain why a TIFF cannot be read without loss. Only features that other formats lack are checked."""
    pages = range(image.n_frames)
    full_pages = [page for page in pages if not _read_tag(image, page, SUBFILE_TYPE, 0) & REDUCED_OR_MASK]
    if len(pages) > 1 and full_pages != [0]:
        return f"has {len(pages)} pages, but only the first would be read; write each page to a separate file"
    if UNSPECIFIED_CHANNEL in _read_tag(image, 0, EXTRA_SAMPLES, ()):
        return "has channels besides color and transparency; write it without these channels"
    bits = _read_tag(image, 0, BITS_PER_SAMPLE, (1,))[0]
    if image.mode == "I" or 8 < bits < 16:
        return f"has {bits}-bit pixels outside the ranges 0 to 255 and 0 to 65535; convert them to one of these ranges"
    if bits == 16 and _read_tag(image, 0, PHOTOMETRIC, None) == WHITE_IS_ZERO:
        return "is a 16-bit negative (photometric interpretation WhiteIsZero); write it as BlackIsZero"
    return ""


def _read_tag(image: Any, page: int, tag: int, default: Any) -> Any:
    """Return a tag's value from a page of a TIFF, and seek back to the first page."""
    image.seek(page)
    found = image.tag_v2.get(tag, default)
    image.seek(0)
    return found


def _describe_beginning(file: BinaryIO) -> str:
    file.seek(0)
    beginning = file.read(16)
    return f"the file begins with {beginning!r}" if beginning else "the file is empty"


@dataclass(frozen=True)
class Unscaled:
    """A `Column.decode` that decodes images of one `shape`, [C, H, W], and rejects all other images."""

    shape: tuple[int, ...]
    thread_safe: ClassVar[bool] = True
    scales: ClassVar[bool] = False

    def __call__(self, stored: Any) -> np.ndarray:
        """Decode a file's bytes, or a dict that contains them as `bytes`, to uint8 [C, H, W].

        Raises `DataError` if the image is rejected or damaged.
        """
        return decode_picture(stored["bytes"] if isinstance(stored, dict) else stored, self.shape, self.scales)


@dataclass(frozen=True)
class Resized(Unscaled):
    """A `Column.decode` that decodes images of any size to one `shape`, [C, H, W]. C is 1 or 3."""

    scales: ClassVar[bool] = True

    @property
    def fingerprint(self) -> str:
        """A string that identifies how images are decoded."""
        return f"resized to {self.shape}, upright, {SCALING}"
