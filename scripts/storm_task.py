"""The slow, double-precision task of `python -m scripts.storm`. Each process records its current phase in a file."""

import os
import random
import time
from pathlib import Path

import torch
from torch import nn

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from sunspot.tasks.images import normalize

SHARED_MEMORY = Path("/dev/shm")  # memory, as sunspot.checkpoint uses it


def moment_of(process: int) -> Path:
    """Return the path of the file in which a process writes its current phase."""
    return SHARED_MEMORY / f"storm-{process}"


HIDDEN = 50_000
"""Number of hidden units. The state has 24 MB, so that copies, commits and sums take some time, too."""


class Slow(nn.Module):
    """Two layers with pauses in the forward and the backward pass."""

    def __init__(self, inputs: int, classes: int, pause_s: float) -> None:
        super().__init__()
        layers = (nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes))
        self.layers = nn.Sequential(*layers).double()
        self.pause_s = pause_s

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.score(normalize(images).double())

    def score(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes for normalized images."""
        self.pause("forward" if self.training else "evaluation")
        scores: torch.Tensor = self.layers(pixels)
        if scores.requires_grad:
            scores.register_hook(lambda _: self.pause("backward"))
        return scores

    def pause(self, at: str) -> None:
        """Pause in a phase. The time varies between workers, so that some wait for the gradients of others."""
        if self.pause_s:
            moment_of(os.getpid()).write_text(at)
            time.sleep(self.pause_s * random.uniform(0.5, 1.5))
            moment_of(os.getpid()).write_text(f"after {at}")


def build_model(settings: Settings, source: Source) -> nn.Module:
    channels, height, width = source.shape
    return Slow(channels * height * width, source.classes, settings.task_args["pause_s"])


def build_optimizer(model: Slow, settings: Settings) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    optimizer.register_step_pre_hook(lambda *_: model.pause("optimizer"))
    return optimizer


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none"), {}
