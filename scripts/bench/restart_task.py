"""A small model on digits, one of whose workers kills itself now and then: each time another rank."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import ray.train
from torch import nn

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.images import loss, predict
from sunspot.tasks.images import schedule as rate
from sunspot.tasks.mnist import build_optimizer

__all__ = ["build_model", "build_optimizer", "loss", "predict", "schedule"]

STEPS = 20
"""Between two kills."""

SERVES_WITHIN_S = 300.0

_args: dict[str, Any] = {}


def build_model(settings: Settings, source: Source) -> nn.Module:
    _args.update(settings.task_args, warm=settings.warm_restart_after_s > 0)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, source.classes))


def schedule(step: int, total_steps: int) -> float:
    signals, context = Path(_args["signals"]), ray.train.get_context()
    killed = len(signals.read_text().split()) if signals.exists() else 0
    due = killed < _args["kills"] and step == (killed + 1) * STEPS
    if due and killed % context.get_world_size() == context.get_world_rank():
        wait_for_server(_args["warm"])
        with signals.open("a") as lines:
            lines.write(f"{time.time()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(step, total_steps)


def wait_for_server(warm: bool) -> None:
    """Return once something on this machine can fork workers; raises `TimeoutError`."""
    began = time.monotonic()
    while warm and "@sunspot-warm-" not in Path("/proc/net/unix").read_text():
        if time.monotonic() - began > SERVES_WITHIN_S:
            raise TimeoutError(f"no server after {SERVES_WITHIN_S:.0f} s")
        time.sleep(0.1)
