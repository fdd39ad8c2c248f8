"""Tests for packing lists into rows of equal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data.columns import Column
from sunspot.data.packing import PackedSource, open_packed
from sunspot.data.source import rows_in
from sunspot.data.table import LISTS_AT_ONCE
from sunspot.errors import DataError, SettingsError
from sunspot.settings import Settings
from tests.harness import REPOSITORY
from tests.harness.datasets import everything, refusal


def pack(folder: Path, lists: list[list[int]], length: int, row_group_size: int = 3) -> PackedSource:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"x": pa.array(lists, pa.list_(pa.int32()))}), path, row_group_size=row_group_size)
    source, _ = open_packed(Settings(dataset=str(path)), {"x": Column("int64", fill=-1)}, length)
    return source


def test_packing_concatenates_lists(tmp_path: Path) -> None:
    source = pack(tmp_path, [[1, 2, 3], [], [4, 5, 6, 7], [8]], length=4)
    found = everything(source)
    np.testing.assert_array_equal(found["x"], [[1, 2, 3, 4], [5, 6, 7, -1], [8, -1, -1, -1]])
    np.testing.assert_array_equal(found["x_length"], [4, 3, 1])
    np.testing.assert_array_equal(found["position"], [[0, 1, 2, 0], [0, 1, 2, 0], [0, 0, 0, 0]])
    assert source.row_groups == (2, 1)
    assert source.shape == (4,)


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12), length=st.integers(1, 9))
def test_every_packed_value_is_in_exactly_one_row(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int
) -> None:
    if not sum(lengths):
        return
    values = iter(range(sum(lengths)))
    lists = [[next(values) for _ in range(each)] for each in lengths]
    source = pack(tmp_path_factory.mktemp("packed"), lists, length)
    found = everything(source)
    kept = [row[:used] for row, used in zip(found["x"], found["x_length"], strict=True)]
    np.testing.assert_array_equal(np.concatenate(kept), np.arange(sum(lengths)))
    begins = {each[0] for each in lists if each} | {int(row[0]) for row in found["x"]}
    starts = {
        int(value)
        for row, places, used in zip(found["x"], found["position"], found["x_length"], strict=True)
        for value, place in zip(row[:used], places, strict=False)
        if place == 0
    }
    assert starts == begins
    group = max(range(len(source.row_groups)), key=lambda number: source.row_groups[number])
    chosen = np.array([source.row_groups[group] - 1, 0])
    for name, array in source.read(group, chosen).items():
        np.testing.assert_array_equal(array, source.read(group)[name][chosen])


class CountingDecoder:
    """A `decode` that returns lists of two values and counts its calls."""

    thread_safe = True

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, value: int) -> list[int]:
        self.calls.append(value)
        return [value, -value]


def test_decoding_stops_after_the_last_requested_row(tmp_path: Path) -> None:
    lists = 3 * LISTS_AT_ONCE
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": range(lists)}), path)
    decode = CountingDecoder()
    source, _ = open_packed(Settings(dataset=str(path)), {"x": Column("int64", decode=decode)}, length=4)
    everything = source.read(0)["x"]
    assert everything.tolist() == [[n, -n, n + 1, -n - 1] for n in range(0, lists, 2)]
    for last, calls in ((1, LISTS_AT_ONCE), (LISTS_AT_ONCE // 2, 2 * LISTS_AT_ONCE), (lists // 2 - 1, lists)):
        decode.calls.clear()
        found = source.read(0, np.array([last, 0]))
        assert found["x"].tolist() == everything[[last, 0]].tolist()
        assert found["x_length"].tolist() == [4, 4]
        assert len(decode.calls) == calls


def test_columns_are_packed_at_the_same_positions(tmp_path: Path) -> None:
    columns = {"x": Column("int64"), "weight": Column()}
    good = pa.table({"x": [[1, 2], [3]], "weight": [[0.5, 1], [0]]})
    pq.write_table(good, tmp_path / "good.parquet")
    source, _ = open_packed(Settings(dataset=str(tmp_path / "good.parquet")), columns, 2)
    np.testing.assert_array_equal(everything(source)["weight"], [[0.5, 1], [0, 0]])
    assert rows_in(source) == 2
    pq.write_table(pa.table({"x": [[1, 2], [3]], "weight": [[0.5, 1], [0, 1]]}), tmp_path / "bad.parquet")
    with refusal(DataError, "bad.parquet, row 1", "weight has 2 values", "x has 1"):
        open_packed(Settings(dataset=str(tmp_path / "bad.parquet")), columns, 2)


def test_the_fingerprint_depends_on_the_packed_length(tmp_path: Path) -> None:
    lists = [[1, 2, 3], [4]]
    assert pack(tmp_path, lists, 2).fingerprint == pack(tmp_path, lists, 2).fingerprint
    assert pack(tmp_path, lists, 2).fingerprint != pack(tmp_path, lists, 4).fingerprint


def test_columns_that_cannot_be_packed_are_rejected(tmp_path: Path) -> None:
    with refusal(DataError, "a.parquet", "all lists of x are empty"):
        pack(tmp_path, [[], []], 2)
    with refusal(SettingsError, "column 'x' cannot be packed"):
        open_packed(Settings(dataset=str(tmp_path)), {"x": Column(shape=(2,))}, 2)


def test_text_columns_are_tokenized(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    from sunspot.data.tokens import Tokenizer

    words = {"[UNK]": 0, "a": 1, "b": 2}
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens.enable_truncation(1)
    tokenizer = Tokenizer(tokens.to_str().encode(), end=3)
    path = tmp_path / "text.parquet"
    pq.write_table(pa.table({"text": ["a b", "b b a ?"]}), path)
    source, _ = open_packed(Settings(dataset=str(path)), {"x": Column("int64", decode=tokenizer, of="text")}, 4)
    found = everything(source)
    np.testing.assert_array_equal(found["x"], [[1, 2, 3, 2], [2, 1, 0, 3]])
    np.testing.assert_array_equal(found["position"], [[0, 1, 2, 0], [0, 1, 2, 3]])
    (tmp_path / "tokenizer.json").write_text(tokens.to_str())
    page = (REPOSITORY / "docs" / "data.md").read_text()
    names: dict[str, Any] = {}
    exec(page[page.index("# sequences.py") :].split("```", 1)[0], names)
    settings = Settings(dataset=str(path), task_args={"tokenizer": str(tmp_path / "tokenizer.json")})
    documented, _ = names["find_sources"](settings)
    assert documented.read(0)["tokens"][0, :7].tolist() == [1, 2, 1, 2, 2, 1, 0]
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with refusal(DataError, "text.parquet, row 0", "x has type int, but the tokenizer needs text"):
        open_packed(Settings(dataset=str(path)), {"x": Column("int64", decode=tokenizer, of="text")}, 4)
