"""Measures how an epoch's plan, and the bytes read with LOADER=ray, grow with rows and workers."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from scripts.bench import Figure
from sunspot.data.convert import write_files
from sunspot.data.image_table import open_images
from sunspot.data.order import RunOrder, Steps, run_order
from sunspot.data.ray_loader import PART_BYTES, RoundPlanner, RoundReader
from sunspot.data.source import rows_in

ROW_BYTES, GROUP_ROWS = 784, 2048
"""Bytes of a row, and rows in a row group, of MNIST as `sunspot.data.convert` writes it."""

PLANNED_ROWS, READ_ROWS = 10**9, 1 << 16


def measure() -> Iterator[Figure]:
    """Yield the figures one after the other."""
    torch.set_num_threads(1)  # as for a worker on a busy machine
    order = run_order("ray", (GROUP_ROWS,) * (PLANNED_ROWS // GROUP_ROWS), 0)
    for world_size in (1, 64, 1000):
        yield from plan(order, world_size)
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        pixels = random.integers(0, 256, (READ_ROWS, 28, 28), np.uint8)
        write_files(Path(folder), iter([(pixels, np.arange(READ_ROWS) % 10)]), [str(digit) for digit in range(10)])
        for world_size in (1, 8, 64, 1000):
            yield read(Path(folder), world_size)


def plan(order: RunOrder, world_size: int) -> Iterator[Figure]:
    """Yield the CPU seconds of an epoch's plan, and the growth of memory up to its peak in MiB.

    The plan uses a single thread, so on an idle machine the CPU seconds equal the elapsed time.
    """
    steps = steps_of(PLANNED_ROWS, world_size)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    began, resident = time.process_time(), status("VmRSS")
    for _ in planner_of(order, steps, world_size)(pa.table({"step": [0]})):
        pass
    size = f"{PLANNED_ROWS:.0e} rows, {world_size} workers"
    yield Figure("plan of an epoch", size, time.process_time() - began, "s")
    yield Figure("plan of an epoch, memory", size, (status("VmHWM") - resident) / 1024, "MiB")


def read(folder: Path, world_size: int) -> Figure:
    """Return the bytes that the readers' system calls read in an epoch of LOADER=ray, relative to those of the data."""
    source = open_images(str(folder))
    order, steps = run_order("ray", source.row_groups, 0), steps_of(rows_in(source), world_size)
    reader = RoundReader(source, order, steps, world_size, steps.workers(world_size))
    planned, before = planner_of(order, steps, world_size)(pa.table({"step": [0]})), bytes_read()
    assert sum(part["row"].size for each in planned for part in reader(each)) == steps.rows
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    what = "bytes read in an epoch of LOADER=ray, over those of the data"
    return Figure(what, f"{world_size} workers", (bytes_read() - before) / size, "x")


def steps_of(rows: int, world_size: int) -> Steps:
    return Steps(rows, max(128, 8 * world_size))


def planner_of(order: RunOrder, steps: Steps, world_size: int) -> RoundPlanner:
    return RoundPlanner(order, steps, steps.per_epoch, PART_BYTES * world_size // ROW_BYTES)


def status(name: str) -> int:
    """Return a size of this process in kB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def bytes_read() -> int:
    """Return the number of bytes that this process's system calls have read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
