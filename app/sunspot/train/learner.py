"""A worker's model, optimizer and loader, and its forward pass."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.optim import Optimizer

from sunspot.checkpoint import SavedObjects
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.tensors import map_tensors
from sunspot.data.order import MIN_ROWS, largest_pass
from sunspot.data.source import Batch
from sunspot.data.torch_loader import TorchLoader
from sunspot.elastic.restore import TrainingState
from sunspot.errors import SettingsError
from sunspot.metric_names import refuse_names
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.sharding import discard_pass, shard_optimizer_state
from sunspot.plan import Plan
from sunspot.run.attempts import IN_PLACE
from sunspot.tasks import Task
from sunspot.tasks.signatures import place_of_function
from sunspot.train.learning_rates import LearningRates
from sunspot.train.randomness import augment
from sunspot.train.undo import StepUndo


class Loader(Protocol):
    """A loader of this worker's rows."""

    ids: torch.Tensor | None
    "Row IDs of the newest batch of `train` in main memory, int64 [B], or None if only the batch itself has them."

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """Yield this worker's rows for each step from `first` to `last` - 1 of an epoch.

        The worker may have no rows in a step.
        """
        ...

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Yield this worker's share of the held-out rows. No two workers get the same row."""
        ...


@dataclass
class Learner:
    """A worker's model, optimizer and loader. The learner computes steps, but does not save or report them."""

    plan: Plan
    task: Task
    place: WorkerPlace
    model: torch.nn.Module
    optimizer: Optimizer
    average: WeightAverage
    loader: Loader
    rates: LearningRates

    def __post_init__(self) -> None:
        source = self.plan.source
        first = np.zeros(MIN_ROWS, np.int64)
        group = next(number for number, rows in enumerate(source.row_groups) if rows)
        columns = {"row": first, **source.read(group, first)}
        self.padding_batch = {name: torch.tensor(values, device=self.place.device) for name, values in columns.items()}
        "Batch for a worker without rows in a step. It repeats the first row, because batch norm needs several rows."
        self.undo = StepUndo(self.model, self.optimizer)
        loss = self.task.loss
        compiles = self.plan.settings.compile != "off"
        self._compiled_loss = torch.compile(loss, dynamic=False) if loss and compiles else None
        self._opaque_model: tuple[torch.nn.Module, Any] | None = None
        "The model of the newest pass, and a wrapper of it that is not compiled together with the loss."

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> Any:
        """Call the task's `loss`, and return its result. COMPILE compiles `loss` separately from the model."""
        if not self._compiled_loss:
            assert self.task.loss
            return self.task.loss(model, batch)
        if not self._opaque_model or self._opaque_model[0] is not model:
            self._opaque_model = model, torch.compiler.disable(model)
        return self._compiled_loss(self._opaque_model[1], batch)

    def warm_up(self) -> None:
        """Take a step and discard it, so that compilation and memory allocation do not delay the other workers later.

        Everything that the step changes will later be replaced by the other workers' state. A task with its own loop is
        not warmed up. If the task's loss needs the other workers, the step fails, and the error is ignored.
        """
        if self.task.train:
            return
        settings = self.plan.settings
        device = self.place.device
        workers = settings.num_workers.most
        limit = self.plan.pass_limit
        rows = max(largest_pass(rows, workers, limit) for rows in self.plan.steps.sizes)
        self.undo.keep()
        with suppress(Exception):
            chosen = torch.arange(rows, device=device) % MIN_ROWS
            batch = {name: column[chosen] for name, column in self.padding_batch.items()}
            batch = augment(
                self.task, batch, (settings.seed, 1), lambda *shape: torch.rand(rows, *shape, device=device)
            )
            losses, _ = row_losses(self, self.model, batch)
            losses.sum().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.undo.put_back_moving()

    def move(self, place: WorkerPlace) -> None:
        """Move to another group, with the same model, optimizer and rows. The worker must have the same shard there."""
        self.place = place
        discard_pass(self.model)
        self._opaque_model = None  # the previous group's model has its own buffers for gradients
        cast(TorchLoader, self.loader).move(place.world_size, place.rank)
        self.undo.stepped.begin_group()
        for parameter in self.model.parameters():
            parameter.grad = None  # discard the gradients of the aborted step

    def saved(self) -> SavedObjects:
        """Return the objects to save in checkpoints, including the task's extra files."""
        files = self.task.checkpoint_files
        more_files = partial(files, self.model) if files else None
        return SavedObjects(self.model, self.optimizer, self.average, more_files, self.undo.stepped)


def load_rest(state: TrainingState, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Load the optimizer's state. If the state is sharded (fsdp), also load the model's weights."""
    if state.optimizer:
        values = shard_optimizer_state(optimizer, state.optimizer)
        if optimizer.param_groups[0]["params"][0].is_cpu and state.tier != IN_PLACE:
            # On the CPU, the optimizer keeps the tensors that it is given, and with them the pages of a whole file.
            values = map_tensors(values, torch.clone)
        optimizer.load_state_dict(values)
    elif state.load_parts:
        state.load_parts(model, optimizer)


def in_precision(learner: Learner) -> AbstractContextManager[None]:
    """Return an autocast context for the precision that is set by PRECISION."""
    if learner.plan.settings.precision == "bf16":
        return torch.autocast(learner.place.device.type, torch.bfloat16)
    return nullcontext()


def row_losses(learner: Learner, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the task's loss and metrics for each row of a batch, all of shape [B].

    With COMPILE, every pass has the same number of rows, so that one graph is enough. Shorter passes are padded with
    repeated rows, whose losses are dropped. The repeated rows only affect layers that mix rows, such as batch norm.
    """
    rows = batch["row"].shape[0]
    batch = fill_up(learner, batch)
    all_rows = batch["row"].shape[0]
    with in_precision(learner):
        losses, metrics = refuse_means(learner, learner.compute_loss(model, batch), all_rows)
    if all_rows > rows:
        losses, metrics = losses[:rows], {name: values[:rows] for name, values in metrics.items()}
    return losses, metrics


def fill_up(learner: Learner, batch: Batch) -> Batch:
    """Repeat the rows of a batch until it has as many rows as a compiled pass needs."""
    rows = batch["row"].shape[0]
    if rows >= learner.plan.pass_rows:
        return batch
    again = torch.arange(learner.plan.pass_rows, device=batch["row"].device) % rows
    return {name: column[again] for name, column in batch.items()}


def refuse_means(learner: Learner, returned: Any, rows: int) -> tuple[torch.Tensor, Batch]:
    """Return the loss and the metrics of each row from `returned`, the value that the task's `loss` has returned.

    Raises `SettingsError` if the loss or a metric is not one number per row, or if a metric's name is not allowed.
    """
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    are_named = type(metrics) is dict or isinstance(metrics, Mapping)  # the second test takes a microsecond
    values = {"the losses": losses, **metrics} if are_named else {"its metrics": metrics}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != (rows,):
            place = place_of_function(learner.task.loss)
            shape = f" and shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise SettingsError(
                f"SUNSPOT_TASK={learner.plan.settings.task}: its loss{place and f'{place},'} returned {name} of "
                f"type {type(value).__name__}{shape}; return a tensor of shape [{rows}] with the loss of each row "
                '(reduction="none"), and optionally a dict of metrics of the same shape'
            )
    if metrics:
        refuse_names(metrics, f"SUNSPOT_TASK={learner.plan.settings.task}: its loss returns")
    return losses, metrics
