"""The slow task under hsdp, with two replicas of two workers. One worker is killed in the middle of a barrier.

Ranks 0 and 2 pass the barrier. Rank 1 is interrupted there, as if it had not heard from all others, and rank 3 is
killed. Rank 1 is then the only worker with its shard. TASK_ARGS names a `folder`, where a file shows that this has
happened.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from sunspot.data.source import Source
from sunspot.parallel.step_barrier import StepBarrier
from sunspot.settings import Settings
from tests.tasks import tiny
from tests.tasks.slow import build_optimizer, loss, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

BARRIER = 50
"""Number of the barrier at which this happens."""

done = Path()
_wait = StepBarrier.wait
_waits = 0


def build_model(settings: Settings, source: Source) -> torch.nn.Module:
    global done
    done = Path(settings.task_args["folder"], "done")
    StepBarrier.wait = wait_and_interrupt  # type: ignore[method-assign]
    return tiny.build_model(settings, source)


def wait_and_interrupt(barrier: StepBarrier) -> bool:
    """Wait at the barrier, and interrupt it once."""
    global _waits
    _waits += 1
    if _waits != BARRIER or done.exists():
        return _wait(barrier)
    meet = barrier._meet

    def interrupt() -> None:
        meet()
        if dist.get_rank() == 3:
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise RuntimeError("Connection closed by peer")

    barrier._meet = interrupt
    try:
        return _wait(barrier)
    finally:
        barrier._meet = meet
