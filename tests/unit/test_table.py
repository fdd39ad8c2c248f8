"""Tests for datasets of declared columns: values of every kind, fingerprints and rejected tables."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sunspot.data.columns import Column
from sunspot.data.images import Resized
from sunspot.data.table import TableSource, open_table
from sunspot.errors import DataError, SettingsError
from sunspot.settings import Settings
from tests.harness.datasets import everything, refusal
from tests.harness.documentation import find_example


def write(path: Path, columns: dict[str, Any], row_group_size: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def read(tmp_path: Path, values: Any, column: Column) -> dict[str, np.ndarray]:
    return everything(open_column(tmp_path, values, column))


def open_column(tmp_path: Path, values: Any, column: Column) -> TableSource:
    location = write(tmp_path / "one.parquet", {"x": values})
    source, _ = open_table(Settings(dataset=str(location)), {"x": column})
    return source


def png(height: int, width: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.effect_noise((width, height), 50).convert(mode).save(out, "PNG")
    return out.getvalue()


def twice(value: str) -> list[int]:
    return [int(value)] * 2


def doubled(value: str) -> list[int]:
    return [2 * int(value) - 1, 2 * int(value)] if value == "8388609" else [0, 2 * int(value)]


def as_many(value: str) -> list[int]:
    return list(range(int(value)))


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("values", "column", "expected"),
    [
        ([1, 2, 3], Column(), [1, 2, 3]),
        ([1.5, 2, 3], Column("float64"), [1.5, 2, 3]),
        ([2**24, 2**24 + 2, -(2**40)], Column(), [2**24, 2**24 + 2, -(2**40)]),
        ([0.1, 1e-50, 16777217.0], Column(), np.float32([0.1, 0, 16777216])),
        ([True, False, True], Column("uint8"), [1, 0, 1]),
        ([[1, 2], [3, 4], [5, 6]], Column("int16", (2,)), [[1, 2], [3, 4], [5, 6]]),
        ([[[1], [2]], [[3], [4]], [[5], [6]]], Column("int64", (2, 1)), [[[1], [2]], [[3], [4]], [[5], [6]]]),
        (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)), Column(shape=(2,)), [[1, 2], [3, 4], [5, 6]]),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(3, 2, 2)),
            Column(shape=(2, 2)),
            np.arange(12).reshape(3, 2, 2),
        ),
        (["1", "2", "3"], Column("int32", (2,), decode=twice), [[1, 1], [2, 2], [3, 3]]),
    ],
    ids=[
        "integers",
        "floats",
        "large integers",
        "rounded floats",
        "booleans",
        "lists",
        "lists of lists",
        "fixed lists",
        "tensors",
        "decoded",
    ],
)
def test_column_values_become_arrays(tmp_path: Path, values: Any, column: Column, expected: Any) -> None:
    source = open_column(tmp_path, values, column)
    found = everything(source)["x"]
    assert found.dtype == column.dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(source.read(0, np.array([1, 0]))["x"], np.array(expected)[[1, 0]])
    assert source.read(1, np.array([], np.int64))["x"].shape == (0, *column.shape)
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize(
    "values", [[[7, 8], [], [9, 9, 9]], pa.array([[7, 8], [], [9, 9, 9]], pa.large_list(pa.int8()))]
)
def test_short_lists_are_padded(tmp_path: Path, values: Any) -> None:
    found = read(tmp_path, values, Column("int64", longest=4, fill=-1))
    np.testing.assert_array_equal(found["x"], [[7, 8, -1, -1], [-1, -1, -1, -1], [9, 9, 9, -1]])
    np.testing.assert_array_equal(found["x_length"], [2, 0, 3])


def test_long_lists_are_truncated_if_the_task_allows_it(tmp_path: Path) -> None:
    found = read(tmp_path, ["1", "5", "2"], Column("int64", longest=2, decode=as_many, cut=True))
    np.testing.assert_array_equal(found["x"], [[0, 0], [0, 1], [0, 1]])
    np.testing.assert_array_equal(found["x_length"], [1, 2, 2])


@pytest.mark.parametrize("shape", [(3, 4, 6), (1, 4, 6)])
def test_encoded_images_are_scaled_to_one_size(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    pictures = [png(9, 9), {"bytes": png(30, 8, "L"), "path": None}["bytes"], png(2, 3)]
    location = write(tmp_path / "a.parquet", {"picture": pictures, "label": [0, 1, 4]})
    columns = {"image": Column("uint8", shape, decode=Resized(shape), of="picture"), "label": Column("int64")}
    source, test = open_table(Settings(dataset=str(location)), columns)
    found = everything(source)
    assert found["image"].shape == (3, *shape)
    assert found["image"].std() > 10
    assert (source.shape, source.classes, test) == (shape, 5, None)
    whole = Image.open(io.BytesIO(pictures[0])).convert("RGB" if shape[0] == 3 else "L")
    assert abs(float(np.asarray(whole).mean()) - float(found["image"][0].mean())) < 20


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Give this process two cores, which is the number of threads that torch uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class InPairs:
    """A `decode` that returns only if another thread is decoding at the same time."""

    thread_safe = True

    def __init__(self) -> None:
        self._both = threading.Barrier(2, timeout=60)

    def __call__(self, value: int) -> int:
        self._both.wait()
        return -value


def test_values_are_decoded_in_as_many_threads_as_the_process_has_cores(tmp_path: Path, two_threads: None) -> None:
    found = read(tmp_path, list(range(100)), Column("int64", decode=InPairs()))
    np.testing.assert_array_equal(found["x"], -np.arange(100))


def test_a_decode_function_not_marked_as_thread_safe_gets_one_value_at_a_time(
    tmp_path: Path, two_threads: None
) -> None:
    at_work = threading.Lock()

    def decode(value: int) -> int:
        assert at_work.acquire(blocking=False)
        time.sleep(0.001)  # let other threads run
        at_work.release()
        return value

    found = read(tmp_path, list(range(20)), Column("int64", decode=decode))
    np.testing.assert_array_equal(found["x"], np.arange(20))


def test_training_and_held_out_rows_have_the_same_columns(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(
            tmp_path / split / "a.parquet", {"a": [1.0, 2.0], "b": [[1, 2], [3, 4]], "label": [0.5, 1.5], "c": ["", ""]}
        )
    columns = {"a": Column(), "b": Column("float32", (2,)), "label": Column()}
    train, test = open_table(Settings(dataset=str(tmp_path)), columns)
    assert (train.shape, train.classes) == ((3,), 0)
    assert test is not None
    assert list(everything(test)) == ["a", "b", "label"]


def test_the_table_example_in_the_documentation_works(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(find_example("python", "# columns.py"), names)
    values = {"age": [30, 40], "place": [[1.5, 2], [3, 4]], "visits": [[5], []], "photo": [png(70, 80), png(3, 3)]}
    location = write(tmp_path / "a.parquet", {**values, "label": [0.5, 1]})
    source, _ = names["find_sources"](Settings(dataset=str(location)))
    assert {name: found.shape[1:] for name, found in everything(source).items()} == {
        "age": (),
        "place": (2,),
        "visits": (16,),
        "visits_length": (),
        "image": (3, 64, 64),
        "label": (),
    }


def save_dataset(folder: Path, parts: list[pa.Table]) -> None:
    """Write a folder in the format of `datasets.Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        with pa.ipc.new_stream(folder / name, part.schema) as writer:
            writer.write_table(part, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_dataset_saved_by_hugging_face_datasets_is_read_unchanged(tmp_path: Path) -> None:
    whole = pa.table({"x": [[1, 2], [3], [], [4, 5, 6], [7]], "label": [0, 2, 1, 1, 0], "more": list("abcde")})
    for split in ("train", "test"):
        save_dataset(tmp_path / split, [whole[:3], whole[3:]])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    columns = {"x": Column("int32", longest=3), "label": Column("int64")}
    train, test = open_table(Settings(dataset=str(tmp_path)), columns)
    assert test is not None
    assert (train.row_groups, train.classes) == ((2, 1, 2), 3)
    found = everything(pickle.loads(pickle.dumps(train)))
    np.testing.assert_array_equal(found["x_length"], [2, 1, 0, 3, 1])
    np.testing.assert_array_equal(found["label"], [0, 2, 1, 1, 0])
    np.testing.assert_array_equal(train.read(2, np.array([1, 0]))["x"], [[7, 0, 0], [4, 5, 6]])

    shutil.rmtree(tmp_path / "train")
    save_dataset(tmp_path / "train", [whole[:3], whole[3:].set_column(0, "x", [[[1, 2, 3, 4], [1]]])])
    changed, _ = open_table(Settings(dataset=str(tmp_path)), columns)
    assert changed.fingerprint != train.fingerprint
    with refusal(DataError, "data-00001-of-00002.arrow, row 0: x has 4 values"):
        everything(changed)
    (tmp_path / "train" / "state.json").write_text("{}")
    with refusal(DataError, "state.json lacks the list of data files", "save the dataset again"):
        open_table(Settings(dataset=str(tmp_path)), columns)


def test_the_error_for_a_damaged_saved_dataset_names_the_file(tmp_path: Path) -> None:
    save_dataset(tmp_path / "data", [pa.table({"x": [1.0]})])
    file = tmp_path / "data" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with refusal(DataError, "data-00000-of-00001.arrow", "damaged"):
        open_table(Settings(dataset=str(tmp_path / "data")), {"x": Column()})


# --------------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_depends_on_content_and_declaration(tmp_path: Path) -> None:
    column = Column("int64", longest=3)
    first = open_column(tmp_path, [[1], [2]], column).fingerprint
    assert open_column(tmp_path, [[1], [2]], column).fingerprint == first
    others = [
        open_column(tmp_path, [[1], [3]], column),
        open_column(tmp_path, [[1], [2]], Column("int64", longest=4)),
        open_column(tmp_path, [[1], [2]], Column("int32", longest=3)),
        open_column(tmp_path, ["1", "2"], Column("int64", longest=3, decode=twice)),
        open_column(tmp_path, ["1", "2"], Column("int64", longest=3, decode=as_many)),
    ]
    assert len({first, *(other.fingerprint for other in others)}) == 6


# ------------------------------------------------------------------------------------------------------ rejected tables


@pytest.mark.parametrize(
    ("values", "column", "said"),
    [
        ([1.0, None, 2.0], Column(), ["row 1: x is null"]),
        ([1.0, 2.0, float("nan")], Column(), ["row 2: x has the value nan, but float32 allows only finite numbers"]),
        ([1.0, 2.0, 1e300], Column(), ["row 2: x has the value 1e+300"]),
        ([1, 2, 300], Column("uint8"), ["row 2: x has the value 300, but uint8 allows only 0 to 255"]),
        ([1, 2, 16777217], Column(), ["row 2: x has the value 16777217, but float32", "float64 or int64"]),
        ([1, -(2**63), -(2**63) + 1], Column(), ["row 2: x has the value -9223372036854775807"]),
        ([1, 2, 2**53 + 1], Column("float64"), ["x has the value 9007199254740993", "declare the column as int64"]),
        ([1, 2, 2049], Column("float16"), ["row 2: x has the value 2049, but float16"]),
        ([[1, 2], [3, 16777217], [4, 5]], Column(shape=(2,)), ["row 1: x has the value 16777217"]),
        (["1", "8388608", "8388609"], Column(shape=(2,), decode=doubled), ["row 2: x has the value 16777217"]),
        (pa.array([1, 2, 2**64 - 1], pa.uint64()), Column(), ["row 2: x has the value 18446744073709551615"]),
        (pa.array([1, 2, 2**63], pa.uint64()), Column("int64"), ["x has the value 9223372036854775808, but int64"]),
        ([[1, 2], [3], [4, 5]], Column("int64", (2,)), ["row 1: x contains a list of 1", "int64 of shape [2]"]),
        ([[1, 2], [3, 4], [None, 5]], Column("int64", (2,)), ["row 2: x contains a null"]),
        ([[[1], [2]], [[3], []], [[4], [5]]], Column("int64", (2, 1)), ["row 1: x contains a list of 0"]),
        ([[1], [2, 3, 4], []], Column("int64", longest=2), ["row 1: x has 3 values", "at most 2", "cut=True"]),
        (["1", "?", "2"], Column("int64", (2,), decode=twice), ["row 1: x cannot be decoded: ValueError"]),
        (["1", "2", "3"], Column("int64", (3,), decode=twice), ["row 0: x was decoded to", "[2]", "[3]"]),
        (["1", None, "3"], Column("int64", (2,), decode=twice), ["row 1: x is null"]),
        ([b"", b"", b""], Column("uint8", (1, 2, 2), decode=Resized((1, 2, 2))), ["row 0: x is not a PNG"]),
    ],
)  # fmt: skip
def test_errors_about_invalid_values_name_the_row(tmp_path: Path, values: Any, column: Column, said: list[str]) -> None:
    source = open_column(tmp_path, values, column)
    with refusal(DataError, "one.parquet", *said):
        everything(source)


@pytest.mark.parametrize(
    ("values", "column", "said"),
    [
        ([1.5], Column("int64"), ["x is double", "numbers of type int64"]),
        (["1"], Column(), ["x is string", "with a decode function"]),
        ([[1]], Column("int64"), ["x is list"]),
        ([1], Column("int64", longest=2), ["x is int64", "lists of up to 2 int64"]),
        ([[1]], Column("int64", of="y"), ["no column 'y'", "(x)"]),
        ([], Column(), ["one.parquet"]),
    ],
)
def test_column_types_are_checked_before_training(tmp_path: Path, values: Any, column: Column, said: list[str]) -> None:
    with refusal(DataError, "one.parquet", *said):
        open_column(tmp_path, values, column)


@pytest.mark.parametrize(
    "column",
    [
        Column("long"),
        Column(shape=(0,)),
        Column(shape=(2,), longest=3),
        Column("uint8", longest=3, fill=-1),
        Column("int64", longest=3, fill=0.5),
        Column("float16", longest=3, fill=1e6),
    ],
)
def test_an_invalid_column_declaration_is_rejected(tmp_path: Path, column: Column) -> None:
    with refusal(SettingsError, "SUNSPOT_TASK=", "column 'x'"):
        open_column(tmp_path, [1], column)


@pytest.mark.parametrize("labels", [[0, -1], [0, None]])
def test_class_labels_are_checked_before_training(tmp_path: Path, labels: list[Any]) -> None:
    location = write(tmp_path / "a.parquet", {"label": labels})
    with refusal(DataError, "a.parquet, row 1", "label is null" if None in labels else "label is -1"):
        open_table(Settings(dataset=str(location)), {"label": Column("int64")})


def test_held_out_rows_cannot_have_more_classes_than_training_rows(tmp_path: Path) -> None:
    for split, label in (("train", 1), ("test", 2)):
        write(tmp_path / split / "a.parquet", {"label": [0, label]})
    with refusal(DataError, "test/a.parquet, row 1", "label is 2"):
        open_table(Settings(dataset=str(tmp_path)), {"label": Column("int64")})


def test_the_bundled_digits_are_rejected_as_a_table() -> None:
    with refusal(DataError, "SUNSPOT_DATASET=sample", "set SUNSPOT_DATASET to the path"):
        open_table(Settings(), {"x": Column()})
