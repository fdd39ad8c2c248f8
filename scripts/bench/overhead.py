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
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from scripts.bench import Figures, in_turns
from scripts.bench.in_process import group_of_one, our_steps, plan_steps
from sunspot.data.source import Batch, read_rows, rows_in
from sunspot.plan import Plan
from sunspot.tasks import load_task

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


def plain_steps(plan: Plan, with_loader: bool) -> Iterator[None]:
    """Take the steps of a plain loop in PyTorch with the same task."""
    task = load_task(plan.settings)
    assert task.loss
    columns = {
        name: torch.from_numpy(column) for name, column in read_rows(plan.source, 0, rows_in(plan.source)).items()
    }
    rows = Rows({name: column for name, column in columns.items() if name != "row"}, rows_in(plan.source))
    model = task.build_model(plan.settings, plan.source).train()
    optimizer = task.build_optimizer(model, plan.settings)
    sampler = BatchSampler(RandomSampler(rows), BATCH_ROWS, drop_last=True)
    while True:
        batches = DataLoader(rows, batch_size=None, sampler=sampler) if with_loader else rows.shuffled()
        for batch in batches:
            losses, _ = task.loss(model, batch)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


class Rows(Dataset[Batch]):
    """A dataset of rows in memory. Each item is a whole batch."""

    def __init__(self, columns: Batch, number: int) -> None:
        self._columns = columns
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, chosen: Any) -> Batch:
        return {name: column[chosen] for name, column in self._columns.items()}

    def shuffled(self) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        return map(self.__getitem__, torch.randperm(self._number).split(BATCH_ROWS))
