"""Reads all data formats.

The formats are Parquet, CSV, JSON Lines, Arrow files of Hugging Face datasets, tar shards, and image folders.
"""

import contextlib
import io
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache

import pyarrow as pa

from sunspot.background import map_parallel
from sunspot.data.arrow_types import to_plain
from sunspot.data.class_folders import find_classes
from sunspot.data.dataset_files import (
    INDEX,
    OPEN_FILES,
    PICTURES,
    clear_open_files,
    file_size,
    join,
    list_all,
    open_file,
    open_uncached,
    read_range,
)
from sunspot.data.fingerprint import digest, digest_array
from sunspot.data.images import FILE_FORMATS, GRAY_MODES, USUAL_SIDE, open_image, upright_size
from sunspot.data.parsed_text import find_inexact_integers, find_json_line, find_line, read_csv, read_json_lines
from sunspot.errors import DataError, SunspotError
from sunspot.formatting import as_bytes, plural

ARROW = ".arrow"
CSV = ".csv"
JSON_LINES = (".jsonl", ".ndjson", ".json")
TAR = ".tar"

SHARD = b"shard"
"""Metadata key in the index of a shard. Its value is a JSON object: `size` is the shard's size in bytes, and `members`
maps the columns that are read from the shard to their types."""

KEY = "__key__"
"""The column with the name of each sample, which is also in the names of the sample's files in the shard."""

BEGIN = "__begin__"
LENGTH = "__length__"
CRC = "__crc32__"
"""The columns of an index with the position and length of each sample in the shard, and the CRC-32 of these bytes. A
sample begins with the tar header of its first file."""

GROUP_BYTES = 4 << 20
"""Bytes in a row group that `sunspot.data.convert` writes. A streaming reader fetches one row group at a time."""

MIN_GROUP_ROWS, MAX_GROUP_ROWS = 64, 2048
"""Smallest and largest number of rows in a row group that `sunspot.data.convert` writes."""

TEXT_GROUP_ROWS = 1024
"""Rows in a row group of CSV or JSON lines. The formats themselves have no groups."""

PICTURE_GROUP_ROWS = 32
"""Images in a row group. Groups are small, because neighboring images have the same class and groups are not split."""

MAX_TEXT_BYTES = 1 << 30
"""Largest size of a text file in bytes. Each process that reads the file keeps it in memory."""

TEXT_FILES = 8
"""Number of parsed text files that each process caches."""

HEADER_BYTES = 64 << 10
"""Buffer size in bytes for reading an image's header. Unbuffered, each small read is a request to the bucket."""


class TableFile(ABC):
    """A data file that is open for reading. Its methods may raise Arrow's errors, which `arrow_errors` translates."""

    schema: pa.Schema
    groups: list[int]
    "The number of rows in each row group."
    has_types = True
    "False if all columns are text, so that only the task's declaration says which are numbers."
    notes: tuple[str, ...] = ()
    "Notes for the user about how the rows are read."

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    @abstractmethod
    def identity(self) -> Sequence[object]:
        """Values that reveal changes to the content: a digest, or the sizes of row groups, columns or images.

        Changes to labels are found by a separate digest.
        """

    @property
    def size(self) -> int:
        """The size in bytes."""
        return file_size(self.path)

    def name_row(self, row: int) -> str:
        """Return a row's name for messages."""
        return f"{self.path}, row {row}"

    @abstractmethod
    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        """Return the `columns` of one row group, or of all groups."""


