"""What surrounds an optimizer step, whoever takes it: app/train/loop.py, or Lightning's Trainer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import torch

from app.data.source import Batch
from app.observe.metrics import MetricWindow, Sums, mean_over_workers
from app.parallel import StepConsensus, any_rank, sync_buffers
from app.train.worker import Worker


def timed(batches: Iterator[Batch]) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the seconds that were waited for it, and when the wait for it began (`perf_counter`)."""
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - began, began


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Make what dropout or augmentation draws in a step a function of (seed, step, rank).

    A resumed run draws what an uninterrupted one would have drawn, and no generator's state has to be stored.
    """
    word = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.manual_seed(word)
    np.random.seed(word)
    random.seed(word)


def after_step(
    worker: Worker,
    agreement: StepConsensus,
    window: MetricWindow,
    step: int,
    rows: torch.Tensor | None,
    learning_rate: float,
) -> bool:
    """Note that `step` has been taken, and do what is due; all workers call this together. True: the run is to stop.

    `rows`: the ids of those that this worker consumed. The window has counted the step. Does not return when the
    workers are to restart.
    """
    per_epoch, has_more = worker.steps.per_epoch, step < worker.total_steps
    epoch_ends = not has_more or step % per_epoch == 0
    worker.took_step(step, rows, window, epoch_ends)
    due = agreement.exchange(worker.due(step, window.last_step_s))
    restart, evaluated = due.restart and has_more, not (epoch_ends and worker.has_test)
    by_interval = due.save or is_multiple(step, worker.settings.checkpoint_every_steps)
    save = due.stop or restart or epoch_ends or (by_interval and not due.busy)
    record = window.close(step, (step - 1) // per_epoch + 1, learning_rate) if save or due.report else {}
    if not evaluated and not due.stop and not restart:
        results = evaluate(worker)
        restart, evaluated = results is None, results is not None
        record |= results or {}
    if record:
        worker.report(record)
    if save or due.copy:
        worker.keep(step, record, evaluated, for_storage=save)
    if restart:
        worker.restart()
    return due.stop


def is_multiple(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due at `step`."""
    return every > 0 and step % every == 0


@torch.no_grad()
def evaluate(worker: Worker) -> dict[str, float] | None:
    """Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ...; empty without such rows.

    None when the workers were told to restart meanwhile: a notice may be shorter than an evaluation.
    """
    if not worker.has_test:
        return {}
    model = worker.model
    sync_buffers(model)  # rank 0's are those of the checkpoint
    model.eval()
    sums = Sums()
    for batch in _batches(worker):
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=worker.settings.precision == "bf16"):
            losses, metrics = worker.task.loss(model, batch or worker.stand_in)
        if batch:
            sums.add({"loss": losses, **metrics})
        worker.heartbeat()
    model.train()
    [broken_off] = any_rank(worker.control_group, worker.commands.look().restart)
    if broken_off:
        return None
    return {f"test_{name}": value for name, value in mean_over_workers(sums, worker.control_group).items()}


def _batches(worker: Worker) -> Iterator[Batch]:
    """This worker's held-out rows, until it is told to restart.

    Under FSDP a forward pass is a joint one: all workers get as many batches, {} those that have no more rows.
    """
    batches = worker.loader.test(worker.settings.global_batch_size)
    while True:
        batch = next(batches, None)
        restart, more = worker.commands.look().restart, batch is not None
        if worker.in_parts:
            restart, more = any_rank(worker.control_group, restart, more)
        if restart or not more:
            return
        yield batch or {}
