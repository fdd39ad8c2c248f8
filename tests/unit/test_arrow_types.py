"""Tests that text, bytes, numbers and lists of any Arrow type are read like those of plain types."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sunspot.data.columns import Column
from sunspot.data.image_table import open_images
from sunspot.data.table import open_table
from sunspot.errors import DataError
from sunspot.settings import Settings
from tests.harness.datasets import everything, refusal
from tests.unit.test_table import png, save_dataset


def plain(values: list[Any], stored: pa.DataType) -> pa.Array:
    return pa.array([values[0], values[1], values[1]], stored)


def dictionary(values: list[Any], stored: pa.DataType) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), pa.array(values, stored))


def runs(values: list[Any], stored: pa.DataType) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array(values, stored))


def read(folder: Path, values: pa.Array, column: Column) -> dict[str, np.ndarray]:
    """Read a column of a saved dataset, both completely and by selected rows.

    If Parquet supports the type, a Parquet file with this column must give the same values.
    """
    save_dataset(folder / "saved", [pa.table({"label": values})])
    locations = [folder / "saved"]
    with contextlib.suppress(pa.ArrowNotImplementedError):
        pq.write_table(pa.table({"label": values}), folder / "a.parquet", row_group_size=2)
        locations.append(folder / "a.parquet")
    sources = [open_table(Settings(dataset=str(location)), {"label": column})[0] for location in locations]
    for source in sources:
        np.testing.assert_array_equal(everything(source)["label"], everything(sources[0])["label"])
        np.testing.assert_array_equal(source.read(0, np.array([1]))["label"], source.read(0)["label"][1:2])
    return everything(sources[0])


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


def codes_of_json(value: Any) -> list[int]:
    return codes(json.dumps(value))


@pytest.mark.parametrize("stored", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
@pytest.mark.parametrize("form", [plain, dictionary, runs])
def test_text_of_any_arrow_type_is_read(tmp_path: Path, form: Any, stored: pa.DataType) -> None:
    values = form(["b", "a"], stored)
    assert read(tmp_path / "label", values, Column("int64"))["label"].tolist() == [1, 0, 0]
    found = read(tmp_path / "decoded", values, Column("int64", longest=2, decode=codes))
    assert found["label"].tolist() == [[98, 0], [97, 0], [97, 0]]


@pytest.mark.parametrize("stored", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("form", [plain, dictionary, runs])
def test_encoded_images_of_any_arrow_type_are_read(tmp_path: Path, form: Any, stored: pa.DataType) -> None:
    pictures = form([png(3, 4), png(3, 4)], stored)
    save_dataset(tmp_path / "saved", [pa.table({"image": pictures, "label": [0, 1, 1]})])
    assert everything(open_images(str(tmp_path / "saved")))["image"].shape == (3, 3, 3, 4)


@pytest.mark.parametrize("form", [plain, dictionary, runs])
def test_numbers_in_any_arrow_encoding_are_read(tmp_path: Path, form: Any) -> None:
    assert read(tmp_path, form([7, 8], pa.int16()), Column())["label"].tolist() == [7, 8, 8]


@pytest.mark.parametrize(
    "stored",
    [pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 2), pa.list_view(pa.int8())],
    ids=str,
)
def test_lists_of_any_arrow_type_are_read(tmp_path: Path, stored: pa.DataType) -> None:
    values = plain([[1, 2], [3, 4]], stored)
    assert read(tmp_path / "fixed", values, Column(shape=(2,)))["label"].tolist() == [[1, 2], [3, 4], [3, 4]]
    assert read(tmp_path / "longest", values, Column(longest=2))["label_length"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([["ab"], ["c", "d"]], pa.list_(pa.string_view())),
        ([["ab"], ["c", "d"]], pa.list_view(pa.string_view())),
        ([{"t": "ab"}, {"t": "c"}], pa.struct([("t", pa.string_view())])),
    ],
    ids=["list", "list view", "struct"],
)
def test_nested_arrow_views_are_read(tmp_path: Path, values: list[Any], stored: pa.DataType) -> None:
    found = read(tmp_path, plain(values, stored), Column("int64", longest=99, decode=codes_of_json))
    assert [bytes(row[row > 0].tolist()).decode() for row in found["label"]] == [
        json.dumps(values[number]) for number in (0, 1, 1)
    ]


@pytest.mark.parametrize("form", [plain, dictionary])
@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (["1", "2"], pa.string_view()),
        ([b"1", b"2"], pa.binary(1)),
        ([1, 2], pa.decimal128(5)),
        ([1, 2], pa.duration("s")),
        ([[1], [2]], pa.list_(pa.int8())),
    ],
    ids=str,
)
def test_errors_about_types_that_are_not_numeric_name_the_type(
    tmp_path: Path, form: Any, values: list[Any], stored: pa.DataType
) -> None:
    with refusal(DataError, "but the task declares numbers of type float32"):
        read(tmp_path, form(values, stored), Column())
