"""What surrounds an optimizer step, taken by sunspot/train/loop.py or by Lightning's Trainer."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from sunspot.data.order import largest_pass
from sunspot.data.source import Batch
from sunspot.observe.metrics import MetricWindow, Sums, mean_over_workers
from sunspot.parallel.collectives import sync_buffers
from sunspot.parallel.decisions import EvaluationEnd, StepDecisionBroadcast
from sunspot.train.forward import row_losses
from sunspot.train.worker import Worker


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
    consensus: StepDecisionBroadcast,
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
    stop, restart = agreed.stop, agreed.restart and has_more
    evaluated = not (epoch_ends and plan.test)
    by_interval = agreed.save or (every > 0 and step % every == 0)
    save = stop or restart or epoch_ends or (by_interval and not agreed.busy)
    record = window.close(step, (step - 1) // per_epoch + 1, learning_rate) if save or agreed.report else {}
    if not (evaluated or stop or restart):
        # A loss meanwhile costs the evaluation, and no step.
        worker.checkpoints.save(step, {**record, **window.recent.newest}, evaluated=False, to_storage=False)
        results, stop, restart = evaluate(worker)
        evaluated = results is not None
        record |= results or {}
    if record:
        worker.report(record, window)
    if save or agreed.copy:
        metrics = {**record, **window.recent.newest}  # a copy without a record hands on the means
        worker.checkpoints.save(step, metrics, evaluated=evaluated, to_storage=save)
    if restart:
        worker.restart_group()
    return stop


def make_up_evaluation(worker: Worker) -> bool:
    """Evaluate the end of the epoch that this group starts from, if the one before did not. Returns whether it stops.

    Raises to end the group when it restarts.
    """
    if worker.evaluated:
        return False
    results, stop, restart = evaluate(worker)
    if results is None:
        worker.checkpoints.save(worker.start, worker.metrics, evaluated=False)  # it may be in memory only
    else:
        worker.add_evaluation(results)
    if restart:
        worker.restart_group()
    return stop


class Evaluation(NamedTuple):
    """How an evaluation ended: with results, or cut short for one of the others, as a notice may be shorter."""

    results: dict[str, float] | None = None
    "Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ...; empty without such rows."
    stop: bool = False
    restart: bool = False


def evaluate(worker: Worker) -> Evaluation:
    """Evaluate the held-out rows; all workers call this together."""
    if not worker.plan.test:
        return Evaluation({})
    model, settings, sums = worker.model, worker.plan.settings, Sums()
    end = EvaluationEnd(worker.control_group, together=settings.parallel == "fsdp")
    sync_buffers(model)  # a checkpoint has rank 0's
    if settings.ema:
        worker.checkpoints.wait_for_copy()  # the average takes the weights' place
    # Not inference_mode: training cannot use what a model keeps of it, such as a table that it made there.
    with worker.average.in_place(model), evaluation_mode(model), torch.no_grad():
        for batch in _batches(worker, end):
            losses, metrics = row_losses(worker, model, batch or worker.padding_batch)
            if batch:
                sums.add({"loss": losses, **metrics})
            worker.heartbeat()
    if end.stop or end.restart:
        return Evaluation(None, end.stop, end.restart)
    return Evaluation({f"test_{name}": mean for name, mean in mean_over_workers(sums, worker.control_group).items()})


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then each of its modules in the mode that it had before."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _batches(worker: Worker, end: EvaluationEnd) -> Iterator[Batch]:
    """This worker's held-out rows, until all have had theirs or are to leave; never more at once than it trains on.

    Under FSDP workers make each forward pass together: all get the same number of batches, {} when they have no rows.
    """
    settings, limit = worker.plan.settings, worker.plan.pass_limit
    batches = worker.loader.test(largest_pass(settings.global_batch_size, worker.world_size, limit))
    while True:
        batch, command = next(batches, {}), worker.commands.poll()
        if end.reached(command.stop, command.restart, bool(batch)):
            return
        if batch or settings.parallel == "fsdp":
            yield batch
        else:
            worker.waits()
