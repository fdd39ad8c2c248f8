"""Runs the training loop without Ray. Forked ranks take a plan's steps, and save and report nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sunspot.checkpoint import CheckpointManager, SavedObjects
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.node_state import NodeParts, NodeState
from sunspot.data.mixed_source import order_of
from sunspot.data.source import Batch, read_rows, rows_in
from sunspot.elastic.claim import CheckpointLoaders, LocalState, begin_attempt
from sunspot.elastic.copies import NodeInventory
from sunspot.elastic.restore import TrainingState, load_start
from sunspot.parallel.collectives import WorkerPlace, gather_objects
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sharding import is_dtensor, part_of
from sunspot.plan import Plan, lay_out, make_plan
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import Attempt
from sunspot.run.identity import Rows, record_identity
from sunspot.settings import IDENTITY, Settings
from sunspot.tasks import load_task
from sunspot.train.build import build_model, build_optimizer
from sunspot.train.learner import Learner, load_rest
from sunspot.train.learning_rates import LearningRates
from sunspot.train.loop import train
from sunspot.train.worker import GroupStart, Worker
from tests.harness.process_group import in_processes


class QuietWorker(Worker):
    """A worker that reports nothing to Ray."""

    losses: ClassVar[list[float]] = []
    "Losses in the newest worker's records."

    def report(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])


class Shares:
    """A loader of a rank's rows: in the run's order if the plan has one, otherwise in the source's order."""

    ids = None

    def __init__(self, plan: Plan, world_size: int, rank: int) -> None:
        self._order = order_of(plan.source, "torch", plan.settings.seed) if plan.order else None
        last_step = min(plan.total_steps, plan.steps.per_epoch) - 1
        end = plan.steps.rows if plan.order else plan.steps.share(last_step, 1, 0)[1]
        rows = read_rows(plan.source, 0, end)  # no more than the steps take, because tests make many loaders
        self._rows = {name: torch.from_numpy(column) for name, column in rows.items()}
        self._steps = plan.steps
        self._world_size = world_size
        self._rank = rank

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        ids = torch.from_numpy(self._order.row_ids(epoch)) if self._order else torch.arange(self._steps.rows)
        for step in range(first, last):
            mine = ids[slice(*self._steps.share(step, self._world_size, self._rank))]
            yield {name: column[mine] for name, column in self._rows.items()}


def make_worker(plan: Plan, group: dist.ProcessGroup) -> Worker:
    """Return a worker on the CPU at the beginning of a run that is not stored."""
    idle: Any = SimpleNamespace(
        **dict.fromkeys(
            ("save", "count_step", "took_step", "wait_for_copy", "drain", "close"), lambda *args, **options: None
        )
    )
    return _make_worker(plan, group, Attempt(1, "me", None, 0), TrainingState(), lambda *_: idle)


def join_run(plan: Plan, run: Run, owner: str, group: dist.ProcessGroup) -> Worker:
    """Return a worker that continues from the run's newest checkpoint in storage, and saves its own checkpoints
    there."""
    nodes = ["node"] * dist.get_world_size(group)
    node = NodeState(run, group, nodes)
    machines = [NodeInventory("host", "node", None, []) for _ in nodes]
    start = begin_attempt(
        Claimant(run, owner), plan.settings, machines, group=group, loaders=CheckpointLoaders(node.read)
    )
    assert start
    state = load_start(run, plan.settings, start, LocalState(None, node, NodeParts(group, nodes)), group)

    def keep(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage, place: WorkerPlace
    ) -> CheckpointManager:
        task = load_task(plan.settings)
        more_files = task.checkpoint_files
        saved = SavedObjects(model, optimizer, average, functools.partial(more_files, model) if more_files else None)
        return CheckpointManager(run, start.attempt, plan, saved, place=place, windows=state.ledger)

    return _make_worker(plan, group, start.attempt, state, keep)


def keep_run(plan: Plan) -> Run:
    """Return the stored run of a plan, with its identity."""
    run = open_run(plan.settings.storage_path, plan.settings.run_name)
    sources = lay_out(plan.source, plan.steps).sources
    rows = Rows("", rows_in(plan.source), plan.steps.per_epoch, "", "", sources)
    record_identity(run, plan.settings.environment(), IDENTITY, rows)
    return run


