"""Functions for tasks on images: normalization, a classifier's loss and prediction, and a learning rate schedule."""

import math

import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Batch

WARMUP = 0.1
"""Fraction of the steps during which the rate rises. At the full rate, Adam's first steps would upset batch norm."""


def schedule(step: int, total_steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay (Loshchilov and Hutter, 2017)."""
    done = (step + 0.5) / total_steps
    return done / WARMUP if done < WARMUP else 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def predict(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return model(normalize(images))


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    scores = predict(model, batch["image"])
    correct = scores.argmax(dim=1) == batch["label"]
    return functional.cross_entropy(scores, batch["label"], reduction="none"), {"accuracy": correct}


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Return uint8 images [B, C, H, W] as float32 from -1 to 1, on the same device."""
    return images.float().div_(127.5).sub_(1)
