"""A small task that waits at chosen steps until a file exists, or for some time."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import nn

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from sunspot.tasks.images import loss as fast_loss
from tests.tasks import tiny
from tests.tasks.tiny import build_optimizer, predict, schedule

__all__ = ["build_model", "build_optimizer", "loss", "predict", "schedule"]

waits: dict[int, tuple[Path, float]] = {}
"Files to wait for, with the maximum seconds for each, keyed by the number of steps that this process has taken."
steps = 0


def build_model(settings: Settings, source: Source) -> nn.Module:
    for number, wait in settings.task_args.items():
        file, limit_s = wait if isinstance(wait, list) else (wait, math.inf)
        waits[int(number)] = Path(file), limit_s
    return tiny.build_model(settings, source)


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    global steps
    if model.training:
        file, limit_s = waits.get(steps, (Path("/"), 0.0))
        began = time.monotonic()
        while not file.exists() and time.monotonic() - began < limit_s:
            time.sleep(0.05)
        steps += 1
    return fast_loss(model, batch)
