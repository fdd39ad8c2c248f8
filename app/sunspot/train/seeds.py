"""Random numbers as a function of the seed and of a step, a row or a rank: no generator's state has to be stored."""

import random

import numpy as np
import torch

ROW_STREAM, DRAW_STREAM = 1, 2
"""Tell the seeds of rows (augment.py) and of `TrainingRun.draw` from those of steps, lest all draw the same numbers."""


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
