"""Writes Iceberg tables with the metadata, manifest lists and manifests of version 2."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = "s3://warehouse/table"
"""The folder of each table according to its metadata. The test tables are elsewhere, like copies of a table."""

DATA_FILE = {
    "type": "record",
    "name": "r2",
    "fields": [
        {"name": "content", "type": "int"},
        {"name": "file_path", "type": "string"},
        {"name": "file_format", "type": "string"},
        {"name": "partition", "type": {"type": "record", "name": "r102", "fields": []}},
        {"name": "record_count", "type": "long"},
        {"name": "sizes", "type": ["null", {"type": "array", "items": "long"}], "default": None},
        {"name": "id", "type": {"type": "fixed", "name": "f", "size": 2}},
        {"name": "numbers", "type": {"type": "array", "items": ["double", "float", "boolean"]}},
    ],
}
ENTRY = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [{"name": "status", "type": "int"}, {"name": "data_file", "type": DATA_FILE}],
}
MANIFEST = {"type": "record", "name": "manifest_file", "fields": [{"name": "manifest_path", "type": "string"}]}


def long(number: int) -> bytes:
    """Encode an integer in Avro's zigzag encoding with a variable length."""
    bits = number << 1 ^ number >> 63
    out = b""
    while bits >= 0x80:
        out += bytes([bits & 0x7F | 0x80])
        bits >>= 7
    return out + bytes([bits])


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return long(len(content)) + content


def data_file(path: str, content: int = 0, form: str = "PARQUET") -> bytes:
    """Encode a record of DATA_FILE. Its last fields cover the types that its other fields do not use."""
    sizes = long(1) + long(-2) + long(16) + long(7) + long(-300) + long(0)
    numbers = long(3) + long(0) + struct.pack("<d", 0.5) + long(1) + struct.pack("<f", 0.5) + long(2) + b"\1" + long(0)
    return long(content) + text(f"{ROOT}/{path}") + text(form) + long(150) + sizes + b"ab" + numbers


def avro(schema: dict[str, Any], records: list[bytes], codec: str = "deflate") -> bytes:
    """Return an Avro file with one block for each record."""
    header = text("avro.schema") + text(json.dumps(schema)) + text("avro.codec") + text(codec)
    out = b"Obj\1" + long(2) + header + long(0) + b"s" * 16
    for record in records:
        packed = zlib.compressobj(wbits=-15)
        block = record if codec == "null" else packed.compress(record) + packed.flush()
        out += long(1) + text(block) + b"s" * 16
    return out


def write_snapshot(table: Path, number: int, files: list[bytes], ids: dict[str, int], status: int = 1) -> None:
    """Add a snapshot of these data files, and make it the current one. Each data file has its own manifest."""
    folder = table / "metadata"
    folder.mkdir(parents=True, exist_ok=True)
    manifests = []
    for index, file in enumerate(files):
        name = f"{number}-m{index}.avro"
        (folder / name).write_bytes(avro(ENTRY, [long(status) + file, long(2) + data_file("data/deleted.parquet")]))
        manifests.append(text(f"{ROOT}/metadata/{name}"))
    (folder / f"snap-{number}.avro").write_bytes(avro(MANIFEST, manifests, codec="null"))
    older = sorted(folder.glob("*.metadata.json"))
    snapshots = json.loads(older[-1].read_text())["snapshots"] if older else []
    snapshots.append({"snapshot-id": number, "schema-id": 0, "manifest-list": f"{ROOT}/metadata/snap-{number}.avro"})
    state = {
        "location": ROOT,
        "current-snapshot-id": number,
        "snapshots": snapshots,
        "schemas": [{"schema-id": 0, "fields": [{"id": each, "name": name} for name, each in ids.items()]}],
    }
    (folder / f"{len(older):05}-uuid.metadata.json").write_text(json.dumps(state))


def write_iceberg(folder: Path, rows: pa.Table, files: int, group: int = 2048) -> str:
    """Write the rows as a table with files of equal size, beside a file that the table no longer contains."""
    (folder / "data").mkdir(parents=True)
    ids = {name: number for number, name in enumerate(rows.schema.names, 1)}
    schema = pa.schema([field.with_metadata({"PARQUET:field_id": str(ids[field.name])}) for field in rows.schema])
    each = len(rows) // files
    for number in range(files):
        part = rows[number * each : (number + 1) * each].cast(schema)
        pq.write_table(part, folder / "data" / f"{number:03}.parquet", row_group_size=group)
    pq.write_table(rows[:5], folder / "data" / "deleted.parquet")
    listed = [data_file(f"data/{number:03}.parquet") for number in reversed(range(files))]
    write_snapshot(folder, 10 + files, listed, ids)
    return str(folder)
