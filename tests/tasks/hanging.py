"""A small task in which rank 1 hangs once in the middle of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sunspot.data.source import Batch
from sunspot.settings import Settings
from sunspot.tasks.images import loss as fast_loss
from tests.tasks import tiny
from tests.tasks.tiny import build_optimizer, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

HANG_AT = 40
calls = 0
marker = Path(os.devnull)


def build_model(settings: Settings, source: object) -> torch.nn.Module:
    global marker
    marker = Path(settings.task_args["marker"])
    return tiny.build_model(settings, source)


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    global calls
    calls += 1
    if calls == HANG_AT and dist.get_rank() == 1 and not marker.exists():
        marker.touch()
        wait_for_ever()
    return fast_loss(model, batch)


def wait_for_ever() -> None:
    while True:
        time.sleep(3600)
