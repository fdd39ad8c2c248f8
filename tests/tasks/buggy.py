"""A small task with a bug that affects every run in its first step."""

from __future__ import annotations

import torch

from sunspot.data.source import Batch
from tests.tasks.tiny import build_model, build_optimizer, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    return functional.cross_entropy(model(batch["image"]), batch["label"]), {}  # noqa: F821
