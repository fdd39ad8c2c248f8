"""LOADER=ray: streams rows with Ray Data, which reads and decodes them in tasks across the cluster.

One pipeline serves all workers of a group across all epochs, in rounds of a few shuffle windows. A task reads each
round and cuts it into one part per worker. Each row is therefore read once, regardless of the number of workers, and
each worker gets exactly its own rows, in the order of its steps. (In a mixture, a round can end within a window of any
source except the one with the largest weight. The next round reads the row groups of that window again.)

    `RoundPlanner`                       | round 0               | round 1               | ...
    `RoundReader`, in a task per round   | part 0 | part 1 | ... | part 0 | part 1 | ... |
    rank 1 takes (`streaming_split`)              | part 1 |              | part 1 |

To Ray Data, a part is a single row. Ray gives these rows to the ranks in turn, so part r of each round goes to rank r.
The streams of all workers end together. A checkpoint only stores the position in the data, because each worker group
gets new streams.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import ray.data
import ray.train
import torch

from sunspot.data.mixed_source import order_of
from sunspot.data.order import RunOrder, ShuffleWindow, Steps, locate_rows
from sunspot.data.source import Batch, DataPlan, Source
from sunspot.errors import DataError, SunspotError

PART_BYTES = 1 << 20
"""Target size of a part in bytes. Smaller parts are inefficient, because Ray Data has a fixed cost per part."""

MAX_BLOCKS = 1000
"""Largest number of blocks for the held-out rows. More blocks would only add scheduling costs."""

PREFETCH_PARTS = 2
"""Number of parts that each worker prefetches."""

PREFETCH_BATCHES = 4
"""Number of batches of held-out rows that each worker prefetches."""

Columns: TypeAlias = dict[str, np.ndarray]


@dataclass(frozen=True)
class RoundPlanner:
    """Plans a run's rounds on demand, in one Ray Data task. The windows of each epoch are computed once."""

    order: RunOrder
    steps: Steps
    total_steps: int
    round_rows: int

    def __call__(self, start: pa.Table) -> Iterator[pa.Table]:
        """Yield a one-row table for each round, beginning at the step in `start`.

        The table's columns are `epoch`, the positions `first` and `last` in the epoch, and `visits`. Each visit has the
        fields `source` and `pass`, the fields of `ShuffleWindow`, and `starts`, the ID of each group's first row.
        """
        starts = [
            first + np.cumsum([0, *order.row_groups])
            for first, order in zip(self.order.starts, self.order.orders, strict=False)
        ]
        for epoch, first, last in self._epochs(*start["step"].to_pylist()):
            before = (epoch - 1) * self.order.rows
            for begin, end, taken in self.order.rounds(before + first, before + last, self.round_rows):
                visits = [
                    {"source": source, "pass": number, **window._asdict()}
                    | {"starts": starts[source][list(window.groups)].tolist()}
                    for source, number, window in taken
                ]
                bounds = {"first": begin - before, "last": end - before}
                yield pa.Table.from_pylist([{"epoch": epoch, **bounds, "visits": visits}])

    def _epochs(self, step: int) -> Iterator[tuple[int, int, int]]:
        """Yield each epoch's number, start position and end position, beginning at `step`. Epochs count from 1."""
        while step < self.total_steps:
            epoch, first = divmod(step, self.steps.per_epoch)
            last = min(self.steps.per_epoch, first + self.total_steps - step)
            yield epoch + 1, self.steps.bounds(first)[0], self.steps.bounds(last - 1)[1]
            step += last - first


