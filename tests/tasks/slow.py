"""A slow version of the small task, for tests that act on a run while it trains."""

from __future__ import annotations

import time

import torch

from sunspot.data.source import Batch
from sunspot.tasks.images import loss as fast_loss
from tests.tasks.tiny import build_model, build_optimizer, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    time.sleep(0.01)
    return fast_loss(model, batch)
