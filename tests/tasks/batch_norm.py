"""A small task with batch norm, dropout and Adam, whose state could be restored incorrectly."""

from __future__ import annotations

import torch
from torch import nn

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.images import loss, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]


def build_model(settings: Settings, source: Source) -> nn.Module:
    channels, height, width = source.shape
    layers = [nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * (height - 2) * (width - 2), source.classes))


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)
