"""Tests for image datasets: all forms of an image column, files and buckets, the bundled digits, and MNIST."""

from __future__ import annotations

import hashlib
import http.server
import importlib
import io
import multiprocessing
import os
import pickle
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from PIL import Image

from scripts import object_stores
from sunspot.data import dataset_files, fingerprint, mnist
from sunspot.data.image_sources import find_sources
from sunspot.data.image_table import SAMPLE, open_image_splits, open_images
from sunspot.data.mnist import open_mnist
from sunspot.data.source import check_labels_match, rows_in
from sunspot.errors import DataError, StorageError
from sunspot.settings import Settings
from sunspot.storage import open_storage
from tests.harness.clouds import BUCKETS, CLOUDS, use_azure, use_google
from tests.harness.datasets import everything, put_mnist, random_images, refusal

MNIST_ROOT = Path(__file__).parents[3] / "shared" / "data"
needs_mnist = pytest.mark.skipif(not (MNIST_ROOT / "MNIST").exists(), reason="needs the MNIST files")


def write(path: Path, image: pa.Array | None, label: object, **options: object) -> Path:
    columns = {"label": label if isinstance(label, pa.Array) else pa.array(label)}
    if image is not None:
        columns["image"] = image
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def encode(pixels: np.ndarray, form: str = "PNG", mode: str | None = None) -> bytes:
    sink = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(sink, form)
    return sink.getvalue()


def tensors(images: np.ndarray) -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(images)


def lists(images: np.ndarray, pixel: pa.DataType | None = None) -> pa.Array:
    kind = pixel or pa.int64()
    for _ in images.shape[1:]:
        kind = pa.list_(kind)
    return pa.array(images.tolist(), kind)


def channels_first(images: np.ndarray) -> np.ndarray:
    """Return images of shape [n, H, W], [n, H, W, C] or [n, C, H, W] as [n, C, H, W]."""
    if images.ndim == 3:
        return images[:, None]
    return images.transpose(0, 3, 1, 2) if images.shape[3] in (1, 3) else images


# --------------------------------------------------------------------------------------------------------- column forms

SHAPES = st.tuples(st.integers(1, 6), st.integers(4, 9), st.integers(4, 9)).flatmap(
    lambda nhw: st.sampled_from([nhw, (*nhw, 1), (*nhw, 3), (nhw[0], 1, *nhw[1:]), (nhw[0], 3, *nhw[1:])])
)
FORMS = {
    "tensor": tensors,
    "int64 lists": lists,
    "uint8 lists": lambda images: lists(images, pa.uint8()),
    "int16 large lists": lambda images: lists(images, pa.int16()).cast(
        pa.large_list(lists(images, pa.int16()).type.value_type)
    ),
}


@pytest.mark.parametrize("form", FORMS)
@given(shape=SHAPES, seed=st.integers(0, 99))
@effort(max_examples=25, deadline=None)
def test_images_of_every_shape_are_read_back(tmp_path_factory, form, shape, seed):
    images = random_images(*shape, seed=seed)
    path = write(tmp_path_factory.mktemp("form") / "a.parquet", FORMS[form](images), range(shape[0]), row_group_size=2)
    source = open_images(str(path))
    expected = channels_first(images)
    assert source.shape == expected.shape[1:]
    assert source.classes == shape[0]
    read = everything(source)
    assert read["image"].dtype == np.uint8
    assert read["image"].flags.c_contiguous
    assert read["label"].dtype == np.int64
    np.testing.assert_array_equal(read["image"], expected)
    np.testing.assert_array_equal(read["label"], np.arange(shape[0]))


@pytest.mark.parametrize("form", [*FORMS, "png"])
def test_chosen_rows_are_returned_in_the_requested_order(tmp_path, form):
    images = random_images(8, 5, 7, 3)
    column = pa.array([encode(image) for image in images]) if form == "png" else FORMS[form](images)
    source = open_images(str(write(tmp_path / "a.parquet", column, range(8), row_group_size=4)))
    read = source.read(1, np.array([3, 0, 2]))
    np.testing.assert_array_equal(read["label"], [7, 4, 6])
    np.testing.assert_array_equal(read["image"], channels_first(images)[[7, 4, 6]])
    assert source.read(0, np.array([], np.int64))["image"].shape == (0, 3, 5, 7)


