"""Tests for LOADER=torch: each node holds the rows in memory once, and each step gets the right rows."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sunspot.data.shared_rows
from sunspot.data.order import Order, Steps
from sunspot.data.shared_rows import LocalWorkers, load_shared
from sunspot.data.torch_loader import Selections, cut_shares
from sunspot.errors import DataError
from tests.harness.constants import SetConstants
from tests.harness.threads import load_in_threads

NODES = ("a", "b", "a", "a")
"""The node of each worker."""


@dataclass
class CountingSource:
    """A source that counts reads of complete groups. Each row has an odd number of bytes."""

    row_groups: tuple[int, ...]
    reads: Counter[int] = field(default_factory=Counter)
    fingerprint: str = field(default_factory=lambda: uuid.uuid4().hex)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        if rows is None:
            self.reads[group] += 1
            rows = np.arange(self.row_groups[group])
        ids = sum(self.row_groups[:group]) + rows
        return {"image": np.repeat(ids[:, None] % 251, 3, axis=1).astype(np.uint8), "label": ids}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_workers_on_the_same_node_read_each_row_once_into_shared_memory(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:

        def refuse(*_: Any, **options: Any) -> None:
            raise PermissionError

        monkeypatch.setattr(sunspot.data.shared_rows, "map_pages", refuse)
    train, test = CountingSource((5, 0, 7, 3)), CountingSource((4,))
    loaded = load_in_threads([train, test], NODES)
    for batches in loaded:
        for rows, source in zip(batches, (train, test), strict=True):
            ids = torch.arange(sum(source.row_groups))
            assert torch.equal(rows["label"], ids)
            assert torch.equal(rows["image"], (ids[:, None] % 251).expand(-1, 3).byte())
    copies = 2 if shared else len(NODES)
    assert set(train.reads.values()) == set(test.reads.values()) == {copies}
    loaded[2][0]["label"][0] = 99
    changed = [int(batches[0]["label"][0]) == 99 for batches in loaded]
    assert changed == [shared, False, True, shared]


def join(source: CountingSource, node: str) -> torch.Tensor:
    """Return the labels that a worker loads alone, as a replacement does."""
    [[rows]] = load_in_threads([source], [node])
    return rows["label"]


def test_a_worker_that_joins_a_node_maps_the_rows_already_in_shared_memory() -> None:
    source = CountingSource((5, 7))
    loaded = load_in_threads([source], ["a", "a"])
    assert join(source, "a").tolist() == list(range(12))
    assert set(source.reads.values()) == {1}
    assert join(source, "b").tolist() == list(range(12))
    assert set(source.reads.values()) == {2}
    join(source, "a")[3] = 99
    assert [int(rows["label"][3]) for [rows] in loaded] == [99, 99]


def test_rows_are_freed_once_no_worker_maps_them() -> None:
    source = CountingSource((5, 7))
    first = load_in_threads([source], ["a"])
    second = join(source, "a")
    del first
    third = join(source, "a")
    assert set(source.reads.values()) == {1}
    del second, third
    join(source, "a")
    assert set(source.reads.values()) == {2}


def test_rows_are_not_mapped_before_they_are_complete() -> None:
    source = CountingSource((5, 7))

    def read(group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        if rows is None and group == 1:
            joined.append(join(source, "a"))
        return source.read(group, rows)

    joined: list[torch.Tensor] = []
    unfinished: Any = SimpleNamespace(row_groups=source.row_groups, fingerprint=source.fingerprint, read=read)
    load_in_threads([unfinished], ["a"])
    assert joined[0].tolist() == list(range(12))
    assert set(source.reads.values()) == {2}


def test_rows_that_do_not_fit_in_memory_are_not_read(
    monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    source: Any = CountingSource((1000,))
    alone = LocalWorkers(0, 1, "a", lambda mine: [mine], lambda act: act())
    set_constants(sunspot.data.shared_rows, MEMORY_WAIT_S=0)
    size = 3008 + 8000  # columns are aligned to 64 bytes
    for left, fits in [(size, True), (None, True), (size - 1, False)]:
        monkeypatch.setattr(sunspot.data.shared_rows, "memory_left", lambda left=left: left)
        source.reads.clear()
        if fits:
            load_shared([source], alone)
        else:
            with pytest.raises(
                DataError, match=r"takes 11 KB, but only 11 KB of memory is left.*with SUNSPOT_LOADER=ray"
            ):
                load_shared([source], alone)
        assert bool(source.reads) == fits


@given(st.integers(2, 300), st.integers(2, 40), st.integers(1, 9), st.data())
def test_a_worker_keeps_only_its_own_row_numbers_in_memory(
    rows: int, batch: int, world_size: int, data: st.DataObject
) -> None:
    steps, whole = Steps(rows, batch), Order((rows,), 3, rows)
    rank = data.draw(st.integers(0, world_size - 1))
    first = data.draw(st.integers(0, steps.per_epoch - 1))
    order = whole.permutation(2, whole.windows(2)[0])
    short = whole.permutation(2, whole.windows(2)[0], np.int32)
    assert short.dtype == np.int32
    assert short.tolist() == order.tolist()
    shares = cut_shares(short, steps, world_size, rank)[first:]
    expected = [order[slice(*steps.share(step, world_size, rank))] for step in range(first, steps.per_epoch)]
    assert [shares[number].tolist() for number in range(len(shares))] == [share.tolist() for share in expected]
    batches = Selections({"label": 2 * torch.arange(rows)}, shares)
    for number, share in enumerate(expected):
        assert batches[number]["row"].tolist() == share.tolist()
        assert batches[number]["label"].tolist() == (2 * share).tolist()
