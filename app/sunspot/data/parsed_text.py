"""Parses CSV and JSON lines with Arrow. Text is kept unchanged, and errors include the line number."""

import contextlib
import csv
import io
import json
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from sunspot.data.arrow_types import map_type
from sunspot.errors import DataError, shorten
from sunspot.formatting import as_bytes, brief, plural

BLOCK_BYTES = 16 << 20
"""Size in bytes of the blocks that Arrow parses. A row cannot be larger."""

SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""Separators that other programs use instead of commas, and their names."""

MAGIC_BYTES = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
"""The names of compressed formats, keyed by the first bytes of a file."""

MARKER_ROW = "sunspot's own last row"
"""The content of the row that `_refuse_open_quote` appends."""

MAX_EXACT = 2.0**53
"""The magnitude up to which float64 represents every integer exactly."""

csv.field_size_limit(1 << 30)  # Python's default limit is 131,072 characters per cell


def read_csv(content: bytes, path: str) -> pa.Table:
    """Parse CSV with all columns as text, because the task declares which columns contain numbers.

    Raises `DataError` with the line number.
    """
    reading = pa.csv.ReadOptions(block_size=BLOCK_BYTES)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    try:
        with pa.csv.open_csv(pa.BufferReader(content), read_options=reading, parse_options=parsing) as file:
            names = file.schema.names
        as_text = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        table = pa.csv.read_csv(pa.BufferReader(content), reading, parsing, as_text)
    except ValueError as error:  # Arrow's errors and UnicodeDecodeError are subclasses of ValueError
        raise DataError(f"{path}: {_explain_csv(content, error)}") from error
    other = _find_separator(names)
    if other:
        raise DataError(f"{path}: {other}")
    if content.count(b'"') % 2:
        _refuse_open_quote(content, path)
    return table


def read_json_lines(content: bytes, path: str) -> pa.Table:
    """Parse JSON lines. Strings that look like dates stay strings. Raises `DataError`."""
    if content.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        raise DataError(f"{path} is a single JSON array; write each object on its own line (jq -c '.[]' does this)")
    reading = pa.json.ReadOptions(block_size=BLOCK_BYTES)
    try:
        table = pa.json.read_json(pa.BufferReader(content), reading)
        # Arrow converts strings that look like dates to timestamps.
        strings = [field.with_type(map_type(field.type, _timestamp_to_text)) for field in table.schema]
        changed = [new for new, old in zip(strings, table.schema, strict=True) if new != old]
        if changed:
            parsing = pa.json.ParseOptions(pa.schema(changed), unexpected_field_behavior="infer")
            table = pa.json.read_json(pa.BufferReader(content), reading, parsing)
        table.validate(full=True)
    except ValueError as error:
        raise DataError(f"{path}: {_explain_text(content) or _damaged('JSON lines file', error)}") from error
    return table


def find_inexact_integers(content: bytes, table: pa.Table) -> dict[str, str]:
    """Return a description of the first integer that Arrow has changed in each column, keyed by column.

    Arrow reads a column as float64 if it contains a fraction, or an integer that does not fit into int64.
    """
    found: dict[str, str] = {}
    suspects = {field.name: field.type for field in table.schema if _has_large_floats(table.column(field.name))}
    for number, line in enumerate(io.BytesIO(content) if suspects else (), 1):
        with contextlib.suppress(ValueError):  # Arrow parses some lines that Python rejects
            row = json.loads(line)
            for name, stored in suspects.items():
                changed = _find_changed(row.get(name), stored)
                if changed is not None and name not in found:
                    found[name] = f"line {number}: {name} has the value {changed}"
    return found


def _has_large_floats(values: pa.ChunkedArray) -> bool:
    """Return True if a column has floats so large that they might be rounded integers. Lists are searched too."""
    if pa.types.is_list(values.type):
        return _has_large_floats(pc.list_flatten(values))
    if pa.types.is_struct(values.type):
        return any(_has_large_floats(pc.struct_field(values, index)) for index in range(values.type.num_fields))
    return pa.types.is_floating(values.type) and (pc.max(pc.abs(values)).as_py() or 0.0) >= MAX_EXACT


def _find_changed(value: Any, stored: pa.DataType) -> int | None:
    """Return the first integer in a JSON value that differs from its float in Arrow, or None."""
    inner: Iterator[tuple[Any, pa.DataType]] = iter(())
    if isinstance(value, list) and pa.types.is_list(stored):
        inner = ((each, stored.value_type) for each in value)
    elif isinstance(value, dict) and pa.types.is_struct(stored):
        inner = ((value.get(field.name), field.type) for field in stored)
    elif type(value) is int and pa.types.is_floating(stored) and int(float(value)) != value:
        return value
    return next((found for each in inner if (found := _find_changed(*each)) is not None), None)


def find_line(content: bytes, row: int) -> int:
    """Return the number of the line on which a CSV row begins, or 0 if the row does not exist. Lines count from 1."""
    return next((line for line, _ in islice(_read_records(content), row + 1, None)), 0)


def find_json_line(content: bytes, row: int, rows: int) -> int:
    """Return the line number of a JSON row, or 0 if there is not exactly one line per row. Lines count from 1."""
    lines = [number for number, line in enumerate(io.BytesIO(content), 1) if line.strip()]
    return lines[row] if len(lines) == rows else 0


def _timestamp_to_text(stored: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(stored) else stored


def _read_records(content: bytes) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each CSV record, including the header."""
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", errors="replace", newline=""))
    line = 1
    for cells in reader:
        if cells:  # Arrow also skips blank lines
            yield line, cells
        line = reader.line_num + 1