class ParquetTable(TableFile):
    """A Parquet file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file = open_file(path)
        self._metadata = [self._file.metadata.row_group(number) for number in range(self._file.num_row_groups)]
        self.schema = self._file.schema_arrow
        self.groups = [group.num_rows for group in self._metadata]

    @property
    def identity(self) -> Sequence[object]:
        # Reading the sizes of single columns from damaged metadata crashes the process (pyarrow 26).
        return [group.total_byte_size for group in self._metadata]

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        if group is None:
            return to_plain(self._file.read(columns=list(columns), use_threads=False))
        return to_plain(self._file.read_row_group(group, columns=list(columns), use_threads=False))


class TarShard(ParquetTable):
    """A tar file of samples and its index, which is a Parquet file (`sunspot.data.tar_index`).

    Classes and JSON fields are stored in the index. For each other file of a sample, the index contains the file's
    position in the shard. These files are read from the shard, with one read for each row group, and every sample's
    checksum is verified.
    """

    def __init__(self, path: str) -> None:
        self._repair = f"write a new index: python -m sunspot.data.convert --from tar {os.path.dirname(path)}"
        try:
            super().__init__(path + INDEX)
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} has no intact index ({path}{INDEX}); {self._repair}") from error
        self.path = path
        about = json.loads((self.schema.metadata or {}).get(SHARD, "{}"))
        if about.get("size") != self.size:
            raise DataError(f"{path} has changed since its index was written; {self._repair}")
        self._types = {name: pa.type_for_alias(alias) for name, alias in about["members"].items()}
        self.schema = pa.schema([field.with_type(self._types.get(field.name, field.type)) for field in self.schema])

    @property
    def identity(self) -> Sequence[object]:
        return [digest_array(super().read([CRC])[CRC].to_numpy())]

    def name_row(self, row: int) -> str:
        return f"{self.path}, sample {super().read([KEY])[KEY][row]}"

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        members = [name for name in columns if name in self._types]
        if not members:
            return super().read(columns, group)
        table = super().read([*columns, BEGIN, LENGTH, CRC], group)
        samples = list(zip(*(table[name].to_pylist() for name in (BEGIN, LENGTH, CRC)), strict=True))
        first = samples[0][0]
        content = memoryview(read_range(self.path, first, samples[-1][0] + samples[-1][1] - first))
        for row, (begin, length, crc) in enumerate(samples, sum(self.groups[: group or 0])):
            if zlib.crc32(content[begin - first :][:length]) != crc:
                raise DataError(
                    f"{self.name_row(row)} does not match its checksum; restore the file, or {self._repair}"
                )
        for name in members:
            parts = [part and bytes(content[part[0] - first : part[1] - first]) for part in table[name].to_pylist()]
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(parts, self._types[name]))
        return table.select(list(columns))


class ArrowTable(TableFile):
    """A stream of Arrow record batches, mapped into memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        if "://" in path:
            raise DataError(
                f"{path}: Arrow files can only be read from disk; copy the dataset to a disk that all nodes share, or "
                "write it as Parquet"
            )
        with pa.ipc.open_stream(pa.memory_map(path)) as reader:
            self.schema = reader.schema
            self._batches = list(reader)
        self.groups = [batch.num_rows for batch in self._batches]

    @property
    def identity(self) -> list[int]:
        return [column.nbytes for batch in self._batches for column in batch.columns]

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        batches = self._batches if group is None else [self._batches[group]]
        return to_plain(pa.Table.from_batches(batches, self.schema).select(list(columns)))


