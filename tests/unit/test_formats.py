"""Tests for common dataset formats: image folders, CSV, JSON lines and saved `datasets`, with class names."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sunspot.data.columns import Column
from sunspot.data.convert import convert_image_folder
from sunspot.data.image_sources import find_sources
from sunspot.data.order import Steps, run_order
from sunspot.data.ray_loader import RoundPlanner, RoundReader
from sunspot.data.source import ModelData, PredictionSettings, rows_in
from sunspot.data.table import TableSource, find_files, open_table
from sunspot.errors import DataError
from sunspot.settings import Settings
from tests.harness.datasets import everything, random_images, refusal
from tests.harness.threads import load_in_threads
from tests.unit.test_table import png, save_dataset

COLUMNS = {"x": Column(), "label": Column("int64")}
LABELS = ["up", "down", "level", "down"]


def write_rows(path: Path, labels: list[Any]) -> Path:
    """Write CSV or JSON lines with line breaks, quotes and commas in the text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"x": number / 2, "text": 'two\n"lines", \u00e9', "label": label} for number, label in enumerate(labels)]
    if path.suffix == ".csv":
        pa.csv.write_csv(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_rows(location: Path, **columns: Column) -> TableSource:
    train, test = open_table(Settings(dataset=str(location)), columns or COLUMNS)
    assert test is None
    return train


def put_picture(path: Path, height: int, width: int, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(height, width, mode))
    return path


def length(text: str) -> list[int]:
    return [len(text)]


def number_of(text: str) -> int:
    return ["down", "level", "up"].index(text)


# --------------------------------------------------------------------------------------------------------- every format


def put_pictures(folder: Path) -> None:
    for number, label in enumerate(LABELS * 20):
        put_picture(folder / label / f"{number:02}.png", 4 + number % 3, 5)


def save_rows(folder: Path) -> None:
    rows = pa.table({"x": np.arange(80) / 2, "label": LABELS * 20})
    save_dataset(folder, [rows[:30], rows[30:]])


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_rows(folder / "a.csv", LABELS * 600),
        lambda folder: write_rows(folder / "a.jsonl", LABELS * 600),
        save_rows,
        put_pictures,
    ],
    ids=["CSV", "JSON lines", "saved by datasets", "images"],
)
def test_the_torch_and_ray_loaders_read_each_row_unchanged(write: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    write(folder)
    source = find_sources(Settings(dataset=str(folder)))[0] if write is put_pictures else open_rows(folder)
    assert len(source.row_groups) > 1
    expected, source = everything(source), pickle.loads(pickle.dumps(source))
    for in_memory, *_ in load_in_threads([source], ["node", "node"]):
        assert {name: values.tolist() for name, values in in_memory.items()} == {
            name: values.tolist() for name, values in expected.items()
        }
    steps = Steps(rows_in(source), 16)
    order = run_order("ray", source.row_groups, 7)
    planned = RoundPlanner(order, steps, steps.per_epoch, 100)(pa.table({"step": [0]}))
    parts = [part for each in planned for part in RoundReader(source, order, steps, 2, 2)(each)]
    ids = np.concatenate([part["row"][0] for part in parts])
    assert sorted(ids) == list(range(rows_in(source)))
    for name, values in expected.items():
        np.testing.assert_array_equal(np.concatenate([part[name][0] for part in parts]), values[ids])


def test_parsed_text_is_freed_after_its_rows_are_loaded(tmp_path: Path) -> None:
    source = open_rows(write_rows(tmp_path / "a.csv", LABELS * 600))
    parsed = pa.total_allocated_bytes()
    load_in_threads([source], ["node"])
    assert pa.total_allocated_bytes() < parsed


# --------------------------------------------------------------------------------------------------- CSV and JSON lines


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_csv_and_json_rows_are_read_unchanged(tmp_path: Path, suffix: str) -> None:
    for split, labels in (("train", LABELS * 500), ("test", ["down", "up"])):
        write_rows(tmp_path / split / f"rows.{suffix}", labels)
    columns = {**COLUMNS, "text": Column("int64", (1,), decode=length)}
    train, test = open_table(Settings(dataset=str(tmp_path)), columns)
    assert test
    assert (train.row_groups, train.classes, train.class_names) == ((1024, 976), 3, ("down", "level", "up"))
    assert train.class_names == test.class_names
    found = everything(pickle.loads(pickle.dumps(train)))
    assert found["x"].tolist() == [number / 2 for number in range(2000)]
    assert found["label"].tolist() == [2, 0, 1, 0] * 500
    assert set(found["text"].flat) == {14}
    assert everything(test)["label"].tolist() == [0, 2]
    line = 2056 if suffix == "csv" else 1028
    assert train.where(1, 3) == f"{tmp_path}/train/rows.{suffix}, row 1027 (line {line})"
    before = train.fingerprint
    write_rows(tmp_path / "train" / f"rows.{suffix}", [*LABELS * 499, "up", "down", "level", "up"])
    with refusal(DataError, "rows", "has changed since it was opened"):
        open_table(Settings(dataset=str(tmp_path)), columns)
        train.read(1)
    assert open_table(Settings(dataset=str(tmp_path)), columns)[0].fingerprint != before


@pytest.mark.parametrize(
    ("files", "columns", "said"),
    [
        ({"a.jsonl": LABELS, "b.jsonl": [0, 1]}, COLUMNS, ["text in some files and numbers in others"]),
        ({"a.csv": LABELS, "b.jsonl": LABELS}, COLUMNS, ["contains CSV and JSON lines", "separate folders"]),
        ({"a.csv": LABELS, "images/b.png": []}, COLUMNS, ["contains CSV and images"]),
        ({"a.csv": ["up", "down"], "val/b.csv": [], "train/b.csv": []}, COLUMNS, ["train/ and val/", "TEST_DATASET"]),
        (
            {"train/a.csv": ["up"], "test/a.csv": ["left"]},
            COLUMNS,
            ["'left' is not one of the classes in the training data (up)"],
        ),
        (
            {"train/a.jsonl": ["1", "x"], "test/a.jsonl": [1]},
            COLUMNS,
            ["test: the classes are numbers", "those of the training rows are 1, x"],
        ),
        (
            {"train/a.csv": [0, 1], "test/a.csv": ["up"]},
            COLUMNS,
            ["test: the classes are up", "those of the training rows are numbers"],
        ),
        ({"a.csv": ["up", ""]}, COLUMNS, ["a.csv, row 1", "label is empty"]),
        ({"a.jsonl": LABELS}, {"label": Column("float32")}, ["a.jsonl", "label is string"]),
        ({"a.csv": LABELS}, {"label": Column("float32")}, ["a.csv, row 0 (line 2): label is 'up', but float32 needs"]),
        ({"a.csv": [0.5, 1.5]}, COLUMNS, ["a.csv, row 0", "label is 0.5", "declare label as float32"]),
        ({"a.csv": LABELS}, {"y": Column()}, ["no column 'y'", "(x, text, label)"]),
        ({"a.jsonl": ["up", None]}, COLUMNS, ["a.jsonl, row 1 (line 2)", "label is null"]),
        (
            {"a.xlsx.txt": []},
            COLUMNS,
            ["no *.parquet, *.csv, *.jsonl or *.tar", "set SUNSPOT_DATASET to", "save_to_disk"],
        ),
    ],
)
def test_unreadable_tables_are_reported_with_the_reason(
    tmp_path: Path, files: dict[str, list[Any]], columns: dict[str, Column], said: list[str]
) -> None:
    for name, labels in files.items():
        if labels:
            write_rows(tmp_path / name, labels)
        else:
            put_picture(tmp_path / name, 3, 3)
    with refusal(DataError, *said):
        open_table(Settings(dataset=str(tmp_path)), columns)


def test_image_tasks_reject_tables_without_images(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", LABELS)
    with refusal(DataError, "no column 'image' among its columns (x, text, label)", "SUNSPOT_TASK"):
        find_sources(Settings(dataset=str(path)))
    with refusal(DataError, "a.txt is not a Parquet file", "set SUNSPOT_DATASET to", ".csv"):
        find_sources(Settings(dataset=str(path.rename(tmp_path / "a.txt"))))


def test_a_json_array_is_not_accepted_as_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\n[{"x": 1}]')
    with refusal(DataError, "a.json is a single JSON array", "on its own line"):
        open_rows(tmp_path)


def test_the_classes_of_decoded_labels_are_counted(tmp_path: Path) -> None:
    source = open_rows(write_rows(tmp_path / "a.csv", LABELS), label=Column("int64", decode=number_of))
    assert (source.classes, source.class_names) == (3, ())
    with refusal(DataError, "a.csv, row 1 (line 4): label cannot be decoded", "'left' is not in list"):
        open_rows(write_rows(tmp_path / "a.csv", ["up", "left"]), label=Column("int64", decode=number_of))


def test_rows_to_predict_can_lack_labels_and_use_the_classes_of_the_model(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", ["down", "up"])
    model = ModelData((1,), 3, ("down", "level", "up"))

    def rows_to_predict(location: Path) -> dict[str, np.ndarray]:
        train, _ = open_table(PredictionSettings.of(Settings(dataset=str(location)), model), COLUMNS)
        return everything(train)

    assert rows_to_predict(path)["label"].tolist() == [0, 2]
    assert list(rows_to_predict(write_rows(path, ["down", "left"]))) == ["x"]
    for text in ("x\n1\n2\n", "x,label\n1,\n2,\n", "x,label\n1,up\n2,\n"):
        path.write_text(text)
        assert rows_to_predict(path)["x"].tolist() == [1, 2]
    for missing in (None, math.nan):  # pandas writes both
        unlabeled = pa.table({"x": [1.0, 2.0], "label": pa.array([missing, missing], pa.float64())})
        pq.write_table(unlabeled, tmp_path / "a.parquet")
        assert list(rows_to_predict(tmp_path / "a.parquet")) == ["x"]


# --------------------------------------------------------------------------------------------------------------- images


def test_folder_images_are_scaled_to_one_size(tmp_path: Path) -> None:
    for name, size in (("cat/b.png", (30, 20)), ("cat/a.png", (9, 9)), ("bird/deep/c.png", (80, 70))):
        put_picture(tmp_path / "train" / name, *size)
    put_picture(tmp_path / "test/cat/0.png", 8, 8, "L")
    (tmp_path / "train" / "cat" / "notes.txt").touch()
    put_picture(tmp_path / "train" / ".thumbnails" / "a.png", 3, 3)
    train, test = find_sources(Settings(dataset=str(tmp_path)))
    assert isinstance(train, TableSource)
    assert test
    assert (train.shape, test.shape, train.class_names, train.scales) == (
        (3, 64, 64),
        (3, 64, 64),
        ("bird", "cat"),
        True,
    )
    found = everything(pickle.loads(pickle.dumps(train)))
    assert (found["image"].shape, found["label"].tolist()) == ((3, 3, 64, 64), [0, 1, 1])
    assert train.where(0, 2) == f"{tmp_path}/train/cat/b.png"
    assert everything(test)["label"].tolist() == [1]
    assert find_sources(Settings(dataset=str(tmp_path), image_size=10))[0].shape == (3, 10, 10)

    # `convert` gives the same pixels, and stores the class names and the scaling in the files.
    convert_image_folder(str(tmp_path / "train"), 64, str(tmp_path / "out"))
    converted, _ = find_sources(Settings(dataset=str(tmp_path / "out")))
    assert ModelData.of(converted) == ModelData.of(train)
    same = everything(converted)["image"]
    assert {image.tobytes() for image in same} == {image.tobytes() for image in found["image"]}


def test_images_of_equal_size_are_not_scaled(tmp_path: Path) -> None:
    pixels = random_images(40, 5, 7)
    for number, image in enumerate(pixels):
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / str(number % 2) / f"{number:02}.png")
    source, _ = find_sources(Settings(dataset=str(tmp_path)))
    assert (source.shape, source.row_groups) == ((1, 5, 7), (32, 8))
    np.testing.assert_array_equal(everything(source)["image"][:, 0], np.concatenate([pixels[::2], pixels[1::2]]))
    before = source.fingerprint
    Image.fromarray(pixels[0]).save(tmp_path / "1" / "01.png")  # the file keeps its size
    assert find_sources(Settings(dataset=str(tmp_path)))[0].fingerprint != before
    (tmp_path / "1" / "01.png").unlink()
    find_sources(Settings(dataset=str(tmp_path)))
    with refusal(DataError, "has changed since it was opened"):
        source.read(0)
    (tmp_path / "1" / "03.png").write_bytes(b"no image")
    with refusal(DataError, "1/03.png", "is not a PNG"):
        find_sources(Settings(dataset=str(tmp_path)))


def test_a_task_can_declare_how_folder_images_are_read(tmp_path: Path) -> None:
    put_picture(tmp_path / "a" / "0.png", 4, 4)
    source = open_rows(tmp_path, image=Column("int64", (1,), decode=length), label=Column("int64"))
    assert everything(source)["image"].tolist() == [[(tmp_path / "a" / "0.png").stat().st_size]]


def test_the_error_for_a_damaged_image_includes_its_path(tmp_path: Path) -> None:
    path = put_picture(tmp_path / "a" / "0.png", 40, 40)
    path.write_bytes(path.read_bytes()[:200])
    source, _ = find_sources(Settings(dataset=str(tmp_path)))
    with refusal(DataError, "a/0.png: image", "truncated"):
        source.read(0)


# --------------------------------------------------------------------------------------------------------- Hugging Face


def test_files_with_conflicting_class_names_are_rejected(tmp_path: Path) -> None:
    rows = pa.table({"x": [0.5, 1.5], "label": [0, 1]})
    for number, names in enumerate([["cat", "dog"], ["cat"], ["dog", "cat"]]):
        labels = [0, min(1, len(names) - 1)]
        named = rows.set_column(1, "label", [labels]).replace_schema_metadata({"classes": json.dumps(names)})
        pq.write_table(named, tmp_path / f"{number}.parquet")
    with refusal(DataError, "classes are cat, dog in some files, but dog, cat in others; use the same class numbers"):
        open_rows(tmp_path)
    (tmp_path / "2.parquet").unlink()
    assert open_rows(tmp_path).class_names == ("cat", "dog")


def test_images_and_class_names_saved_by_hugging_face_datasets_are_read(tmp_path: Path) -> None:
    images = [{"bytes": png(6, 5), "path": "a.png"}, {"bytes": png(6, 5), "path": None}]
    names = {"info": {"features": {"label": {"names": ["cat", "dog", "cow"], "_type": "ClassLabel"}}}}
    table = pa.table({"image": images, "label": [1, 0]}).replace_schema_metadata({"huggingface": json.dumps(names)})
    save_dataset(tmp_path / "saved", [table])
    source, _ = find_sources(Settings(dataset=str(tmp_path / "saved")))
    data = ModelData.of(source)
    assert (data.shape, data.classes, data.class_names, data.scales) == ((3, 6, 5), 3, ("cat", "dog", "cow"), False)
    assert everything(source)["image"].shape == (2, 3, 6, 5)
    scaled, _ = find_sources(Settings(dataset=str(tmp_path / "saved"), image_size=4))
    assert everything(scaled)["image"].shape == (2, 3, 4, 4)
    (tmp_path / "dictionary").mkdir()
    (tmp_path / "saved").rename(tmp_path / "dictionary" / "all")
    (tmp_path / "dictionary" / "dataset_dict.json").write_text("{}")
    with refusal(
        DataError,
        "contains several saved datasets (all); set SUNSPOT_DATASET to one of them, such as",
        "/dictionary/all",
    ):
        find_sources(Settings(dataset=str(tmp_path / "dictionary")))
    pq.write_table(table.set_column(1, "label", pa.array([1, 3])), tmp_path / "a.parquet")
    with refusal(DataError, "a.parquet contains the label 3, but its metadata has names for only 3 classes"):
        find_sources(Settings(dataset=str(tmp_path / "a.parquet")))


def test_a_note_lists_skipped_tables_and_images(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0], "label": [0]}), tmp_path / "a.parquet")
    assert open_rows(tmp_path).notes == ()
    write_rows(tmp_path / "b.csv", LABELS)
    put_picture(tmp_path / "cat" / "a.png", 4, 4)
    (tmp_path / "README.md").touch()
    told = f"{tmp_path}: only Parquet files are read; 2 other files with tables or images, such as b.csv, are skipped"
    assert open_rows(tmp_path).notes == (told,)


def test_file_names_must_be_valid_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / "hund"
    folder.mkdir()
    (folder / os.fsdecode(b"x\xff.png")).touch()
    with pytest.raises(DataError, match=r"hund/x\\udcff\.png: the name is not valid UTF-8; change it"):
        find_files(str(tmp_path))
