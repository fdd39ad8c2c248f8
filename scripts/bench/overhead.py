"""Measures what a step costs the training thread besides the model's own work, without Ray.

The model is one small layer, so nearly all of the time is the loop's. A thread's own clock does not count what other
processes do on the same cores.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from scripts.bench import Figures, in_turns
from scripts.bench.in_process import our_steps, plan_steps
from scripts.bench.plain import plain_steps
from sunspot.plan import Plan

TURNS = 30
STEPS = 200
"""Steps in each turn of each way."""

BATCH_ROWS = 16
"""Rows of each worker in a step."""


def measure(most: int) -> Figures:
    """Return the microseconds of the training thread per step, in Sunspot and in plain PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_rank(0, 1, most, folder)


def measure_two(most: int) -> Figures:
    """Return the microseconds per step as `measure` does, but for the slower of two workers in each turn."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            ranks = pool.starmap(measure_rank, [(rank, 2, most, folder) for rank in range(2)], chunksize=1)
    one, other = ranks
    return {name: [*map(max, one[name], other[name])] for name in one}


def measure_rank(rank: int, workers: int, most: int, folder: str) -> Figures:
    """Return the figures of one of the workers. All workers must call this together, with an empty folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", workers)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    try:
        ways: dict[str, Callable[[Plan], Iterator[None]]] = {
            "Sunspot": partial(our_steps, survives=True),
            "PyTorch with a DataLoader": partial(plain_steps, with_loader=True),
            "Sunspot, `SURVIVORS=off`": partial(our_steps, survives=False),
            "PyTorch with rows by index": partial(plain_steps, with_loader=False),
        }
        begun = {
            name: way(plan_steps(f"{folder}/{number}", "scripts.bench.small_task", BATCH_ROWS))
            for number, (name, way) in enumerate(ways.items())
        }
        timed = {name: partial(microseconds_per_step, steps) for name, steps in islice(begun.items(), most)}
        in_turns(timed, 2)  # warm up
        return in_turns(timed, TURNS)
    finally:
        dist.destroy_process_group()


def microseconds_per_step(steps: Iterator[None]) -> float:
    """Take STEPS steps, and return the microseconds of this thread for each."""
    began = time.thread_time()
    for _ in islice(steps, STEPS):
        pass
    return 1e6 * (time.thread_time() - began) / STEPS
