"""Reads Avro object container files, in which an Iceberg table lists its data files (Avro 1.12 specification).

Enums, maps, and references to named types are not supported, because Iceberg's lists do not contain them.
"""

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from sunspot.errors import DataError, shorten

MAGIC_BYTES = 4

SYNC_BYTES = 16
"""Size in bytes of the sync marker that follows the header and each block."""

CODECS: dict[bytes, Callable[[bytes], bytes]] = {
    b"null": bytes,
    b"deflate": partial(zlib.decompress, wbits=-zlib.MAX_WBITS),
}
"""Functions that decompress a block, keyed by codec. Iceberg uses deflate unless a table sets another codec."""

FORMATS = {"boolean": "?", "float": "<f", "double": "<d"}
"""The `struct` formats of primitive types with a fixed size."""

ITEM = {"type": "record", "fields": [{"name": "key", "type": "string"}, {"name": "value", "type": "bytes"}]}
"""Schema of an entry in the header's metadata. The metadata is a map, which Avro encodes like an array of entries."""


def read_avro(content: bytes, path: str) -> list[Any]:
    """Return a file's values, usually records as dicts. Raises `DataError` if the file cannot be read."""
    try:
        file = io.BytesIO(content)
        _take(file, MAGIC_BYTES)
        header = {item["key"]: item["value"] for item in _decode(file, {"type": "array", "items": ITEM})}
        schema = json.loads(header["avro.schema"])
        decompress = CODECS[header.get("avro.codec", b"null")]
        sync = _take(file, SYNC_BYTES)
        values: list[Any] = []
        while file.tell() < len(content):
            count = _read_long(file)
            block = io.BytesIO(decompress(_take(file, _read_long(file))))
            values += [_decode(block, schema) for _ in range(count)]
            if _take(file, SYNC_BYTES) != sync:
                raise ValueError("a block does not end with the file's sync marker")
        return values
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged, or is not an Avro file with the codec null or deflate: {shorten(error)}"
        ) from error


def _decode(file: BinaryIO, schema: Any) -> Any:
    """Return the next value. `schema` is its Avro schema, parsed from JSON."""
    if isinstance(schema, list):
        return _decode(file, schema[_read_long(file)])
    if isinstance(schema, str):
        return _read_plain(file, schema)
    match schema["type"]:
        case "record":
            return {field["name"]: _decode(file, field["type"]) for field in schema["fields"]}
        case "array":
            values: list[Any] = []
            while count := _read_long(file):
                if count < 0:
                    _read_long(file)  # the size of the items in bytes
                values += [_decode(file, schema["items"]) for _ in range(abs(count))]
            return values
        case "fixed":
            return _take(file, schema["size"])
        case inner:
            return _decode(file, inner)


def _read_plain(file: BinaryIO, name: str) -> Any:
    """Return the next value of a primitive type."""
    match name:
        case "null":
            return None
        case "int" | "long":
            return _read_long(file)
        case "bytes":
            return _take(file, _read_long(file))
        case "string":
            return _take(file, _read_long(file)).decode()
    form = FORMATS[name]
    return struct.unpack(form, _take(file, struct.calcsize(form)))[0]


def _read_long(file: BinaryIO) -> int:
    """Return the next integer. Its bits are stored in groups of seven, lowest first, and the lowest bit is the sign."""
    bits = shift = 0
    byte = 0x80
    while byte & 0x80:
        byte = _take(file, 1)[0]
        bits |= (byte & 0x7F) << shift
        shift += 7
    return bits >> 1 ^ -(bits & 1)


def _take(file: BinaryIO, size: int) -> bytes:
    """Return the next `size` bytes. Raises `ValueError` if the file has fewer."""
    found = file.read(max(0, size))
    if len(found) != size:
        raise ValueError("the file ends within a value")
    return found
