"""Loads all rows of a dataset into memory that the workers of a node share. Each worker reads a part of the rows.

If a worker is added to a node later, it maps the memory that the other workers have filled, and reads no rows.

If memory cannot be shared, for example in a sandbox that hides /proc, each worker loads all rows.
"""

import contextlib
import math
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sunspot.data.fingerprint import digest
from sunspot.data.source import Batch, Source, rows_in
from sunspot.data.table_files import clear_file_cache
from sunspot.errors import DataError
from sunspot.formatting import as_bytes
from sunspot.machine.cgroup import memory_left
from sunspot.machine.shared_pages import Pages, find_pages, map_pages

ALIGNMENT = 64
"""Alignment of each column's first byte, in bytes."""

MEMORY_WAIT_S = 20.0
"""Seconds to wait for free memory, because processes of the previous worker group might still be exiting."""


class LocalWorkers(NamedTuple):
    """A worker's rank, and functions that coordinate the workers. All workers must call these functions together."""

    rank: int
    world_size: int
    node: str
    "The name of the run's job and of the node. Workers with the same name share memory."
    gather: Callable[[Any], list[Any]]
    "A function that returns every worker's object, ordered by rank."
    finish: Callable[[Callable[[], None]], None]
    "A function that calls its argument, and returns once the call has returned on all workers."


class _Column(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The size in bytes, including the padding before the next column."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def cut(self, pages: np.ndarray) -> np.ndarray:
        """Return the column that begins at the start of `pages`."""
        return np.frombuffer(pages, self.dtype, math.prod(self.shape)).reshape(self.shape)


def load_shared(sources: list[Source], workers: LocalWorkers) -> list[Batch]:
    """Load all rows of each source as one read-only tensor per column, indexed by row ID.

    Raises the same errors as `Source.read`, and `DataError` if a node runs out of memory.
    """
    plans = [_plan_columns(source) for source in sources]
    size = sum(column.size for plan in plans for column in plan)
    name = digest(workers.node.encode(), sources[0].fingerprint.encode(), repr(plans).encode())
    shared = _share_pages(size, f"sunspot-rows-{name}", workers)
    need = size
    if shared.pages is None:
        need = size * shared.workers
        shared = SharedPages(np.empty(size, np.uint8), number=0, workers=1)
    workers.finish(lambda: _await_memory(need) if shared.number == 0 and not shared.complete else None)
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
        if shared.complete:
            return
        for source, columns in zip(sources, loaded, strict=True):
            ends = np.cumsum(source.row_groups)
            for group in range(shared.number, len(source.row_groups), shared.workers):
                first = ends[group] - source.row_groups[group]
                if first == ends[group]:
                    continue
                for name, values in source.read(group).items():
                    columns[name][first : ends[group]] = values

    workers.finish(read)
    if shared.file:
        shared.file.complete()
        shared.file.close()
    clear_file_cache()  # parsed text would double the memory usage
    return [{name: torch.from_numpy(values) for name, values in columns.items()} for columns in loaded]


def _plan_columns(source: Source) -> list[_Column]:
    """Return the columns of a source, based on its first row."""
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    first = source.read(group, np.zeros(1, np.int64))
    return [_Column(name, (rows_in(source), *values.shape[1:]), values.dtype) for name, values in first.items()]


class SharedPages(NamedTuple):
    """The memory that the workers of this node share."""

    pages: np.ndarray | None
    "Memory for all rows, uint8 [size], or None if a worker of this node cannot map it."
    number: int
    "This worker's number among the workers of its node, counted from 0."
    workers: int
    "The number of workers on this node."
    complete: bool = False
    "True if the pages contain the rows already."
    file: Pages | None = None
    "The file with the pages, in the worker that created it."


def _share_pages(size: int, name: str, workers: LocalWorkers) -> SharedPages:
    """Map pages that all workers of this node share. Pages use no memory until they are written."""
    found = find_pages(name, size)
    mine = Pages(size, name)
    everyone = workers.gather((workers.node, mine.path, found is not None))
    paths = [path for node, path, _ in everyone if node == workers.node]
    number = paths.index(mine.path)
    complete = all(found_here for node, _, found_here in everyone if node == workers.node)
    pages = found if complete else None
    with contextlib.suppress(OSError):
        pages = pages if complete else map_pages(paths[0], size, shared=True)
    answers = workers.gather((workers.node, pages is not None))
    if pages is None or not all(mapped for node, mapped in answers if node == workers.node):
        return SharedPages(None, number, len(paths))
    return SharedPages(pages.numpy(), number, len(paths), complete, None if number or complete else mine)


def _await_memory(size: int) -> None:
    """Wait until the node has `size` bytes of free memory. Raises `DataError` after MEMORY_WAIT_S seconds."""
    until = time.monotonic() + MEMORY_WAIT_S
    while (left := memory_left()) is not None and left < size:
        if time.monotonic() >= until:
            raise DataError(
                f"{socket.gethostname()}: loading all rows takes {as_bytes(size)}, but only {as_bytes(left)} of memory "
                "is left; give the workers more memory, or start a new run with SUNSPOT_LOADER=ray, which streams the "
                "rows (the loader of an existing run cannot change)"
            )
        time.sleep(1.0)
