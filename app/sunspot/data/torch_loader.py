"""LOADER=torch: all rows in memory, once per node, and a DataLoader that takes an epoch's rows in order.

Rows are kept on the GPU if they leave enough memory for training. A step then only sends the row numbers to the GPU.
"""

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import ray.train.torch
import torch
from torch.utils.data import DataLoader, Dataset

from sunspot.background import start_thread
from sunspot.data.order import Steps, run_order
from sunspot.data.shared_rows import LocalWorkers, load_shared
from sunspot.data.source import Batch, DataPlan, rows_in

GPU_FRACTION = 0.2
"""Fraction of a GPU's free memory that rows may take. Training needs most of the memory, but the exact amount is
unknown before it runs."""


class TorchLoader:
    """Batches of this worker."""

    def __init__(self, data: DataPlan, device: torch.device, workers: LocalWorkers, full_batch: bool = False) -> None:
        """Load the rows. With `full_batch`, each step takes all of the worker's rows and is an epoch."""
        loaded = load_shared([data.train, data.test] if data.test else [data.train], workers)
        self._device = device
        self.resident = fits_on(device, sum(column.nbytes for rows in loaded for column in rows.values()))
        "True if the rows are on the device that trains."
        if self.resident:
            loaded = [{name: column.to(device) for name, column in rows.items()} for rows in loaded]
        self._rows = loaded[0]
        self._test = loaded[1] if data.test else {}
        self._test_size = rows_in(data.test) if data.test else 0
        self._order = run_order("torch", data.train.row_groups, data.seed)
        self._steps = data.steps
        self._world_size = workers.world_size
        self._rank = workers.rank
        self._ahead: tuple[int, Future[list[np.ndarray]]] | None = None
        self._full_batch = full_batch
        self._batch: Batch = {}
        "Rows of each step if `full_batch` is set; empty before the first step."

    def move(self, world_size: int, rank: int) -> None:
        """Load the rows of this rank in a group of `world_size` workers from now on."""
        self._world_size = world_size
        self._rank = rank
        self._ahead = None
        self._batch = {}

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """Return this worker's rows of the steps `first` .. `last` - 1 of an epoch (from 1).

        A batch may have no rows.
        """
        if self._full_batch:
            self._batch = self._batch or next(self._batches(self._rows, self._shuffle(1)))
            return iter([self._batch])
        ahead, self._ahead = self._ahead, None
        shares = ahead[1].result() if ahead and ahead[0] == epoch else self._shuffle(epoch)
        # Computing the next epoch's order takes seconds for many rows.
        self._ahead = epoch + 1, start_thread(lambda: self._shuffle(epoch + 1), "shuffle")
        return self._batches(self._rows, shares[first:last])

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Return this worker's part of the held-out rows. Each row goes to exactly one worker."""
        mine = np.arange(self._rank, self._test_size, self._world_size)
        return self._batches(
            self._test, [mine[begin : begin + batch_size] for begin in range(0, len(mine), batch_size)]
        )

    def _shuffle(self, epoch: int) -> list[np.ndarray]:
        # The smaller type that can number the rows: an order of 1e8 rows takes 0.4 GB or 0.8 GB.
        dtype = np.int32 if self._steps.rows <= np.iinfo(np.int32).max else np.int64
        order = self._order.permutation(epoch, self._order.windows(epoch)[0], dtype)
        return cut_shares(order, self._steps, self._world_size, self._rank)

    def _batches(self, rows: Batch, selections: list[np.ndarray]) -> Iterator[Batch]:
        taken = Selections(rows, selections, self._device if self.resident else None)
        if self.resident or self._device.type == "cpu":
            return map(taken.__getitem__, range(len(taken)))
        # With batch_size=None, an item is a complete batch, taken in one indexing operation instead of row by row. Only
        # copies from pinned memory to a GPU, one batch ahead, run while the host continues.
        loader = DataLoader(taken, batch_size=None, pin_memory=self._device.type == "cuda")
        return iter(ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False))


class Selections(Dataset[Batch]):
    """Dataset whose item k is the rows of selection k."""

    def __init__(self, rows: Batch, selections: list[np.ndarray], device: torch.device | None = None) -> None:
        """Use rows in this process's memory or, if `device` is given, on that device."""
        self._rows = rows
        self._selections = selections
        self._device = device

    def __len__(self) -> int:
        return len(self._selections)

    def __getitem__(self, index: int) -> Batch:
        chosen = torch.from_numpy(self._selections[index])
        if self._device:
            pinned = chosen.pin_memory() if self._device.type == "cuda" else chosen
            chosen = pinned.to(self._device, non_blocking=True)
        return {**{name: column.index_select(0, chosen) for name, column in self._rows.items()}, "row": chosen.long()}


def cut_shares(order: np.ndarray, steps: Steps, world_size: int, rank: int) -> list[np.ndarray]:
    """Return the rows that a worker takes in each step of an epoch.

    The arrays are copies, so that they do not keep other workers' rows in memory.
    """
    full = steps.per_epoch - 1  # all steps but the last have the same size
    each, rest = (slice(*steps.share(step, world_size, rank)) for step in (0, full))
    alike = order[: full * steps.batch].reshape(full, steps.batch)[:, each]
    return [*np.ascontiguousarray(alike), order[rest].copy()]


def fits_on(device: torch.device, size: int) -> bool:
    """Return True if `size` bytes of rows belong on the device: a GPU with enough free memory."""
    return device.type == "cuda" and size <= GPU_FRACTION * torch.cuda.mem_get_info(device)[0]
