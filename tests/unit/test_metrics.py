"""The workers' numbers as one record, and what a checkpoint keeps of them to be compared by."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from app.observe.metrics import RECENT_ROWS, MetricWindow, RecentMeans, scalars
from app.run.checkpoints import Checkpoint, best_first

EPOCH = 100_000


def test_the_best_by_loss_is_no_lucky_step(group: dist.ProcessGroup) -> None:
    """A loss that falls from 1.5 to 0.6; step 301 has rows that happen to be easy, and a window for itself."""
    window = MetricWindow(group, torch.device("cpu"), RecentMeans(EPOCH, {}))
    checkpoints, plain, step = [], [], 0
    for length in [100, *[1, 99] * 9]:
        for _ in range(length):
            step += 1
            mean = 0.1 if step == 301 else 1.5 - 0.9 * step / 1000
            window.add_step([{"loss": torch.full((128,), mean)}], step_time=0.1, data_wait=0.0)
        record = window.close(step, 1, 0.1)
        plain.append((record["loss"], step))
        checkpoints.append(Checkpoint(f"{step}", step, 1, EPOCH, EPOCH, 1, {**scalars(record), **window.recent.newest}))
    assert step == 1000
    assert min(plain)[1] == 301
    assert best_first(checkpoints, "loss", "min")[0].step == step


def added(recent: RecentMeans, rows: int, **means: float) -> dict[str, float]:
    recent.add(rows, means)
    return recent.newest


def test_recent_means_are_over_rows_of_the_newest_windows() -> None:
    recent = RecentMeans(EPOCH, {})
    assert added(recent, RECENT_ROWS // 2, loss=4.0) == {"recent_rows": RECENT_ROWS // 2, "loss": 4.0}
    found = added(recent, RECENT_ROWS // 4, loss=1.0, accuracy=0.5)
    assert found == {"recent_rows": RECENT_ROWS * 3 // 4, "loss": 3.0, "accuracy": 0.5}
    assert added(recent, RECENT_ROWS, loss=2.0) == {"recent_rows": RECENT_ROWS, "loss": 2.0}


def test_an_epoch_is_enough() -> None:
    recent = RecentMeans(240, {})
    assert added(recent, 240, loss=4.0)["loss"] == 4.0
    assert added(recent, 240, loss=3.0)["loss"] == 3.0


@pytest.mark.parametrize("rows", ["recent_rows", "rows"])
def test_the_next_worker_group_goes_on_with_the_means_of_its_state(rows: str) -> None:
    before = {rows: 3000, "loss": 2.0, "test_loss": 9.0}
    recent = RecentMeans(EPOCH, before)
    assert recent.newest == before, "for a copy that is made before there is a window"
    assert added(recent, 1000, loss=6.0) == {"recent_rows": 4000, "loss": 3.0}
    assert added(RecentMeans(EPOCH, {"time": 1.0}), 1000, loss=6.0) == {"recent_rows": 1000, "loss": 6.0}
