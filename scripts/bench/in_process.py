"""Takes Sunspot's steps in this process, with the real loop, worker and loader, but without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from sunspot.checkpoint import CheckpointManager
from sunspot.data.shared_rows import LocalWorkers
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

CPU = torch.device("cpu")


@contextmanager
def group_of_one() -> Iterator[None]:
    """Context manager with a process group that has only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_steps(folder: str, task: str, batch_rows: int, **more: str) -> Plan:
    """Return a plan for this process's group, which saves and reports nothing before the end of an epoch.

    Each worker takes `batch_rows` rows per step.
    """
    workers = dist.get_world_size()
    settings = load_settings(
        {
            "STORAGE_PATH": folder,
            "TASK": task,
            "GLOBAL_BATCH_SIZE": str(batch_rows * workers),
            "NUM_WORKERS": str(workers),
            "EPOCHS": "1000000",
            "CHECKPOINT_EVERY_S": "0",
            "REPORT_EVERY_S": "1e9",
            "SNAPSHOT_COST": "0",
            **more,
        }
    )
    return make_plan(settings, load_task(settings))


def our_steps(plan: Plan, survives: bool, device: torch.device = CPU) -> Iterator[None]:
    """Take Sunspot's steps on each worker. If workers outlive their group (`survives`), steps can be undone."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    sums = SumGuard(device if device.type == "cuda" else None) if survives else None
    place = WorkerPlace(group, rank, world_size, device, sums=sums)
    run = open_run(plan.settings.storage_path, plan.settings.run_name)
    attempt = Attempt(1, "benchmark", None, 0)
    if rank == 0:
        claim(run, [], attempt)
    workers = LocalWorkers(rank, world_size, f"node {rank}", partial(gather_objects, group=group), lambda act: act())
    learner = build_learner(plan, place, attempt, TrainingState(), lambda *_: TorchLoader(plan.data, device, workers))
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
