"""The training loop, as every worker of the group runs it."""

import time
from typing import Any

import torch

from app.data.order import forward_passes, micro_batches
from app.data.source import Batch
from app.observe.metrics import Stopwatch
from app.parallel import StepConsensus, clip_gradients, gradient_sync, prepare
from app.train.forward import row_losses
from app.train.setup import join_run
from app.train.step import after_step, evaluate, seed_generators, timed
from app.train.worker import Worker


def train_loop(config: dict[str, Any]) -> None:
    """What Ray Train runs on every worker; `config` is that of app/train/trainer.py."""
    with join_run(config) as worker:
        if not worker:
            return
        if hasattr(worker.task, "build_module"):
            from app.train.lightning import train as train_with_lightning  # only its own tasks need Lightning

            train_with_lightning(worker)
        else:
            train(worker)
        worker.checkpoints.close(finished=True)


def train(worker: Worker) -> None:
    """Train from the worker's first step to the end of the run, or until it is stopped.

    A step is one optimizer step, counted over the whole run. Step k of an epoch consumes the same rows on any number of
    workers, and every row has the same weight in the gradient.
    """
    settings, task, steps, total_steps = worker.plan.settings, worker.task, worker.plan.steps, worker.plan.total_steps
    model = prepare(worker.model, settings)
    optimizer, loader = worker.optimizer, worker.loader
    consensus = StepConsensus(worker.control_group)
    window = worker.open_window()
    step = worker.start

    if not worker.evaluated:  # the group before ended with the epoch's last step
        worker.add_evaluation(evaluate(worker))

    while step < total_steps:
        epoch, first = divmod(step, steps.per_epoch)
        last = min(steps.per_epoch, first + total_steps - step)
        model.train()
        for batch, data_wait, began in timed(loader.train(epoch + 1, first, last)):
            seed_generators(settings.seed, step, worker.rank)
            begin, end = steps.bounds(step % steps.per_epoch)
            values = accumulate_gradients(worker, model, batch, end - begin, window.forward)
            worker.checkpoints.wait_for_copy()  # from here on parameters change
            clip_gradients(model, settings.clip_norm)
            learning_rate = set_learning_rate(optimizer, task.schedule(step, total_steps))
            optimizer.step()
            optimizer.zero_grad()
            step += 1

            window.add_step(values, time.perf_counter() - began, data_wait)
            if after_step(worker, consensus, window, step, batch.get("row"), learning_rate):
                return


def accumulate_gradients(
    worker: Worker, model: torch.nn.Module, batch: Batch, rows_in_step: int, forward: Stopwatch
) -> list[Batch]:
    """Forward and backward over this worker's share of a step; returns each row's values, [B], without the graph.

    Gradients are averaged over the workers, so a row's loss is weighted by world size / rows in the step: the result is
    the mean over all rows of the step, whatever each worker's share. More than `micro_batch_size` rows are accumulated,
    and gradients are averaged once, with the last part. All workers make the same number of passes, as FSDP needs all
    in each: a worker with fewer parts, or without rows, makes some with weight 0. `forward` times the forward passes.
    """
    settings = worker.plan.settings
    rows = len(batch["row"]) if batch else 0
    own = list(micro_batches(rows, settings.micro_batch_size)) if rows else []
    idle = forward_passes(rows_in_step, worker.world_size, settings.micro_batch_size) - len(own)
    parts: list[slice | None] = [*[None] * idle, *own]
    values = []
    for number, part in enumerate(parts, start=1):
        given = {name: column[part] for name, column in batch.items()} if part else worker.padding_batch
        with gradient_sync(model, now=number == len(parts)):
            with forward:
                losses, metrics = row_losses(worker, model, given)
            (losses.sum() * (worker.world_size / rows_in_step if part else 0.0)).backward()
        if part:
            values.append({"loss": losses.detach(), **metrics})
    return values


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Scale each group's peak rate; returns the first. It is a function of the step, so nothing has to be stored."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