def _refuse_open_quote(content: bytes, path: str) -> None:
    """Raise `DataError` if a quote in CSV is never closed, because its cell would contain all later rows.

    The check appends a marker row, which an open quote would swallow.
    """
    [(line, cells)] = deque(_read_records(content + b"\n" + MARKER_ROW.encode()), maxlen=1)
    if cells != [MARKER_ROW]:
        raise DataError(
            f'{path}: the row that begins on line {line} opens a quote (") that is never closed, so one cell contains '
            "the rest of the file; close the quote, or double the quotes inside a quoted cell"
        )


def _explain_csv(content: bytes, error: Exception) -> str:
    """Explain why CSV cannot be parsed, and how to fix it."""
    found = _explain_text(content)
    if found:
        return found
    if "straddling" in str(error):
        return f"a row is larger than the limit of {as_bytes(BLOCK_BYTES)}; write the file as Parquet"
    records = _read_records(content)
    _, header = next(records)
    other = _find_separator(header)
    if other:
        return other
    for line, cells in records:
        if len(cells) != len(header):
            text = brief(",".join(cells))
            return (
                f"line {line} has {plural(len(cells), 'cell')}, but the header has {len(header)}: {text}; correct it, "
                "and quote cells that contain commas or line breaks"
            )
    return _damaged("CSV file", error)


def _explain_text(content: bytes) -> str:
    """Explain why the content is not UTF-8 text, and how to fix it. Returns an empty string if it is."""
    if not content.strip():
        return "the file is empty; add rows, or remove the file"
    packed = [kind for start, kind in MAGIC_BYTES.items() if content.startswith(start)]
    if packed:
        return f"the file is compressed ({packed[0]}); unpack it"
    if b"\0" in content[:1000]:
        return "the file is UTF-16 or binary; save it as UTF-8 (iconv -f UTF-16 -t UTF-8 does this)"
    for number, line in enumerate(io.BytesIO(content), 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            byte = line[error.start]
            return (
                f"line {number} is not UTF-8: byte 0x{byte:02x} would be {chr(byte)!r} in Latin-1; save the file as "
                "UTF-8 (iconv -f ISO-8859-1 -t UTF-8 does this)"
            )
    return ""


def _find_separator(header: list[str]) -> str:
    """Return an error message with the fix if cells are not separated by commas, otherwise an empty string."""
    found = next((separator for separator in SEPARATORS if separator in header[0]), "")
    if len(header) > 1 or not found:
        return ""
    return (
        f"cells are separated by {SEPARATORS[found]} ({brief(header[0])}); separate them with commas, and write "
        "numbers with a decimal point"
    )


def _damaged(what: str, error: Exception) -> str:
    return f"not a {what}, or damaged: {shorten(error)}"
