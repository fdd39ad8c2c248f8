"""Files of tables, opened alike: Parquet, and the Arrow files that Hugging Face's `datasets` saves."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Protocol

import pyarrow as pa

from sunspot.data.parquet_files import OPEN_FILES, open_file
from sunspot.errors import DataError

ARROW = ".arrow"


class TableFile(Protocol):
    """An open file; its methods raise Arrow's errors (`parquet_errors`)."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def groups(self) -> list[int]:
        """The rows of each row group."""

    @property
    def chunks(self) -> list[int]:
        """The bytes of each column in each row group."""

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        """Read some columns of a row group, or of all."""


class ParquetTable:
    """A Parquet file; a `TableFile`."""

    def __init__(self, path: str) -> None:
        self._file = open_file(path)
        self.schema: pa.Schema = self._file.schema_arrow

    @cached_property
    def groups(self) -> list[int]:
        metadata = self._file.metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    @property
    def chunks(self) -> list[int]:
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [group.column(number).total_compressed_size for group in groups for number in range(group.num_columns)]

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        if group is None:
            return self._file.read(columns=list(columns), use_threads=False)
        return self._file.read_row_group(group, columns=list(columns), use_threads=False)


class ArrowTable:
    """A stream of record batches, mapped into memory; a `TableFile`."""

    def __init__(self, path: str) -> None:
        if "://" in path:
            raise DataError(
                f"{path}: Arrow files are read from disks only; copy the dataset to one that all nodes see, or write "
                "it as Parquet"
            )
        with pa.ipc.open_stream(pa.memory_map(path)) as reader:
            self.schema: pa.Schema = reader.schema
            self._batches = list(reader)

    @property
    def groups(self) -> list[int]:
        return [batch.num_rows for batch in self._batches]

    @property
    def chunks(self) -> list[int]:
        return [column.nbytes for batch in self._batches for column in batch.columns]

    def read(self, columns: Sequence[str], group: int | None = None) -> pa.Table:
        batches = self._batches if group is None else [self._batches[group]]
        return pa.Table.from_batches(batches, self.schema).select(list(columns))


def open_table_file(path: str) -> TableFile:
    """Open a file of either kind, by its name; Parquet readers have state, so each call gets its own."""
    return _map_arrow(path) if path.endswith(ARROW) else ParquetTable(path)


@lru_cache(maxsize=OPEN_FILES)
def _map_arrow(path: str) -> ArrowTable:
    return ArrowTable(path)


def forget_mapped_files() -> None:
    """Map files anew from now on: they may have been rewritten."""
    _map_arrow.cache_clear()
