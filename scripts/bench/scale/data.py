"""Rows: planning an epoch, and reading them with LOADER=ray."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from scripts.bench.scale import Figure
from sunspot.data.convert import write_files
from sunspot.data.image_table import open_images
from sunspot.data.order import Steps, run_order
from sunspot.data.ray_loader import PART_BYTES, RoundPlanner, RoundReader
from sunspot.data.source import rows_in
from sunspot.data.table import TableSource

ROW_BYTES, GROUP_ROWS = 784, 2048
"""Of MNIST, as `sunspot.data.convert` writes it."""

READ_ROWS = 1 << 16
"""Rows of the dataset that is read."""


def measure() -> Iterator[Figure]:
    """Measure its figures, one after the other."""
    torch.set_num_threads(1)  # a worker's share of a machine that is full
    for rows in (10**6, 10**7, 10**8, 10**9):
        yield from plan(rows)
    with tempfile.TemporaryDirectory() as folder:
        source = write_data(Path(folder))
        for world_size in (1, 8, 64, 1000):
            yield read(source, Path(folder), world_size)


def plan(rows: int) -> Iterator[Figure]:
    """An epoch of LOADER=ray."""
    order = run_order("ray", (GROUP_ROWS,) * (rows // GROUP_ROWS), 0)
    for world_size in (1, 64, 1000):
        planner = planner_of(order, rows, world_size)
        seconds, peak = cost(lambda: sum(1 for _ in planner(pa.table({"step": [0]}))))  # noqa: B023
        size = f"{rows:.0e} rows, {world_size} workers"
        yield Figure("plan of an epoch", size, seconds, "s")
        yield Figure("plan of an epoch, memory", size, peak, "MiB")


def read(source: TableSource, folder: Path, world_size: int) -> Figure:
    """Bytes that the readers' system calls got in an epoch of LOADER=ray."""
    rows, order = rows_in(source), run_order("ray", source.row_groups, 0)
    steps, planner = steps_of(rows, world_size), planner_of(order, rows, world_size)
    reader = RoundReader(source, order, steps, world_size, steps.workers(world_size))
    before = bytes_read()
    taken = sum(part["row"].size for planned in planner(pa.table({"step": [0]})) for part in reader(planned))
    assert taken == steps.rows
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    what = "bytes read in an epoch of LOADER=ray, over those of the data"
    return Figure(what, f"{world_size} workers", (bytes_read() - before) / size, "x")


def steps_of(rows: int, world_size: int) -> Steps:
    return Steps(rows, max(128, 8 * world_size))


def planner_of(order: Any, rows: int, world_size: int) -> RoundPlanner:
    steps = steps_of(rows, world_size)
    return RoundPlanner(order, steps, steps.per_epoch, PART_BYTES * world_size // ROW_BYTES)


def write_data(folder: Path) -> TableSource:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (READ_ROWS, 28, 28), np.uint8)
    write_files(folder, iter([(pixels, np.arange(READ_ROWS) % 10)]), [str(digit) for digit in range(10)])
    return open_images(str(folder))


def cost(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of processor time, and MiB of memory at the peak over those at the beginning.

    All of it works in one thread: on a machine that does nothing else, these are the seconds that pass.
    """
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    began, resident_before = time.process_time(), status("VmRSS")
    work()
    return time.process_time() - began, (status("VmHWM") - resident_before) / 1024


def status(name: str) -> int:
    """kB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def bytes_read() -> int:
    """By this process's system calls so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
