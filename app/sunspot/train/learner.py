"""What computes a step on one worker: its model, its optimizer and its rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch

from sunspot.checkpoint import SavedObjects
from sunspot.checkpoint.average import WeightAverage
from sunspot.data.order import MIN_ROWS
from sunspot.data.source import Batch, Source
from sunspot.data.torch_loader import TorchLoader
from sunspot.parallel.collectives import WorkerPlace
from sunspot.plan import Plan
from sunspot.tasks import Task


class Loader(Protocol):
    """This worker's rows."""

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """Yield its share of the steps `first` .. `last` - 1 of an epoch (from 1); it may have no rows."""
        ...

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Yield its part of the held-out rows, each row on exactly one worker."""
        ...


class StepBuffers:
    """A model's buffers as they were when the newest step began, for when it is to be taken again.

    Batch norm's averages move with each forward pass.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._moving = set(range(len(self._buffers)))
        "Numbers of those that steps change: after the first one, only what has been seen to change."
        self._kept: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []

    def keep(self) -> None:
        """Note their values, as a step begins."""
        versions = [buffer._version for buffer in self._buffers]  # autograd's count of changes has no public name
        if self._versions:
            changed = {number for number, version in enumerate(versions) if version != self._versions[number]}
            self._moving = changed | (self._moving if len(self._moving) < len(versions) else set())
        self._versions = versions
        self._kept = {number: self._buffers[number].detach().clone() for number in self._moving}

    def put_back(self) -> None:
        """Set them to what they were."""
        with torch.no_grad():
            for number, values in self._kept.items():
                self._buffers[number].copy_(values)
        self._versions = []
        self._moving = set(range(len(self._buffers)))


@dataclass
class Learner:
    """All that computes a step on this worker; nothing of what is saved or reported."""

    plan: Plan
    task: Task
    place: WorkerPlace
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    loader: Loader

    def __post_init__(self) -> None:
        self.padding_batch = make_padding_batch(self.plan.source, self.place.device)
        self.buffers = StepBuffers(self.model)

    def move(self, place: WorkerPlace) -> None:
        """Train on in another group: its model, its optimizer and its rows stay."""
        self.place = place
        cast(TorchLoader, self.loader).move(place.world_size, place.rank)
        for parameter in self.model.parameters():
            parameter.grad = None  # of a step that others could not end

    def saved(self) -> SavedObjects:
        """Return what its checkpoints hold, with the files that the task adds."""
        files = getattr(self.task, "checkpoint_files", None)
        return SavedObjects(self.model, self.optimizer, self.average, partial(files, self.model) if files else None)


def make_padding_batch(source: Source, device: torch.device) -> Batch:
    """Make the batch of a worker whose share of a step is empty: the first row, as often as batch norm needs it."""
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    first = np.zeros(MIN_ROWS, np.int64)
    columns = {"row": first, **source.read(group, first)}
    return {name: torch.tensor(values, device=device) for name, values in columns.items()}
