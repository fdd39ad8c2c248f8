"""LOADER=ray: rows streamed by Ray Data, which reads and decodes them in tasks anywhere in the cluster.

Each worker gets a stream of exactly its own rows, in the order its steps consume them, from the run's position to its
end. Only the position has to be stored, and no worker's stream ends before another's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.data
import ray.train
import torch

from app.data.order import Order, ShuffleWindow, Steps, row_ids, run_order
from app.data.source import Batch, Source
from app.errors import DataError

MAX_BLOCKS = 1000
"""Blocks of a stream's index: more only cost scheduling, as a task yields its windows one by one."""

PREFETCH_BATCHES = 4
"""Batches prepared in advance by each worker."""


@dataclass(frozen=True)
class WindowReader:
    """Reads one worker's rows of shuffle windows, in Ray Data's tasks."""

    source: Source
    order: Order
    steps: Steps
    world_size: int
    rank: int

    def __call__(self, index: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """For each (`epoch`, `window`, `first`, `last`) of the index, the worker's rows in order."""
        for epoch, number, first, last in zip(
            index["epoch"], index["window"], index["first"], index["last"], strict=True
        ):
            window = self.order.windows(int(epoch))[number]
            positions = self.steps.positions(self.world_size, self.rank, int(first), int(last)) - window.first
            if len(positions):
                yield self.read(window, self.order.permutation(int(epoch), window)[positions])

    def read(self, window: ShuffleWindow, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The given rows of a window (numbered through its groups), in the given order."""
        which, ids = row_ids(self.source.row_groups, window.groups, rows)
        starts = np.cumsum([0, *self.source.row_groups])
        columns: dict[str, np.ndarray] = {"row": ids}
        for number, group in enumerate(window.groups):
            mine = np.flatnonzero(which == number)
            if not len(mine):
                continue
            for name, values in self.source.read(group, ids[mine] - starts[group]).items():
                if name not in columns:
                    columns[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
                columns[name][mine] = values
        return columns


@dataclass(frozen=True)
class GroupReader:
    """Reads whole row groups of held-out rows, each group on one worker."""

    source: Source

    def __call__(self, index: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        for group in index["group"]:
            columns = self.source.read(int(group))
            first = sum(self.source.row_groups[:group])
            yield {"row": np.arange(first, first + self.source.row_groups[group]), **columns}


class StepStreams(ray.train.DataConfig):
    """Gives every worker its own stream, instead of Ray's split by blocks, which ignores steps.

    Ray asks for new streams for each worker group; `start` returns the step that the group starts from.
    """

    def __init__(
        self,
        source: Source,
        test: Source | None,
        steps: Steps,
        seed: int,
        total_steps: int,
        start: Callable[[], int],
        reading_cpus: float = 1.0,
    ) -> None:
        super().__init__()
        self._reading_cpus = reading_cpus
        self._source, self._test, self._steps = source, test, steps
        self._order = run_order("ray", source.row_groups, seed)
        self._total_steps, self._start = total_steps, start

    def configure(self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        [name] = datasets
        streams = self._train_streams if name == "train" else self._test_streams
        return [{name: stream.iterator()} for stream in streams(world_size)]

    def _train_streams(self, world_size: int) -> list[ray.data.Dataset]:
        index = list(self._remaining(self._start()))
        readers = [WindowReader(self._source, self._order, self._steps, world_size, rank) for rank in range(world_size)]
        return [self._read(index, reader) for reader in readers]

    def _test_streams(self, world_size: int) -> list[ray.data.Dataset]:
        assert self._test
        groups = [{"group": group} for group in range(len(self._test.row_groups))]
        return [self._read(groups[rank::world_size], GroupReader(self._test)) for rank in range(world_size)]

    def _read(self, index: list[dict[str, int]], reader: WindowReader | GroupReader) -> ray.data.Dataset:
        blocks = max(1, min(len(index), MAX_BLOCKS))
        stream = ray.data.from_items(index, override_num_blocks=blocks)
        stream = stream.map_batches(reader, batch_size=None, num_cpus=self._reading_cpus)
        stream.context.execution_options.preserve_order = True
        return stream

    def _remaining(self, step: int) -> Iterator[dict[str, int]]:
        """The windows with the rows of all steps from `step` to the end of the run, in order."""
        while step < self._total_steps:
            epoch, first_step = divmod(step, self._steps.per_epoch)
            steps_here = min(self._steps.per_epoch, first_step + self._total_steps - step)
            first, last = self._steps.bounds(first_step)[0], self._steps.bounds(steps_here - 1)[1]
            for window in self._order.windows(epoch + 1):
                if window.first < last and first < window.last:
                    bounds = {"first": max(first, window.first), "last": min(last, window.last)}
                    yield {"epoch": epoch + 1, "window": window.number, **bounds}
            step += steps_here - first_step


class RayLoader:
    """This worker's batches, cut from its streams."""

    def __init__(self, steps: Steps, world_size: int, rank: int, device: torch.device, has_test: bool) -> None:
        self._steps, self._world_size, self._rank, self._device = steps, world_size, rank, device
        self._stream = ray.train.get_dataset_shard("train")
        self._test = ray.train.get_dataset_shard("test") if has_test else None
        self._rows: Iterator[Batch] | None = None
        self._left: Batch = {}

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """This worker's share of the steps `first` .. `last` - 1 of an epoch (from 1); {} for a share without rows."""
        for step in range(first, last):
            begin, end = self._steps.share(step, self._world_size, self._rank)
            yield self._take(end - begin)

    def test(self, batch_size: int) -> Iterator[Batch]:
        """This worker's part of the held-out rows, each row on exactly one worker."""
        assert self._test
        return iter(self._test.iter_torch_batches(batch_size=batch_size, device=self._device))

    def _take(self, rows: int) -> Batch:
        """The next `rows` rows of the stream, which runs through all epochs without a pause."""
        if not rows:
            return {}
        if self._rows is None:
            begin, end = self._steps.share(0, self._world_size, self._rank)
            options = {"batch_size": max(1, end - begin), "prefetch_batches": PREFETCH_BATCHES}
            self._rows = iter(self._stream.iter_torch_batches(device=self._device, **options))
        while len(self._left.get("row", ())) < rows:
            more = next(self._rows, None)
            if more is None:
                raise DataError(f"rank {self._rank}: its stream of rows ended early; has the dataset been changed?")
            self._left = {name: torch.cat([self._left[name], more[name]]) for name in more} if self._left else more
        taken = {name: column[:rows] for name, column in self._left.items()}
        rest = {name: column[rows:] for name, column in self._left.items()}
        self._left = rest if len(rest["row"]) else {}
        return taken
