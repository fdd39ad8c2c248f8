"""The training loop for a LightningModule, in which Lightning's Trainer takes the steps."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

from sunspot.adapters.lightning import LightningTask, count_from, defines, make_trainer
from sunspot.checkpoint.tensors import map_tensors
from sunspot.data.source import Batch
from sunspot.parallel.gradients import prepare
from sunspot.train.run import LibraryRun
from sunspot.train.worker import Worker

BETWEEN_STEPS = (
    *("on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_zero_grad", "configure_callbacks"),
)
"""Hooks in which a module may change parameters between two optimizer steps."""


def train(worker: Worker, task: LightningTask) -> None:
    """Train with Lightning's Trainer."""
    learner = worker.learner
    step = worker.group_start.step
    module = cast(LightningModule, learner.model)
    task.begin_schedule(module, learner.optimizer, step)
    if worker.repeat_evaluation():
        return

    run = LightningRun(worker)
    trainer = make_trainer(
        run.settings,
        learner.plan.steps,
        accelerator="cuda" if run.device.type == "cuda" else "cpu",
        strategy=RowWeightedDDPStrategy(run, task),
        plugins=[RayLightningEnvironment()],
        precision="bf16-mixed" if run.settings.precision == "bf16" else "32-true",
        callbacks=[StepCallback(run, task)],
    )
    count_from(trainer, step, step // run.steps_per_epoch)
    prepare_trainer(trainer).fit(module, run)


class LightningRun(LibraryRun):
    """A run in which Lightning controls precision, schedulers and hooks. The Trainer iterates over it to get batches.

    The module is wrapped after its `setup` has run. `StepCallback` waits for the copy of the state just before the
    parameters change. An optimizer hook would wait too early, because Lightning runs the forward and backward passes
    inside the optimizer's step.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._hooks_between_steps = any(defines(cast(LightningModule, self.model), hook) for hook in BETWEEN_STEPS)

    def __len__(self) -> int:
        """Return the number of steps in an epoch. A Trainer that knows this number does not prefetch a batch."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the epoch.

        The iterator does nothing before its first `next`, because the Trainer creates iterators that it does not use.
        The Trainer requests the next batch after all hooks of a step have run, including the module's hooks.
        """
        return self.rest_of_epoch()

    def wrap_model(self) -> torch.nn.Module:
        """Wrap the module so that its gradients are averaged over the workers, and return it."""
        if self._worker.averages:
            self.use_model(prepare(self.model, self.settings))
        return self.model

    def step(self) -> None:
        super().step()
        if self._hooks_between_steps:
            self._worker.checkpoints.wait_for_copy()


class RowWeightedDDPStrategy(RayDDPStrategy):
    """DDP strategy that gives all rows of a step the same weight, as `TrainingRun.passes` does.

    Each batch is one optimizer step. A batch with more rows than `Plan.pass_limit` is split into several passes, and
    the gradients are accumulated.
    """

    def __init__(self, run: LightningRun, task: LightningTask) -> None:
        super().__init__()
        self._run, self._task = run, task

    def configure_ddp(self) -> None:
        self.model = self._run.wrap_model()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Use the run's optimizer, which already has its state. `StepCallback` steps the schedulers."""
        self.optimizers = [self._run.optimizer]

    def training_step(self, batch: Any, *index: int) -> Any:
        """Run the first forward pass only.

        The Trainer zeroes gradients after this call, so `backward` runs the remaining passes.
        """
        self._batch = batch
        self._whole = slice(0, self._run.pass_rows)
        self._passes = self._run.passes()
        in_epoch = self._run.position % self._run.steps_per_epoch  # counted from 0, unlike the Trainer's own number
        self._index = (in_epoch,) if index else ()
        return self._forward(next(self._passes))

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Run the backward pass of the batch's first part, and the forward and backward passes of its other parts.

        Returns the sum of the losses.
        """
        total = super().backward(closure_loss, optimizer, *args, **options)
        for rows in self._passes:
            output = self._forward(rows)
            loss = output["loss"] if isinstance(output, Mapping) else output
            total = total + super().backward(loss, optimizer, *args, **options)
        return total

    def _forward(self, rows: slice) -> Any:
        """Run the forward pass of a part of the batch.

        Returns the module's output, in which the loss is the weighted sum of the rows' losses.
        """
        run = self._run
        module = cast(LightningModule, self.lightning_module)
        batch = self._batch if rows == self._whole else map_tensors(self._batch, lambda tensor: tensor[rows])
        step = functools.partial(super().training_step, batch, *self._index)
        with run.forward():
            losses, metrics, output = self._task.per_row(module, step, rows.stop - rows.start)
        run.refuse_detached(losses)
        run.log({"loss": losses, **metrics})
        loss = losses.sum() * run.weight
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss


class StepCallback(Callback):
    """Steps the schedulers, and makes the optimizer wait until the state is copied.

    It also ends the last step of each epoch. Any other step ends when the Trainer requests the next batch.

    This callback replaces Ray's `RayTrainReportCallback`, whose uploads delay training and can lose files without an
    error. Sunspot commits its own checkpoints with a manifest (checkpoint/commit.py), and reports only metrics to Ray.
    """

    def __init__(self, run: LightningRun, task: LightningTask) -> None:
        self._run = run
        self._task = task

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._run.before_change()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._task.advance_schedule(pl_module, self._run.position + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.end_step()  # no batch is requested after the last step of an epoch
        trainer.should_stop = self._run.stopped
