"""Random, damaged and hostile inputs: each ends in success or in one message; no trace, no hang, and no code is run."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import stat
import string
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sunspot.data.image_table import open_images
from sunspot.data.images import decode_bytes, decode_images
from sunspot.elastic.restore import read_init
from sunspot.errors import SunspotError
from sunspot.report import gather, render
from sunspot.report.html import element
from sunspot.run import Run, open_run
from sunspot.run.overview import list_runs
from sunspot.run.status import RunState
from sunspot.search_space import load_search
from sunspot.settings import PREFIX, Settings
from sunspot.storage.base import Entry
from sunspot.storage.local import LocalStorage
from sunspot.submitter.manifest.profile import manifests
from sunspot.submitter.manifest.render import JobRequest
from sunspot.submitter.manifest.render import render as render_manifest
from sunspot.submitter.printing import print_table, write_file
from sunspot.submitter.runs import find_run, find_storage
from tests.harness.datasets import random_images
from tests.harness.fuzz import COMMANDS, damaged, effort, ends_well, hostile_text
from tests.harness.runs import begin

# ---------------------------------------------------------------------------------------------- settings and profiles

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([10**30, -(10**400), 2**53, "1_000", "\uff11", "0b1"]))

expressions = st.builds(
    lambda function, words, tail: f"{function}({','.join(map(str, words))}{tail}",
    st.sampled_from(["uniform", "loguniform", "randint", "choice", "normal", " choice ", "run"]),
    st.lists(numbers | st.text(max_size=5) | st.just("[" * 500), max_size=4),
    st.sampled_from([")", "", "))", ") ", "\n)"]),
)

searched = st.dictionaries(st.sampled_from(["LEARNING_RATE", "EPOCHS", "SEED", "TASK"]), expressions, max_size=3)


@effort(4)
@given(searched, st.dictionaries(st.text(max_size=5), expressions, max_size=3))
def test_search_spaces(settings: dict[str, str], arguments: dict[str, str]) -> None:
    wanted = {PREFIX + name: text for name, text in settings.items()}
    wanted |= {PREFIX + "TASK_ARGS": json.dumps(arguments), PREFIX + "TRIALS": "3"}
    search = ends_well(lambda: load_search(wanted))
    if search:
        assert len(search.trials) == (3 if search.dimensions else 0)
        assert search == load_search(wanted) or "nan" in str(wanted).lower()


SHIPPED = [path.read_bytes() for path in sorted((manifests() / "profiles").glob("*.yaml"))]


@effort(4)
@given(damaged(SHIPPED) | st.binary(max_size=50))
def test_profiles(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    settings = {"RUN_NAME": "run", "STORAGE_PATH": "s3://bucket/runs"}
    rendered = ends_well(lambda: render_manifest(JobRequest(str(path), settings, "sunspot:1")))
    if rendered:
        assert yaml.safe_load(rendered.to_yaml()) == json.loads(json.dumps(rendered.manifest))


# ----------------------------------------------------------------------------------------------------- data and weights


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
def test_images(content: bytes, channels: int) -> None:
    from PIL import EpsImagePlugin

    shape = (channels, 8, 8)
    with mock.patch.object(EpsImagePlugin, "Ghostscript", side_effect=BaseException("ran Ghostscript")):
        for pixels in (
            ends_well(lambda: decode_images(content, shape, "the body")),
            ends_well(lambda: decode_bytes(content, shape)),
        ):
            assert pixels is None or (pixels.dtype == np.uint8 and pixels.shape[-3:] == shape)


def npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


NPY = [
    npy(random_images(3, 8, 8)),
    npy(random_images(2, 3, 8, 8)),
    npy(np.asfortranarray(random_images(3, 8, 8))),
    npy(np.zeros((3, 8, 8), "f8")),
]


@effort(8)
@given(damaged(NPY))
def test_npy(content: bytes) -> None:
    images = ends_well(lambda: decode_images(content, (3, 8, 8), "the body"))
    assert images is None or (images.dtype == np.uint8 and images.shape[1:] == (3, 8, 8))


def parquet(image: pa.Array, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"image": image, "label": pa.array([0, 1, 2, 1], pa.int64())}), sink, **options)
    return sink.getvalue()


GREY = random_images(4, 5, 5)

PARQUET = [
    parquet(pa.FixedShapeTensorArray.from_numpy_ndarray(GREY), row_group_size=2),
    parquet(pa.FixedShapeTensorArray.from_numpy_ndarray(GREY), compression="zstd", use_dictionary=False),
    parquet(pa.array(GREY.tolist()), compression="none"),
    parquet(pa.array([image_bytes("PNG")] * 4), compression="gzip", data_page_version="2.0"),
]


@effort(8)
@given(damaged(PARQUET))
def test_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    source = ends_well(lambda: open_images(str(path)))
    for group in range(len(source.row_groups) if source else 0):
        rows = ends_well(lambda number=group: source.read(number))
        assert rows is None or rows["image"].dtype == np.uint8


class Harmful:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


PROOF = Path("loaded-by-a-pickle")


def saved(state: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(state, sink, **options)
    return sink.getvalue()


WEIGHTS = [
    saved({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}),
    saved({"weight": torch.zeros(3)}, _use_new_zipfile_serialization=False),
    saved({"weight": Harmful(PROOF)}),
    saved({"weight": Harmful(PROOF)}, _use_new_zipfile_serialization=False),
    *(pickle.dumps({"weight": Harmful(PROOF)}, protocol) for protocol in range(6)),
    pickle.dumps([1.5, "text", {"a": (None, True)}]),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@effort(4)
@given(damaged(WEIGHTS) | st.sampled_from(WEIGHTS) | st.binary(max_size=50))
def test_init_from(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with contextlib.chdir(tmp_path):
        state = ends_well(lambda: read_init(Settings(init_from=str(path)), None))
        assert state is None or isinstance(state, dict)
        assert not PROOF.exists(), "it ran code"


# ---------------------------------------------------------------------------------------------------- paths and names

parts = st.one_of(
    hostile_text.filter(lambda text: "/" not in text),
    st.sampled_from(
        [".", "..", "folder", "file", "link", "broken", "fifo", "device", "~", "~nobody-of-that-name", "s3:"]
    ),
)

paths = st.lists(parts, min_size=1, max_size=3).map("/".join).filter(lambda text: not text.startswith("/"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The working directory, below another one, with one of each kind of thing in it."""
    folder = tmp_path / "a" / "b" / "c"
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_text("a user's")
    (folder / "link").symlink_to("file")
    (folder / "device").symlink_to("/dev/null")
    (folder / "broken").symlink_to("nothing")
    os.mkfifo(folder / "fifo")
    with contextlib.chdir(folder):
        yield folder


