"""Randomness as a function of the seed and of a step, a row or a rank: no generator's state has to be stored.

So training rows are augmented, by a task's `augment_row` and `augment`, alike at any number of workers.
"""

import random
from collections.abc import Callable

import numpy as np
import torch

from sunspot.data.source import Batch
from sunspot.tasks import Task

ROW_STREAM, DRAW_STREAM = 1, 2
"""Tell the seeds of rows and of `TrainingRun.draw` from those of steps, lest all draw the same numbers."""


def seed_of(*words: int) -> int:
    """Return the seed of 32 bits that these words make; zeros at their end make no difference."""
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def seed_generators(*words: int) -> None:
    """Seed all generators, for a step (dropout) by the run's seed, the step and the rank.

    A resumed run draws what an uninterrupted one would have drawn.
    """
    word = seed_of(*words)
    # Not torch.manual_seed: for each kind of device that is not in use it formats a stack trace, 0.2 ms a step.
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(word)
    np.random.seed(word)
    random.seed(word)


def augment(task: Task, batch: Batch, seed: int, epoch: int, draw: Callable[..., torch.Tensor]) -> Batch:
    """Return a batch with the columns that the task changes; unchanged by a task that has neither function."""
    if by_row := getattr(task, "augment_row", None):
        batch = {**batch, **_augment_rows(by_row, batch, seed, epoch)}
    if by_batch := getattr(task, "augment", None):
        batch = {**batch, **by_batch(batch, draw)}
    return batch


def _augment_rows(by_row: Callable[[Batch], Batch], batch: Batch, seed: int, epoch: int) -> Batch:
    """Return the changed columns of all rows; a row's random numbers follow from the seed, the epoch and its id."""
    changed = []
    for place, row in enumerate(batch["row"].tolist()):
        seed_generators(seed, epoch, row, ROW_STREAM)
        changed.append(by_row({name: column[place] for name, column in batch.items()}))
    return {name: torch.stack([row[name] for row in changed]) for name in changed[0]}
