"""Normalization, loss, prediction and learning rate schedule for image classifiers."""

import math

import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Batch

WARMUP = 0.1
"""Fraction of the steps used for warm-up. Without warm-up, Adam's first steps would disturb batch norm."""


def schedule(step: int, total_steps: int) -> float:
    """Return the learning rate's factor, with linear warm-up and cosine decay (Loshchilov and Hutter, 2017)."""
    done = (step + 0.5) / total_steps
    return done / WARMUP if done < WARMUP else 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def predict(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return model(normalize(images))


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    scores = predict(model, batch["image"])
    correct = scores.argmax(dim=1) == batch["label"]
    return functional.cross_entropy(scores, batch["label"], reduction="none"), {"accuracy": correct}


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Scale uint8 images [B, C, H, W] to float32 values from -1 to 1."""
    return images.float().div_(127.5).sub_(1)
