"""A task that prints from Python and from a library, then fails."""

from __future__ import annotations

import os

import torch

from sunspot.data.source import Batch
from tests.tasks.tiny import build_model, build_optimizer, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    print("printed by python")
    os.write(2, b"written by a library\n")
    raise ValueError("the task is broken")