@dataclass(frozen=True)
class RoundReader:
    """Reads rounds and cuts them into parts, in Ray Data tasks."""

    source: Source
    order: RunOrder
    steps: Steps
    world_size: int
    streams: int
    "The number of workers that get a part, which are those that have rows in at least one step."

    def __call__(self, rounds: pa.Table) -> Iterator[dict[str, np.ndarray]]:
        """Yield the parts of the planned rounds.

        Each part contains the columns of its rows, [1, n, ...]. `_rank`, [1], is the rank that gets the part. `_epoch`
        and `_first`, [1], are the epoch and the position at which the part's round begins.
        """
        for given in rounds.to_pylist():
            ranks = self.steps.ranks(self.world_size, given["first"], given["last"])
            columns = self._read(given, places=np.argsort(np.argsort(ranks, kind="stable")))
            ends = np.cumsum(np.bincount(ranks, minlength=self.streams))
            where = {"_epoch": np.array([given["epoch"]]), "_first": np.array([given["first"]])}
            for rank, (begin, end) in enumerate(pairwise([0, *ends])):
                part = {name: column[None, begin:end] for name, column in columns.items()}
                yield {"_rank": np.array([rank]), **where, **part}

    def _read(self, given: dict[str, Any], places: np.ndarray) -> Columns:
        """Return the rows of a round as arrays. `places` contains each row's position in the arrays."""
        columns: Columns = {}
        before = (given["epoch"] - 1) * self.order.rows
        begins = self.order.count(before + given["first"])
        ends = self.order.count(before + given["last"])
        sources = self.order.sources(before + given["first"], before + given["last"])
        for visit in given["visits"]:
            source = visit["source"]
            order = self.order.orders[source]
            first_group = sum(len(each.row_groups) for each in self.order.orders[:source])
            window = ShuffleWindow(*(visit[name] for name in ShuffleWindow._fields))
            first = max(begins[source], window.first)
            last = min(ends[source], window.last)
            wanted = order.permutation(visit["pass"], window)[first - window.first : last - window.first]
            to = places[sources == source][first - begins[source] : last - begins[source]]
            which, rows = locate_rows([order.row_groups[group] for group in window.groups], wanted)
            for number, (group, start) in enumerate(zip(window.groups, visit["starts"], strict=True)):
                mine = np.flatnonzero(which == number)
                if not len(mine):
                    continue
                read = self.source.read(first_group + group, rows[mine])
                for name, values in {"row": start + rows[mine], **read}.items():
                    if name not in columns:
                        columns[name] = np.empty((len(places), *values.shape[1:]), values.dtype)
                    columns[name][to[mine]] = values
        return columns


def read_pieces(pieces: dict[str, np.ndarray], source: Source) -> Iterator[dict[str, np.ndarray]]:
    """Yield the held-out rows of each of the `pieces` from `cut_evenly`. Runs in Ray Data tasks."""
    for group, first, last in zip(*(pieces[name].tolist() for name in ("group", "first", "last")), strict=True):
        rows = np.arange(first, last)
        yield {"row": sum(source.row_groups[:group]) + rows, **source.read(group, rows)}


