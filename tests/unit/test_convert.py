"""Tests for `python -m sunspot.data.convert`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sunspot.data import convert
from sunspot.data.convert import CLASS_NAMES, main
from sunspot.data.image_table import open_image_splits, open_images
from sunspot.data.source import rows_in
from sunspot.errors import DataError, SettingsError
from tests.harness.datasets import everything, put_mnist, refusal

REPOSITORY = Path(__file__).parents[2]


def put_images(folder: Path, color: tuple[int, int, int], count: int, size: tuple[int, int] = (20, 12)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", size, color).save(folder / f"{number}.png")


def class_names(path: Path) -> list[str]:
    return json.loads(pq.read_schema(path).metadata[CLASS_NAMES])


def test_converted_mnist_equals_the_original(tmp_path, capsys):
    images = put_mnist(tmp_path / "data")
    assert main(["--from", "mnist", "--data-root", str(tmp_path / "data"), str(tmp_path / "out")]) == 0
    assert "5000 rows in train, 10 rows in test" in capsys.readouterr().out
    train, test = open_image_splits(str(tmp_path / "out"))
    assert test
    np.testing.assert_array_equal(everything(train)["image"][:, 0], images["train"])
    np.testing.assert_array_equal(everything(train)["label"], np.arange(5000) % 10)
    np.testing.assert_array_equal(everything(test)["image"][:, 0], images["t10k"])
    assert train.row_groups == (2048, 2048, 904)
    assert class_names(tmp_path / "out" / "train" / "part-00000.parquet") == [str(digit) for digit in range(10)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_large_dataset_is_converted_to_several_files(tmp_path, set_constants):
    set_constants(convert, FILE_BYTES=2 * 2048 * 16)
    images = put_mnist(tmp_path / "data")
    convert.convert_mnist(str(tmp_path / "data"), str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out" / "train").iterdir()) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    train, _ = open_image_splits(str(tmp_path / "out"))
    assert train.row_groups == (2048, 2048, 904)
    np.testing.assert_array_equal(everything(train)["image"][:, 0], images["train"])


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_image_folders_with_splits_are_converted(tmp_path, held_out):
    root = tmp_path / "root"
    put_images(root / "train" / "cat", (250, 0, 0), 5)
    put_images(root / "train" / "dog" / "deeper", (0, 0, 250), 4, size=(9, 30))
    (root / "train" / "dog" / "notes.txt").write_text("not an image")
    put_images(root / held_out / "dog", (0, 0, 250), 2)
    assert main(["--from", "imagefolder", "--root", str(root), "--size", "16", str(tmp_path / "out")]) == 0
    train, test = open_image_splits(str(tmp_path / "out"))
    assert test
    assert train.shape == (3, 16, 16)
    read = everything(train)
    assert np.bincount(read["label"]).tolist() == [5, 4]
    assert (read["image"][read["label"] == 0] == np.array([250, 0, 0])[:, None, None]).all()
    assert (read["image"][read["label"] == 1] == np.array([0, 0, 250])[:, None, None]).all()
    assert everything(test)["label"].tolist() == [1, 1]
    assert class_names(tmp_path / "out" / "test" / "part-00000.parquet") == ["cat", "dog"]


def test_image_folders_without_splits_are_shuffled_reproducibly(tmp_path):
    for label in range(4):
        put_images(tmp_path / "root" / str(label), (label, label, label), 20)
    for out in ("one", "two"):
        convert.convert_image_folder(str(tmp_path / "root"), 8, str(tmp_path / out))
    labels = everything(open_images(str(tmp_path / "one")))["label"]
    assert np.bincount(labels).tolist() == [20] * 4
    assert labels.tolist() != sorted(labels)
    assert (tmp_path / "one/part-00000.parquet").read_bytes() == (tmp_path / "two/part-00000.parquet").read_bytes()


def test_gray_images_are_center_cropped_and_stay_gray(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    pixels = np.zeros((10, 30), np.uint8)
    pixels[:, 10:20] = 200
    Image.fromarray(pixels).save(tmp_path / "root" / "a" / "0.png")
    convert.convert_image_folder(str(tmp_path / "root"), 10, str(tmp_path / "out"))
    source = open_images(str(tmp_path / "out"))
    assert source.shape == (1, 10, 10)
    assert (source.read(0)["image"] == 200).all()


def test_a_failed_conversion_leaves_no_files(tmp_path):
    root = tmp_path / "root"
    put_images(root / "train" / "cat", (1, 2, 3), 2)
    put_images(root / "test" / "cow", (1, 2, 3), 2)
    arguments = ["--from", "imagefolder", "--root", str(root), str(tmp_path / "out")]
    with refusal(DataError, "test/cow", "cat"):
        main(arguments)
    (root / "test" / "cow").rename(root / "test" / "cat")
    (root / "test" / "cat" / "bad.png").write_bytes((root / "test" / "cat" / "0.png").read_bytes()[:60])
    with refusal(DataError, "test/cat/bad.png", "damaged"):
        main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    for empty in ("none", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with refusal(DataError, empty):
            convert.convert_image_folder(str(tmp_path / empty), 8, str(tmp_path / "out"))
    with refusal(SettingsError, "--root"):
        main(["--from", "imagefolder", str(tmp_path / "out")])
    with refusal(SettingsError, "s3://", "local"):
        main(["--from", "mnist", "s3://bucket/out"])


def test_an_existing_output_directory_is_not_changed(tmp_path):
    put_mnist(tmp_path / "data")
    (tmp_path / "out").mkdir()
    with refusal(SettingsError, str(tmp_path / "out"), "already exists"):
        convert.convert_mnist(str(tmp_path / "data"), str(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_a_killed_conversion_leaves_no_readable_dataset(tmp_path):
    put_mnist(tmp_path / "data")
    program = (
        "import sys, time; from sunspot.data import convert; fsync = convert._fsync\n"
        "def stop(path): print(path, flush=True); time.sleep(60)\n"
        "convert._fsync = stop\n"
        "convert.main(sys.argv[1:])"
    )
    arguments = ["--from", "mnist", "--data-root", str(tmp_path / "data"), str(tmp_path / "place" / "out")]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert "part-00000.parquet" in process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    for place in ("place", "place/out"):
        with pytest.raises(DataError):
            open_images(str(tmp_path / place))
    convert.convert_mnist(str(tmp_path / "data"), str(tmp_path / "place" / "out"))
    assert [rows_in(each) for each in open_image_splits(str(tmp_path / "place" / "out")) if each] == [5000, 10]


def test_convert_prints_an_error_and_returns_an_exit_code(tmp_path):
    command = [sys.executable, "-m", "sunspot.data.convert", "--from", "imagefolder", "--root", str(tmp_path / "none")]
    ended = subprocess.run([*command, str(tmp_path / "out")], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "none" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_reading_data_imports_no_heavy_library():
    program = "import sys; from sunspot.data import convert, image_table, mnist, source; print(*sys.modules)"
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "torchvision", "PIL"} & set(ended.stdout.split())
    assert time.monotonic() - began < 20
