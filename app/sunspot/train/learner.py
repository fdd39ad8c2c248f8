"""What computes a step on one worker: its model, its optimizer and its rows, and the forward pass over these."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch

from sunspot.checkpoint import SavedObjects
from sunspot.checkpoint.average import WeightAverage
from sunspot.data.order import MIN_ROWS, largest_pass
from sunspot.data.source import Batch
from sunspot.data.torch_loader import TorchLoader
from sunspot.errors import SettingsError
from sunspot.metric_names import refuse_names
from sunspot.parallel.collectives import WorkerPlace
from sunspot.plan import Plan
from sunspot.tasks import Task
from sunspot.tasks.signatures import place_of_function
from sunspot.train.learning_rates import LearningRates
from sunspot.train.randomness import augment
from sunspot.train.undo import StepUndo


class Loader(Protocol):
    """This worker's rows."""

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """Yield its share of the steps `first` .. `last` - 1 of an epoch (from 1); it may have no rows."""
        ...

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Yield its part of the held-out rows, each row on exactly one worker."""
        ...


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
    rates: LearningRates

    def __post_init__(self) -> None:
        source, first = self.plan.source, np.zeros(MIN_ROWS, np.int64)
        group = next(number for number, rows in enumerate(source.row_groups) if rows)
        columns = {"row": first, **source.read(group, first)}
        self.padding_batch = {name: torch.tensor(values, device=self.place.device) for name, values in columns.items()}
        "The batch of a worker whose share of a step is empty: the first row, as often as batch norm needs it."
        self.undo = StepUndo(self.model, self.optimizer)

    def warm_up(self) -> None:
        """Take a step that does not count, so that what a first one compiles and allocates keeps nobody waiting.

        The state of those who train takes the place of what it changes. A loop of its own takes steps that nobody else
        knows, and a loss that needs the other workers raises: their first step then is what it is.
        """
        if hasattr(self.task, "train"):
            return
        settings, device = self.plan.settings, self.place.device
        workers, limit = settings.num_workers.most, self.plan.pass_limit
        rows = max(largest_pass(rows, workers, limit) for rows in self.plan.steps.sizes)
        self.undo.keep()
        with suppress(Exception):
            chosen = torch.arange(rows, device=device) % MIN_ROWS
            batch = {name: column[chosen] for name, column in self.padding_batch.items()}
            batch = augment(self.task, batch, settings.seed, 1, lambda *shape: torch.rand(rows, *shape, device=device))
            losses, _ = row_losses(self, self.model, batch)
            losses.sum().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.undo.put_back_moving()

    def move(self, place: WorkerPlace) -> None:
        """Train on in another group: its model, its optimizer and its rows stay."""
        self.place = place
        cast(TorchLoader, self.loader).move(place.world_size, place.rank)
        self.undo.stepped.begin_group()
        for parameter in self.model.parameters():
            parameter.grad = None  # of a step that others could not end

    def saved(self) -> SavedObjects:
        """Return what its checkpoints hold, with the files that the task adds."""
        files = getattr(self.task, "checkpoint_files", None)
        more_files = partial(files, self.model) if files else None
        return SavedObjects(self.model, self.optimizer, self.average, more_files, self.undo.stepped)


def in_precision(learner: Learner) -> AbstractContextManager[None]:
    """Autocast, as PRECISION says."""
    bf16 = learner.plan.settings.precision == "bf16"
    return torch.autocast(learner.place.device.type, torch.bfloat16, enabled=bf16)


def row_losses(learner: Learner, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Compute the task's loss of each row of a batch, [B], and its metrics, [B] each.

    Under COMPILE every pass has the same number of rows, so that one graph serves all: short passes are padded by
    repeating rows, of which no loss is returned. Only where rows see each other (batch norm) do these count.
    """
    rows, batch = len(batch["row"]), fill_up(learner, batch)
    with in_precision(learner):
        losses, metrics = refuse_means(learner, learner.task.loss(model, batch), len(batch["row"]))
    if len(batch["row"]) > rows:
        losses, metrics = losses[:rows], {name: values[:rows] for name, values in metrics.items()}
    return losses, metrics


def fill_up(learner: Learner, batch: Batch) -> Batch:
    """Repeat rows of a batch that has too few for a pass under COMPILE; the first rows remain those of the batch."""
    rows = len(batch["row"])
    if rows >= learner.plan.pass_rows:
        return batch
    again = torch.arange(learner.plan.pass_rows, device=batch["row"].device) % rows
    return {name: column[again] for name, column in batch.items()}


def refuse_means(learner: Learner, returned: Any, rows: int) -> tuple[torch.Tensor, Batch]:
    """Return the loss and the metrics of each row.

    Raises `SettingsError` for anything else, such as means, and for metric names that are not allowed.
    """
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    values = {"the losses": losses, **metrics} if isinstance(metrics, Mapping) else {"its metrics": metrics}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != (rows,):
            place = place_of_function(learner.task.loss)
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise SettingsError(
                f"SUNSPOT_TASK={learner.plan.settings.task}: its loss{place}: {name}: a {type(value).__name__}{shape}; "
                f'return the loss of each of the {rows} rows, a tensor of shape [{rows}] (reduction="none"), and a '
                "dict of metrics of that shape"
            )
    refuse_names(metrics, f"SUNSPOT_TASK={learner.plan.settings.task}: its loss returns")
    return losses, metrics