def cut_evenly(row_groups: Sequence[int], world_size: int, rank: int) -> list[dict[str, int]]:
    """Return a rank's pieces of row groups. A piece is rows `first` .. `last` - 1 of a `group`.

    The ranks' numbers of rows differ by at most one. A rank's pieces are adjacent, so most groups are read by only one
    rank.
    """
    begin, end = (sum(row_groups) * number // world_size for number in (rank, rank + 1))
    bounds = enumerate(pairwise(accumulate(row_groups, initial=0)))
    return [
        {"group": group, "first": max(begin, start) - start, "last": min(end, stop) - start}
        for group, (start, stop) in bounds
        if max(begin, start) < min(end, stop)
    ]


class StepStreams(ray.train.DataConfig):
    """Gives each worker its own rows of each step, which Ray's default split cannot do.

    Ray requests new streams for each worker group. `start` returns the step at which the group begins.
    """

    def __init__(self, data: DataPlan, total_steps: int, start: Callable[[], int], reading_cpus: float) -> None:
        super().__init__()
        self._reading_cpus = reading_cpus
        self._source = data.train
        self._test = data.test
        self._steps = data.steps
        self._order = order_of(data.train, "ray", data.seed)
        self._total_steps = total_steps
        self._start = start

    def configure(self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        [name] = datasets
        streams = self._train_streams if name == "train" else self._test_streams
        return [{name: stream} for stream in streams(world_size)]

    def _train_streams(self, world_size: int) -> list[ray.data.DataIterator]:
        streams = self._steps.workers(world_size)
        round_rows = PART_BYTES * streams // math.prod(self._source.shape)
        planner = RoundPlanner(self._order, self._steps, self._total_steps, round_rows)
        reader = RoundReader(self._source, self._order, self._steps, world_size, streams)
        rounds = ray.data.from_items([{"step": self._start()}])
        # Otherwise, the next part would go to the rank with the fewest parts.
        rounds.context.execution_options.preserve_order = True
        rounds.context.target_max_block_size = 1  # a block contains one round, and later one part
        rounds = rounds.map_batches(planner, batch_size=None, batch_format="pyarrow", num_cpus=0)
        parts = rounds.map_batches(reader, batch_size=None, batch_format="pyarrow", num_cpus=self._reading_cpus)
        splits = parts.streaming_split(streams)
        return [splits[min(rank, streams - 1)] for rank in range(world_size)]

    def _test_streams(self, world_size: int) -> list[ray.data.DataIterator]:
        assert self._test
        options = {"fn_kwargs": {"source": self._test}, "num_cpus": self._reading_cpus}
        streams = []
        for rank in range(world_size):
            pieces = cut_evenly(self._test.row_groups, world_size, rank)
            stream = ray.data.from_items(pieces, override_num_blocks=max(1, min(len(pieces), MAX_BLOCKS)))
            stream = stream.map_batches(read_pieces, batch_size=None, **options)
            stream.context.execution_options.preserve_order = True
            streams.append(stream.iterator())
        return streams


class RayLoader:
    """Loads one worker's batches from its streams."""

    ids: torch.Tensor | None = None

    def __init__(self, steps: Steps, world_size: int, rank: int, device: torch.device, has_test: bool) -> None:
        self._steps = steps
        self._world_size = world_size
        self._rank = rank
        self._device = device
        self._stream = ray.train.get_dataset_shard("train")
        self._test = ray.train.get_dataset_shard("test") if has_test else None
        self._pin = device.type == "cuda"
        self._parts: Iterator[Batch] | None = None
        self._left: Batch = {}

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        """Yield this worker's batches for steps `first` .. `last` - 1 of an epoch, or {} for a step without rows.

        Epochs count from 1.
        """
        if not self._parts and self._rank < self._steps.workers(self._world_size):
            # Parts stay in main memory, because a GPU might not have enough memory for them and the model.
            options = {"batch_size": None, "prefetch_batches": PREFETCH_PARTS, "pin_memory": self._pin}
            self._parts = iter(self._stream.iter_torch_batches(device="cpu", **options))
            # The stream waits for all ranks, so every rank requests its first part, even before a step without rows.
            self._left = self._next_part(begins_at=(epoch, self._steps.bounds(first)[0]))
        for step in range(first, last):
            begin, end = self._steps.share(step, self._world_size, self._rank)
            yield self._take(end - begin)

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of this worker's held-out rows. Each row goes to exactly one worker."""
        assert self._test
        options = {"batch_size": batch_size, "prefetch_batches": PREFETCH_BATCHES, "pin_memory": self._pin}
        return iter(self._test.iter_torch_batches(device=self._device, **options))

    def _take(self, rows: int) -> Batch:
        """Return the next `rows` rows of the stream, which continues across epochs."""
        if not rows:
            return {}
        while len(self._left["row"]) < rows:
            more = self._next_part()
            self._left = {name: torch.cat([self._left[name], more[name]]) for name in more}
        taken = {name: column[:rows].to(self._device, non_blocking=True) for name, column in self._left.items()}
        self._left = {name: column[rows:] for name, column in self._left.items()}
        return taken

    def _next_part(self, begins_at: tuple[int, int] | None = None) -> Batch:
        assert self._parts
        part = next(self._parts, None)
        if part is None:
            raise DataError(f"rank {self._rank}: the stream of rows ended early; check whether the dataset has changed")
        if int(part.pop("_rank")) != self._rank:
            raise SunspotError(f"rank {self._rank} received another worker's rows from Ray {ray.__version__}")
        begins = int(part.pop("_epoch")), int(part.pop("_first"))
        if begins_at and begins != begins_at:  # storage may have listed an older attempt when the stream was created
            raise RuntimeError(
                f"rank {self._rank}: the stream of rows begins at row {begins[1]} of epoch {begins[0]}, but the step "
                f"begins at row {begins_at[1]} of epoch {begins_at[0]}; the next worker group gets a new stream"
            )
        return {name: column[0] for name, column in part.items()}
