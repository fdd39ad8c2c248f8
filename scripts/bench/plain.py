"""A plain PyTorch loop to compare with Sunspot's, with the same model, loss, memory layout and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from scripts.bench.in_process import CPU
from sunspot.data.source import Batch, read_rows, rows_in
from sunspot.parallel.sharding import shard_model
from sunspot.plan import Plan
from sunspot.tasks import load_task

MeanLoss = Callable[[torch.nn.Module, Batch], torch.Tensor]


def plain_steps(
    plan: Plan, device: torch.device = CPU, mean_loss: MeanLoss | None = None, with_loader: bool = False
) -> Iterator[None]:
    """Take the steps of a plain loop, whose rows are on the device. `mean_loss` replaces the task's own loss."""
    settings = plan.settings
    task = load_task(settings)
    row_losses = task.loss
    assert row_losses
    mean_loss = mean_loss or (lambda model, batch: row_losses(model, batch)[0].mean())
    columns = read_rows(plan.source, 0, rows_in(plan.source))
    rows = Rows({name: torch.from_numpy(column).to(device) for name, column in columns.items() if name != "row"})
    model = shard_model(task.build_model(settings, plan.source), settings, device)
    world_size = dist.get_world_size()
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = task.build_optimizer(model, settings)
    rounding = torch.autocast(device.type, torch.bfloat16) if settings.precision == "bf16" else nullcontext()
    sampler = BatchSampler(RandomSampler(rows), settings.global_batch_size // world_size, drop_last=True)
    while True:
        by_number = (rows[chosen] for chosen in torch.randperm(len(rows), device=device).split(sampler.batch_size))
        for batch in DataLoader(rows, batch_size=None, sampler=sampler) if with_loader else by_number:
            with rounding:
                loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


class Rows(Dataset[Batch]):
    """A dataset of rows in memory. Each item is a whole batch."""

    def __init__(self, columns: Batch) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, chosen: Any) -> Batch:
        return {name: column[chosen] for name, column in self._columns.items()}
