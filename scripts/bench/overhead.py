"""Measures what a step costs the training thread besides the model's own work, in one process without Ray.

The model is one small layer, so nearly all of the time is the loop's. A thread's own clock does not count what other
processes do on the same cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch

from scripts.bench import Figures, in_turns
from scripts.bench.in_process import group_of_one, our_steps, plan_steps
from scripts.bench.plain import plain_steps
from sunspot.plan import Plan

TURNS = 30
STEPS = 200
"""Steps in each turn of each way."""

BATCH_ROWS = 16


def measure(most: int) -> Figures:
    """Return the microseconds of the training thread per step, in Sunspot and in plain PyTorch."""
    torch.set_num_threads(1)
    with group_of_one(), tempfile.TemporaryDirectory() as folder:
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


def microseconds_per_step(steps: Iterator[None]) -> float:
    """Take STEPS steps, and return the microseconds of this thread for each."""
    began = time.thread_time()
    for _ in islice(steps, STEPS):
        pass
    return 1e6 * (time.thread_time() - began) / STEPS
