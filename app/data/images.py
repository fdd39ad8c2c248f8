"""Images from files: PNG, JPEG (or any other format that Pillow reads), and NumPy's .npy."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError, SettingsError, shorten

NPY_MAGIC = b"\x93NUMPY"

GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}
"""Pillow's modes without colour."""


def read_images(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [B, *shape] of a file: one image, or all B of an array [B, C, H, W].

    Raises `SettingsError` naming the file, its content and what was expected.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    return decode_images(content, shape, str(path))


def decode_images(content: bytes, shape: tuple[int, int, int], place: str) -> np.ndarray:
    """Like `read_images`, from bytes; `place` names them in messages."""
    return _from_array(content, shape, place) if content.startswith(NPY_MAGIC) else _from_image(content, shape, place)


def _from_array(content: bytes, shape: tuple[int, int, int], place: str) -> np.ndarray:
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise SettingsError(f"{place}: an array that cannot be read: {shorten(error)}") from error
    if array.dtype != np.uint8 or array.shape[-3:] != shape or array.ndim not in (3, 4) or not len(array):
        raise SettingsError(
            f"{place}: an array of {array.dtype} {list(array.shape)}, but the model takes uint8 {list(shape)} "
            "(channels, height, width), or several of them as [B, C, H, W]"
        )
    return array.reshape(-1, *shape)


def _from_image(content: bytes, shape: tuple[int, int, int], place: str) -> np.ndarray:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content))
        pixels = to_pixels(image, shape[0])
    except Exception as error:  # Pillow's decoders raise all kinds
        raise SettingsError(f"{place}: neither an image nor an .npy array, or damaged: {shorten(error)}") from error
    grey = image.mode in GREY_MODES
    if pixels.shape != shape or (shape[0] == 1 and not grey):
        raise SettingsError(
            f"{place}: an image of {image.height} x {image.width} (height x width), {'grey' if grey else 'in colour'}, "
            f"but the model takes {shape[1]} x {shape[2]}, {'grey' if shape[0] == 1 else 'in colour'}; convert it"
        )
    return pixels[None]


def open_image(content: bytes, place: str) -> Any:
    """A Pillow image whose header has been read."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(content))
    except Exception as error:  # Pillow's decoders raise all kinds
        raise DataError(f"{place}: image bytes are neither PNG nor JPEG, or damaged: {shorten(error)}") from error


def decode_bytes(content: bytes, shape: tuple[int, int, int], place: str) -> np.ndarray:
    """uint8 [C, H, W] of encoded bytes."""
    image = open_image(content, place)
    if (image.height, image.width) != shape[1:]:
        raise DataError(
            f"{place}: image of {image.height} x {image.width} (height x width), the first of the dataset has "
            f"{shape[1]} x {shape[2]}; resize them all to one size"
        )
    if shape[0] == 1 and image.mode not in GREY_MODES:
        raise DataError(f"{place}: image in colour, the first of the dataset is grey; write them all alike")
    try:
        return to_pixels(image, shape[0])
    except Exception as error:
        raise DataError(f"{place}: image bytes are damaged: {shorten(error)}") from error


def to_pixels(image: Any, channels: int) -> np.ndarray:
    """uint8 [C, H, W] of a Pillow image, as grey (1) or RGB (3)."""
    if image.mode[0] == "I":
        # 16 bits: Pillow's own conversion clips them to 255 instead of scaling.
        grey = (np.asarray(image, np.uint32) >> 8).astype(np.uint8)[None]
        return grey if channels == 1 else np.repeat(grey, 3, axis=0)
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
