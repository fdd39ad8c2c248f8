"""Measures what a step costs the training thread besides the model's own work, without Ray.

The model is one small layer, so nearly all of the time is the loop's. A thread's own clock does not count what other
processes do on the same cores.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from scripts.bench import Figures, in_turns
from sunspot.checkpoint import CheckpointManager
from sunspot.data.shared_rows import LocalWorkers
from sunspot.data.source import Batch, read_rows, rows_in
from sunspot.data.torch_loader import TorchLoader
from sunspot.elastic.messages import Command
from sunspot.elastic.restore import TrainingState
from sunspot.parallel.collectives import WorkerPlace, gather_objects
from sunspot.parallel.sum_guard import SumGuard
from sunspot.plan import Plan, make_plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, claim
from sunspot.settings import load_settings
from sunspot.tasks import load_task
from sunspot.train.build import build_learner
from sunspot.train.loop import take_step
from sunspot.train.run import TrainingRun
from sunspot.train.worker import GroupStart, Worker

TURNS = 30
STEPS = 200
"""Steps in each turn of each way."""

BATCH_ROWS = 16
"""Rows of each worker in a step."""

Way = Callable[[str], Iterator[None]]
"""A loop that takes a step whenever it is advanced, given a folder of its own for a run."""


def measure(most: int) -> Figures:
    """Return the microseconds of the training thread per step, in Sunspot and in plain PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_rank(0, 1, most, folder)


def measure_two(most: int) -> Figures:
    """Return the same for the slower one of two workers in each turn."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            ranks = pool.starmap(measure_rank, [(rank, 2, most, folder) for rank in range(2)], chunksize=1)
    one, other = ranks
    return {name: [*map(max, one[name], other[name])] for name in one}


def measure_rank(rank: int, workers: int, most: int, folder: str) -> Figures:
    """Return the figures of one of the workers. All workers must call this together, with an empty folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", workers)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    try:
        ways: dict[str, Way] = {
            "Sunspot": partial(our_steps, survives=True),
            "PyTorch with a DataLoader": partial(plain_steps, with_loader=True),
            "Sunspot, `SURVIVORS=off`": partial(our_steps, survives=False),
            "PyTorch with rows by index": partial(plain_steps, with_loader=False),
        }
        begun = {name: way(f"{folder}/{number}") for number, (name, way) in enumerate(ways.items())}
        timed = {name: partial(microseconds_per_step, steps) for name, steps in islice(begun.items(), most)}
        in_turns(timed, 2)  # warm up
        return in_turns(timed, TURNS)
    finally:
        dist.destroy_process_group()


def microseconds_per_step(steps: Iterator[None]) -> float:
    """Take STEPS steps, and return the microseconds of this thread for each."""
    began = time.thread_time()
    for _ in islice(steps, STEPS):
        pass
    return 1e6 * (time.thread_time() - began) / STEPS


def make_small_plan(folder: str) -> Plan:
    """Return a plan for the small task, without an end that the benchmark could reach."""
    workers = dist.get_world_size()
    settings = load_settings(
        {
            "STORAGE_PATH": folder,
            "TASK": "scripts.bench.small_task",
            "GLOBAL_BATCH_SIZE": str(BATCH_ROWS * workers),
            "NUM_WORKERS": str(workers),
            "EPOCHS": "1000000",
            "CHECKPOINT_EVERY_S": "0",
            "REPORT_EVERY_S": "1e9",
            "SNAPSHOT_COST": "0",
        }
    )
    return make_plan(settings, load_task(settings))


def our_steps(folder: str, survives: bool) -> Iterator[None]:
    """Take Sunspot's steps on each worker, which prepares to take back its steps if it `survives` losses."""
    plan = make_small_plan(folder)
    rank = dist.get_rank()
    workers = dist.get_world_size()
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    place = WorkerPlace(group, rank, workers, sums=SumGuard() if survives else None)
    run = open_run(plan.settings.storage_path, plan.settings.run_name)
    attempt = Attempt(1, "benchmark", None, 0)
    if rank == 0:
        claim(run, [], attempt)
    local = LocalWorkers(rank, workers, f"node {rank}", partial(gather_objects, group=group), lambda act: act())
    learner = build_learner(
        plan, place, attempt, TrainingState(), lambda *_: TorchLoader(plan.data, place.device, local)
    )
    checkpoints = CheckpointManager(run, attempt, plan, learner.saved(), place=place)
    start = GroupStart(0, True, {})
    ignore: Any = SimpleNamespace(
        **dict.fromkeys(("heartbeat", "took_step", "report"), lambda *_, **__: None), due=lambda: False
    )
    commands: Any = SimpleNamespace(poll=Command)
    reporter = ignore if rank == 0 else None
    worker = Worker(learner, start, checkpoints, commands, ignore, ignore, reporter, ExitStack())
    training = TrainingRun(worker)
    for batch in training.batches():
        take_step(training, batch)
        yield


def plain_steps(folder: str, with_loader: bool) -> Iterator[None]:
    """Take the steps of a plain loop in PyTorch with the same task."""
    plan = make_small_plan(folder)
    task = load_task(plan.settings)
    assert task.loss
    columns = {
        name: torch.from_numpy(column) for name, column in read_rows(plan.source, 0, rows_in(plan.source)).items()
    }
    rows = Rows({name: column for name, column in columns.items() if name != "row"}, rows_in(plan.source))
    model = task.build_model(plan.settings, plan.source).train()
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = task.build_optimizer(model, plan.settings)
    sampler = BatchSampler(RandomSampler(rows), BATCH_ROWS, drop_last=True)
    while True:
        batches = DataLoader(rows, batch_size=None, sampler=sampler) if with_loader else rows.shuffled()
        for batch in batches:
            losses, _ = task.loss(model, batch)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


class Rows(Dataset[Batch]):
    """A dataset of rows in memory. Each item is a whole batch."""

    def __init__(self, columns: Batch, number: int) -> None:
        self._columns = columns
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, chosen: Any) -> Batch:
        return {name: column[chosen] for name, column in self._columns.items()}

    def shuffled(self) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        return map(self.__getitem__, torch.randperm(self._number).split(BATCH_ROWS))
