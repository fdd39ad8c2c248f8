"""A small convolutional network without batch norm, trained by SGD, with the same losses on any number of workers."""

from __future__ import annotations

import torch
from torch import nn

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.images import loss, predict, schedule

__all__ = ["build_model", "build_optimizer", "loss", "predict", "schedule"]


def build_model(settings: Settings, source: Source) -> nn.Module:
    channels, _, _ = source.shape
    width = settings.task_args.get("width", 8)
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, source.classes),
    )


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=0.9)
