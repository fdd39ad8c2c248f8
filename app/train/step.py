"""What surrounds an optimizer step, taken by app/train/loop.py or by Lightning's Trainer."""

import random
import time
from collections.abc import Iterator

import numpy as np
import torch

from app.data.order import largest_pass
from app.data.source import Batch
from app.observe.metrics import MetricWindow, Sums, mean_over_workers
from app.parallel import StepConsensus, any_rank, sync_buffers
from app.train.forward import row_losses
from app.train.worker import Worker


def timed(batches: Iterator[Batch]) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the seconds waited for it, and when that wait began (`perf_counter`)."""
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - began, began


def seed_of(*words: int) -> int:
    """The seed of 32 bits that these words make; zeros at their end make no difference."""
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def seed_generators(*seeds: int) -> None:
    """Make the random numbers to come a function of these: those of a step (dropout) of the seed, the step, the rank.

    A resumed run draws what an uninterrupted one would have drawn, without storing any generator's state.
    """
    word = seed_of(*seeds)
    # Not torch.manual_seed: for each kind of device that is not in use it formats a stack trace, 0.2 ms a step.
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(word)
    np.random.seed(word)
    random.seed(word)


def after_step(
    worker: Worker,
    consensus: StepConsensus,
    window: MetricWindow,
    step: int,
    rows: torch.Tensor | None,
    learning_rate: float,
) -> bool:
    """Record that `step` was taken and do what is due; all workers call this together. Returns whether the run stops.

    `rows` are the ids that this worker consumed, and `window` includes the step. Raises to end the group when it
    restarts.
    """
    plan, every = worker.plan, worker.plan.settings.checkpoint_every_steps
    per_epoch, has_more = plan.steps.per_epoch, step < plan.total_steps
    epoch_ends = not has_more or step % per_epoch == 0
    worker.average.update(step)
    worker.took_step(step, rows, window, epoch_ends)
    agreed = consensus.agree(lambda: worker.due(step, window.last_step_s))
    restart, evaluated = agreed.restart and has_more, not (epoch_ends and plan.test)
    by_interval = agreed.save or (every > 0 and step % every == 0)
    save = agreed.stop or restart or epoch_ends or (by_interval and not agreed.busy)
    record = window.close(step, (step - 1) // per_epoch + 1, learning_rate) if save or agreed.report else {}
    if not evaluated and not agreed.stop and not restart:
        results = evaluate(worker)
        restart, evaluated = results is None, results is not None
        record |= results or {}
    if record:
        worker.report(record, window)
    if save or agreed.copy:
        metrics = {**record, **window.recent.newest}  # a copy without a record hands on the means
        worker.checkpoints.save(step, metrics, evaluated=evaluated, to_storage=save)
    if restart:
        worker.restart_group()
    return agreed.stop


def evaluate(worker: Worker) -> dict[str, float] | None:
    """Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ...; empty without such rows.

    None when a restart was requested meanwhile: a notice may be shorter than an evaluation.
    """
    if not worker.plan.test:
        return {}
    model, settings = worker.model, worker.plan.settings
    sync_buffers(model)  # a checkpoint has rank 0's
    model.eval()
    sums = Sums()
    # FSDP keeps the buffers that it gathers parameters into: training could not use those of inference mode.
    without_graph = torch.no_grad() if settings.parallel == "fsdp" else torch.inference_mode()
    with worker.average.in_place(model), without_graph:
        for batch in _batches(worker):
            losses, metrics = row_losses(worker, model, batch or worker.padding_batch)
            if batch:
                sums.add({"loss": losses, **metrics})
            worker.heartbeat()
    model.train()
    [interrupted] = any_rank(worker.control_group, worker.commands.poll().restart)
    if interrupted:
        return None
    return {f"test_{name}": value for name, value in mean_over_workers(sums, worker.control_group).items()}


def _batches(worker: Worker) -> Iterator[Batch]:
    """This worker's held-out rows, until a restart is requested; never more at once than it trains on.

    Under FSDP workers make each forward pass together: all get the same number of batches, {} when they have no rows.
    """
    settings = worker.plan.settings
    batches = worker.loader.test(largest_pass(settings.global_batch_size, worker.world_size, settings.micro_batch_size))
    while True:
        batch = next(batches, None)
        restart, more = worker.commands.poll().restart, batch is not None
        if settings.parallel == "fsdp":
            restart, more = any_rank(worker.control_group, restart, more)
        if restart or not more:
            return
        yield batch or {}
