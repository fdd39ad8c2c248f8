"""Tests of the process groups of PARALLEL=hsdp."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sunspot.parallel import replica_groups
from sunspot.parallel.replica_groups import ReplicaGroups
from tests.harness.constants import SetConstants
from tests.harness.process_group import in_processes

LIMIT_S = 30.0


def test_a_process_exits_if_its_collective_does_not_return(tmp_path: Path, set_constants: SetConstants) -> None:
    """Rank 1 never takes part, as if the shutdown of the connections had no effect. It waits for the end of rank 0."""
    set_constants(replica_groups, STUCK_S=0.1)

    def act(group: Any) -> None:
        groups = ReplicaGroups(2)
        groups.form(timedelta(seconds=LIMIT_S))
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="closed"):
                dist.recv(torch.zeros(1), 0)
            return
        groups.end_if_stuck()
        groups.sum_in_replica(torch.zeros(1))

    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="rank 0"):
        in_processes(tmp_path, 2, act)
    assert time.monotonic() - began < LIMIT_S / 2


def test_a_process_does_not_exit_if_its_collectives_return(tmp_path: Path, set_constants: SetConstants) -> None:
    set_constants(replica_groups, STUCK_S=0.1)

    def act(group: Any) -> bool:
        groups = ReplicaGroups(1)
        groups.form(timedelta(seconds=LIMIT_S))
        groups.end_if_stuck()
        threading.Event().wait(0.5)
        return groups.step_barrier.wait()

    assert in_processes(tmp_path, 2, act) == [True, True]
