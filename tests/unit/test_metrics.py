"""Tests for reducing the workers' numbers to one record, and for the means in checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sunspot.observe.metrics import NUMBERS, RECENT_ROWS, MetricWindow, RecentMeans, Sums, reduce
from sunspot.run.checkpoints import Checkpoint, best_first
from tests.harness.process_group import in_processes

EPOCH = 100_000


def test_one_lucky_step_does_not_make_a_checkpoint_the_best(group: dist.ProcessGroup) -> None:
    """The loss falls from 1.5 to 0.6. Step 301 has easy rows, and is the only step of its window."""
    window = MetricWindow(group, torch.device("cpu"), RecentMeans(EPOCH, {}))
    checkpoints = []
    plain = []
    step = 0
    for length in [100, *[1, 99] * 9]:
        for _ in range(length):
            step += 1
            mean = 0.1 if step == 301 else 1.5 - 0.9 * step / 1000
            window.add_step([{"loss": torch.full((128,), mean)}], step_time=0.1, data_wait=0.0)
        record = window.close(step, 1, 0.1)
        plain.append((record["loss"], step))
        checkpoints.append(Checkpoint(f"{step}", step, 1, EPOCH, EPOCH, 1, {**record, **window.recent.newest}))
    assert step == 1000
    assert min(plain)[1] == 301
    assert best_first(checkpoints, "loss", "min")[0].step == step


def reduced(group: dist.ProcessGroup) -> list[tuple[Any, ...]]:
    """Return the results of two reductions on one of three workers. The last worker has no rows."""
    rank, found = group.rank(), []
    for window in range(2):
        sums = Sums()
        for number in range(3 * (rank < 2)):
            sums.add({"loss": torch.tensor([0.1 + rank / 3, window + number / 7])})
        if rank == window:
            sums.add({"later": torch.tensor([float(rank), 0.1])})
        numbers = {"unknown": math.nan, "speed": -1.0 / (rank + 1), "size": 300.0 * rank}
        combined, table = reduce(sums, numbers, group)
        found.append((combined, {name: values.tolist() for name, values in table.items()}, sums.totals()))
    return found


def test_all_workers_get_the_same_means_and_only_rank_0_gets_the_numbers_of_every_rank(tmp_path: Path) -> None:
    ranks = in_processes(tmp_path, 3, reduced)
    for window in range(2):
        parts = [rank[window][-1] for rank in ranks]
        sums = {name: [part.get(name, (0.0, 0)) for part in parts] for name in ("later", "loss")}
        means = {name: sum(t for t, _ in each) / sum(n for _, n in each) for name, each in sums.items()}
        for rank in ranks:
            combined = rank[window][0]
            assert combined.means == means, "means are equal to the last bit"
            assert combined.rows == 12
            assert math.isnan(combined.maxima.pop("unknown"))
            assert combined.maxima == {"speed": -1 / 3, "size": 600.0}
        table, *others = [rank[window][1] for rank in ranks]
        assert all(map(math.isnan, table.pop("unknown")))
        assert table == {"speed": [-1.0, -1 / 2, -1 / 3], "size": [0.0, 300.0, 600.0]}
        assert others == [{}, {}]


def test_a_record_combines_all_workers_and_keeps_the_numbers_of_each_rank(group: dist.ProcessGroup) -> None:
    window = MetricWindow(group, torch.device("cpu"), RecentMeans(EPOCH, {}))
    for step_time in (0.1, 0.3):
        window.add_step([{"loss": torch.tensor([1.0, 2.0])}], step_time, data_wait=0.25)
    record = window.close(2, 1, 0.1)
    assert (record["rows"], record["loss"], record["world_size"]) == (4, 1.5, 1)
    assert all(isinstance(record[name], float) for name in NUMBERS)
    assert [window.ranks[name].tolist() for name in ("rows", "data_wait_s", "steps_s")] == [[4.0], [0.5], [0.4]]
    assert set(window.own) == {*window.ranks, "time"}


def added(recent: RecentMeans, rows: int, **means: float) -> dict[str, float]:
    recent.add(rows, means)
    return recent.newest


def test_recent_means_cover_the_rows_of_the_newest_windows() -> None:
    recent = RecentMeans(EPOCH, {})
    assert added(recent, RECENT_ROWS // 2, loss=4.0) == {"recent_rows": RECENT_ROWS // 2, "loss": 4.0}
    found = added(recent, RECENT_ROWS // 4, loss=1.0, accuracy=0.5)
    assert found == {"recent_rows": RECENT_ROWS * 3 // 4, "loss": 3.0, "accuracy": 0.5}
    assert added(recent, RECENT_ROWS, loss=2.0) == {"recent_rows": RECENT_ROWS, "loss": 2.0}


def test_recent_means_cover_at_most_one_epoch() -> None:
    recent = RecentMeans(240, {})
    assert added(recent, 240, loss=4.0)["loss"] == 4.0
    assert added(recent, 240, loss=3.0)["loss"] == 3.0


def test_the_next_worker_group_continues_with_the_restored_means() -> None:
    before = {"recent_rows": 3000, "loss": 2.0, "test_loss": 9.0}
    recent = RecentMeans(EPOCH, before)
    assert recent.newest == before, "a copy may be made before the first window"
    assert added(recent, 1000, loss=6.0) == {"recent_rows": 4000, "loss": 3.0}
    assert added(RecentMeans(EPOCH, {"time": 1.0}), 1000, loss=6.0) == {"recent_rows": 1000, "loss": 6.0}
