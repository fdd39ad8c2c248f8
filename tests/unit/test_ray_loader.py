"""Tests for LOADER=ray: each row is read once, and each worker gets its own rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data.order import Order, RunOrder, Steps, locate_rows
from sunspot.data.ray_loader import RayLoader, RoundPlanner, RoundReader, cut_evenly, read_pieces

row_groups = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda groups: sum(groups) >= 2)


@dataclass
class CountingSource:
    """A `Source` that counts the reads of each group. Each row's `value` is twice its ID."""

    row_groups: tuple[int, ...]
    reads: Counter[int] = field(default_factory=Counter)

    def read(self, group: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        self.reads[group] += 1
        first = sum(self.row_groups[:group])
        return {"value": 2 * (first + rows[:, None])}


@given(row_groups, st.integers(2, 30), st.integers(1, 9), st.integers(1, 60), st.integers(1, 200), st.data())
def test_each_worker_gets_its_rows_and_each_row_group_is_read_once(
    groups: list[int], batch: int, world_size: int, window_rows: int, round_rows: int, data: st.DataObject
) -> None:
    steps = Steps(sum(groups), batch)
    total = 3 * steps.per_epoch - 1
    start = data.draw(st.integers(0, total - 1))
    passes = Order(tuple(groups), 7, window_rows)
    order = RunOrder((passes,))
    source = CountingSource(tuple(groups))
    planner = RoundPlanner(order, steps, total, round_rows)
    reader = RoundReader(source, order, steps, world_size, steps.workers(world_size))

    streams: list[list[int]] = [[] for _ in range(world_size)]
    for planned in planner(pa.table({"step": [start]})):
        parts = list(reader(planned))
        assert len(parts) == steps.workers(world_size)  # part n of a round goes to rank n
        for rank, part in enumerate(parts):
            assert part["_rank"].tolist() == [rank]
            [rows], [values] = part["row"], part["value"]
            assert values.tolist() == [[2 * row] for row in rows.tolist()]
            streams[rank] += rows.tolist()

    expected: list[list[int]] = [[] for _ in range(world_size)]
    ids = [visited(passes, epoch) for epoch in (1, 2, 3)]
    for step in range(start, total):
        epoch, in_epoch = divmod(step, steps.per_epoch)
        for rank in range(world_size):
            expected[rank] += ids[epoch][slice(*steps.share(in_epoch, world_size, rank))]
    assert streams == expected
    assert max(source.reads.values()) <= 3 - start // steps.per_epoch


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_held_out_rows_are_divided_evenly_for_any_group_size(groups: list[int], world_size: int) -> None:
    """Most Parquet writers put up to a million rows into one group."""
    source = CountingSource(tuple(groups))
    evaluated, counts = list[int](), list[int]()
    for rank in range(world_size):
        pieces = cut_evenly(groups, world_size, rank)
        index = {name: np.array([piece[name] for piece in pieces], int) for name in ("group", "first", "last")}
        read = list(read_pieces(index, source))
        assert all((part["value"][:, 0] == 2 * part["row"]).all() for part in read)
        rows = [row for part in read for row in part["row"].tolist()]
        evaluated += rows
        counts.append(len(rows))
    assert evaluated == list(range(sum(groups)))
    assert max(counts) - min(counts) <= 1
    assert sum(source.reads.values()) < len(groups) + world_size, "a group is only read again if it is cut"


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_stream_that_begins_at_the_wrong_step_is_rejected(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage can list an older attempt when the stream is created."""
    steps = Steps(40, 10)
    order = RunOrder((Order((20, 20), 7, 20),))
    reader = RoundReader(CountingSource((20, 20)), order, steps, 1, 1)

    def stream(**_: Any) -> Iterator[dict[str, torch.Tensor]]:
        for planned in RoundPlanner(order, steps, 8, 20)(pa.table({"step": [start]})):
            for part in reader(planned):
                yield {name: torch.from_numpy(column) for name, column in part.items()}

    monkeypatch.setattr("ray.train.get_dataset_shard", lambda _: SimpleNamespace(iter_torch_batches=stream))
    epoch, first = start // steps.per_epoch + 1, start % steps.per_epoch
    loader, stale = (RayLoader(steps, 1, 0, torch.device("cpu"), has_test=False) for _ in range(2))
    assert len(next(loader.train(epoch, first, 4))["row"]) == 10
    with pytest.raises(
        RuntimeError, match=f"begins at row {10 * first} of epoch {epoch}, but the step begins at row 30 of"
    ):
        next(stale.train(1, 3, 4))


def visited(order: Order, epoch: int) -> list[int]:
    """Return the IDs of all rows in an epoch's order."""
    starts = np.cumsum([0, *order.row_groups])
    ids: list[int] = []
    for window in order.windows(epoch):
        which, rows = locate_rows([order.row_groups[g] for g in window.groups], order.permutation(epoch, window))
        ids += (starts[list(window.groups)][which] + rows).tolist()
    return ids
