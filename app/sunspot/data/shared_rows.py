"""Loads all rows of a dataset into memory once per node. The node's workers map the same pages, and each reads a part.

If memory cannot be shared (in a sandbox that hides /proc), each worker loads all rows for itself.
"""

import contextlib
import math
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sunspot.cgroup import memory_left
from sunspot.data.source import Batch, Source, rows_in
from sunspot.data.table_files import clear_file_cache
from sunspot.errors import DataError
from sunspot.formatting import as_bytes
from sunspot.shared_pages import Pages, map_pages

ALIGNMENT = 64
"""Bytes to whose multiples the beginning of a column is aligned."""

MEMORY_WAIT_S = 20.0
"""Seconds to wait for free memory, because processes of the previous worker group may not have ended yet."""


class LocalWorkers(NamedTuple):
    """Communication among the workers. All workers call each function together."""

    rank: int
    world_size: int
    node: str
    "Name of the node. Workers on the same node can share memory."
    gather: Callable[[Any], list[Any]]
    "Function that returns every worker's object, by rank."
    finish: Callable[[Callable[[], None]], None]
    "Function that calls its argument, and returns when the call has returned on all workers."


class _Column(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes, including the padding before the next column."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def cut(self, pages: np.ndarray) -> np.ndarray:
        """Return the column that begins at the start of `pages`."""
        return np.frombuffer(pages, self.dtype, math.prod(self.shape)).reshape(self.shape)


def load_shared(sources: list[Source], workers: LocalWorkers) -> list[Batch]:
    """Load all rows of each source as a read-only tensor for each column, with the row of id k at index k.

    Raises the errors of `Source.read`, and `DataError` if a node has too little memory.
    """
    plans = [_plan_columns(source) for source in sources]
    size = sum(column.size for plan in plans for column in plan)
    shared = _share_pages(size, workers)
    need = size
    if shared.pages is None:
        need = size * shared.workers
        shared = SharedPages(np.empty(size, np.uint8), number=0, workers=1)
    workers.finish(lambda: _await_memory(need) if shared.number == 0 else None)
    pages = shared.pages
    assert pages is not None
    loaded = []
    for plan in plans:
        columns = {}
        for column in plan:
            columns[column.name] = column.cut(pages)
            pages = pages[column.size :]
        loaded.append(columns)

    def read() -> None:
        for source, columns in zip(sources, loaded, strict=True):
            ends = np.cumsum(source.row_groups)
            for group in range(shared.number, len(source.row_groups), shared.workers):
                first = ends[group] - source.row_groups[group]
                if first == ends[group]:
                    continue
                for name, values in source.read(group).items():
                    columns[name][first : ends[group]] = values

    workers.finish(read)
    clear_file_cache()  # parsed text would double the memory
    return [{name: torch.from_numpy(values) for name, values in columns.items()} for columns in loaded]


def _plan_columns(source: Source) -> list[_Column]:
    """Plan the columns by the first row of a source."""
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    first = source.read(group, np.zeros(1, np.int64))
    return [_Column(name, (rows_in(source), *values.shape[1:]), values.dtype) for name, values in first.items()]


class SharedPages(NamedTuple):
    """Memory for the rows, uint8 [size], and the workers of this node that use it."""

    pages: np.ndarray | None
    "Memory of all rows; None if a worker of this node cannot map it."
    number: int
    "Number of this worker among the workers of its node."
    workers: int
    "Number of workers on this node."


def _share_pages(size: int, workers: LocalWorkers) -> SharedPages:
    """Map pages that all workers of this node share. They take memory once they are written to."""
    mine = Pages(size)
    paths = [path for node, path in workers.gather((workers.node, mine.path)) if node == workers.node]
    pages = None
    with contextlib.suppress(OSError):
        pages = map_pages(paths[0], size, shared=True).numpy()
    answers = workers.gather((workers.node, pages is not None))
    mine.close()
    all_mapped = all(mapped for node, mapped in answers if node == workers.node)
    return SharedPages(pages if all_mapped else None, paths.index(mine.path), len(paths))


def _await_memory(size: int) -> None:
    """Block until the node has `size` bytes of free memory; raises `DataError` if that takes too long."""
    until = time.monotonic() + MEMORY_WAIT_S
    while (left := memory_left()) is not None and left < size:
        if time.monotonic() >= until:
            raise DataError(
                f"{socket.gethostname()}: all rows in memory take {as_bytes(size)}, but only {as_bytes(left)} are "
                "left there; give the workers more memory, or set SUNSPOT_LOADER=ray, which streams the rows (a run "
                "that has begun keeps its loader: choose another SUNSPOT_RUN_NAME)"
            )
        time.sleep(1.0)
