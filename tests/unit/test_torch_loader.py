"""Tests that LOADER=torch gives the same batches from main memory and from the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import sunspot.data.torch_loader
from sunspot.data.order import Steps
from sunspot.data.shared_rows import LocalWorkers
from sunspot.data.source import Batch, DataPlan, EmptySource
from sunspot.data.torch_loader import TorchLoader, fits_on, prefetch

ROWS, BATCH = 23, 5


class Numbers(EmptySource):
    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        numbers = np.arange(ROWS) if rows is None else rows
        return {"image": np.stack([numbers, numbers**2], axis=1).astype(np.uint8), "label": numbers % 3}


def batches(monkeypatch: pytest.MonkeyPatch, resident: bool, world_size: int, rank: int) -> list[Batch]:
    """Return all training and evaluation batches of an epoch."""
    alone = LocalWorkers(rank, world_size, "node", lambda mine: [mine], lambda act: act())
    source = Numbers((2,), 3, row_groups=(ROWS,))
    monkeypatch.setattr(sunspot.data.torch_loader, "fits_on", lambda device, size: resident)
    monkeypatch.setattr("ray.train.torch.prepare_data_loader", unchanged)
    loader = TorchLoader(DataPlan(source, source, Steps(ROWS, BATCH), 7), torch.device("cpu"), alone)
    assert loader.resident is resident
    return [*loader.train(1, 1, 5), *loader.test(4)]


def unchanged(loader: Any, **options: Any) -> Iterator[Batch]:
    return iter(loader)


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 1)])
def test_batches_are_the_same_whether_rows_are_on_the_device_or_in_memory(
    monkeypatch: pytest.MonkeyPatch, world_size: int, rank: int
) -> None:
    here, there = (batches(monkeypatch, resident, world_size, rank) for resident in (False, True))
    assert len(here) == len(there) > 5
    for one, other in zip(here, there, strict=True):
        assert list(one) == list(other)
        for name, column in one.items():
            assert column.dtype == other[name].dtype
            assert torch.equal(column, other[name])
        assert torch.equal(one["image"][:, 0].long(), one["row"])


def test_the_row_ids_of_a_batch_on_a_device_stay_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = LocalWorkers(1, 2, "node", lambda mine: [mine], lambda act: act())
    source = Numbers((2,), 3, row_groups=(ROWS,))
    monkeypatch.setattr("ray.train.torch.prepare_data_loader", unchanged)
    loader = TorchLoader(DataPlan(source, source, Steps(ROWS, BATCH), 7), torch.device("meta"), alone)
    for batch in loader.train(1, 1, 5):
        assert loader.ids is not None
        assert loader.ids.dtype == torch.int64
        assert torch.equal(loader.ids, batch["row"])


def test_a_thread_prepares_the_next_batch_while_the_caller_uses_the_previous_batch() -> None:
    threads = []
    second = threading.Event()

    def taken() -> Iterator[Batch]:
        for number in range(3):
            threads.append(threading.current_thread())
            if number == 1:
                second.set()
            yield {"row": torch.tensor([number])}
        raise ValueError("no more rows")

    batches = prefetch(taken(), torch.device("cpu"))
    found = [int(next(batches)["row"])]
    assert second.wait(10)
    assert len(threads) == 2
    with pytest.raises(ValueError, match="no more rows"):
        found.extend(int(batch["row"]) for batch in batches)
    assert found == [0, 1, 2]
    assert threading.current_thread() not in threads
    assert not threads[0].is_alive()


def test_the_prefetching_thread_ends_after_the_last_batch_or_when_its_caller_stops() -> None:
    threads = set(threading.enumerate())
    batch = {"row": torch.tensor([0])}
    assert list(prefetch(iter([batch, batch]), torch.device("cpu"))) == [batch, batch]
    batches = prefetch(iter([batch] * 9), torch.device("cpu"))
    assert next(batches) is batch
    batches.close()
    assert set(threading.enumerate()) == threads


def test_rows_are_kept_only_on_a_gpu_with_enough_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 2000))
    assert [fits_on(torch.device("cuda", 0), size) for size in (200, 201)] == [True, False]
    assert not fits_on(torch.device("cpu"), 1)
