"""Evaluation on the held-out rows, sharded over the workers and exact for any number of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from app.data.batch import Batch
from app.metrics import Sums, mean_over_workers
from app.worker import Worker, sync_buffers


@torch.no_grad()
def evaluate(worker: Worker) -> dict[str, float] | None:
    """Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ...; empty without such rows.

    None when the workers were told to leave meanwhile: a notice may be shorter than an evaluation.
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
        worker.beat()
    model.train()
    [broken_off] = _anyone(worker, worker.wishes.look().leave)
    if broken_off:
        return None
    return {f"test_{name}": value for name, value in mean_over_workers(sums, worker.control_group).items()}


def _batches(worker: Worker) -> Iterator[Batch]:
    """This worker's held-out rows, until it is told to leave.

    Under FSDP a forward pass is a joint one: all workers get as many batches, {} those that have no more rows.
    """
    batches = worker.loader.test(worker.settings.global_batch_size)
    while True:
        batch = next(batches, None)
        leave, more = worker.wishes.look().leave, batch is not None
        if worker.in_parts:
            leave, more = _anyone(worker, leave, more)
        if leave or not more:
            return
        yield batch or {}


def _anyone(worker: Worker, *mine: bool) -> list[bool]:
    """For each question whether any worker says yes; all call this together."""
    answers = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(answers, dist.ReduceOp.MAX, worker.control_group)
    return [bool(answer) for answer in answers.tolist()]
