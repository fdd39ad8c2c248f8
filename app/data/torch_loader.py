"""LOADER=torch: all rows in memory, behind a DataLoader that indexes the epoch's permutation."""

from collections.abc import Iterator

import numpy as np
import ray.train.torch
import torch
from torch.utils.data import DataLoader, Dataset

from app.data.order import Steps, run_order
from app.data.source import Batch, Source, read_rows, rows_in


class TorchLoader:
    """This worker's batches."""

    def __init__(
        self, source: Source, test: Source | None, steps: Steps, seed: int, world_size: int, rank: int
    ) -> None:
        self._rows = load_rows(source)
        self._test = load_rows(test) if test else None
        self._order = run_order("torch", source.row_groups, seed)
        self._steps, self._world_size, self._rank = steps, world_size, rank

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """This worker's share of the steps `first` .. `last` - 1 of an epoch (from 1); a share may have no rows."""
        order = self._order.permutation(epoch, self._order.windows(epoch)[0])
        shares = [order[slice(*self._steps.share(step, self._world_size, self._rank))] for step in range(first, last)]
        return self._batches(self._rows, shares)

    def test(self, batch_size: int) -> Iterator[Batch]:
        """This worker's part of the held-out rows, each row on exactly one worker."""
        assert self._test
        mine = np.arange(len(self._test["row"]))[self._rank :: self._world_size]
        return self._batches(
            self._test, [mine[begin : begin + batch_size] for begin in range(0, len(mine), batch_size)]
        )

    @staticmethod
    def _batches(rows: Batch, selections: list[np.ndarray]) -> Iterator[Batch]:
        # batch_size=None: an item is a whole batch, taken in one indexing operation instead of row by row.
        loader = DataLoader(Selections(rows, selections), batch_size=None)
        return iter(ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False))


class Selections(Dataset[Batch]):
    """Item k is the rows of selection k."""

    def __init__(self, rows: Batch, selections: list[np.ndarray]) -> None:
        self._rows, self._selections = rows, selections

    def __len__(self) -> int:
        return len(self._selections)

    def __getitem__(self, index: int) -> Batch:
        chosen = torch.from_numpy(self._selections[index])
        return {name: column[chosen] for name, column in self._rows.items()}


def load_rows(source: Source) -> Batch:
    """All rows of a source in memory: a tensor for each column, and `row` with the row ids."""
    return {name: torch.from_numpy(column) for name, column in read_rows(source, 0, rows_in(source)).items()}
