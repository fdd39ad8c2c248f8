"""A small network with two parameter groups at different learning rates, and a PyTorch scheduler selected by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from sunspot.settings import Settings
from tests.tasks.tiny import build_model, loss

__all__ = ["build_model", "build_optimizer", "build_scheduler", "loss"]


def build_swa(optimizer: Any) -> Any:
    from torch.optim.swa_utils import SWALR  # imported here, because its module takes seconds to import

    return SWALR(optimizer, 0.005, anneal_epochs=5)


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "OneCycleLR": lambda optimizer, total: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.01], total),
    "CosineAnnealingLR": lambda optimizer, total: lr_scheduler.CosineAnnealingLR(optimizer, total // 2, 1e-4),
    "CosineAnnealingWarmRestarts": lambda optimizer, _: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "CyclicLR": lambda optimizer, _: lr_scheduler.CyclicLR(optimizer, [0.001, 0.01], [0.1, 0.05], 4),
    "SequentialLR": lambda optimizer, total: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, total - 4)],
        [4],
    ),
    "LambdaLR": lambda optimizer, _: lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n), lambda n: 0.9**n]),
    "ChainedScheduler": lambda optimizer, _: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "MultiplicativeLR": lambda optimizer, _: lr_scheduler.MultiplicativeLR(optimizer, lambda n: 1 - 0.1 / n),
    "PolynomialLR": lambda optimizer, total: lr_scheduler.PolynomialLR(optimizer, total // 2, 2.0),
    "SWALR": lambda optimizer, _: build_swa(optimizer),
    "cycle after a warm-up": lambda optimizer, total: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.OneCycleLR(optimizer, 0.1, total)],
        [4],
    ),
}
"""Functions that build a scheduler from an optimizer and a number of steps, keyed by name."""


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.8)


def build_scheduler(optimizer: Any, settings: Settings, total_steps: int) -> Any:
    return SCHEDULERS[settings.task_args["scheduler"]](optimizer, total_steps)
