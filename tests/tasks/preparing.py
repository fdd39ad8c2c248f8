"""The slow task, whose model takes its time in a process that prepares itself alone, while others train."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from sunspot.data.source import Source
from sunspot.settings import Settings
from tests.tasks import tiny
from tests.tasks.slow import build_optimizer, loss, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]


def build_model(settings: Settings, source: Source) -> torch.nn.Module:
    if not dist.is_initialized():
        begun, go = (Path(settings.task_args["folder"], name) for name in ("begun", "go"))
        begun.touch()
        while not go.exists():
            time.sleep(0.05)
    return tiny.build_model(settings, source)
