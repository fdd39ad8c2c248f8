"""A small task with the faults given in TASK_ARGS, for tests of doctor's findings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sunspot.data.source import Batch, Source
from sunspot.data.torch_loader import Selections
from sunspot.settings import Settings
from sunspot.tasks.images import loss as fast_loss
from tests.tasks import tiny
from tests.tasks.tiny import build_optimizer, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

faults: dict[str, Any] = {}
"""Faults by name. `read_s` is the seconds to read each batch, and `leak_mib` the memory that each step leaks. At rank 1
only, `lag_s` and `busy_s` are seconds of sleeping and computing in each forward pass, and `group` is a control group to
join."""

leaked: list[bytes] = []


def build_model(settings: Settings, source: Source) -> torch.nn.Module:
    faults.update(settings.task_args)
    Selections.__getitem__ = read_slowly
    if "group" in faults and rank() == 1:
        Path(faults["group"], "cgroup.procs").write_text(str(os.getpid()))
    return tiny.build_model(settings, source)


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    if rank() == 1:
        time.sleep(faults.get("lag_s", 0.0))
        compute(faults.get("busy_s", 0.0))
    if "leak_mib" in faults:
        leaked.append(b"x" * (faults["leak_mib"] << 20))
    return fast_loss(model, batch)


def read_slowly(rows: Selections, index: int, read: Any = Selections.__getitem__) -> Batch:
    time.sleep(faults.get("read_s", 0.0))
    return read(rows, index)


def compute(seconds: float) -> None:
    """Use this many seconds of CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rank() -> int:
    return dist.get_rank()
