"""Tests for image files: how they are decoded, and which are rejected before memory is allocated."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from sunspot.data import images
from sunspot.data.images import (
    FILE_FORMATS,
    FORMATS,
    decode_images,
    decode_picture,
    open_image,
    read_images,
    upright_size,
)
from sunspot.errors import DataError, SettingsError, SunspotError
from tests.harness.constants import SetConstants

Decode = Callable[[bytes], np.ndarray]

SHAPE = (3, 8, 8)


def save(form: str, size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: object) -> bytes:
    sink = io.BytesIO()
    Image.new(mode, size).save(sink, form, **options)
    return sink.getvalue()


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """Return a gray PNG with the given size in its header."""

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
def test_png_images_of_every_mode_are_decoded(decode: Decode, mode: str) -> None:
    assert decode(save("PNG", mode=mode)).shape == SHAPE


@both
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_images_of_every_mode_are_decoded(decode: Decode, mode: str) -> None:
    assert decode(save("JPEG", mode=mode)).shape == SHAPE


@both
@pytest.mark.parametrize("form", ["EPS", "GIF", "TIFF", "BMP", "PPM", "ICO", "PCX", "PDF", "WEBP"])
def test_unsupported_image_formats_are_rejected(decode: Decode, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("ran Ghostscript"))
    with pytest.raises(SunspotError, match=r"(?=.*PNG)(?=.*JPEG)"):
        decode(save(form))


@both
def test_animated_images_are_rejected(decode: Decode) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    with pytest.raises(SunspotError, match=r"an animation of \d+ frames; use a single image"):
        decode(save("PNG", save_all=True, append_images=frames))


@both
@pytest.mark.parametrize(
    "content",
    [png(20_000, 8000, bytes(8_000 * 20_001)), png(30_000, 30_000), png(2**31 - 1, 2**31 - 1), png(1, 2**31 - 1)],
    ids=["complete", "short", "huge", "tall"],
)
def test_a_decompression_bomb_allocates_no_memory(decode: Decode, content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SunspotError, match=r"pixels|height x width|damaged"):
            decode(content)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_a_decompression_bomb_in_the_first_row_is_rejected() -> None:
    with pytest.raises(DataError, match="pixels"):
        open_image(io.BytesIO(png(12_000, 12_000)))


@both
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_truncated_images_are_rejected_or_decoded(decode: Decode, form: str) -> None:
    whole = save(form)
    for length in range(len(whole)):
        try:
            assert decode(whole[:length]).shape == SHAPE
        except SunspotError as error:
            assert "damaged" in str(error)  # noqa: PT017


# ---------------------------------------------------------------------------------------------------- lossless decoding

TO_STORED = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_90",
    7: "TRANSVERSE",
    8: "ROTATE_270",
}
"""A mapping from EXIF orientations to the operation that turns an upright image into its stored form."""


def bright_top() -> Image.Image:
    """Return an image of 8 by 12 pixels with a bright upper half."""
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[:4] = 250
    return Image.fromarray(pixels)


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, form, **options)
    return sink.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "TIFF in LZW"])
@pytest.mark.parametrize("orientation", [1, *TO_STORED])
def test_images_are_rotated_by_their_exif_orientation(orientation: int, form: str) -> None:
    turn = TO_STORED.get(orientation)
    stored = bright_top().transpose(Image.Transpose[turn]) if turn else bright_top()
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"TIFF in LZW": {"compression": "tiff_lzw"}, "WEBP": {"lossless": True}, "JPEG": {"quality": 100}}
    content = encode(stored, form.split()[0], exif=exif, **options.get(form, {}))
    assert upright_size(open_image(io.BytesIO(content), FILE_FORMATS)) == (8, 12)
    for scales in (True, False) if form in FORMATS else (True,):
        pixels = decode_picture(content, (3, 8, 12), scales)
        assert pixels[:, :4].min() > 240
        assert pixels[:, 4:].max() < 10


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b""])
def test_unreadable_exif_data_is_ignored(exif: bytes) -> None:
    pixels = decode_picture(encode(bright_top(), "JPEG", exif=exif), (3, 8, 12))
    assert pixels[:, :3].min() > 200


def test_images_are_rotated_despite_other_invalid_exif_data() -> None:
    resolution = struct.pack("<HHII", 0x011A, 10, 1, 38)  # a signed fraction, -1 / 0
    orientation = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    entries = struct.pack("<IH", 8, 2) + orientation + resolution + bytes(4) + struct.pack("<ii", -1, 0)
    content = encode(bright_top().transpose(Image.Transpose.ROTATE_90), "JPEG", exif=b"Exif\0\0II*\0" + entries)
    assert decode_picture(content, (3, 8, 12))[:, :3].min() > 200


def tiff(
    bits: list[int], row: bytes, photometric: int = 1, sample_format: int = 1, extra: tuple[int, ...] = ()
) -> bytes:
    """Return a TIFF of 8 equal rows of 8 pixels."""
    content = row * 8
    shorts = {256: [8], 257: [8], 258: bits, 259: [1], 262: [photometric], 277: [len(bits)], 278: [8]}
    shorts |= {339: [sample_format] * len(bits)} | ({338: list(extra)} if extra else {})
    longs = {273: [8], 279: [len(content)]}
    tags = sorted(
        [(tag, 3, "H", values) for tag, values in shorts.items()] + [(t, 4, "I", v) for t, v in longs.items()]
    )
    begin = 8 + len(content)
    entries = rest = b""
    values_at = begin + 2 + 12 * len(tags) + 4
    for tag, kind, letter, values in tags:
        packed = struct.pack(f"<{len(values)}{letter}", *values)
        if len(packed) > 4:
            rest, packed = rest + packed, struct.pack("<I", values_at + len(rest))
        entries += struct.pack("<HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    header = b"II*\0" + struct.pack("<I", begin)
    return header + content + struct.pack("<H", len(tags)) + entries + bytes(4) + rest


SIXTEEN_BITS = np.arange(8, dtype="<u2") * 8192


def pages(*kinds: int) -> bytes:
    """Return a TIFF with one page per kind: 0 is a full page, 1 is a smaller version, and 4 is a mask."""
    sink = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(sink, True) as writer:
        for kind in kinds:
            Image.new("L", (8, 8)).save(writer, "TIFF", tiffinfo={254: kind})
            writer.newFrame()
    return sink.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tiff([32], np.linspace(0, 1, 8, dtype="<f4").tobytes(), sample_format=3), "floating-point pixels"),
        (tiff([32], np.arange(8, dtype="<i4").tobytes(), sample_format=2), "32-bit pixels outside"),
        (tiff([32], np.arange(8, dtype="<u4").tobytes()), "32-bit pixels outside"),
        (tiff([16], np.arange(8, dtype="<i2").tobytes(), sample_format=2), "16-bit pixels outside"),
        (tiff([12], bytes(12)), "12-bit pixels outside"),
        (tiff([16], SIXTEEN_BITS.tobytes(), photometric=0), "a 16-bit negative"),
        (tiff([8] * 4, bytes(32), photometric=2, extra=(0,)), "has channels besides"),
        (tiff([8] * 5, bytes(40), photometric=2, extra=(2, 0)), "has channels besides"),
        (tiff([8] * 3, bytes(24), photometric=8), "LAB colors"),
        (pages(0, 0, 0), "has 3 pages"),
        (pages(1, 0), "has 2 pages"),
        (b"Pf 8 8 -1.0\n" + bytes(256), "floating-point pixels"),
        (save("GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")]), "an animation"),
        (save("WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")]), "an animation"),
        (b"", "the file is empty"),
        (b"\0\0\0\x1cftypheic\0\0\0\0mif1", "ftypheic"),
    ],
)
def test_images_that_would_lose_information_are_rejected(content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as error:
        decode_picture(content, SHAPE, scales=True)
    assert "object at" not in str(error.value)


@pytest.mark.parametrize("content", [pages(0), pages(1), pages(0, 1, 1), pages(0, 4)])
def test_thumbnails_and_masks_do_not_count_as_tiff_pages(content: bytes) -> None:
    assert decode_picture(content, (1, 8, 8), scales=True).shape == (1, 8, 8)


@pytest.mark.parametrize(
    "content", [tiff([16], SIXTEEN_BITS.tobytes()), encode(Image.fromarray(np.tile(SIXTEEN_BITS, (8, 1))), "PNG")]
)
def test_16_bit_pixels_keep_their_upper_8_bits(content: bytes) -> None:
    assert decode_picture(content, (1, 8, 8), scales=True)[0, 0].tolist() == [0, 32, 64, 96, 128, 160, 192, 224]


def noise(mode: str) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *(("JPEG", mode) for mode in ("L", "RGB", "CMYK")),
        *(("TIFF", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("GIF", mode) for mode in ("L", "P")),
        *(("BMP", mode) for mode in ("1", "L", "P", "RGB")),
        *(("MPO", mode) for mode in ("RGB",)),
    ],
)
def test_pixels_equal_those_read_by_torchvision(form: str, mode: str) -> None:
    """torchvision's ImageFolder opens a file with Pillow and converts it to RGB."""
    options = {"MPO": {"save_all": True, "append_images": [noise("RGB")]}, "GIF": {"transparency": 3}}
    image = noise("RGB").convert(mode) if mode in ("P", "CMYK", "YCbCr") else noise(mode)
    content = encode(image, form, **options.get(form, {}))
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode_picture(content, SHAPE, scales=True), expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [(1000, 750), (500, 375), (60, 101), (64, 48), (32, 24), (48, 64)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_scaled_pixels_are_close_to_those_scaled_by_pillow(size: tuple[int, int], mode: str, turned: bool) -> None:
    coarse = np.random.default_rng(1).integers(0, 256, (6, 8, 3), np.uint8)
    photo = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    content = encode(photo, "JPEG", quality=90, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    expected = np.asarray(ImageOps.fit(upright.convert("RGB"), (48, 64), Image.Resampling.BICUBIC), float)
    differences = np.abs(decode_picture(content, (3, 64, 48), scales=True) - expected.transpose(2, 0, 1))
    assert differences.mean() < 2  # the crop can begin half a pixel of the photo further out
    assert differences.max() < 16


# ----------------------------------------------------------------------------------------------------------------- .npy


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [SHAPE, (2, *SHAPE)])
def test_an_npy_array_is_read(shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
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
def test_malformed_arrays_are_rejected_before_memory_is_allocated(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(
            SettingsError, match=r"the body (contains an array|is damaged|cannot be read as a NumPy array)"
        ):
            decode_images(content, SHAPE, "the body")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(20)
def test_reading_an_endless_device_fails(set_constants: SetConstants) -> None:
    set_constants(images, MAX_BYTES=10**6)
    with pytest.raises(SettingsError, match=r"/dev/zero is larger than 1 MB"):
        read_images(Path("/dev/zero"), SHAPE)
