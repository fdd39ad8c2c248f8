"""Writes the index of a tar shard, so that `TarShard` in `table_files` can read its rows by number.

A shard has the layout of WebDataset: 0001.jpg, 0001.cls and 0001.json are the members of sample 0001, and are next to
each other in the file. Each sample becomes a row:

  - A member with an image suffix becomes the column `image`.
  - The member `cls` becomes the column `label`, with integers if all labels in the shard are class numbers, otherwise
    with text.
  - Each field of `json` becomes a column.
  - Any other member becomes a column with its suffix as the name. The column contains text if the suffix is in TEXT,
    otherwise bytes.
"""

import io
import itertools
import json
import logging
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sunspot.data.dataset_files import INDEX, absolute, join, list_all, open_output, open_uncached
from sunspot.data.images import SUFFIXES
from sunspot.data.labels import CLASS_NUMBER, LABEL
from sunspot.data.table_files import BEGIN, CRC, KEY, LENGTH, SHARD, TAR, rows_per_group
from sunspot.errors import DataError, shorten

log = logging.getLogger(__name__)

MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")
"""Pattern for the path of a member. The groups are its sample and its suffix, which begins after the first dot of the
file's name. Other files are skipped."""

TEXT = ("txt", "text", "transcript")
"""Suffixes of members that are text, as in WebDataset."""

READ_BYTES = 8 << 20
"""Buffer size in bytes for reading a shard from its first to its last member."""


def index_shards(location: str) -> dict[str, int]:
    """Write an index beside each tar file in a folder and its subfolders, on disk or in a bucket.

    Returns the total number of rows under the key "", because the files are not assigned to splits. Raises `DataError`
    if a file cannot be split into samples, and `StorageError` if an index cannot be written.
    """
    location = absolute(location)
    shards = [name for name in list_all(location).sizes if name.lower().endswith(TAR)]
    if not shards:
        raise DataError(f"{location} contains no *{TAR}; use the folder that contains the tar files")
    return {"": sum(_index_shard(join(location, name)) for name in shards)}


def _index_shard(path: str) -> int:
    """Write a shard's index, and return its number of rows."""
    try:
        with open_uncached(path) as raw, io.BufferedReader(raw, READ_BYTES) as file:
            size = raw.size()
            rows = list(_read_rows(file))
        keys = {row[KEY] for row in rows}
        if len(keys) < len(rows) or not rows:
            raise tarfile.ReadError(
                "it has no samples, or the files of a sample are not next to each other (use tar --sort=name)"
            )
    except tarfile.TarError as error:
        raise DataError(f"{path} is not a tar file of samples: {shorten(error)}; write it again") from error
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    labels = columns.get(LABEL)
    if labels and all(isinstance(label, str) and re.match(CLASS_NUMBER, label) for label in labels):
        columns[LABEL] = list(map(int, labels))
    members = {
        name: "large_string" if name in TEXT else "large_binary" for name in names if range in map(type, columns[name])
    }
    arrays: dict[str, pa.Array] = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array([[v.start, v.stop] if isinstance(v, range) else v for v in values])
        except (pa.ArrowException, OverflowError) as error:
            log.warning(f"{path}: the column {name} is omitted, because its values differ in type: {shorten(error)}")
    about = json.dumps({"size": size, "members": members}).encode()
    with open_output(path + INDEX) as index:
        table = pa.table(arrays).replace_schema_metadata({SHARD: about})
        pq.write_table(table, index, row_group_size=rows_per_group(sum(columns[LENGTH]) // len(rows)))
    return len(rows)


def _read_rows(file: io.BufferedReader) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample. A member other than .cls or .json becomes a column with its byte range in the file.

    Raises `tarfile.TarError` if the file is damaged, or if a sample has two values for a column.
    """
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for key, group in itertools.groupby(_list_members(archive), lambda member: member[0]):
            members = [(suffix, member) for _, suffix, member in group]
            begin = members[0][1].offset
            length = members[-1][1].offset_data + members[-1][1].size - begin
            file.seek(begin)
            content = file.read(length)
            row: dict[str, Any] = {KEY: key, BEGIN: begin, LENGTH: length, CRC: zlib.crc32(content)}
            for suffix, member in members:
                found = _read_member(suffix, member, content[member.offset_data - begin :][: member.size])
                if found.keys() & row.keys():
                    column = min(found.keys() & row.keys())
                    raise tarfile.ReadError(f"{member.name} contains a second value for the sample's column {column}")
                row |= found
            yield row
        file.seek(archive.offset)
        rest = file.read(READ_BYTES)
        if len(rest) < tarfile.BLOCKSIZE or any(rest):
            raise tarfile.ReadError("the tar file's end is missing, or is followed by another tar file")


def _list_members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield the sample name, the suffix (in lower case) and the tar header of each member."""
    for member in archive:
        match = MEMBER.fullmatch(member.name)
        if match and not member.isdir():
            if not member.isreg() or member.issparse():
                raise tarfile.ReadError(f"{member.name} is a link or a sparse file")
            yield match[1], match[2].lower(), member


def _read_member(suffix: str, member: tarfile.TarInfo, content: bytes) -> dict[str, Any]:
    """Return the values in a member, keyed by column."""
    try:
        if suffix == "cls":
            return {LABEL: content.decode().strip()}
        if suffix == "json":
            return dict(json.loads(content).items())
    except (ValueError, AttributeError) as error:
        raise tarfile.ReadError(
            f"{member.name} is not {'a JSON object' if suffix == 'json' else 'text'}: {error}"
        ) from error
    column = "image" if f".{suffix}" in SUFFIXES else suffix
    return {column: range(member.offset_data, member.offset_data + member.size)}
