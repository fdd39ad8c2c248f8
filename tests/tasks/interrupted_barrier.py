"""The slow task under hsdp with two replicas of two workers, one of which is killed in the middle of a barrier.

Ranks 0 and 2 pass the barrier. Rank 1 is interrupted there, as if it had not heard from all others, and rank 3 is
killed. Rank 1 is then the only worker with its shard.
"""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

from sunspot.parallel.replica_groups import ReplicaGroups
from tests.tasks.slow import build_model, build_optimizer, loss, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

BARRIER = 50
"""Number of the barrier at which this happens."""

_meet = ReplicaGroups._meet
_met = 0


def meet_in_part(groups: ReplicaGroups) -> None:
    global _met
    _meet(groups)
    _met += 1
    if dist.get_world_size() == 4 and _met == BARRIER:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise RuntimeError("Connection closed by peer")


ReplicaGroups._meet = meet_in_part  # type: ignore[method-assign]
