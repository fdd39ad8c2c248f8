"""The plain PyTorch loop beside Sunspot's, with the same model, loss, memory layout and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sunspot.data.source import Batch, read_rows, rows_in
from sunspot.parallel.sharding import shard_model
from sunspot.plan import Plan
from sunspot.tasks import load_task

MeanLoss = Callable[[torch.nn.Module, Batch], torch.Tensor]


def plain_steps(plan: Plan, device: torch.device, mean_loss: MeanLoss | None = None) -> Iterator[None]:
    """Take the steps of a plain loop, whose rows are on the device. `mean_loss` replaces the task's own loss."""
    settings = plan.settings
    task = load_task(settings)
    row_losses = task.loss
    assert row_losses
    mean_loss = mean_loss or (lambda model, batch: row_losses(model, batch)[0].mean())
    columns = read_rows(plan.source, 0, rows_in(plan.source))
    rows = {name: torch.from_numpy(column).to(device) for name, column in columns.items() if name != "row"}
    model = shard_model(task.build_model(settings, plan.source), settings, device)
    optimizer = task.build_optimizer(model, settings)
    rounds = settings.precision == "bf16"
    while True:
        for chosen in torch.randperm(plan.steps.rows, device=device).split(settings.global_batch_size):
            batch = {name: column[chosen] for name, column in rows.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=rounds):
                loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
