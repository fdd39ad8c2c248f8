"""Rows: planning an epoch, reading them with LOADER=ray, and keeping them in memory with LOADER=torch."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from scripts.bench.scale import Figure
from scripts.bench.scale.threads import load_in_threads
from sunspot.data.convert import write_files
from sunspot.data.image_table import open_images
from sunspot.data.order import WINDOW_ROWS, Order, Steps, locate_rows, run_order
from sunspot.data.ray_loader import PART_BYTES, RoundPlanner, RoundReader
from sunspot.data.source import rows_in
from sunspot.data.table import TableSource
from sunspot.data.torch_loader import EpochShares, Selections, load_rows

ROW_BYTES, GROUP_ROWS = 784, 2048
"""Of MNIST, as `sunspot.data.convert` writes it."""

READ_ROWS = 1 << 16
"""Rows of the dataset that is read."""

ORDER_ROWS = 10**8

PEERS = 8
"""Workers of a node."""

REPEATS = 5


def measure() -> Iterator[Figure]:
    torch.set_num_threads(1)  # a worker's share of a machine that is full
    for rows in (10**6, 10**7, 10**8, 10**9):
        yield from plan(rows)
    with tempfile.TemporaryDirectory() as folder:
        source = write_data(Path(folder))
        for world_size in (1, 8, 64, 1000):
            yield read(source, Path(folder), world_size)
        yield keep(source)
        yield from take(source)
    yield from shuffle()


def plan(rows: int) -> Iterator[Figure]:
    """An epoch of LOADER=ray. Before, each worker's tasks planned all of it again for each window that they read."""
    what = "plan of an epoch (before: of one window, times windows and workers)"
    order = run_order("ray", (GROUP_ROWS,) * (rows // GROUP_ROWS), 0)
    once = min(cost(lambda: order.windows(1))[0] for _ in range(REPEATS))
    for world_size in (1, 64, 1000):
        steps = steps_of(rows, world_size)
        planner = RoundPlanner(order, steps, steps.per_epoch, PART_BYTES * world_size // ROW_BYTES)
        seconds, peak = cost(lambda: sum(1 for _ in planner(pa.table({"step": [0]}))))  # noqa: B023
        size = f"{rows:.0e} rows, {world_size} workers"
        yield Figure(what, size, seconds, "s", once * (rows // WINDOW_ROWS) * world_size)
        yield Figure("plan of an epoch, memory", size, peak, "MiB")


def read(source: TableSource, folder: Path, world_size: int) -> Figure:
    """Bytes that the readers' system calls got in an epoch of LOADER=ray."""
    steps, order = steps_of(rows_in(source), world_size), run_order("ray", source.row_groups, 0)
    planner = RoundPlanner(order, steps, steps.per_epoch, PART_BYTES * world_size // ROW_BYTES)
    reader = RoundReader(source, order, steps, world_size, steps.workers(world_size))
    before = bytes_read()
    rows = sum(part["row"].size for planned in planner(pa.table({"step": [0]})) for part in reader(planned))
    assert rows == steps.rows
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    ratio = (bytes_read() - before) / size
    what = "bytes read in an epoch of LOADER=ray, over those of the data"
    return Figure(what, f"{world_size} workers", ratio, "x", groups_per_worker(order, steps, world_size))


def groups_per_worker(order: Order, steps: Steps, world_size: int) -> float:
    """The way of before: each worker read each row group that had a row of its own, in each window."""
    reads = 0
    for window in order.windows(1):
        which, _ = locate_rows([order.row_groups[group] for group in window.groups], order.permutation(1, window))
        ranks = steps.ranks(world_size, window.first, window.last)
        reads += len(np.unique(ranks * len(window.groups) + which))
    return reads / len(order.row_groups)


def keep(source: TableSource) -> Figure:
    """Memory of a node whose workers have all rows; threads stand in for them."""

    def load_each() -> Any:
        with ThreadPoolExecutor(PEERS) as pool:
            return list(pool.map(lambda _: load_rows(source), range(PEERS)))

    data = rows_in(source) * (ROW_BYTES + 8) / 2**20
    taken = []
    for load in (lambda: load_in_threads([source], ["node"] * PEERS), load_each):
        pa.default_memory_pool().release_unused()
        before = resident()
        rows = load()
        pa.default_memory_pool().release_unused()
        taken.append((resident() - before) / data)
        del rows
    return Figure("memory of a node's rows, over the rows", f"{PEERS} workers", taken[0], "x", taken[1])


def take(source: TableSource) -> Iterator[Figure]:
    """A worker's share of a step out of the rows in memory."""
    rows = load_rows(source)
    for share in (128, 1024):
        chosen = [np.random.default_rng(step).permutation(rows_in(source))[:share] for step in range(200)]
        selections = Selections({name: column for name, column in rows.items() if name != "row"}, chosen)

        def index(step: int, chosen: list[np.ndarray] = chosen) -> Any:
            picked = torch.from_numpy(chosen[step])
            return {name: column[picked] for name, column in rows.items()}

        ours, before = microseconds(selections.__getitem__), microseconds(index)
        yield Figure("batch out of rows in memory", f"{share} rows", ours, "us", before)


def microseconds(get: Callable[[int], Any]) -> float:
    """Of one of 200 batches, in the median."""
    return median(cost(lambda: [get(step) for step in range(200)])[0] for _ in range(REPEATS)) / 200 * 1e6


def shuffle() -> Iterator[Figure]:
    """An epoch's order under LOADER=torch, and what a worker keeps of it."""
    order, steps = run_order("torch", (ORDER_ROWS,), 0), steps_of(ORDER_ROWS, PEERS)
    window = order.windows(1)[0]
    kept: list[EpochShares] = []
    seconds, peak = cost(lambda: kept.append(EpochShares.of(order.permutation(1, window, np.int32), steps, PEERS, 0)))
    before_s, before = cost(lambda: order.permutation(1, window))
    size = f"{ORDER_ROWS:.0e} rows, {PEERS} workers"
    yield Figure("order of an epoch, LOADER=torch (now behind the epoch before)", size, seconds, "s", before_s)
    yield Figure("order of an epoch, LOADER=torch, peak memory of a worker", size, peak, "MiB", before)
    share = (kept[0][0].nbytes * len(kept[0])) / 2**20
    yield Figure("order of an epoch, LOADER=torch, kept by a worker", size, share, "MiB", before)


def steps_of(rows: int, world_size: int) -> Steps:
    return Steps(rows, max(128, 8 * world_size))


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
    result = work()
    seconds, peak = time.process_time() - began, status("VmHWM")
    del result
    return seconds, (peak - resident_before) / 1024


def status(name: str) -> int:
    """kB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def resident() -> float:
    """MiB of this process, each page once however often it is mapped."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def bytes_read() -> int:
    """By this process's system calls so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
