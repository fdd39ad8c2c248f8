"""The storm's task with a teacher: frozen weights that follow the trained weights in each forward pass."""

import copy

import torch
from torch import nn

from scripts.storm_task import Slow, build_optimizer, loss
from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.images import normalize

__all__ = ["build_model", "build_optimizer", "loss"]


class Followed(Slow):
    """A student. Its scores depend on its teacher's scores."""

    def __init__(self, inputs: int, classes: int, pause_s: float) -> None:
        super().__init__(inputs, classes, pause_s)
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for taught, weight in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                    taught.lerp_(weight, 0.1)
        scores: torch.Tensor = super().forward(images) + self.teacher(normalize(images).double())
        return scores


def build_model(settings: Settings, source: Source) -> nn.Module:
    channels, height, width = source.shape
    return Followed(channels * height * width, source.classes, settings.task_args["pause_s"])
