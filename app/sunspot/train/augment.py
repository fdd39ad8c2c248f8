"""Augmentation of training rows by a task's `augment_row` and `augment`: the same at any number of workers."""

from collections.abc import Callable

import torch

from sunspot.data.source import Batch
from sunspot.tasks import Task
from sunspot.train.seeds import ROW_STREAM, seed_generators


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
