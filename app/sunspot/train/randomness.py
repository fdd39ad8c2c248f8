"""Derives random numbers from the seed and a step, row or rank, so that no generator's state has to be stored.

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

WORD = (1 << 64) - 1
"""Largest unsigned 64-bit integer."""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, the increment of SplitMix64."""

DRAW_STREAM = 2
"""Word that distinguishes the seeds of `TrainingRun.draw` from the seeds of steps."""


def seed_of(*words: int) -> int:
    """Return a 32-bit seed made from integers of at most 64 bits.

    Each integer is mixed in with the finalizer of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
    NumPy's `SeedSequence` takes four times as long, and a seed is needed in every step.
    """
    state = 0
    for word in words:
        state = (state ^ word) + GOLDEN_GAMMA & WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & WORD
        state ^= state >> 31
    return state >> 32


def seed_generators(*words: int) -> None:
    """Seed all generators with these integers. For a step, these are the run's seed, the step and the rank.

    A resumed run then draws the same numbers as an uninterrupted run, for example in dropout.
    """
    word = seed_of(*words)
    # torch.manual_seed would format a stack trace for each type of device that is not in use, 0.2 ms a step.
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(word)
    np.random.seed(word)
    random.seed(word)


def draw_uniform(seed: int, first: int, number: int) -> torch.Tensor:
    """Return the numbers `first` to `first + number` - 1 of a random stream.

    The numbers are uniform in [0, 1), as a float32 tensor [number]. The generator is Philox, which can start anywhere
    in its stream (Salmon et al. 2011, doi:10.1145/2063384.2063405). Each value of its counter gives four numbers.
    """
    generator = np.random.Philox(key=seed)
    generator.advance(first // 4)
    words = generator.random_raw(first % 4 + number)[first % 4 :]
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def augment(
    task: Task,
    batch: Batch,
    words: tuple[int, ...],
    draw: Callable[..., torch.Tensor],
    ids: torch.Tensor | None = None,
) -> Batch:
    """Apply the task's `augment_row` and `augment` to a batch, if the task defines them. Return the new batch.

    `words` seed the random numbers of each row. They are the run's seed and the epoch or, in a mixture, the run's seed
    and the step. `ids` is a copy of the batch's row IDs in main memory, int64 [B]. If `ids` is None, the IDs are read
    from the batch.
    """
    if task.augment_row:
        batch = {**batch, **_augment_rows(task.augment_row, batch, words, batch["row"] if ids is None else ids)}
    if task.augment:
        batch = {**batch, **task.augment(batch, draw)}
    return batch


def _augment_rows(by_row: Callable[[Batch], Batch], batch: Batch, words: tuple[int, ...], ids: torch.Tensor) -> Batch:
    """Augment each row separately. A row's random numbers depend only on the `words` and its ID."""
    changed = []
    for place, row in enumerate(ids.tolist()):
        seed_generators(*words, row, ROW_STREAM)
        changed.append(by_row({name: column[place] for name, column in batch.items()}))
    return {name: torch.stack([row[name] for row in changed]) for name in changed[0]}
