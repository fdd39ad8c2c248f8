"""The files that a dataset's rows lie in: their row groups, and what tells whether they are still the same."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from sunspot.data.columns import row_of
from sunspot.data.fingerprint import digest, digest_array, sample_ranges
from sunspot.data.parquet_files import (
    file_size,
    forget_open_files,
    join,
    list_files,
    parquet_errors,
    read_range,
)
from sunspot.data.table_files import TableFile, forget_mapped_files, open_table_file
from sunspot.errors import DataError

Summary = TypeVar("Summary")

FILES_AT_ONCE = 8
"""Files whose footers and labels are read at the same time when a dataset is opened."""


class Group(NamedTuple):
    """A row group: its file (index into `RowFiles.files`), its number and first row in that file."""

    file: int
    number: int
    first: int
    rows: int


class FileSummary(NamedTuple):
    """What is known of a file when it has been opened."""

    groups: list[int]
    "Rows of each."
    size: int
    "Bytes."
    digest: str
    "Of its labels and the sizes of its column chunks."


@dataclass(frozen=True)
class RowFiles:
    """A dataset's files, and their row groups as one sequence. Holds names and numbers only."""

    location: str
    "The file or folder that was opened, as an absolute path or a URL."
    files: tuple[str, ...]
    "Paths relative to `location`; one empty path when `location` is a file."
    groups: tuple[Group, ...]
    sizes: tuple[int, ...]
    "Bytes of each file."
    tables: str
    "Digest of all labels, and of the sizes of all column chunks."

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(group.rows for group in self.groups)

    def where(self, group: int, row: int) -> str:
        return row_of(self.path_of(group), self.groups[group].first + row)

    def path_of(self, group: int) -> str:
        """The file of a row group."""
        return join(self.location, self.files[self.groups[group].file])

    def read_table(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of a row group; raises `DataError` if its file has changed since it was opened."""
        place, path = self.groups[group], self.path_of(group)
        with parquet_errors(path):
            file = open_table_file(path)
            if file_size(path) != self.sizes[place.file] or file.groups[place.number :][:1] != [place.rows]:
                raise DataError(f"{path}: has changed since it was opened; start the run again")
            return file.read(columns, place.number)

    @property
    def names(self) -> list[str]:
        """Of the files, without the folder that they are in: a copy of a dataset is the same dataset."""
        return [name or os.path.basename(self.location) for name in self.files]

    def identify(self, layout: str) -> str:
        """A fingerprint: of a `layout`, then, after a '-', of the content.

        The content is all labels, the sizes of all column chunks, and samples of the files' bytes. Unseen remain values
        that were changed in place, outside the samples, and take as many bytes as before.
        """
        ranges = zip(self.files, sample_ranges(self.sizes), strict=True)
        places = [(join(self.location, name), offset, length) for name, some in ranges for offset, length in some]
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            samples = pool.map(lambda place: read_range(*place), places)
            content = digest(self.tables.encode(), *samples)
        return f"{hashlib.sha256(layout.encode()).hexdigest()[:16]}-{content}"


def check_files(location: str, check: Callable[[str], Summary]) -> tuple[list[str], list[str], list[Summary]]:
    """Names (`RowFiles.files`) and paths of a dataset's files, and what `check` returns for each path."""
    forget_open_files()
    forget_mapped_files()
    names = list_files(location)
    paths = [join(location, name) for name in names]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return names, paths, list(pool.map(check, paths))


def number_groups(files: Iterable[Sequence[int]]) -> tuple[Group, ...]:
    """The row groups of all files, given the rows of each; empty ones are left out."""
    return tuple(
        Group(index, number, first, rows)
        for index, sizes in enumerate(files)
        for number, (first, rows) in enumerate(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
        if rows
    )


def summarize_file(path: str, file: TableFile, labels: np.ndarray) -> FileSummary:
    """What a file tells of itself, and its labels, int64 [n] (none: empty)."""
    known = digest(digest_array(labels).encode(), json.dumps(file.chunks).encode())
    return FileSummary(file.groups, file_size(path), known)


def find_column(schema: pa.Schema, name: str, path: str) -> pa.Field:
    """The one column with a name; raises `DataError`."""
    found = ", ".join(schema.names) or "none"
    if name not in schema.names:
        raise DataError(f"{path}: no column {name!r} among its columns ({found}); rename the one that holds it")
    if schema.names.count(name) > 1:
        raise DataError(f"{path}: several columns {name!r} among its columns ({found}); rename the others")
    return schema.field(name)