def test_only_chosen_rows_are_decoded(tmp_path):
    column = pa.array([encode(random_images(4, 4)), b"not an image", encode(random_images(4, 4))])
    source = open_images(str(write(tmp_path / "a.parquet", column, [0, 1, 2])))
    assert source.read(0, np.array([2, 0]))["label"].tolist() == [2, 0]
    with refusal(DataError, "a.parquet", "row 1", "PNG"):
        source.read(0, np.array([1]))


def test_a_permuted_tensor_is_rejected(tmp_path):
    column = tensors(random_images(4, 6, 7, 3).transpose(0, 3, 1, 2))  # a view: only its strides put the channels first
    path = write(tmp_path / "a.parquet", column, range(4))
    with refusal(DataError, "a.parquet", "permutation"):
        open_images(str(path))


def test_tensors_are_read_without_a_copy(tmp_path):
    source = open_images(str(write(tmp_path / "a.parquet", tensors(random_images(64, 28, 28)), [0] * 64)))
    image = source.read(0)["image"]
    assert not image.flags.writeable, "a view of Arrow's memory is read-only"


@pytest.mark.parametrize(
    ("mode", "channels"), [("L", 1), ("LA", 1), ("1", 1), ("RGB", 3), ("RGBA", 3), ("P", 3), ("CMYK", 3)]
)
def test_encoded_images_of_every_mode_are_read(tmp_path, mode, channels):
    pixels = np.zeros((6, 5, 3), np.uint8)
    pixels[:3] = 255
    form = "JPEG" if mode == "CMYK" else "PNG"
    path = write(tmp_path / "a.parquet", pa.array([encode(pixels, form, mode)] * 2), [0, 1])
    source = open_images(str(path))
    assert source.shape == (channels, 6, 5)
    image = everything(source)["image"]
    assert (image[:, :, :2] > 250).all()
    assert (image[:, :, 4:] < 5).all()


def test_16_bit_pixels_are_scaled_rather_than_clipped(tmp_path):
    pixels = np.array([[0, 256, 0x1234, 65535]] * 4, np.uint16)
    source = open_images(str(write(tmp_path / "a.parquet", pa.array([encode(pixels)]), [0])))
    np.testing.assert_array_equal(source.read(0)["image"][0, 0, 0], [0, 1, 0x12, 255])


def test_gray_images_are_converted_to_color_but_color_images_are_never_converted_to_gray(tmp_path):
    gray, color = random_images(4, 4), random_images(4, 4, 3)
    source = open_images(str(write(tmp_path / "a.parquet", pa.array([encode(color), encode(gray)]), [0, 1])))
    np.testing.assert_array_equal(source.read(0)["image"][1], np.stack([gray] * 3))
    source = open_images(str(write(tmp_path / "b.parquet", pa.array([encode(gray), encode(color)]), [0, 1])))
    with refusal(DataError, "b.parquet", "row 1", "color"):
        source.read(0)


# ----------------------------------------------------------------------------------------------------------- many files