@effort(4)
@given(paths)
def test_output(place: Path, name: str) -> None:
    before = {path: path.lstat() for path in place.parent.parent.rglob("*")}
    with mock.patch.dict(os.environ, HOME=str(place)):
        written = ends_well(lambda: write_file(name, b"mark", b"mark"))
    for path, found in before.items():
        now = path.lstat()
        assert (now.st_ino, stat.S_IFMT(now.st_mode), now.st_size) == (
            found.st_ino,
            stat.S_IFMT(found.st_mode),
            found.st_size,
        )
    if written:
        assert written.read_bytes() == b"mark"
        written.unlink()
    assert {path for path in place.parent.parent.rglob("*")} == set(before)


@effort(1)
@given(paths | st.text(string.ascii_lowercase + "/:@%?#[]\\ ", max_size=9).map("s3://".__add__), parts)
def test_storage_and_run_names(place: Path, storage: str, name: str) -> None:
    environment = {"HOME": str(place), "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "x"}
    before = set(place.parent.parent.rglob("*"))
    with (
        mock.patch.dict(os.environ, {**environment, "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}),
        mock.patch("sunspot.storage.bucket.REQUEST_TRIES", 1),
    ):
        ends_well(lambda: list_runs(find_storage(storage)))
        ends_well(lambda: find_run(name, storage))
    assert set(place.parent.parent.rglob("*")) == before, "looking for a run makes nothing"


file_names = st.binary(min_size=1, max_size=20).filter(
    lambda name: not set(name) & {0, ord("/")} and name not in (b".", b"..")
)


@effort(1)
@given(st.lists(file_names | st.sampled_from([b"\x1b[2J", b"a\nb", b"-rf", b"~", b"run\xff"]), max_size=3, unique=True))
def test_hostile_names_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[bytes]) -> None:
    storage = LocalStorage(str(tmp_path / os.urandom(8).hex()))
    for name in names:
        begin(Run(storage, os.fsdecode(name)))
    found = ends_well(lambda: list_runs(storage))
    assert found is not None
    assert {summary.name for summary in found} <= set(map(os.fsdecode, names))
    print_table(["run"], [[summary.name] for summary in found])
    assert not COMMANDS.search(capsys.readouterr().out)
    for name in names:
        run = ends_well(lambda name=name: find_run(os.fsdecode(name), str(storage.root)))
        assert run is None or run.name == os.fsdecode(name)


keys = st.lists(parts | st.sampled_from(["", "run", "run.json", "checkpoints", "submissions"]), max_size=5).map(
    "/".join
)


@effort(4)
@given(
    st.lists(st.builds(Entry, keys, st.integers(0, 2**70), st.floats(allow_nan=False), st.text(max_size=3)), max_size=6)
)
def test_hostile_keys_of_a_bucket(entries: list[Entry]) -> None:
    storage = mock.Mock(list_readable=lambda prefix, leave_out: sorted(entries))
    assert ends_well(lambda: list_runs(storage)) is not None


# --------------------------------------------------------------------------------------------------------------- report


class Tags(HTMLParser):
    """The elements of a page, and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names |= {tag, *(f"{tag}.{name}" for name, _ in attrs)}


markup = st.lists(
    hostile_text
    | st.sampled_from(
        ["<", ">", '"', "'", "&", "</", "<x-canary", " onload=x ", "<!--", "-->", "&lt;", "</style>", "]]>", "\n"]
    ),
    max_size=8,
).map("".join)


@effort(8)
@given(markup)
def test_markup_in_an_element(text: str) -> None:
    page = Tags(element("p", text, class_=text))
    assert page.names == {"p", "p.class"}


@effort(1)
@given(markup, st.sampled_from(list(RunState)))
def test_markup_in_a_page(tmp_path_factory: pytest.TempPathFactory, text: str, state: RunState) -> None:
    run = begin(open_run(str(tmp_path_factory.mktemp("runs")), "run"))
    page = ends_well(lambda: render(gather(run, state, text)))
    assert page is not None
    assert Tags(page.decode()).names <= Tags(render(gather(run, state, "reason")).decode()).names


def test_what_does_not_end_well_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        ends_well(lambda: 1 // 0)
    with pytest.raises(BaseException, match=r"not done after 0\.1 s"):
        ends_well(lambda: [number for number in itertools.count() if number < 0], 0.1)
    with pytest.raises(AssertionError):
        ends_well(lambda: (_ for _ in ()).throw(SunspotError()))
