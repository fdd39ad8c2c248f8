"""Evaluation on the held-out rows, sharded over the workers and exact for any number of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
    sums, broken_off = Sums(), False
    for batch in worker.loader.test(worker.settings.global_batch_size):
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=worker.settings.precision == "bf16"):
            losses, metrics = worker.task.loss(model, batch)
        sums.add({"loss": losses, **metrics})
        worker.beat()
        if broken_off := worker.wishes.look().leave:
            break
    model.train()
    anyone = torch.tensor([broken_off])
    dist.all_reduce(anyone, dist.ReduceOp.MAX, worker.control_group)
    if anyone.item():
        return None
    return {f"test_{name}": value for name, value in mean_over_workers(sums, worker.control_group).items()}
