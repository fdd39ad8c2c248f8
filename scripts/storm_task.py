"""The task of `python -m scripts.storm`: in double precision, slow, and each process tells what it is at."""

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
    """Where a process tells what it is at."""
    return SHARED_MEMORY / f"storm-{process}"


HIDDEN = 50_000
"""Makes a state of 24 MB, so that a copy, a commit and a sum take a while, too."""


class Slow(nn.Module):
    """Two layers that take their time, forward and backward."""

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
        """Stay at this for a while; no two workers for as long, so that one waits for the other's sum."""
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
