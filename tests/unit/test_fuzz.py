"""Tests that damaged input never hangs, and is either accepted or rejected with a safe error message."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sunspot.data.image_table import open_images
from sunspot.data.images import decode_images, decode_picture
from sunspot.errors import SunspotError
from sunspot.run import Run
from sunspot.run.overview import list_runs
from sunspot.storage.local import LocalStorage
from sunspot.submitter.manifest.profile import manifests
from sunspot.submitter.manifest.render import JobRequest
from sunspot.submitter.manifest.render import render as render_manifest
from sunspot.submitter.printing import print_table
from sunspot.submitter.runs import find_run
from tests.harness.datasets import random_images
from tests.harness.fuzz import COMMANDS, damaged, effort, ends_well
from tests.harness.runs import begin

SHIPPED = [path.read_bytes() for path in sorted((manifests() / "profiles").glob("*.yaml"))]


@effort(4)
@given(damaged(SHIPPED) | st.binary(max_size=50))
def test_a_damaged_profile_is_rendered_or_rejected_with_a_safe_error_message(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    settings = {"RUN_NAME": "run", "STORAGE_PATH": "s3://bucket/runs"}
    rendered = ends_well(lambda: render_manifest(JobRequest(str(path), settings, "sunspot:1")))
    if rendered:
        assert yaml.safe_load(rendered.to_yaml()) == json.loads(json.dumps(rendered.manifest))


def image_bytes(form: str, mode: str = "RGB", **options: Any) -> bytes:
    sink = io.BytesIO()
    pixels = Image.fromarray(random_images(8, 8, 3)).convert(mode)
    pixels.save(sink, form, **options)
    return sink.getvalue()


IMAGES = [
    *(image_bytes("PNG", mode) for mode in ("RGB", "L", "P", "RGBA", "1", "I;16")),
    *(image_bytes("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
    image_bytes("JPEG", progressive=True),
    image_bytes("PNG", save_all=True, append_images=[Image.new("RGB", (8, 8))]),
    *(image_bytes(form) for form in ("EPS", "GIF", "TIFF", "BMP", "PPM", "WEBP", "ICO", "PDF")),
]


@effort(8)
@given(damaged(IMAGES) | st.binary(max_size=50), st.sampled_from([1, 3]))
def test_a_damaged_image_is_decoded_or_rejected_with_a_safe_error_message(content: bytes, channels: int) -> None:
    from PIL import EpsImagePlugin

    shape = (channels, 8, 8)
    with mock.patch.object(EpsImagePlugin, "Ghostscript", side_effect=BaseException("ran Ghostscript")):
        for pixels in (
            ends_well(lambda: decode_images(content, shape, "the body")),
            ends_well(lambda: decode_picture(content, shape)),
        ):
            assert pixels is None or (pixels.dtype == np.uint8 and pixels.shape[-3:] == shape)


def parquet(image: pa.Array, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"image": image, "label": pa.array([0, 1, 2, 1], pa.int64())}), sink, **options)
    return sink.getvalue()


GRAY = random_images(4, 5, 5)

PARQUET = [
    parquet(pa.FixedShapeTensorArray.from_numpy_ndarray(GRAY), row_group_size=2),
    parquet(pa.FixedShapeTensorArray.from_numpy_ndarray(GRAY), compression="zstd", use_dictionary=False),
    parquet(pa.array(GRAY.tolist()), compression="none"),
    parquet(pa.array([image_bytes("PNG")] * 4), compression="gzip", data_page_version="2.0"),
]


@effort(8)
@given(damaged(PARQUET))
def test_a_damaged_parquet_file_is_read_or_rejected_with_a_safe_error_message(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    source = ends_well(lambda: open_images(str(path)))
    for group in range(len(source.row_groups) if source else 0):
        rows = ends_well(lambda number=group: source.read(number))
        assert rows is None or rows["image"].dtype == np.uint8


file_names = st.binary(min_size=1, max_size=20).filter(
    lambda name: not set(name) & {0, ord("/")} and name not in (b".", b"..")
)


@effort(1)
@given(st.lists(file_names | st.sampled_from([b"\x1b[2J", b"a\nb", b"-rf", b"~", b"run\xff"]), max_size=3, unique=True))
def test_a_run_with_a_hostile_name_is_found_or_rejected_with_a_safe_error_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[bytes]
) -> None:
    storage = LocalStorage(str(tmp_path / os.urandom(8).hex()))
    for name in names:
        begin(Run(storage, os.fsdecode(name)))
    found = ends_well(lambda: list_runs(storage))
    assert found is not None
    assert set(found) <= set(map(os.fsdecode, names))
    print_table(["run"], [[name] for name in found])
    assert not COMMANDS.search(capsys.readouterr().out)
    for name in names:
        run = ends_well(lambda name=name: find_run(os.fsdecode(name), str(storage.root)))
        assert run is None or run.name == os.fsdecode(name)


def test_a_hang_or_an_unexpected_error_fails_a_fuzz_test() -> None:
    with pytest.raises(ZeroDivisionError):
        ends_well(lambda: 1 // 0)
    with pytest.raises(BaseException, match=r"not done after 0\.1 s"):
        ends_well(lambda: [number for number in itertools.count() if number < 0], 0.1)
    with pytest.raises(AssertionError):
        ends_well(lambda: (_ for _ in ()).throw(SunspotError()))
