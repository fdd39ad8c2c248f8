"""The training loop of a LightningModule: Lightning's Trainer takes the steps, sunspot/train/step.py does the rest."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sunspot.checkpoint.snapshot import map_tensors
from sunspot.data.order import micro_batches
from sunspot.data.source import Batch
from sunspot.parallel.decisions import StepDecisionBroadcast
from sunspot.tasks.lightning_adapter import LightningTask, defines, make_trainer
from sunspot.train.step import after_step, make_up_evaluation, seed_generators, timed
from sunspot.train.worker import Worker

BETWEEN_STEPS = (
    *("on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_zero_grad", "configure_callbacks"),
)
"""Hooks between a step and the next change of parameters, in which a module may change some itself."""


def train(worker: Worker) -> None:
    """Do what `sunspot.train.loop.train` does, by Lightning's Trainer."""
    task, model, step = cast(LightningTask, worker.task), cast(LightningModule, worker.model), worker.start
    task.begin_schedule(model, worker.optimizer, step)
    if make_up_evaluation(worker):
        return

    shares = Shares(worker)
    trainer = make_trainer(
        worker.plan.settings,
        worker.plan.steps,
        accelerator="cuda" if worker.device.type == "cuda" else "cpu",
        strategy=EvenStrategy(worker, task, shares),
        plugins=[RayLightningEnvironment()],
        precision="bf16-mixed" if worker.plan.settings.precision == "bf16" else "32-true",
        callbacks=[ReportCallback(worker, task, shares)],
    )
    count_from(trainer, step, worker.plan.steps.per_epoch)
    prepare_trainer(trainer).fit(model, shares)


def count_from(trainer: Trainer, step: int, per_epoch: int) -> None:
    """Start a module's `global_step` and `current_epoch`, and the Trainer's own count, at `step`.

    Lightning sets these only from a checkpoint of its own, and there is none: the state comes from ours.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    epochs = dict.fromkeys(("ready", "started", "processed", "completed"), step // per_epoch)
    loop.epoch_progress.load_state_dict({"total": epochs, "current": epochs})


class Shares:
    """This worker's share of each step, as the Trainer's batches, and the figures of the newest one."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.window = worker.open_window()
        self.step = worker.start
        "Optimizer steps taken."
        self.batch: Batch = {}
        "Empty for a share without rows: then the module gets the padding batch."
        self.began = self.data_wait = 0.0
        self.values: list[Batch] = []
        "Each row's values, of every forward pass."
        self.finish_step: Callable[[], bool] = lambda: False
        "Called after a step; True: the run stops."

    def __len__(self) -> int:
        """Steps of a whole epoch. With a length, the Trainer fetches no batch ahead."""
        return self._worker.plan.steps.per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch. Nothing happens before the first `next`: the Trainer makes iterators it does not use.

        The Trainer asks for the next batch when all hooks of a step are done, the module's too.
        """
        worker = self._worker
        epoch, first = divmod(self.step, len(self))
        last = min(len(self), first + worker.plan.total_steps - self.step)
        for batch, self.data_wait, self.began in timed(worker.loader.train(epoch + 1, first, last)):
            self.batch, self.values = batch if batch and len(batch["row"]) else {}, []
            seed_generators(worker.plan.settings.seed, self.step, worker.rank)
            yield self.batch or worker.padding_batch
            if self.finish_step():
                return

    @property
    def position(self) -> int:
        """The step's number in its epoch, from 0."""
        return self.step % len(self)

    @property
    def weight(self) -> float:
        """The weight of a row's loss, as DDP averages gradients over workers; 0 without rows."""
        begin, end = self._worker.plan.steps.bounds(self.position)
        return self._worker.world_size / (end - begin) if self.batch else 0.0


class EvenStrategy(RayDDPStrategy):
    """DDP with the same weight for all rows of a step, as in `sunspot.train.run.passes`.

    One batch is one optimizer step: more rows than `Plan.pass_limit` are accumulated within it.
    """

    def __init__(self, worker: Worker, task: LightningTask, shares: Shares) -> None:
        hook = bf16_compress_hook if worker.plan.settings.gradient_precision == "bf16" else None
        super().__init__(gradient_as_bucket_view=True, ddp_comm_hook=hook)
        self._worker, self._task, self._shares = worker, task, shares

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Use the worker's, which has its state already; the callback runs its schedulers."""
        self.optimizers = [self._worker.optimizer]

    def training_step(self, batch: Any, *index: int) -> Any:
        """The first forward pass; the others are made in `backward`, before which gradients are zeroed."""
        rows = len((self._shares.batch or self._worker.padding_batch)["row"])
        parts = list(micro_batches(rows, self._worker.plan.pass_limit))
        whole = len(parts) == 1
        self._parts = [(batch if whole else map_tensors(batch, lambda t, p=part: t[p]), part) for part in parts]  # type: ignore[misc]
        self._index = (self._shares.position,) if index else ()  # the Trainer counts from where it began
        return self._forward()

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Backward through the first part, then forward and backward through the others."""
        total = super().backward(closure_loss, optimizer, *args, **options)
        while self._parts:
            output = self._forward()
            loss = output["loss"] if isinstance(output, Mapping) else output
            total = total + super().backward(loss, optimizer, *args, **options)
        return total

    def _forward(self) -> Any:
        """One part's forward pass; returns what the module's step did, with the part's weighted sum as its loss."""
        batch, part = self._parts.pop(0)
        model = cast(DistributedDataParallel, self.model)
        step = functools.partial(super().training_step, batch, *self._index)
        # Gradients are averaged with the last part.
        with model.no_sync() if self._parts else nullcontext(), self._shares.window.forward:
            module, rows = cast(LightningModule, model.module), part.stop - part.start
            losses, metrics, output = self._task.per_row(module, step, rows)
        if self._shares.batch:
            self._shares.values.append({"loss": losses.detach(), **metrics})
        loss = losses.sum() * self._shares.weight
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss


class ReportCallback(Callback):
    """Saves and reports after each step, in place of Ray's `RayTrainReportCallback`.

    Checkpoints that Ray uploads can lose files without an error, and hold up the training. Ours are committed with a
    manifest (sunspot/checkpoint/commit.py); Ray gets only the metrics.
    """

    def __init__(self, worker: Worker, task: LightningTask, shares: Shares) -> None:
        self._worker, self._task, self._shares = worker, task, shares
        self._consensus = StepDecisionBroadcast(worker.control_group)
        self._learning_rate = 0.0
        self._finished = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._shares.finish_step = functools.partial(self._finish_step, trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._worker.checkpoints.wait_for_copy()  # from here on parameters change
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        shares = self._shares
        shares.step += 1
        self._task.advance_schedule(pl_module, shares.step)
        shares.window.add_step(shares.values, time.perf_counter() - shares.began, shares.data_wait)
        self._finished = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_step(trainer, pl_module)  # after the last step of an epoch no batch is asked for

    def _finish_step(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Do what is due after a step and all of its hooks, whose changes to the state are part of the step."""
        if not self._finished:
            self._finished = True
            shares, rows = self._shares, self._shares.batch.get("row")
            trainer.should_stop = after_step(
                self._worker, self._consensus, shares.window, shares.step, rows, self._learning_rate
            )
            if any(defines(pl_module, hook) for hook in BETWEEN_STEPS):
                self._worker.checkpoints.wait_for_copy()
        return trainer.should_stop