def test_row_ids_follow_the_order_of_paths_and_rows(tmp_path):
    for name, label in (("b/1.parquet", 2), ("a.parquet", 0), ("b/0.parquet", 1), ("c.parquet", 3)):
        write(tmp_path / name, tensors(random_images(3, 4, 4)), [label] * 3, row_group_size=2)
    write(tmp_path / "_temporary" / "x.parquet", tensors(random_images(1, 4, 4)), [9])
    write(tmp_path / ".hidden.parquet", tensors(random_images(1, 4, 4)), [9])
    (tmp_path / "_SUCCESS").touch()
    source = open_images(str(tmp_path))
    assert source.row_groups == (2, 1) * 4
    assert everything(source)["label"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert source.where(3, 0) == f"{tmp_path}/b/0.parquet, row 2"


def test_the_fingerprint_depends_on_file_names_and_row_groups_and_the_shape(tmp_path):
    def fingerprint(folder: str, name: str = "a.parquet", rows: int = 4, size: int = 4, group: int = 2) -> str:
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
        images = tensors(random_images(rows, size, 4, seed=rows))
        write(tmp_path / folder / name, images, [0] * rows, row_group_size=group)
        return open_images(str(tmp_path / folder)).fingerprint

    base = fingerprint("x")
    assert fingerprint("elsewhere") == base
    others = {fingerprint("x", name="b.parquet"), fingerprint("x", rows=5), fingerprint("x", size=5)}
    assert len({base, fingerprint("x", group=4)} | others) == 5


ROWS_OF_CONTENT = 200


@pytest.fixture(params=["whole", "sampled"])
def fingerprint_of(request, tmp_path, set_constants):
    """Return a function that fingerprints two files of images, which it reads completely or in samples."""
    if request.param == "sampled":
        set_constants(fingerprint, SAMPLES=8, SAMPLE_BYTES=256)

    def make(images: np.ndarray, labels: np.ndarray) -> str:
        for number, some in enumerate(np.split(np.arange(ROWS_OF_CONTENT), 2)):
            options = {"compression": "none", "use_dictionary": False, "row_group_size": 50}
            write(tmp_path / f"{number}.parquet", tensors(images[some]), labels[some], **options)
        return open_images(str(tmp_path)).fingerprint

    return make


def test_changed_content_of_the_same_size_changes_the_fingerprint(fingerprint_of):
    images, labels = random_images(ROWS_OF_CONTENT, 8, 8), np.arange(ROWS_OF_CONTENT) % 7
    base = fingerprint_of(images, labels)
    assert fingerprint_of(images, labels) == base, "written again at another time"
    swapped = labels.copy()
    swapped[[120, 121]] = swapped[[121, 120]]
    found = [fingerprint_of(images, swapped), fingerprint_of(images[::-1], labels), fingerprint_of(images, labels)]
    assert found[2] == base
    assert len(set(found)) == 3
    assert {name.partition("-")[0] for name in found} == {base.partition("-")[0]}, "earlier versions compared this part"


def test_one_changed_pixel_changes_the_fingerprint_of_a_small_dataset(tmp_path):
    images = random_images(4, 8, 8)
    prints = []
    for pixel in (0, 1):
        images[2, 3, 3] = pixel
        write(tmp_path / "a.parquet", tensors(images), [0, 1, 0, 1], compression="none", use_dictionary=False)
        prints.append(open_images(str(tmp_path)).fingerprint)
    assert prints[0] != prints[1]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_fingerprint_samples_are_limited_in_number_and_stay_within_their_files(sizes):
    ranges = fingerprint.sample_ranges([size * 4096 for size in sizes])
    assert len(ranges) == len(sizes)
    for size, places in zip(sizes, ranges, strict=True):
        assert all(offset >= 0 and length > 0 and offset + length <= size * 4096 for offset, length in places)
    read = sum(length for places in ranges for _, length in places)
    assert read == sum(sizes) * 4096 or sum(map(len, ranges)) == fingerprint.SAMPLES
    assert read <= fingerprint.SAMPLES * fingerprint.SAMPLE_BYTES


def test_a_source_can_be_pickled_and_read_by_many_threads(tmp_path):
    images = random_images(64, 8, 8)
    write(tmp_path / "a.parquet", tensors(images), range(64), row_group_size=4, compression="zstd")
    source = pickle.loads(pickle.dumps(open_images(str(tmp_path))))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda turn: source.read(turn % 16), range(160)))
    for turn, group in enumerate(read):
        np.testing.assert_array_equal(group["image"][:, 0], images[turn % 16 * 4 :][:4])


def test_reading_a_changed_file_fails_until_it_is_opened_again(tmp_path):
    path = write(tmp_path / "a.parquet", tensors(random_images(4, 4, 4)), [0] * 4)
    before = open_images(str(path))
    path.unlink()
    write(path, tensors(random_images(6, 4, 4)), [0] * 6)
    assert rows_in(open_images(str(path))) == 6
    with refusal(DataError, "a.parquet", "changed"):
        before.read(0)


