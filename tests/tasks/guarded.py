"""A task whose fused optimizer can cancel a step. A forward pass moves batch norm's averages and a frozen teacher.

TASK_ARGS: `optimizer` names a class of `torch.optim`, and `way` names another state that a forward pass changes (see
`early_changes`).
"""

from __future__ import annotations

from typing import Any

import torch

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from tests.tasks.early_changes import Model, measure


def build_model(settings: Settings, source: Source) -> Model:
    return Model(settings.task_args["way"])


def build_optimizer(model: Model, settings: Settings) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"momentum": 0.9} if settings.task_args["optimizer"] == "SGD" else {}
    trained = [each for each in model.parameters() if each.requires_grad]
    return getattr(torch.optim, settings.task_args["optimizer"])(trained, 0.01, fused=True, **options)


def loss(model: Model, batch: Batch) -> tuple[torch.Tensor, Batch]:
    losses = measure(model, batch)
    return losses, {"doubled": 2 * losses.detach()}
