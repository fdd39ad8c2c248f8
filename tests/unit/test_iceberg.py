"""Tests for Iceberg tables: the files of a snapshot, and tables that cannot be read from Parquet files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sunspot.data.avro import read_avro
from sunspot.data.columns import Column
from sunspot.data.iceberg import find_snapshot
from sunspot.data.image_sources import find_sources
from sunspot.data.table import TableSource, open_table
from sunspot.errors import DataError
from sunspot.settings import Settings
from tests.harness.datasets import everything, refusal
from tests.harness.iceberg import DATA_FILE, ROOT, avro, data_file, write_iceberg, write_snapshot
from tests.harness.shards import image_rows, write_parquet

IDS = {"image": 1, "label": 2, "size": 3}


def open_images(location: str | Path) -> TableSource:
    source, _ = find_sources(Settings(dataset=str(location)))
    assert isinstance(source, TableSource)
    return source


def test_a_table_gives_the_same_rows_in_the_same_row_groups_as_parquet(tmp_path: Path) -> None:
    rows = image_rows(120)
    table = open_images(write_iceberg(tmp_path / "table", rows, 3, group=16))
    parquet = open_images(write_parquet(tmp_path / "parquet", rows, 3, group=16))
    assert table.row_groups == parquet.row_groups
    expected = everything(parquet)
    for name, values in everything(table).items():
        np.testing.assert_array_equal(values, expected[name])
    assert table.notes == (
        f"{tmp_path}/table: reading snapshot 13; if the table changes, resume with SUNSPOT_DATASET={tmp_path}/table@13",
    )


def test_a_new_snapshot_counts_as_different_data_and_old_snapshots_stay_readable(tmp_path: Path) -> None:
    table = tmp_path / "table"
    before = open_images(write_iceberg(table, image_rows(40), 2))
    files = [data_file("data/000.parquet"), data_file("data/001.parquet")]
    write_snapshot(table, 20, files, IDS)
    assert open_images(table).fingerprint == before.fingerprint
    shutil.copy(table / "data" / "001.parquet", table / "data" / "002.parquet")
    write_snapshot(table, 30, [*files, data_file("data/002.parquet")], IDS)
    assert sum(open_images(table).row_groups) == 60
    assert open_images(table).fingerprint != before.fingerprint
    assert open_images(f"{table}@12").fingerprint == before.fingerprint
    with refusal(DataError, "has no snapshot 99", "12, 20, 30", f"SUNSPOT_DATASET={table}@ID"):
        open_images(f"{table}@99")


def replace_state(table: Path, **values: object) -> None:
    path = max((table / "metadata").glob("*.metadata.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def add_file(content: int, form: str, path: str = "data/x") -> Callable[[Path], None]:
    return lambda table: write_snapshot(table, 20, [data_file("data/000.parquet"), data_file(path, content, form)], IDS)


def write_again(table: Path) -> None:
    shutil.copy(table / "metadata" / "00000-uuid.metadata.json", table / "metadata" / "00000-other.metadata.json")


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (add_file(1, "PARQUET"), ["has delete files", "data/x", "rewrite_data_files", "remove-dangling-deletes=true"]),
        (add_file(1, "PUFFIN"), ["has delete files"]),
        (add_file(0, "ORC"), ["formats other than Parquet"]),
        (lambda table: write_snapshot(table, 20, [], IDS), ["has no rows"]),
        (lambda table: replace_state(table, **{"current-snapshot-id": -1}), ["has no snapshot -1 (available: 12"]),
        (lambda table: replace_state(table, location="s3://other/table"), ["is outside its Iceberg table's folder"]),
        (lambda table: replace_state(table, snapshots=3), ["does not describe an Iceberg table"]),
        (write_again, ["00000-other.metadata.json", "only one of these can be current"]),
        (lambda table: (table / "metadata" / "snap-12.avro").write_bytes(b"Obj"), ["snap-12.avro is damaged"]),
        (lambda table: (table / "metadata" / "12-m0.avro").unlink(), ["12-m0.avro was not found"]),
    ],
)
def test_damaged_or_unsupported_iceberg_tables_are_rejected(
    change: Callable[[Path], object], faults: list[str], tmp_path: Path
) -> None:
    table = tmp_path / "table"
    write_iceberg(table, image_rows(40), 2)
    change(table)
    with refusal(DataError, *faults):
        open_images(table)


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_avro_values_of_every_type_are_decoded(codec: str) -> None:
    content = avro(DATA_FILE, [data_file("a"), data_file("b", 1)], codec)
    first, second = read_avro(content, "file")
    assert first == {
        "content": 0,
        "file_path": f"{ROOT}/a",
        "file_format": "PARQUET",
        "partition": {},
        "record_count": 150,
        "sizes": [7, -300],
        "id": b"ab",
        "numbers": [0.5, 0.5, True],
    }
    assert second == first | {"content": 1, "file_path": f"{ROOT}/b"}
    for wrong in (avro(DATA_FILE, [], "snappy"), content[:-16] + b"x" * 16):
        with refusal(DataError, "file is damaged, or is not an Avro file with the codec null or deflate"):
            read_avro(wrong, "file")


@pytest.mark.parametrize("kept", [3, 30, -1, -17, -40])
def test_a_damaged_manifest_is_rejected(kept: int, tmp_path: Path) -> None:
    write_iceberg(tmp_path / "table", image_rows(40), 2)
    path = tmp_path / "table" / "metadata" / "12-m0.avro"
    path.write_bytes(path.read_bytes()[:kept])
    with refusal(DataError, "12-m0.avro is damaged"):
        find_snapshot(str(tmp_path / "table"))


def test_a_file_with_a_different_column_of_the_same_name_is_rejected(tmp_path: Path) -> None:
    write_iceberg(tmp_path / "table", image_rows(40), 2)
    files = [data_file("data/000.parquet"), data_file("data/001.parquet")]
    write_snapshot(tmp_path / "table", 20, files, IDS | {"size": 4})
    settings = Settings(dataset=str(tmp_path / "table"))
    assert open_table(settings, {"label": Column("int64")})[0].row_groups == (20, 20)
    with refusal(DataError, "000.parquet: size was a different column", "rewrite-all=true"):
        open_table(settings, {"size": Column()})


def test_a_folder_called_metadata_does_not_make_an_iceberg_table(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "a.parquet")
    assert find_snapshot(str(tmp_path)) is None
    assert open_table(Settings(dataset=str(tmp_path)), {"x": Column()})[0].row_groups == (1,)
