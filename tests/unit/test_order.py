"""Tests for the order of rows and for each worker's share of a step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data.order import MIN_ROWS, Order, ShuffleWindow, Steps, largest_pass, locate_rows, micro_batches, share

rows = st.integers(2, 500)
batches = st.integers(2, 64)
worlds = st.integers(1, 9)
row_groups = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda groups: sum(groups) >= 2)


@given(rows, batches)
def test_the_steps_of_an_epoch_cover_every_position_once(rows: int, batch: int) -> None:
    steps = Steps(rows, batch)
    bounds = [steps.bounds(step) for step in range(steps.per_epoch)]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == rows
    assert all(end - begin == batch for begin, end in bounds[:-1])
    assert MIN_ROWS <= bounds[-1][1] - bounds[-1][0] <= batch + 1


@given(st.integers(2, 500), worlds)
def test_the_shares_of_the_workers_are_nearly_equal_and_contain_at_least_two_rows(rows: int, world_size: int) -> None:
    shares = [share(rows, world_size, rank) for rank in range(world_size)]
    sizes = [end - begin for begin, end in shares]
    some = [size for size in sizes if size]
    assert [position for begin, end in shares for position in range(begin, end)] == list(range(rows))
    assert max(some) - min(some) <= 1
    assert min(some) >= MIN_ROWS
    assert len(some) == min(world_size, rows // MIN_ROWS)
    assert sizes[0] > 0, "rank 0 needs rows because its batch norm averages are kept"


@given(rows, batches, worlds, st.data())
def test_the_two_methods_that_assign_positions_to_workers_agree(
    rows: int, batch: int, world_size: int, data: st.DataObject
) -> None:
    steps = Steps(rows, batch)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    ranks = steps.ranks(world_size, first, last)
    for rank in range(world_size):
        shares = [steps.share(step, world_size, rank) for step in range(steps.per_epoch)]
        expected = [p for begin, end in shares for p in range(begin, end) if first <= p < last]
        assert (np.flatnonzero(ranks == rank) + first).tolist() == expected
        assert (rank < steps.workers(world_size)) == any(begin < end for begin, end in shares)


@given(st.integers(2, 300), st.integers(0, 40))
def test_micro_batches_have_nearly_equal_sizes(rows: int, most: int) -> None:
    parts = list(micro_batches(rows, most))
    sizes = [part.stop - part.start for part in parts]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (most or rows)
    assert min(sizes) >= (1 if 0 < most < 3 else MIN_ROWS)


def test_a_worker_with_fewer_rows_can_have_the_largest_forward_pass() -> None:
    """A share of 5 rows has passes of 2 and 3 rows if the limit is 4, but a share of 4 rows has a single pass."""
    assert largest_pass(9, 2, 4) == 4
    assert largest_pass(9, 2, 5) == 5
    assert largest_pass(9, 2, 0) == 5


@given(row_groups, st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 100))
def test_an_epoch_visits_every_row_once(groups: list[int], seed: int, epoch: int, window_rows: int) -> None:
    order = Order(tuple(groups), seed, window_rows)
    windows = order.windows(epoch)
    assert [window.first for window in windows] == [0, *(window.last for window in windows[:-1])]
    ids = [id for window in windows for id in ids_of(order, epoch, window)]
    assert sorted(ids) == list(range(sum(groups)))


def ids_of(order: Order, epoch: int, window: ShuffleWindow) -> list[int]:
    """Return the IDs of a window's rows, in order."""
    which, rows = locate_rows([order.row_groups[group] for group in window.groups], order.permutation(epoch, window))
    groups = np.array(window.groups)[which]
    assert np.all((rows >= 0) & (rows < np.array(order.row_groups)[groups]))
    return (np.cumsum([0, *order.row_groups])[groups] + rows).tolist()


def test_the_order_depends_on_seed_and_epoch() -> None:
    def first_rows(seed: int, epoch: int) -> list[int]:
        order = Order((1000,), seed, 1000)
        return order.permutation(epoch, order.windows(epoch)[0])[:20].tolist()

    assert first_rows(0, 1) == first_rows(0, 1)
    assert len({tuple(first_rows(seed, epoch)) for seed in range(3) for epoch in range(1, 4)}) == 9


def test_the_row_order_is_the_same_in_every_version() -> None:
    """Stored positions depend on this exact order. A different order would repeat rows in a resumed epoch."""
    order = Order((5, 3, 4), seed=7, window_rows=6)
    assert [window.groups for window in order.windows(2)] == PINNED_GROUPS
    assert [order.permutation(2, window).tolist() for window in order.windows(2)] == PINNED_ROWS


PINNED_GROUPS = [(2, 1), (0,)]
PINNED_ROWS = [[5, 0, 2, 3, 6, 1, 4], [2, 4, 1, 3, 0]]
