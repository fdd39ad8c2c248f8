"""The training loop, as every worker of the group runs it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
from torch.nn.parallel import DistributedDataParallel

from app.agreement import Agreement
from app.data.batch import Batch
from app.data.order import micro_batches
from app.evaluate import evaluate
from app.metrics import Stopwatch, Window
from app.worker import Worker, join_run


def train_loop(config: dict[str, Any]) -> None:
    """What Ray Train runs on every worker; `config` is made by `app.trainer`."""
    with join_run(config) as worker:
        if worker:
            train(worker)


def train(worker: Worker) -> None:
    """Train from where the run stands to its end.

    A step is one optimizer step, counted over the whole run: step k of an epoch consumes the same rows on any number
    of workers, and every row has the same weight in the gradient.
    """
    settings, task, steps = worker.settings, worker.task, worker.steps
    model = ray.train.torch.prepare_model(worker.model)
    optimizer, loader = worker.optimizer, worker.loader
    agreement = Agreement(worker.control_group)
    window = Window(worker.control_group, worker.device)
    step = worker.start

    if not worker.evaluated:  # an epoch ends here, and the workers before left before they could
        worker.catch_up(step, evaluate(worker))

    while step < worker.total_steps:
        epoch, first = divmod(step, steps.per_epoch)
        last = min(steps.per_epoch, first + worker.total_steps - step)
        model.train()
        for batch, data_wait, began in timed(loader.train(epoch + 1, first, last)):
            seed_generators(settings.seed, step, worker.rank)
            begin, end = steps.bounds(step % steps.per_epoch)
            values = accumulate_gradients(worker, model, batch, end - begin, window.forward)
            worker.wait_for_copy()  # of the state: from here on parameters change
            learning_rate = set_learning_rate(optimizer, task.schedule(step, worker.total_steps))
            optimizer.step()
            optimizer.zero_grad()
            step += 1

            step_time = time.perf_counter() - began
            window.add_step(values, step_time, data_wait)
            epoch_ends = step == worker.total_steps or step % steps.per_epoch == 0
            worker.took_step(step, batch.get("row"), window, epoch_ends)
            due = agreement.exchange(worker.due(step, step_time))
            leave, evaluated = due.leave and step < worker.total_steps, not (epoch_ends and worker.has_test)
            save = due.save or due.stop or leave or epoch_ends or is_multiple(step, settings.checkpoint_every_steps)
            record = window.close(step, epoch + 1, learning_rate) if save or due.report else {}
            if not evaluated and not due.stop and not leave:
                results = evaluate(worker)
                leave, evaluated = results is None, results is not None
                record |= results or {}
            if record:
                worker.report(record)
            if save or due.copy:
                worker.keep(step, record, evaluated, for_storage=save)
            if leave:
                worker.leave()
            if due.stop:
                worker.finish()
                return
    worker.finish()


def accumulate_gradients(
    worker: Worker, model: torch.nn.Module, batch: Batch, rows_in_step: int, forward: Stopwatch
) -> list[Batch]:
    """Forward and backward over this worker's share of a step; returns each row's values, [B], without the graph.

    DDP averages gradients over the workers, so a row's loss is weighted by world size / rows in the step: the result
    is the mean over all rows of the step, whatever each worker's share. More than `micro_batch_size` rows are
    accumulated, and gradients travel once, with the last part. A worker without rows joins with weight 0. `forward`
    measures the forward passes.
    """
    settings, task = worker.settings, worker.task
    rows = len(batch["row"]) if batch else 0
    weight = worker.world_size / rows_in_step if rows else 0.0
    batch = batch if rows else worker.stand_in
    parts = list(micro_batches(len(batch["row"]), settings.micro_batch_size))
    values = []
    for part in parts:
        travels = part is parts[-1] or not isinstance(model, DistributedDataParallel)
        with nullcontext() if travels else model.no_sync():  # type: ignore[operator]
            with forward, torch.autocast(worker.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                losses, metrics = task.loss(model, {name: column[part] for name, column in batch.items()})
            (losses.sum() * weight).backward()
        values.append({"loss": losses.detach(), **metrics})
    return values if rows else []


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Scale each group's peak rate. The rate is a function of the step, so that nothing of it has to be stored."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def is_multiple(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due at `step`."""
    return every > 0 and step % every == 0


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Make what dropout or augmentation draws in a step a function of (seed, step, rank).

    A resumed run draws what an uninterrupted one would have drawn, and no generator's state has to be stored.
    """
    word = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.manual_seed(word)
    np.random.seed(word)
    random.seed(word)


def timed(batches: Iterator[Batch]) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the seconds that were waited for it, and when the wait for it began (`perf_counter`)."""
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - began, began