def test_reading_a_changed_file_fails_even_with_the_same_number_of_rows(tmp_path):
    path = write(tmp_path / "a.parquet", pa.array([encode(random_images(4, 4))] * 2), [0, 1])
    before = open_images(str(path))
    path.unlink()
    write(path, pa.array([encode(random_images(4, 4, seed=1)), b"longer than before" * 10]), [0, 1])
    dataset_files.clear_open_files()
    with refusal(DataError, "a.parquet", "changed"):
        before.read(0, np.array([0]))


# ---------------------------------------------------------------------------------------------------- rejected datasets

GOOD = tensors(random_images(3, 4, 4))
FLOATS = pa.array([0.0, 1.0, 2.0])
WITH_NULL = pa.array([0, 1, None])
NEGATIVE = pa.array([0, -1, 2])


@pytest.mark.parametrize(
    ("image", "label", "parts"),
    [
        (None, [0, 1, 2], ("no column 'image'", "label")),
        (GOOD, FLOATS, ("row 0", "double", "integer")),
        (GOOD, WITH_NULL, ("row 2", "null")),
        (GOOD, NEGATIVE, ("row 1", "-1")),
        (GOOD, pa.array([0, 2**63, 1], pa.uint64()), ("row 1", str(2**63))),
        (GOOD.slice(0, 0), pa.array([], pa.int64()), ("no rows",)),
        (pa.array(["a", "b", "c"]), [0, 1, 2], ("image is string", "PNG")),
        (tensors(random_images(3, 4, 4).astype(np.float32)), [0, 1, 2], ("image is", "float", "uint8")),
        (lists(random_images(3, 4)), [0, 1, 2], ("image is list", "lists of lists")),
        (tensors(random_images(3, 5, 5, 2)), [0, 1, 2], ("[5, 5, 2]", "1 or 3")),
        (pa.array([None, None, None], pa.binary()), [0, 1, 2], ("row 0", "null")),
        (pa.array([[[]]] * 3, pa.list_(pa.list_(pa.int64()))), [0, 1, 2], ("row 0", "[1, 0]")),
    ],
)
def test_unusable_datasets_are_rejected_before_training(tmp_path, image, label, parts):
    write(tmp_path / "a.parquet", GOOD, [0, 1, 2])
    write(tmp_path / "bad.parquet", image, label)
    with refusal(DataError, "bad.parquet", *parts):
        open_images(str(tmp_path / "bad.parquet"))
    if "row 0" not in parts or "double" in parts:
        with refusal(DataError, "bad.parquet", *parts):
            open_images(str(tmp_path))


HOLED = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.uint8(), [2, 2]), pa.array([[0, 1, 2, 3], [0, None, 2, 3]], pa.list_(pa.uint8(), 4))
)


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        (pa.array([encode(random_images(4, 4)), encode(random_images(4, 4))[:60]]), ("damaged",)),
        (pa.array([encode(random_images(4, 4)), encode(random_images(4, 5))]), ("4 x 5", "4 x 4")),
        (pa.array([encode(random_images(4, 4)), None]), ("null",)),
        (pa.array([[[0, 1], [2, 3]], [[0, 256], [2, 3]]]), ("256", "0 to 255")),
        (pa.array([[[0, 1], [2, 3]], [[0, -1], [2, 3]]], pa.list_(pa.list_(pa.int8()))), ("-1", "0 to 255")),
        (pa.array([[[0, 1], [2, 3]], [[0, 1], [2]]]), ("list of 1", "[2, 2]")),
        (pa.array([[[0, 1], [2, 3]], [[0, 1]]]), ("list of 1", "[2, 2]")),
        (pa.array([[[0, 1], [2, 3]], [[0, 1], None]]), ("null",)),
        (pa.array([[[0, 1], [2, 3]], [[0, 1], [2, None]]]), ("null",)),
        (pa.array([[[0, 1], [2, 3]], None]), ("null",)),
        (HOLED, ("null",)),
    ],
)
def test_errors_about_invalid_images_name_the_file_and_row(tmp_path, image, parts):
    good = pa.concat_arrays([image[:1]] * 3)
    path = write(tmp_path / "a.parquet", pa.concat_arrays([good, image]), range(5), row_group_size=3)
    source = open_images(str(path))
    source.read(0)
    with refusal(DataError, "a.parquet, row 4", *parts):
        source.read(1)


