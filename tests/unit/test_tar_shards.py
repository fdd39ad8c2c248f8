"""Tests for tar shards in WebDataset's layout: their index, their rows, and the order in both loaders."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sunspot.data.columns import Column
from sunspot.data.convert import main
from sunspot.data.dataset_files import list_files
from sunspot.data.image_sources import find_sources
from sunspot.data.order import Steps, run_order
from sunspot.data.ray_loader import RoundPlanner, RoundReader
from sunspot.data.source import Source, rows_in
from sunspot.data.table import TableSource, open_table
from sunspot.errors import DataError
from sunspot.settings import Settings
from tests.harness.datasets import everything, random_images, refusal
from tests.harness.shards import encode, image_rows, write_parquet, write_shards, write_tar
from tests.harness.threads import load_in_threads

PNG = encode(random_images(4, 4))


def open_images(location: str | Path) -> TableSource:
    source, _ = find_sources(Settings(dataset=str(location)))
    assert isinstance(source, TableSource)
    return source


def open_columns(location: str | Path, **columns: Column) -> TableSource:
    return open_table(Settings(dataset=str(location)), columns)[0]


def put_samples(folder: Path, *members: tuple[str, Any], rows: int = 2) -> Path:
    """Write a shard with these members, or with this many images of label 1, and its index."""
    folder.mkdir(exist_ok=True)
    given = members or [
        (f"{row}.{suffix}", each) for row in range(rows) for suffix, each in (("png", PNG), ("cls", b"1"))
    ]
    write_tar(folder / "a.tar", given)
    assert main(["--from", "tar", str(folder)]) == 0
    return folder


def streamed(source: Source, step: int, workers: int) -> list[list[int]]:
    """Return the row numbers and sizes that LOADER=ray gives to each worker from a step on."""
    steps = Steps(rows_in(source), 16)
    order = run_order("ray", source.row_groups, 7)
    streams: list[list[int]] = [[] for _ in range(workers)]
    for planned in RoundPlanner(order, steps, 2 * steps.per_epoch, 50)(pa.table({"step": [step]})):
        for rank, part in enumerate(RoundReader(source, order, steps, workers, workers)(planned)):
            streams[rank] += part["row"][0].tolist() + part["size"][0].tolist()
    return streams


def test_shards_give_the_same_rows_in_the_same_order_as_parquet(tmp_path: Path) -> None:
    rows = image_rows(300)
    columns = {"size": Column(), "label": Column("int64")}
    shards = write_shards(tmp_path / "shards", rows, files=2)
    parquet = write_parquet(tmp_path / "parquet", rows, files=2, group=2048)
    for mine, theirs in (
        (open_images(shards), open_images(parquet)),
        (open_columns(shards, **columns), open_columns(parquet, **columns)),
    ):
        mine = pickle.loads(pickle.dumps(mine))
        assert (mine.row_groups, mine.classes, mine.shape) == (theirs.row_groups, theirs.classes, theirs.shape)
        expected = everything(theirs)
        for in_memory, *_ in load_in_threads([mine], ["node", "node"]):
            assert {name: values.tolist() for name, values in in_memory.items()} == {
                name: values.tolist() for name, values in expected.items()
            }
        chosen = np.array([7, 0, 149])
        for name, values in mine.read(1, chosen).items():
            np.testing.assert_array_equal(values, expected[name][150 + chosen])
    for step, workers in ((0, 2), (9, 3), (30, 1)):
        assert streamed(mine, step, workers) == streamed(theirs, step, workers)


def test_row_groups_of_large_samples_contain_few_rows(tmp_path: Path) -> None:
    members = [(f"{row:03}.bin", bytes(40_000)) for row in range(150)]
    source = open_columns(put_samples(tmp_path, *members), bin=Column("int64", (1,), decode=length))
    assert source.row_groups == (103, 47)
    assert everything(source)["bin"].tolist() == [[40_000]] * 150


def length(content: bytes | str) -> list[int]:
    return [len(content)]


def test_each_file_of_a_sample_is_a_column(tmp_path: Path) -> None:
    first, second = random_images(2, 4, 6)
    jpeg = encode(second, "JPEG")
    folder = put_samples(
        tmp_path / "shards",
        ("set/", b""),
        ("set/.hidden", b"x"),
        ("README", b"x"),
        *(("set/a.b/1.PNG", encode(first)), ("set/a.b/1.cls", b"up\n"), ("set/a.b/1.seg.npy", b"12345")),
        *(("set/a.b/1.txt", "h\u00e9".encode()), ("set/a.b/1.json", b'{"size": 1, "mixed": 1, "place": [1, 2]}')),
        *(("set/a.b/2.jpg", jpeg), ("set/a.b/2.cls", b"down"), ("set/a.b/2.seg.npy", b"")),
        *(("set/a.b/2.txt", b""), ("set/a.b/2.json", b'{\n "size": 2.5, "mixed": "x", "place": [3, 4]\n}')),
    )
    images = open_images(folder)
    assert images.class_names == ("down", "up")
    read = everything(images)
    assert read["label"].tolist() == [1, 0]
    np.testing.assert_array_equal(read["image"][0], first[None])
    assert images.where(0, 1).endswith("a.tar, sample set/a.b/2")
    table = open_columns(
        folder,
        size=Column(),
        place=Column("int64", (2,)),
        caption=Column("int64", (1,), decode=length, of="txt"),
        mask=Column("int64", (1,), decode=length, of="seg.npy"),
    )
    assert {name: values.tolist() for name, values in everything(table).items()} == {
        "size": [1.0, 2.5],
        "place": [[1, 2], [3, 4]],
        "caption": [[2], [0]],
        "mask": [[5], [0]],
    }
    with refusal(DataError, "has no column 'mixed'"):
        open_columns(folder, mixed=Column())


def test_columns_whose_values_differ_in_type_are_left_out_with_a_warning(tmp_path: Path, warned: list[str]) -> None:
    put_samples(tmp_path, ("0.json", b'{"x": 1, "y": 1}'), ("1.json", b'{"x": "one", "y": 2}'))
    assert any("the column x is omitted" in text for text in warned)
    assert everything(open_columns(tmp_path, y=Column()))["y"].tolist() == [1, 2]


def test_the_error_for_a_missing_label_names_the_sample(tmp_path: Path) -> None:
    put_samples(tmp_path, ("0.png", PNG), ("0.cls", b"1"), ("lost.png", PNG))
    with refusal(DataError, "a.tar, sample lost: label is null"):
        open_images(tmp_path)


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ([("0.png", PNG), ("1.png", PNG), ("0.cls", b"1")], "--sort=name"),
        ([("0.png", PNG), ("0.jpg", PNG)], "0.jpg contains a second value for the sample's column image"),
        (
            [("0.cls", b"1"), ("0.json", b'{"label": 2}')],
            "0.json contains a second value for the sample's column label",
        ),
        ([("0.json", b"[1]")], "0.json is not a JSON object"),
        ([("0.json", b"{")], "0.json is not a JSON object"),
        ([("0.cls", b"\xff")], "0.cls is not text"),
        ([("0.png", "elsewhere.png")], "0.png is a link"),
        ([("README", b"x")], "it has no samples"),
    ],
)
def test_a_shard_that_cannot_be_split_into_samples_is_rejected(
    members: list[tuple[str, Any]], fault: str, tmp_path: Path
) -> None:
    write_tar(tmp_path / "a.tar", members)
    with refusal(DataError, "a.tar is not a tar file of samples", fault):
        main(["--from", "tar", str(tmp_path)])
    assert not (tmp_path / "a.tar.index").exists()


@pytest.mark.parametrize("kept", [700, 1024 + 50, 3 * 512, 4 * 1024])
def test_an_incomplete_shard_is_rejected(kept: int, tmp_path: Path) -> None:
    path = put_samples(tmp_path, rows=2) / "a.tar"
    assert 2 * 2 * 1024 == 4096  # headers and contents of four members
    path.write_bytes(path.read_bytes()[:kept])
    with refusal(DataError, "a.tar"):
        main(["--from", "tar", str(tmp_path)])


def test_a_shard_that_contains_a_second_archive_is_rejected(tmp_path: Path) -> None:
    path = put_samples(tmp_path) / "a.tar"
    path.write_bytes(path.read_bytes() * 2)
    with refusal(DataError, "followed by another tar file"):
        main(["--from", "tar", str(tmp_path)])


def test_a_shard_with_a_missing_or_damaged_or_outdated_index_is_rejected(tmp_path: Path) -> None:
    folder = put_samples(tmp_path)
    path = folder / "a.tar"
    index = (folder / "a.tar.index").read_bytes()
    fix = f"python -m sunspot.data.convert --from tar {folder}"
    assert rows_in(open_images(path)) == 2
    for content in (None, b"", index[:-100]):
        (folder / "a.tar.index").unlink()
        if content is not None:
            (folder / "a.tar.index").write_bytes(content)
        with refusal(DataError, "a.tar has no intact index", fix):
            open_images(folder)
        (folder / "a.tar.index").write_bytes(index)
    write_tar(path, [(f"{row}.png", PNG) for row in range(40)])
    with refusal(DataError, "a.tar has changed since its index was written", fix):
        open_images(folder)


def test_a_shard_that_was_rewritten_with_the_same_size_is_noticed(tmp_path: Path) -> None:
    source = open_images(put_samples(tmp_path, rows=3))
    before = source.fingerprint
    path = tmp_path / "a.tar"
    size = path.stat().st_size
    write_tar(path, [(f"{row}.{suffix}", each) for row in range(3) for suffix, each in (("png", PNG), ("cls", b"2"))])
    assert path.stat().st_size == size
    with refusal(DataError, "a.tar, sample 0 does not match its checksum", "--from tar"):
        open_images(tmp_path)
    assert main(["--from", "tar", str(tmp_path)]) == 0
    assert everything(open_images(tmp_path))["label"].tolist() == [2, 2, 2]
    assert open_images(tmp_path).fingerprint != before


def test_indexing_a_shard_again_does_not_change_the_data(tmp_path: Path) -> None:
    before = open_images(put_samples(tmp_path)).fingerprint
    index = tmp_path / "a.tar.index"
    pq.write_table(pq.read_table(index), index, use_dictionary=False)
    assert open_images(tmp_path).fingerprint == before
    os.rename(tmp_path, tmp_path.with_name("copy"))
    assert open_images(tmp_path.with_name("copy")).fingerprint == before


def test_indexed_shards_take_precedence_over_parquet_files_beside_them(tmp_path: Path) -> None:
    """img2dataset writes a Parquet file and statistics beside each tar file."""
    put_samples(tmp_path)
    pq.write_table(pa.table({"url": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a_stats.json").write_text("{}")
    assert list_files(str(tmp_path)).names == ["a.tar"]
    assert "such as a.parquet, are skipped" in list_files(str(tmp_path)).notes[0]


def test_compressed_shards_and_folders_without_shards_are_rejected(tmp_path: Path) -> None:
    with refusal(DataError, "contains no *.tar"):
        main(["--from", "tar", str(tmp_path)])
    put_samples(tmp_path)
    for name in ("b.tgz", "b.tar.gz"):
        (tmp_path / name).touch()
        with refusal(DataError, f"{name} is compressed"):
            open_images(tmp_path)
        (tmp_path / name).unlink()


def test_delta_tables_are_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1]}), tmp_path / "part-0.parquet")
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / "00000000000000000000.json").touch()
    with refusal(DataError, "is a Delta table", "as Parquet"):
        list_files(str(tmp_path))


def test_lance_datasets_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.lance").touch()
    with refusal(DataError, "is a Lance dataset", "as Parquet"):
        list_files(str(tmp_path))
