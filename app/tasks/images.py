"""What tasks on images have in common: pixels to scores, the loss of a classifier, and a schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from app.data.source import Batch

WARMUP = 0.1
"""Part of the steps over which the rate rises: Adam's first steps, at full rate, cost batch norm its start."""


def schedule(step: int, total_steps: int) -> float:
    """Linear warm-up, then half a cosine down to nothing (Loshchilov and Hutter, 2017, without restarts)."""
    done = (step + 0.5) / total_steps
    return done / WARMUP if done < WARMUP else 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def predict(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = model(normalize(images))
    return scores


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    scores = predict(model, batch["image"])
    correct = scores.argmax(dim=1) == batch["label"]
    return functional.cross_entropy(scores, batch["label"], reduction="none"), {"accuracy": correct}


def normalize(images: torch.Tensor) -> torch.Tensor:
    """uint8 [B, C, H, W] to float32 with mean 0.5 and standard deviation 0.5: -1 to 1. Done where the model is."""
    return images.float().div_(127.5).sub_(1)
