"""Evaluation on the held-out rows, sharded over the workers and exact for any number of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from app.metrics import Sums, mean_over_workers
from app.worker import Worker


@torch.no_grad()
def evaluate(worker: Worker) -> dict[str, float]:
    """Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ...; empty without such rows."""
    if not worker.has_test:
        return {}
    model = worker.model
    # Each worker has batch norm's averages of its own rows; rank 0's are those of the checkpoint.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums()
    for batch in worker.loader.test(worker.settings.global_batch_size):
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=worker.settings.precision == "bf16"):
            losses, metrics = worker.task.loss(model, batch)
        sums.add({"loss": losses, **metrics})
    model.train()
    return {f"test_{name}": value for name, value in mean_over_workers(sums, worker.control_group).items()}
