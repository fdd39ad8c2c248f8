"""A model with one expert per class. Each expert is used only for the rows of its class."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from sunspot.tasks.images import normalize


class Experts(nn.Module):
    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(pixels, 8)
        self.experts = nn.ModuleList(nn.Linear(8, classes) for _ in range(classes))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(image.flatten(1)).relu()
        scores = [self.experts[kind](row) for row, kind in zip(hidden, label.tolist(), strict=True)]
        return torch.stack(scores)


def build_model(settings: Settings, source: Source) -> nn.Module:
    channels, height, width = source.shape
    return Experts(channels * height * width, source.classes)


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Build an optimizer that changes a parameter even if its gradient is 0, but not if it has none."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    scores = model(normalize(batch["image"]), batch["label"])
    return functional.cross_entropy(scores, batch["label"], reduction="none"), {}
