"""Images from files: PNG, JPEG (or whatever else Pillow reads), and NumPy's .npy."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from app.data.parquet import GREY_MODES, to_pixels
from app.errors import SettingsError, shorten

ARRAY = b"\x93NUMPY"
"""What an .npy file begins with."""


def read_images(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [B, *shape] of a file: one image, or as many as an array [B, C, H, W] in it has.

    Raises `SettingsError` naming the file, what it holds and what was expected.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    return decode_images(content, shape, str(path))


def decode_images(content: bytes, shape: tuple[int, int, int], place: str) -> np.ndarray:
    """`read_images` of a file's content; `place` is what messages call it."""
    return _from_array(content, shape, place) if content.startswith(ARRAY) else _from_image(content, shape, place)


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
    except Exception as error:  # Pillow raises whatever its decoders stumble over
        raise SettingsError(f"{place}: neither an image nor an .npy array, or damaged: {shorten(error)}") from error
    grey = image.mode in GREY_MODES
    if pixels.shape != shape or (shape[0] == 1 and not grey):
        raise SettingsError(
            f"{place}: an image of {image.height} x {image.width} (height x width), {'grey' if grey else 'in colour'}, "
            f"but the model takes {shape[1]} x {shape[2]}, {'grey' if shape[0] == 1 else 'in colour'}; convert it"
        )
    return pixels[None]
