"""`python -m scripts.bench.stock_loop`: the yardstick for recovery, the training loop of Ray's own guides.

It follows the guides to PyTorch, fault tolerance and elastic training, changes no default of Ray's, and takes task,
data, batch, workers, CHECKPOINT_EVERY_STEPS and MAX_FAILURES from the SUNSPOT_ settings. It writes to
<STORAGE_PATH>/<RUN_NAME>-stock. A checkpoint has no position in the data: a restart begins the epoch again.

Rank 0 prints a line of JSON for each step, `{"time", "step", "world"}`, and for each start of the workers, `{"time",
"event": "start", "from_step", "checkpoint_step", "world"}`. Times are in seconds since the epoch; steps are optimizer
steps counted through the run, and those after `from_step` are repeated. Ray shows a worker's line twice.

With AUDIT, the ids of the rows that each step consumed are written with each checkpoint, as scripts/failures/rows.py
reads them.

Only the driver needs this file: Ray sends the function to the workers. The image contains sunspot/ alone, so:

    FROM sunspot:0.1.0
    COPY scripts/__init__.py scripts/
    COPY scripts/bench/__init__.py scripts/bench/stock_loop.py scripts/bench/
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from typing import Any

import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader, TensorDataset

from sunspot.data.torch_loader import load_rows
from sunspot.errors import run_and_exit
from sunspot.plan import Plan, make_plan, with_absolute_paths
from sunspot.settings import load_settings
from sunspot.storage import open_storage
from sunspot.tasks import load_task

FILE = "checkpoint.pt"


def train(config: dict[str, Any]) -> None:
    """The training loop of each worker."""
    began = time.time()
    plan: Plan = config["plan"]
    settings = plan.settings
    context = ray.train.get_context()
    world, rank = context.get_world_size(), context.get_world_rank()

    task = load_task(settings)
    model = ray.train.torch.prepare_model(task.build_model(settings, plan.source))
    bare = model.module if world > 1 else model
    optimizer = task.build_optimizer(bare, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: task.schedule(min(step, plan.total_steps - 1), plan.total_steps)
    )
    rows = load_rows(plan.source)
    dataset = TensorDataset(rows["image"], rows["label"], rows["row"])
    loader = DataLoader(dataset, batch_size=settings.global_batch_size // world, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)

    first_epoch = step = checkpoint_step = 0
    start, parent = ray.train.collective.broadcast_from_rank_zero(f"{began:.3f}"), "none"
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, FILE))
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, step, checkpoint_step = state["epoch"], state["epoch_began"], state["step"]
        parent = state["start"]
    if rank == 0:
        print_event(time=began, event="start", from_step=step, checkpoint_step=checkpoint_step, world=world)

    taken: list[tuple[int, int, list[int]]] = []
    for epoch in range(first_epoch, settings.epochs):
        if world > 1:
            loader.sampler.set_epoch(epoch)
        epoch_began = step
        model.train()
        for image, label, row in loader:
            losses, _ = task.loss(model, {"image": image, "label": label})
            loss = losses.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if settings.audit:
                taken.append((epoch + 1, step, row.tolist()))
            if rank == 0:
                print_event(time=time.time(), step=step, world=world)

            over = step - epoch_began == len(loader)
            every = settings.checkpoint_every_steps
            if over or (every and step % every == 0) or step == plan.total_steps:
                state = {
                    "model": bare.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "step": step,
                    "start": start,
                    # A restart begins at the first row of the unfinished epoch.
                    "epoch": epoch + over,
                    "epoch_began": step if over else epoch_began,
                }
                if taken:
                    told = json.dumps({"rows": len(dataset), "time": time.time(), "taken": taken}).encode()
                    name = f"{start}-after-{parent}-at-{checkpoint_step}/{step}-{rank}.json"
                    open_storage(settings.storage_path).write(f"{settings.run_name}-stock/rows/{name}", told)
                    taken = []
                save({"loss": loss.item(), "step": step}, state, rank)
            if step == plan.total_steps:
                return


def save(metrics: dict[str, Any], state: dict[str, Any], rank: int) -> None:
    """Report to Ray, from rank 0 with a checkpoint; return when Ray has uploaded it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save(state, os.path.join(folder, FILE))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def print_event(**event: Any) -> None:
    """Print one line, which Ray forwards to the driver's output."""
    print(json.dumps(event), flush=True)


def main() -> int:
    """Read the settings and train."""
    settings = with_absolute_paths(load_settings())
    workers = settings.num_workers
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"plan": make_plan(settings, load_task(settings))},
        scaling_config=ScalingConfig(
            num_workers=(workers.least, workers.most) if workers.elastic else workers.least,
            use_gpu=settings.use_gpu == "true",
            resources_per_worker=settings.resources_per_worker or None,
        ),
        run_config=RunConfig(
            name=f"{settings.run_name}-stock",
            storage_path=settings.storage_path,
            # By default 0: the first loss of a worker would end the run.
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
