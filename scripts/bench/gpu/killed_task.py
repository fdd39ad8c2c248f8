"""ResNet-18 on digits, in a process that kills itself at some steps, once at each."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import nn

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.images import loss
from sunspot.tasks.images import schedule as rate
from sunspot.tasks.mnist import build_model as build
from sunspot.tasks.mnist import build_optimizer

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

_args: dict[str, Any] = {}


def build_model(settings: Settings, source: Source) -> nn.Module:
    _args.update(settings.task_args)
    return build(settings, source)


def schedule(step: int, total_steps: int) -> float:
    signals, kills = Path(_args["signals"]), _args["kills"]
    killed = len(signals.read_text().split()) if signals.exists() else 0
    if killed < kills and step == (killed + 1) * total_steps // (kills + 1):
        with signals.open("a") as lines:
            lines.write(f"{time.time()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(step, total_steps)