@pytest.mark.parametrize("twice", ["image", "label"])
def test_duplicate_columns_are_rejected(tmp_path, twice):
    names = ["image", "label", twice]
    columns = {"image": tensors(random_images(2, 4, 4)), "label": pa.array([0, 1])}
    pq.write_table(pa.table([columns[name] for name in names], names=names), tmp_path / "a.parquet")
    with refusal(DataError, "a.parquet", f"several columns named '{twice}'", "rename all but one"):
        open_images(str(tmp_path))


def test_images_of_different_shapes_are_rejected(tmp_path):
    write(tmp_path / "a.parquet", tensors(random_images(2, 4, 4)), [0, 1])
    write(tmp_path / "b.parquet", tensors(random_images(2, 4, 5)), [0, 1])
    with refusal(DataError, "b.parquet", "[4, 5]", "[4, 4]"):
        open_images(str(tmp_path))


def test_errors_about_damaged_files_name_the_path(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with refusal(DataError, "a.parquet", "not a Parquet file"):
        open_images(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"")
    with refusal(DataError, "a.parquet"):
        open_images(str(tmp_path))
    path = write(tmp_path / "a.parquet", tensors(random_images(500, 8, 8)), [0] * 500, compression="zstd")
    content = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    content[at : at + 200] = bytes(200)
    path.write_bytes(content)
    source = open_images(str(path))
    with refusal(DataError, "a.parquet", "damaged"):
        source.read(0)


def test_missing_and_empty_locations_are_rejected(tmp_path):
    with refusal(DataError, str(tmp_path / "none"), "not found", "DATASET"):
        open_images(str(tmp_path / "none"))
    with refusal(DataError, str(tmp_path), "no *.parquet"):
        open_images(str(tmp_path))
    with refusal(DataError, "http://host/x", "s3://"):
        open_images("http://host/x")


# --------------------------------------------------------------------------------------------------------- the settings


def folders(path: Path, **labels: list[int]) -> str:
    for name, values in labels.items():
        write(path / name / "0.parquet", tensors(random_images(len(values), 4, 4)), values)
    return str(path)


def test_folders_named_train_and_test_become_training_and_held_out_rows(tmp_path):
    both = folders(tmp_path / "both", train=[0, 1, 2], test=[1, 2])
    train, test = find_sources(Settings(dataset=both))
    assert test
    assert (rows_in(train), rows_in(test)) == (3, 2)

    alone = folders(tmp_path / "alone", train=[0, 1])
    train, test = find_sources(Settings(dataset=alone))
    assert (rows_in(train), test) == (2, None)

    train, test = open_image_splits(alone, both)
    assert test
    assert (rows_in(train), rows_in(test)) == (2, 2)


def test_the_test_dataset_setting_takes_precedence_over_a_test_folder(tmp_path):
    both = folders(tmp_path / "both", train=[0, 1, 2], test=[1, 2])
    other = folders(tmp_path / "other", rest=[0])
    train, test = open_image_splits(both, other)
    assert test
    assert (rows_in(train), rows_in(test)) == (3, 1)
    train, test = open_image_splits(other, other)
    assert test
    assert (rows_in(train), rows_in(test)) == (1, 1)


def test_held_out_rows_must_match_the_training_rows(tmp_path):
    location = folders(tmp_path, train=[0, 1], test=[1, 0, 2, 3])
    with refusal(DataError, "test/0.parquet, row 2", "label is 2", "0 to 1"):
        find_sources(Settings(dataset=location))
    write(tmp_path / "test" / "0.parquet", tensors(random_images(1, 4, 5)), [0])
    with refusal(DataError, "test/0.parquet", "(1, 4, 5)", "(1, 4, 4)"):
        check_labels_match(open_images(str(tmp_path / "train")), open_images(str(tmp_path / "test")))


# ------------------------------------------------------------------------------------------------------- bundled digits


def test_the_sample_dataset_contains_every_digit_in_both_splits():
    train, test = find_sources(Settings(dataset="sample"))
    assert train.shape == test.shape == (1, 28, 28)
    assert train.classes == test.classes == 10
    content = "ee2866cee3309fbf"
    assert train.fingerprint == f"a1d44e11a4dc988a-{content}", "a run that has begun refuses another fingerprint"
    assert test.fingerprint == f"e5deddb15e94b2d1-{content}"
    assert np.bincount(everything(train)["label"]).tolist() == [1200] * 10
    assert np.bincount(everything(test)["label"]).tolist() == [200] * 10


def test_the_sample_dataset_matches_its_description():
    content = SAMPLE.read_bytes()
    note = SAMPLE.with_name("SAMPLE.md").read_text()
    assert hashlib.sha256(content).hexdigest() in note
    assert f"{len(content):,} bytes" in note
    assert len(content) < 2.6e6


@needs_mnist
def test_rebuilding_the_sample_dataset_gives_the_same_rows(tmp_path):
    from scripts.make_sample import make_sample

    make_sample(str(MNIST_ROOT), tmp_path / "sample.parquet")
    made, bundled = pq.read_table(tmp_path / "sample.parquet"), pq.read_table(SAMPLE)
    assert made.equals(bundled, check_metadata=True)


# ---------------------------------------------------------------------------------------------------------------- MNIST


def test_mnist_files_are_read_without_changing_them(tmp_path):
    images = put_mnist(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    train, test = open_mnist(str(tmp_path))
    train = pickle.loads(pickle.dumps(train))
    assert train.row_groups == (4096, 904)
    np.testing.assert_array_equal(everything(train)["image"][:, 0], images["train"])
    np.testing.assert_array_equal(everything(test)["label"], np.arange(10))
    read = train.read(1, np.array([2, 0]))
    np.testing.assert_array_equal(read["image"][:, 0], images["train"][[4098, 4096]])
    assert read["label"].tolist() == [8, 6]
    assert train.where(1, 2).endswith("train-images-idx3-ubyte, row 4098")
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written when the files are complete"


def test_compressed_mnist_files_are_unpacked_instead_of_downloaded(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise socket.gaierror("no name service here")

    import torchvision

    put_mnist(tmp_path, pack=True)
    packed = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*.gz")}
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", list(packed.items()))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert rows_in(open_mnist(str(tmp_path))[0]) == 5000


def test_the_fingerprint_depends_on_the_mnist_files(tmp_path):
    def fingerprints(**options) -> list[str]:
        put_mnist(tmp_path, **options)
        return [source.fingerprint for source in open_mnist(str(tmp_path))]

    base = fingerprints()
    assert base[0] != base[1]
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels = path.read_bytes()
    path.write_bytes(labels[:-2] + labels[:-3:-1])
    [changed, _] = [source.fingerprint for source in open_mnist(str(tmp_path))]
    assert changed != base[0]


@needs_mnist
def test_the_published_mnist_files_are_read():
    train, test = find_sources(Settings(dataset="mnist", data_root=str(MNIST_ROOT)))
    assert test
    assert (rows_in(train), rows_in(test), train.shape) == (60000, 10000, (1, 28, 28))
    assert np.bincount(everything(test)["label"])[0] == 980


def test_the_error_for_a_failed_download_includes_the_fix(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise socket.gaierror("no name service here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    importlib.import_module("torchvision.datasets")  # so that the import does not count toward the time limit
    began = time.monotonic()
    with refusal(DataError, "MNIST/raw", "train-images-idx3-ubyte", "cannot download", "DATASET=sample"):
        open_mnist(str(tmp_path))
    assert time.monotonic() - began < 30
    assert not list(tmp_path.rglob("*ubyte*")), "a failed download leaves nothing behind"


def test_a_partial_download_does_not_count_as_complete(tmp_path, monkeypatch):
    def half(folder: str) -> None:
        put_mnist(Path(folder))
        raise OSError("connection reset")

    monkeypatch.setattr(mnist, "_fetch", half)
    with pytest.raises(DataError, match="cannot download them: connection reset") as failed:
        open_mnist(str(tmp_path))
    assert not failed.value.final, "a retry of the job may reach a mirror"
    assert not list(tmp_path.rglob("*ubyte*"))
    monkeypatch.setattr(mnist, "_fetch", lambda folder: put_mnist(Path(folder)))
    assert rows_in(open_mnist(str(tmp_path))[0]) == 5000


def test_missing_mnist_files_are_downloaded_and_damaged_files_are_reported(tmp_path, monkeypatch):
    put_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(mnist, "_fetch", lambda folder: put_mnist(Path(folder)))
    with refusal(DataError, "MNIST/raw", "train", "damaged", "delete the folder"):
        open_mnist(str(tmp_path))
    path.unlink()
    assert rows_in(open_mnist(str(tmp_path))[0]) == 5000


def _open_counting(data_root: str, count: str) -> int:
    def slow(folder: str) -> None:
        with open(count, "a") as file:
            file.write("x")
        time.sleep(1)
        put_mnist(Path(folder))

    mnist._fetch = slow
    return rows_in(open_mnist(data_root)[0])


def test_one_process_downloads_mnist_while_other_processes_wait(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        count = str(tmp_path / "count")
        assert pool.starmap(_open_counting, [(str(tmp_path / "data"), count)] * 3, chunksize=1) == [5000] * 3
    assert Path(count).read_text() == "x"
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {"MNIST", ".mnist.lock"}


def test_the_error_after_a_long_wait_for_another_download_names_the_lock_file(tmp_path, set_constants, caplog):
    from filelock import FileLock

    set_constants(mnist, WAIT_S=0.2)
    with (
        FileLock(tmp_path / ".mnist.lock", is_singleton=False),
        refusal(DataError, ".mnist.lock", "another process that downloads MNIST"),
    ):
        open_mnist(str(tmp_path))
    assert "waiting" in caplog.text


# -------------------------------------------------------------------------------------------------------------- buckets


def s3_environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.parametrize("scheme", ["s3", *CLOUDS])
def test_a_dataset_in_a_bucket_equals_its_local_copy(tmp_path, request, scheme):
    url = f"{scheme}://{request.getfixturevalue(BUCKETS[scheme])}"
    both = folders(tmp_path, train=[0, 1, 2], test=[1, 2])
    bucket = open_storage(url)
    for path in tmp_path.rglob("*.parquet"):
        bucket.write(f"digits/{path.relative_to(tmp_path)}", path.read_bytes())
    bucket.write("digits/train/_SUCCESS", b"")

    local, _ = open_image_splits(both)
    train, test = open_image_splits(f"{url}/digits/")
    assert test
    assert train.fingerprint == local.fingerprint
    assert train.where(0, 1) == f"{url}/digits/train/0.parquet, row 1"
    np.testing.assert_array_equal(everything(train)["image"], everything(local)["image"])
    np.testing.assert_array_equal(everything(test)["label"], [1, 2])
    assert rows_in(open_images(f"{url}/digits/test/0.parquet")) == 2
    with refusal(DataError, f"{url}/nothing", "not found"):
        open_images(f"{url}/nothing")


@pytest.mark.parametrize("scheme", CLOUDS)
def test_an_unreachable_cloud_is_not_reported_as_a_damaged_file(monkeypatch, set_constants, scheme):
    set_constants(dataset_files, REQUEST_TIMEOUT_S=0.5)
    use = {"gs": use_google, "az": use_azure}[scheme]
    use(object_stores.free_port(), monkeypatch)
    with refusal(StorageError, f"{scheme}://data/digits", "cannot be read"):
        open_images(f"{scheme}://data/digits")


def test_an_access_denied_error_includes_the_url(monkeypatch):
    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        do_GET = do_HEAD

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        s3_environment(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        with refusal(StorageError, "s3://data/digits", "ACCESS_DENIED"):
            open_images("s3://data/digits")
        server.shutdown()


def test_an_unreachable_url_is_reported_within_the_timeout(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        s3_environment(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
        began = time.monotonic()
        with refusal(StorageError, "s3://data/digits"):
            open_images("s3://data/digits")
    assert time.monotonic() - began < 30


def test_reading_from_an_unresponsive_server_times_out(monkeypatch, set_constants):
    set_constants(dataset_files, REQUEST_TIMEOUT_S=1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        s3_environment(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with refusal(StorageError, "s3://data/digits"):
            open_images("s3://data/digits")
    assert time.monotonic() - began < 10
