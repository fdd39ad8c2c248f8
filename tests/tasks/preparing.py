"""A slow task whose model waits or fails if a replacement builds it while other workers train."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from sunspot.data.source import Source
from sunspot.errors import DataError
from sunspot.settings import Settings
from tests.tasks import tiny
from tests.tasks.slow import build_optimizer, loss, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]


def build_model(settings: Settings, source: Source) -> torch.nn.Module:
    if not dist.is_initialized():
        folder = Path(settings.task_args["folder"])
        begun = folder / "begun"
        fail = folder / "fail"
        go = folder / "go"
        begun.touch()
        if fail.exists():
            fail.unlink()
            raise DataError("the rows take 40 GB, but only 12 GB are left there")
        while not go.exists():
            time.sleep(0.05)
    return tiny.build_model(settings, source)
