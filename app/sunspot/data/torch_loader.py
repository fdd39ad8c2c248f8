"""Implements LOADER=torch, which keeps all rows in memory, once per node, and selects each step's rows by number.

If a worker's GPU has enough free memory, the rows are kept there, and a step sends only row numbers to the GPU.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import ray.train.torch
import torch
from torch.utils.data import DataLoader, Dataset

from sunspot.background import start_thread
from sunspot.data.mixed_source import order_of
from sunspot.data.order import Steps
from sunspot.data.shared_rows import LocalWorkers, load_shared
from sunspot.data.source import Batch, DataPlan, rows_in

GPU_FRACTION = 0.2
"""Largest fraction of a GPU's free memory that rows can use. How much training needs is unknown before it runs."""


class TorchLoader:
    """Loads one worker's batches from rows in memory."""

    def __init__(self, data: DataPlan, device: torch.device, workers: LocalWorkers, full_batch: bool = False) -> None:
        """Load the rows. With `full_batch`, each step is an epoch, with all of the worker's rows in one batch."""
        loaded = load_shared([data.train, data.test] if data.test else [data.train], workers)
        self._device = device
        self.resident = fits_on(device, sum(column.nbytes for rows in loaded for column in rows.values()))
        "True if the rows are in the memory of the training device."
        if self.resident:
            loaded = [{name: column.to(device) for name, column in rows.items()} for rows in loaded]
        self._rows = loaded[0]
        self._test = loaded[1] if data.test else {}
        self._test_size = rows_in(data.test) if data.test else 0
        self._order = order_of(data.train, "torch", data.seed)
        self._steps = data.steps
        self._world_size = workers.world_size
        self._rank = workers.rank
        self._ahead: tuple[int, Future[list[np.ndarray]]] | None = None
        self._full_batch = full_batch
        self._batch: Batch = {}
        "The rows of every step if `full_batch` is set. Empty before the first step."
        self.ids: torch.Tensor | None = None

    def move(self, world_size: int, rank: int) -> None:
        """Change the worker's rank and the number of workers for all later batches."""
        self._world_size = world_size
        self._rank = rank
        self._ahead = None
        self._batch = {}

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """Return this worker's batches for steps `first` .. `last` - 1 of an epoch.

        Epochs count from 1. A batch can be empty.
        """
        if self._full_batch:
            self._batch = self._batch or next(self._batches(self._rows, self._shuffle(1)))
            return iter([self._batch])
        ahead, self._ahead = self._ahead, None
        shares = ahead[1].result() if ahead and ahead[0] == epoch else self._shuffle(epoch)
        # Computing the order of many rows takes seconds, so the next epoch's order is computed in advance.
        self._ahead = epoch + 1, start_thread(lambda: self._shuffle(epoch + 1), "shuffle")
        batches = self._batches(self._rows, shares[first:last])
        return batches if self._device.type == "cpu" else self._note_ids(batches, shares[first:last])

    def _note_ids(self, batches: Iterator[Batch], selections: list[np.ndarray]) -> Iterator[Batch]:
        """Yield each batch after storing its row IDs in `self.ids`."""
        for batch, rows in zip(batches, selections, strict=True):
            self.ids = torch.from_numpy(rows).long()
            yield batch

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of this worker's held-out rows. Each row goes to exactly one worker."""
        mine = np.arange(self._rank, self._test_size, self._world_size)
        return self._batches(
            self._test, [mine[begin : begin + batch_size] for begin in range(0, len(mine), batch_size)]
        )

    def _shuffle(self, epoch: int) -> list[np.ndarray]:
        # int32 saves memory if it can number all rows: an order of 1e8 rows takes 0.4 GB instead of 0.8 GB.
        dtype = np.int32 if self._steps.rows <= np.iinfo(np.int32).max else np.int64
        return cut_shares(self._order.row_ids(epoch, dtype), self._steps, self._world_size, self._rank)

    def _batches(self, rows: Batch, selections: list[np.ndarray]) -> Iterator[Batch]:
        taken = Selections(rows, selections, self._device if self.resident else None)
        if self.resident or self._device.type == "cpu":
            return map(taken.__getitem__, range(len(taken)))
        # With batch_size=None, each item is a complete batch, so the DataLoader does not collate single rows. Pinned
        # memory lets the next batch be copied to the GPU asynchronously.
        loader = DataLoader(taken, batch_size=None, pin_memory=self._device.type == "cuda")
        return prefetch(iter(ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False)), self._device)


class Selections(Dataset[Batch]):
    """A dataset of batches: item k contains the rows of selection k."""

    def __init__(self, rows: Batch, selections: list[np.ndarray], device: torch.device | None = None) -> None:
        """Select from `rows`, which are on `device`, or in main memory if `device` is None."""
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


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches. A thread prepares the next batch while the caller works on the current one.

    For a GPU, the thread selects the rows and copies them into pinned memory, which can take longer than a step. Ray's
    `prepare_data_loader` then copies the batch to the GPU in a separate CUDA stream, and makes the current stream of
    `device` wait for the copy.
    """
    with ThreadPoolExecutor(1, "prefetch") as thread:
        if device.type == "cuda":
            thread.submit(torch.cuda.set_device, device)  # each thread has a current device of its own
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def cut_shares(order: np.ndarray, steps: Steps, world_size: int, rank: int) -> list[np.ndarray]:
    """Return the row numbers of a worker's share of each step in an epoch.

    The arrays are copies, so that they do not keep the other workers' row numbers in memory.
    """
    full = steps.per_epoch - 1  # all steps except the last have the same size
    each, rest = (slice(*steps.share(step, world_size, rank)) for step in (0, full))
    alike = order[: full * steps.batch].reshape(full, steps.batch)[:, each]
    return [*np.ascontiguousarray(alike), order[rest].copy()]


def fits_on(device: torch.device, size: int) -> bool:
    """Return True if the device is a GPU with enough free memory for `size` bytes of rows."""
    return device.type == "cuda" and size <= GPU_FRACTION * torch.cuda.mem_get_info(device)[0]
