"""Tests of LOADER=ray on a real Ray cluster, where one stream gives each worker its own rows."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import ray.train
import torch

from sunspot.background import start_thread
from sunspot.data.order import Steps
from sunspot.data.ray_loader import RayLoader, StepStreams
from sunspot.data.source import DataPlan
from sunspot.elastic.watchdog import describe
from sunspot.run.failures import Hang
from tests.harness.waiting import wait_until

GROUPS, WORKERS = (1000,) * 20, 3


@dataclass(frozen=True)
class WatchedSource:
    """Rows with a `value` of twice their ID. Each read of a group leaves a file in `folder`."""

    folder: str
    row_groups: tuple[int, ...] = GROUPS
    shape: tuple[int, ...] = (1 << 20,)
    "Shape of a row so large that each shuffle window is a separate round."

    def read(self, group: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        tempfile.mkstemp(prefix=f"{group}-", dir=self.folder)
        return {"value": 2 * (sum(self.row_groups[:group]) + rows[:, None])}


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_a_rank_that_waits_for_rows_does_not_count_as_hung(
    held_out: bool, ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node has the CPUs that reading needs, as after a preemption of its pods."""
    steps, source = Steps(sum(GROUPS), 50), cast(Any, WatchedSource(str(tmp_path)))
    streams = StepStreams(DataPlan(source, source, steps, 7), steps.per_epoch, lambda: 0, reading_cpus=1000)
    shards = {name: streams.configure({name: None}, 1)[0][name] for name in ("train", "test")}
    monkeypatch.setattr(ray.train, "get_dataset_shard", shards.get)
    loader, thread = RayLoader(steps, 1, 0, torch.device("cpu"), has_test=True), list[int]()

    def take_first() -> None:
        thread.append(threading.get_ident())
        next(loader.test(50) if held_out else loader.train(1, 0, 1))

    start_thread(take_first, "training")
    about = {"attempt": 1, "rank": 0, "world_size": 1, "step": 0, "beat": 0.0}

    waits_in = "take_first" if held_out else "_next_part"
    events: list[Hang] = []

    def waits_for_rows() -> bool:
        with (tmp_path / "stacks").open("w+") as file:
            faulthandler.dump_traceback(file)
        events.append(describe({**about, "thread": thread[0]}, (tmp_path / "stacks").read_text(), 300.0))
        return events[-1].loading and waits_in in events[-1].detail

    wait_until(lambda: thread and waits_for_rows(), seconds=30)
    event = events[-1]
    assert "rank 0: no step for 300 s; waits for rows of Ray Data in " in event.detail
