"""Images from files: what is decoded, and what is refused before memory is taken for it."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sunspot.data import images
from sunspot.data.images import decode_images, decode_picture, open_image, read_images
from sunspot.errors import DataError, SettingsError, SunspotError

Decode = Callable[[bytes], np.ndarray]

SHAPE = (3, 8, 8)


def save(form: str, size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: object) -> bytes:
    sink = io.BytesIO()
    Image.new(mode, size).save(sink, form, **options)
    return sink.getvalue()


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A grey PNG that claims any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")


def npy(header: str, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header.encode() + content


def of_a_request(content: bytes) -> np.ndarray:
    return decode_images(content, SHAPE, "the body")[0]


def of_a_row(content: bytes) -> np.ndarray:
    return decode_picture(content, SHAPE)


pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")

both = pytest.mark.parametrize("decode", [of_a_request, of_a_row])


@both
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "I;16"])
def test_every_mode_of_png(decode: Decode, mode: str) -> None:
    assert decode(save("PNG", mode=mode)).shape == SHAPE


@both
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_mode_of_jpeg(decode: Decode, mode: str) -> None:
    assert decode(save("JPEG", mode=mode)).shape == SHAPE


@both
@pytest.mark.parametrize("form", ["EPS", "GIF", "TIFF", "BMP", "PPM", "ICO", "PCX", "PDF", "WEBP"])
def test_other_formats_are_refused(decode: Decode, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("ran Ghostscript"))
    with pytest.raises(SunspotError, match=r"(?=.*PNG)(?=.*JPEG)"):
        decode(save(form))


@both
def test_an_animation_is_refused(decode: Decode) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    with pytest.raises(SunspotError, match="an animation; give one image"):
        decode(save("PNG", save_all=True, append_images=frames))


@both
@pytest.mark.parametrize(
    "content",
    [png(20_000, 8000, bytes(8_000 * 20_001)), png(30_000, 30_000), png(2**31 - 1, 2**31 - 1), png(1, 2**31 - 1)],
    ids=["whole", "short", "huge", "tall"],
)
def test_a_bomb_of_pixels_takes_no_memory(decode: Decode, content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SunspotError, match=r"pixels|height x width|damaged"):
            decode(content)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_a_bomb_as_the_first_row_is_refused() -> None:
    with pytest.raises(DataError, match="pixels"):
        open_image(png(12_000, 12_000))


@both
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_every_cut_is_refused_or_an_image(decode: Decode, form: str) -> None:
    whole = save(form)
    for length in range(len(whole)):
        try:
            assert decode(whole[:length]).shape == SHAPE
        except SunspotError as error:
            assert "damaged" in str(error)  # noqa: PT017


# ----------------------------------------------------------------------------------------------------------------- .npy


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [SHAPE, (2, *SHAPE)])
def test_an_array_is_read(shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8), order=order)
    np.save(tmp_path / "a.npy", array)
    assert (decode_images((tmp_path / "a.npy").read_bytes(), SHAPE, "a.npy") == array.reshape(-1, *SHAPE)).all()


HEADER = "{'descr': '|u1', 'fortran_order': False, 'shape': (%s,), }\n"


@pytest.mark.parametrize(
    "content",
    [
        npy(HEADER % "1000000000000, 3, 8, 8"),
        npy(HEADER % f"{10**30}, 3, 8, 8"),
        npy(HEADER % "-1, 3, 8, 8"),
        npy(HEADER % "0, 3, 8, 8"),
        npy(HEADER % "3, 8, 8", bytes(191)),
        npy(HEADER % "3, 8, 8", bytes(193)),
        npy(HEADER % "'3', 8, 8", bytes(192)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (3, 8, 8), }\n", b"cos\nsystem\n(S'exit 1'\ntR."),
        npy("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (3, 8, 8), }\n", bytes(192)),
        npy("(" * 9000),
        npy("[" * 9000 + "]" * 9000),
        npy("{'descr': '|u1'}\n"),
        npy("9" * 9000),
        npy("x" * 60_000),
        npy("\x00"),
        npy("{}", version=b"\x03\x00"),
        npy("{}", version=b"\x09\x09"),
        b"\x93NUMPY",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    ],
    ids=lambda content: repr(content[10:60]),
)
def test_a_malformed_array_is_refused_before_it_takes_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SettingsError, match="the body: an array"):
            decode_images(content, SHAPE, "the body")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(20)
def test_a_device_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 10**6)
    with pytest.raises(SettingsError, match=r"/dev/zero: it has more than 1 MB"):
        read_images(Path("/dev/zero"), SHAPE)