def train_group(plan: Plan, ranks: int, killed_at: int = 0) -> list[float]:
    """Start or continue the run of `plan` on some ranks, to its end or until all ranks are killed in a step.

    Return the reported mean losses.
    """
    run = keep_run(plan)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if killed_at:
            stack.enter_context(pytest.raises(pytest.fail.Exception, match="returned nothing"))
        return in_processes(Path(folder), ranks, lambda group: _take_part(plan, run, killed_at, group))[0]
    return []


def _take_part(plan: Plan, run: Run, killed_at: int, group: dist.ProcessGroup) -> list[float]:
    worker = join_run(plan, run, "me", group)
    took_step = worker.checkpoints.took_step

    def took_or_die(step: int, rows: torch.Tensor | None) -> None:
        if step == killed_at:
            worker.checkpoints.drain()
            os.kill(os.getpid(), signal.SIGKILL)
        took_step(step, rows)

    worker.checkpoints.took_step = took_or_die
    QuietWorker.losses = []
    train(worker)
    worker.checkpoints.close(finished=True)
    return QuietWorker.losses


def find_place(settings: Settings, group: dist.ProcessGroup) -> WorkerPlace:
    """Return this rank's place in a group. All ranks must call this together."""
    replicas = ReplicaGroups(settings.shard_degree) if settings.parallel == "hsdp" else None
    if replicas:
        replicas.form(timedelta(seconds=30))
    return WorkerPlace(group, dist.get_rank(group), dist.get_world_size(group), replicas=replicas)


def _make_worker(
    plan: Plan, group: dist.ProcessGroup, attempt: Attempt, state: TrainingState, keep: Callable[..., CheckpointManager]
) -> Worker:
    place = find_place(plan.settings, group)
    task = load_task(plan.settings)
    model = build_model(plan, task, state, attempt, place)
    optimizer, average = build_optimizer(plan.settings, task, model)
    rates = LearningRates(plan, task, optimizer)
    load_rest(state, model, optimizer)
    idle: Any = SimpleNamespace(**dict.fromkeys(("heartbeat", "report", "took_step"), lambda *args, **options: None))
    idle.paused = contextlib.nullcontext
    loader: Any = Shares(plan, place.world_size, place.rank)
    learner = Learner(plan, task, place, model, optimizer, average, loader, rates)
    checkpoints = keep(model, optimizer, average, place)
    return QuietWorker(learner, GroupStart(attempt.step, True, {}), checkpoints, idle, idle, idle, None, ExitStack())


def plan_without_evaluation(settings: Settings) -> Plan:
    plan = make_plan(settings, load_task(settings))
    return Plan(settings, plan.source, None, plan.steps, plan.total_steps)


def train_ranks(folder: Path, count: int, **settings: Any) -> dict[str, np.ndarray]:
    """Return the final weights of a run on `count` ranks."""
    folder.mkdir()
    plan = plan_without_evaluation(Settings(**settings))
    return in_processes(folder, count, functools.partial(train_rank, plan))[0]


def losses_of_ranks(folder: Path, count: int, **settings: Any) -> list[float]:
    """Return the mean loss of each step on `count` ranks."""
    folder.mkdir()
    plan = plan_without_evaluation(Settings(**settings, checkpoint_every_steps=1))

    def act(group: dist.ProcessGroup) -> list[float]:
        QuietWorker.losses = []
        train_rank(plan, group)
        return QuietWorker.losses

    return in_processes(folder, count, act)[0]


def train_rank(plan: Plan, group: dist.ProcessGroup) -> dict[str, np.ndarray]:
    """Train as one of the ranks."""
    worker = make_worker(plan, group)
    train(worker)
    whole = {name: gather(tensor) for name, tensor in worker.learner.model.state_dict().items()}
    dist.barrier()
    return whole


def gather(tensor: torch.Tensor) -> np.ndarray:
    """Return the whole tensor, gathered if it is sharded. Under hsdp, this uses the first replica's parts."""
    if not is_dtensor(tensor):
        return tensor.numpy()
    parts = gather_objects(part_of(tensor).numpy(), dist.group.WORLD)
    return np.concatenate(parts[: tensor.device_mesh.size()])
