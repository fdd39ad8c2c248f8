"""Linear regression on declared columns, trained by SGD, with the same losses on any number of workers."""

from __future__ import annotations

import torch
from torch import nn

from sunspot.data.columns import Column
from sunspot.data.source import Batch, Source
from sunspot.data.table import open_table
from sunspot.settings import Settings


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    return open_table(
        settings, {"size": Column(), "place": Column("float64", shape=(2, 2)), "label": Column("float32")}
    )


def build_model(settings: Settings, source: Source) -> nn.Module:
    [numbers] = source.shape
    return nn.Linear(numbers, 1)


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    numbers = torch.cat([batch["size"][:, None], batch["place"].flatten(1).float()], dim=1)
    error = model(numbers)[:, 0] - batch["label"]
    return error.square(), {"distance": error.detach().abs()}
