"""Tests for CSV and JSON lines from other programs: text is kept unchanged, and errors include the line."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sunspot.data.columns import Column
from sunspot.data.source import ModelData, PredictionSettings
from sunspot.data.table import TableSource, open_table
from sunspot.errors import DataError
from sunspot.plan import describe_classes
from sunspot.settings import Settings
from tests.harness.datasets import everything, refusal

LABEL = {"label": Column("int64")}


def open_text(location: Path, **columns: Column) -> TableSource:
    return open_table(Settings(dataset=str(location)), columns)[0]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def characters(value: Any) -> list[int]:
    assert isinstance(value, str), type(value)
    return [ord(character) for character in value]


def read_text(path: Path) -> list[str]:
    found = everything(open_text(path, text=Column("int64", longest=50, decode=characters)))
    rows = zip(found["text"].tolist(), found["text_length"], strict=True)
    return ["".join(map(chr, row[:length])) for row, length in rows]


# ----------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    "text",
    ["00042", "True", "2024-05-01", "2024-05-01T10:00:00Z", "1.50", "NA", "null", "", " padded ", "1e5", "10:30"],
)
def test_text_reaches_the_task_unchanged(tmp_path: Path, text: str) -> None:
    assert read_text(write(tmp_path / "a.csv", f"n,text\n1,{text}\n2,{text}\n")) == [text, text]
    assert read_text(write(tmp_path / "a.jsonl", f'{{"n": 1, "text": "{text}"}}\n' * 2)) == [text, text]


def test_dates_in_json_lists_and_objects_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"x": [{"on": "2024-05-01"}], "n": 1, "more": "2024-05-01"}\n')
    column = Column("int64", longest=50, decode=lambda value: characters(value[0]["on"]))
    assert everything(open_text(path, x=column, n=Column("int64")))["x_length"].tolist() == [10]


def test_tasks_can_read_numbers_in_csv_as_text(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "text\nhello\n")
    write(tmp_path / "b.csv", "text\n2024\n")
    assert read_text(tmp_path) == ["hello", "2024"]


# --------------------------------------------------------------------------------------------------------------- labels


def open_labels(folder: Path, files: dict[str, list[str]], suffix: str = "csv") -> TableSource:
    for name, labels in files.items():
        lines = ["label", *labels] if suffix == "csv" else [f'{{"label": {label}}}' for label in labels]
        write(folder / f"{name}.{suffix}", "\n".join(lines) + "\n")
    return open_text(folder, **LABEL)


@pytest.mark.parametrize(
    ("files", "names", "numbers"),
    [
        ({"a": ["01", "02", "10"]}, ["01", "02", "10"], [0, 1, 2]),
        ({"a": ["10", "11"], "b": ["09", "10"]}, ["09", "10", "11"], [1, 2, 0, 1]),
        ({"a": ["1", "2"], "b": ["x", "1"]}, ["1", "2", "x"], [0, 1, 2, 0]),
        ({"a": ["True", "False"]}, ["False", "True"], [1, 0]),
        ({"a": ["2024-01-01", "2024-02-01"]}, ["2024-01-01", "2024-02-01"], [0, 1]),
        ({"a": ["NA", "DE"]}, ["DE", "NA"], [1, 0]),
        ({"a": ["2", "0"], "b": [" 1"]}, [], [2, 0, 1]),
    ],
)
def test_csv_labels_are_class_names_unless_all_labels_are_numbers(
    tmp_path: Path, files: dict[str, list[str]], names: list[str], numbers: list[int]
) -> None:
    source = open_labels(tmp_path, files)
    assert (list(source.class_names), everything(source)["label"].tolist()) == (names, numbers)


def test_dates_and_digits_in_json_strings_are_class_names(tmp_path: Path) -> None:
    assert open_labels(tmp_path, {"a": ['"2024-01-02"', '"2024-01-01"']}, "jsonl").class_names == (
        "2024-01-01",
        "2024-01-02",
    )
    assert open_labels(tmp_path, {"a": ['"10"', '"02"']}, "jsonl").class_names == ("02", "10")


def test_held_out_and_predicted_labels_use_the_training_classes(tmp_path: Path) -> None:
    write(tmp_path / "train/a.csv", "label\n01\n10\n")
    write(tmp_path / "test/a.csv", "label\n10\n")
    train, test = open_table(Settings(dataset=str(tmp_path)), LABEL)
    assert test
    assert (test.class_names, everything(test)["label"].tolist()) == (("01", "10"), [1])
    to_predict = PredictionSettings.of(Settings(dataset=str(tmp_path / "test")), ModelData.of(train))
    assert everything(open_table(to_predict, LABEL)[0])["label"].tolist() == [1]
    write(tmp_path / "test/a.csv", "label\n11\n")
    with refusal(DataError, "'11' is not one of the classes in the training data (01, 10)"):
        open_table(Settings(dataset=str(tmp_path)), LABEL)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["1", "NA"], "row 1 (line 3): label is NA; it must be"),
        (["1", ""], "row 1 (line 3): label is empty"),
        (["0", "-1"], "row 1 (line 3): label is -1"),
        (["1", "1.0"], "row 1 (line 3): label is 1.0"),
        (["0", "3000000000"], "row 1 (line 3): label is 3000000000; it must be an integer from 0 to 2147483647"),
    ],
)
def test_errors_about_invalid_labels_name_the_row(tmp_path: Path, labels: list[str], said: str) -> None:
    write(tmp_path / "a.csv", "label,x\n" + "".join(f"{label},1\n" for label in labels))
    with refusal(DataError, "a.csv", said):
        open_text(tmp_path / "a.csv", **LABEL)


def test_the_plan_counts_the_classes_that_have_rows(tmp_path: Path) -> None:
    said = describe_classes(open_labels(tmp_path, {"a": ["1", "2", "10"]}))
    assert said == "11 classes, of which 3 have rows (labels are numbers from 0 to 10)"
    assert describe_classes(open_labels(tmp_path, {"a": ["1", "0"]})) == "2 classes"


def test_too_many_class_names_for_the_label_type_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "label\n" + "".join(f"c{number}\n" for number in range(300)))
    with refusal(DataError, "300 classes do not fit in uint8; declare label as int64"):
        open_text(path, label=Column("uint8"))


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("cells", "dtype", "expected"),
    [
        ("1,2", "float32", [1, 2]),
        (" 1.5 ,+2", "float64", [1.5, 2]),
        ("true,False", "float32", [1, 0]),
        ("TRUE,3", "int64", [1, 3]),
        ("007,-1", "int32", [7, -1]),
        (".5,1e3", "float16", [0.5, 1000]),
        ("16777218,16777217.5", "float32", [16777218, 16777218]),
        ("9223372036854775807,+1", "int64", [2**63 - 1, 1]),
    ],
)
def test_csv_cells_are_converted_to_numbers_of_the_declared_type(
    tmp_path: Path, cells: str, dtype: str, expected: list[float]
) -> None:
    path = write(tmp_path / "a.csv", "x\n" + cells.replace(",", "\n"))
    found = everything(open_text(path, x=Column(dtype)))["x"]
    assert (found.dtype, found.tolist()) == (np.dtype(dtype), expected)


@pytest.mark.parametrize(
    ("cell", "dtype", "said"),
    [
        ("n/a", "float32", "is 'n/a', but float32 needs a number"),
        ('""', "float32", "is empty, but float32 needs a number"),
        ('"1,234"', "float32", "is '1,234', but float32 needs a number; write numbers with a decimal point"),
        ("nan", "float32", "has the value nan, but float32 allows only finite numbers"),
        ("inf", "float64", "has the value inf"),
        ("1e400", "float64", "has the value inf, but float64 allows only finite numbers"),
        ("1e39", "float32", "has the value 1e+39"),
        ("3.0", "int64", "is '3.0', but int64 needs an integer"),
        ("0x10", "int64", "is '0x10'"),
        ("9223372036854775808", "int64", "is 9223372036854775808, which is too large for int64"),
        ("300", "uint8", "has the value 300, but uint8 allows only 0 to 255"),
        ("16777217", "float32", "has the value 16777217, but float32 represents integers exactly only up to 16777216"),
        ("9007199254740993", "float64", "has the value 9007199254740993, but float64 represents"),
    ],
)
def test_csv_cells_are_checked_before_training(tmp_path: Path, cell: str, dtype: str, said: str) -> None:
    path = write(tmp_path / "a.csv", f'text,x\n"two\nlines",1\n\nb,{cell}\n')
    with refusal(DataError, f"a.csv, row 1 (line 5): x {said}"):
        open_text(path, x=Column(dtype))


def test_a_list_in_a_csv_cell_needs_a_decode_function(tmp_path: Path) -> None:
    with refusal(DataError, "x is string", "with a decode function"):
        open_text(write(tmp_path / "a.csv", 'x\n"1,2"\n'), x=Column(shape=(2,)))


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x;label\n1,5;up\n", "a.csv: cells are separated by semicolons (x;label); separate them with commas"),
        ("x\tlabel\n1\tup\n", "a.csv: cells are separated by tabs"),
        ("x|label\n1|up\n", "a.csv: cells are separated by bars"),
        ("x,label\n1,up\n".encode("utf-16"), "a.csv: the file is UTF-16 or binary; save it as UTF-8"),
        ("x,label\n1,up\n2,gr\u00fcn\n".encode("latin-1"), "line 3 is not UTF-8: byte 0xfc would be 'ü' in Latin-1"),
        ("x,gr\u00fcn\n1,2\n".encode("latin-1"), "a.csv: line 1 is not UTF-8"),
        ('x,label\n\n1,"up\nor down"\n2\n', "a.csv: line 5 has 1 cell, but the header has 2: 2; correct it"),
        ("x,label\n1,up,\n", "a.csv: line 2 has 3 cells, but the header has 2"),
        ('x,label\n1,up\n2,"down\n3,up\n', "a.csv: the row that begins on line 3 opens a quote"),
        (gzip.compress(b"x,label\n1,up\n", mtime=0), "a.csv: the file is compressed (gzip); unpack it"),
        ("", "a.csv: the file is empty; add rows, or remove the file"),
        ("x,label\n", "a.csv has no rows; add rows, or remove the file"),
        ("x, label\n1,up\n", "among its columns (x,  label); remove the spaces around the column's name"),
        ("1,up\n2,down\n", "these values; the first line must contain the column names"),
        ("x,x,label\n1,2,up\n", "several columns named 'x'; rename all but one"),
    ],
)  # fmt: skip
def test_errors_about_csv_explain_the_fault(tmp_path: Path, content: str | bytes, said: str) -> None:
    with refusal(DataError, said):
        open_text(write(tmp_path / "a.csv", content), x=Column(), **LABEL)


def test_a_quote_inside_an_unquoted_cell_is_an_ordinary_character(tmp_path: Path) -> None:
    assert read_text(write(tmp_path / "a.csv", 'text\n5" pipe\nb\n')) == ['5" pipe', "b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'\xef\xbb\xbf[{"x": 1}]', "a.jsonl is a single JSON array"),
        ('{"x": 1}\n'.encode("utf-16"), "a.jsonl: the file is UTF-16 or binary"),
        ('{"x": 1}\n{"x": 1, "y": "\u00fc"}\n'.encode("latin-1"), "a.jsonl: line 2 is not UTF-8"),
        (b'{"x": 1}\n{"x":', "a.jsonl: not a JSON lines file, or damaged: JSON parse error: Invalid value. in row 1"),
        (b'{"x": 1}\n{"x": "1"}\n', "changed from number to string in row 1"),
        (b"", "a.jsonl: the file is empty; add rows, or remove the file"),
    ],
)
def test_errors_about_json_lines_explain_the_fault(tmp_path: Path, content: bytes, said: str) -> None:
    with refusal(DataError, said):
        open_text(write(tmp_path / "a.jsonl", content), x=Column())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("9007199254740993", "1.5", "line 1: x has the value 9007199254740993, "),
        ("1.5", "9223372036854775809", "line 2: x has the value 9223372036854775809, "),
        ("[1, 2]", "[18446744073709551615, 1]", "line 2: x has the value 18446744073709551615, "),
        ('{"u": 0.5}', '{"u": 9007199254740993}', "line 2: x has the value 9007199254740993, "),
    ],
)
def test_json_integers_that_do_not_fit_a_float_are_rejected(tmp_path: Path, first: str, second: str, said: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"x": {first}, "y": 1}}\n{{"x": {second}, "y": 2}}\n')
    with refusal(DataError, f"a.jsonl, {said}which float64 cannot represent exactly"):
        everything(open_text(path, x=Column("float64", decode=lambda value: 0.0)))
    assert everything(open_text(path, y=Column()))["y"].tolist() == [1, 2], "columns that are not read are not checked"


def test_large_json_integers_that_fit_a_float64_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"x": 9007199254740994, "y": 9007199254740993}\n{"x": 1e300, "y": 1}\n')
    found = everything(open_text(path, x=Column("float64"), y=Column("int64")))
    assert (found["x"].tolist(), found["y"].tolist()) == ([2.0**53 + 2, 1e300], [2**53 + 1, 1])


@pytest.mark.parametrize(
    ("between", "named"),
    [("\n", "row 2 (line 3): x is null"), ("\n\n", "row 2 (line 5): x is null"), (" ", "row 2: x is null")],
)
def test_errors_about_json_rows_name_the_line(tmp_path: Path, between: str, named: str) -> None:
    path = write(tmp_path / "a.jsonl", between.join(('{"x": 1}', '{"x": 2}', '{"x": null}')))
    with refusal(DataError, f"a.jsonl, {named}; fill it in, or remove the row"):
        everything(open_text(path, x=Column()))


def test_a_file_with_only_empty_lists_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"x": []}\n{"x": []}\n')
    write(tmp_path / "b.jsonl", '{"x": [3]}\n')
    assert everything(open_text(tmp_path, x=Column("int64", longest=2)))["x"].tolist() == [[0, 0], [0, 0], [3, 0]]
    write(tmp_path / "a.jsonl", '{"x": [null]}\n')
    with refusal(DataError, "a.jsonl, row 0 (line 1): x contains a null"):
        everything(open_text(tmp_path, x=Column("int64", longest=2)))


def test_an_error_lists_only_some_of_many_columns(tmp_path: Path) -> None:
    names = [*(f"f{number:04}" for number in range(5000)), "labels"]
    path = write(tmp_path / "a.csv", ",".join(names) + "\n" + ",".join(["1"] * 5001) + "\n")
    with pytest.raises(DataError, match=r"\(labels, f0000, .* and 4991 more\)") as caught:
        open_text(path, **LABEL)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["b.csv.gz", "b.jsonl.zst", "b.CSV.ZIP"])
def test_compressed_files_are_rejected_rather_than_skipped(tmp_path: Path, name: str) -> None:
    write(tmp_path / "rows/a.csv", "x\n1\n")
    packed = write(tmp_path / "rows" / name, b"\x1f\x8b")
    for location in (tmp_path / "rows", packed):
        with refusal(DataError, f"{name} is compressed; unpack it"):
            open_text(location, x=Column())