class TextTable(TableFile):
    """A CSV or JSON Lines file, which is parsed and kept in memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        if self.size > MAX_TEXT_BYTES:
            raise DataError(
                f"{path} is {as_bytes(self.size)} in size, but the limit for text files is {as_bytes(MAX_TEXT_BYTES)}, "
                "because each worker keeps the file in memory; split it into several files, or write it as Parquet"
            )
        content = read_range(path, 0, self.size)
        self._digest = digest(content)
        self.has_types = not path.lower().endswith(CSV)
        self._table = read_json_lines(content, path) if self.has_types else read_csv(content, path)
        self._inexact = find_inexact_integers(content, self._table) if self.has_types else {}
        self.schema = self._table.schema
        self.groups = group_sizes(len(self._table), TEXT_GROUP_ROWS)

    def name_row(self, row: int) -> str:
        name = super().name_row(row)
        line = 0
        with contextlib.suppress(SunspotError):  # the file might be gone
            content = read_range(self.path, 0, self.size)
            line = find_json_line(content, row, len(self._table)) if self.has_types else find_line(content, row)
        return f"{name} (line {line})" if line else name

    @property
    def identity(self) -> list[str]:
        return [self._digest]

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        changed = next((self._inexact[name] for name in columns if name in self._inexact), "")
        if changed:
            raise DataError(
                f"{self.path}, {changed}, which float64 cannot represent exactly. The column is read as float64, "
                "because it also contains fractions or integers beyond int64; write the column's numbers as strings, "
                "or write the file as Parquet"
            )
        rows = self._table if group is None else self._table.slice(group * TEXT_GROUP_ROWS, TEXT_GROUP_ROWS)
        return rows.select(list(columns))


class PictureFolder(TableFile):
    """A folder that contains one folder of images per class. Rows are sorted by path.

    The column `image` contains the bytes of the file, and the column `label` contains the class name.
    """

    schema = pa.schema({"image": pa.large_binary(), "label": pa.string()})

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._location = path.removesuffix("/" + PICTURES)
        self.folders = find_classes(self._location, list_all(self._location))
        self.notes = self.folders.describe()
        self.sizes = self.folders.pictures
        self._names = list(self.sizes)
        self.groups = group_sizes(len(self._names), PICTURE_GROUP_ROWS)

    @property
    def identity(self) -> Sequence[object]:
        return list(self.sizes.items())

    @cached_property
    def size(self) -> int:
        return sum(self.sizes.values())

    def name_row(self, row: int) -> str:
        return join(self._location, self._names[row])

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        first = (group or 0) * PICTURE_GROUP_ROWS
        names = self._names if group is None else self._names[first : first + PICTURE_GROUP_ROWS]
        found: dict[str, pa.Array] = {}
        if "image" in columns:
            found["image"] = pa.array(map_parallel(self._read_picture, names), pa.large_binary())
        if "label" in columns:
            found["label"] = pa.array(map(self.folders.class_of, names), pa.string())
        return pa.table({name: found[name] for name in columns})

    def find_dims(self, side: int) -> tuple[int, ...]:
        """Return [H, W] if all images are gray, otherwise [H, W, 3].

        H and W are `side` if it is set. Otherwise, they are the size of the images, or USUAL_SIDE if the sizes differ.
        """
        headers = map_parallel(self._read_header, self._names)
        refused = [header for header in headers if isinstance(header, DataError)]
        if refused:
            others = f" (and {plural(len(refused) - 1, 'other image')} cannot be read)" if len(refused) > 1 else ""
            raise DataError(f"{refused[0]}{others}")
        sizes, modes = zip(*(header for header in headers if not isinstance(header, DataError)), strict=True)
        height, width = (side, side) if side else sizes[0] if len(set(sizes)) == 1 else (USUAL_SIDE, USUAL_SIDE)
        return (height, width) if GRAY_MODES.issuperset(modes) else (height, width, 3)

    def _read_picture(self, name: str) -> bytes:
        with open_uncached(join(self._location, name)) as file:
            return bytes(file.read())

    def _read_header(self, name: str) -> tuple[tuple[int, int], str] | DataError:
        """Return an image's (height, width) and Pillow mode, or the error if it cannot be read."""
        path = join(self._location, name)
        with open_uncached(path) as file, io.BufferedReader(file, HEADER_BYTES) as buffered:
            try:
                image = open_image(buffered, FILE_FORMATS)
            except DataError as error:
                return DataError(f"{path} {error}")
            return upright_size(image), image.mode


def group_sizes(rows: int, group_rows: int) -> list[int]:
    """Divide `rows` rows into groups of `group_rows`, and return the groups' sizes. The last group can be smaller."""
    return [min(group_rows, rows - first) for first in range(0, rows, group_rows)]


def rows_per_group(row_bytes: int) -> int:
    """Return how many rows `sunspot.data.convert` writes to each row group, given the size of a row in bytes."""
    return min(MAX_GROUP_ROWS, max(MIN_GROUP_ROWS, GROUP_BYTES // max(1, row_bytes)))


def open_table_file(path: str) -> TableFile:
    """Open a table file in the format that its name indicates.

    Parquet readers are not cached, because they have state.
    """
    if path.endswith((ARROW, "/" + PICTURES)):
        return _cached_table(path)
    if path.lower().endswith(TAR):
        return TarShard(path)
    return _cached_text(path) if path.lower().endswith((CSV, *JSON_LINES)) else ParquetTable(path)


def open_pictures(location: str) -> PictureFolder:
    """Open the image folders below a location."""
    pictures = open_table_file(join(location, PICTURES))
    assert isinstance(pictures, PictureFolder)
    return pictures


@lru_cache(maxsize=OPEN_FILES)
def _cached_table(path: str) -> TableFile:
    return ArrowTable(path) if path.endswith(ARROW) else PictureFolder(path)


@lru_cache(maxsize=TEXT_FILES)
def _cached_text(path: str) -> TableFile:
    return TextTable(path)


def clear_file_cache() -> None:
    """Clear the caches of open and parsed files. Call this if the files might have been rewritten."""
    clear_open_files()
    _cached_table.cache_clear()
    _cached_text.cache_clear()
