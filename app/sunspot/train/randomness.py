"""Computes random numbers from the seed and a step, row or rank, so no generator's state is stored.

A task's `augment_row` and `augment` change each training row in the same way for any number of workers.
"""

import random
from collections.abc import Callable

import numpy as np
import torch

from sunspot.data.source import Batch
from sunspot.tasks import Task

ROW_STREAM = 1
"""Word that distinguishes the seeds of rows from the seeds of steps."""

DRAW_STREAM = 2
"""Word that distinguishes the seeds of `TrainingRun.draw` from the seeds of steps."""


def seed_of(*words: int) -> int:
    """Combine the words into a 32-bit seed. Trailing zeros make no difference."""
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def seed_generators(*words: int) -> None:
    """Seed all generators with these words. For a step, these are the run's seed, the step and the rank.

    A resumed run then draws the same numbers as an uninterrupted one, for example in dropout.
    """
    word = seed_of(*words)
    # torch.manual_seed would format a stack trace for each type of device that is not in use, 0.2 ms a step.
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(word)
    np.random.seed(word)
    random.seed(word)


def augment(task: Task, batch: Batch, seed: int, epoch: int, draw: Callable[..., torch.Tensor]) -> Batch:
    """Return a batch after the task's `augment_row` and `augment`, if it defines them."""
    if task.augment_row:
        batch = {**batch, **_augment_rows(task.augment_row, batch, seed, epoch)}
    if task.augment:
        batch = {**batch, **task.augment(batch, draw)}
    return batch


def _augment_rows(by_row: Callable[[Batch], Batch], batch: Batch, seed: int, epoch: int) -> Batch:
    """Return the changed columns of all rows. A row's random numbers follow from the seed, the epoch and its id."""
    changed = []
    for place, row in enumerate(batch["row"].tolist()):
        seed_generators(seed, epoch, row, ROW_STREAM)
        changed.append(by_row({name: column[place] for name, column in batch.items()}))
    return {name: torch.stack([row[name] for row in changed]) for name in changed[0]}
