r"""`python -m scripts.bench.torchft_loop`: training under TorchFT, as in Ray's example of `TorchftConfig`.

Each worker is a replica of its own: when one is lost the others go on without it, and Ray replaces that one, which gets
the state from them. As in the example, nothing is reported to Ray and nothing is saved, and a worker that is replaced
begins its part of the data again. Task, data, batch, workers, MAX_STEPS and MAX_FAILURES come from the SUNSPOT_
settings.

Each worker prints `{"time", "step", "world"}` for each step that was committed; `world` is how many took part in it.
Its parts are those of the example in Ray 2.60, with torchft 0.2.
With AUDIT, each also writes the ids of the rows that it consumed in a step, as scripts/failures/rows.py reads them.

The image has torchft and the exporter of OpenTelemetry that it imports, beside sunspot/:

    pip install --no-deps --target torchft torchft==0.2.0 opentelemetry-exporter-otlp-proto-http==1.45.2 \
      opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-common==0.66b2 \
      opentelemetry-exporter-http-transport==0.66b2
    FROM sunspot:0.1.0
    COPY torchft /sunspot
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import ray.train
import ray.util
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from sunspot.data.torch_loader import load_rows
from sunspot.errors import run_and_exit
from sunspot.plan import Plan, make_plan, with_absolute_paths
from sunspot.settings import load_settings
from sunspot.storage import open_storage
from sunspot.tasks import load_task


def train(config: dict[str, Any]) -> None:
    """The training loop of each worker."""
    import torchft  # type: ignore[import-not-found]
    from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]

    began = time.time()
    plan: Plan = config["plan"]
    settings = plan.settings
    context = ray.train.get_context()
    world, rank = context.get_world_size(), context.get_world_rank()
    task = load_task(settings)
    bare = task.build_model(settings, plan.source)
    inner = task.build_optimizer(bare, settings)
    rates = [group["lr"] for group in inner.param_groups]

    def load_state(state: dict[str, Any]) -> None:
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=30))
    manager = torchft.Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"worker-{rank}",
        # By address: the name of a pod is known to nobody else.
        hostname=ray.util.get_node_ip_address(),
        lighthouse_addr=f"http://{config['driver']}:{urlsplit(os.environ['TORCHFT_LIGHTHOUSE']).port}",
        timeout=timedelta(seconds=60),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=30), device=torch.device("cpu")),
    )
    model, optimizer = torchft.DistributedDataParallel(manager, bare), torchft.Optimizer(manager, inner)
    rows = load_rows(plan.source)
    dataset = TensorDataset(rows["image"], rows["label"], rows["row"])
    sampler = torchft.DistributedSampler(
        dataset, replica_rank=rank, num_replica_groups=world, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(dataset, settings.global_batch_size // world, sampler=sampler)
    batches = iter(loader)
    epoch = 0
    "From 1; 0 until the first step tells a worker that is replaced which one the others are in."
    model.train()
    while (step := manager.current_step()) < plan.total_steps:
        batch = next(batches, None)
        if batch is None:
            epoch += bool(epoch)
            sampler.set_epoch(epoch)
            batches = iter(loader)
            continue
        image, label, row = batch
        for place, param_group in enumerate(inner.param_groups):
            param_group["lr"] = rates[place] * task.schedule(step, plan.total_steps)
        optimizer.zero_grad()
        losses, _ = task.loss(model, {"image": image, "label": label})
        losses.mean().backward()
        optimizer.step()
        if manager.current_step() > step and manager.is_participating():  # committed, with these rows
            step = manager.current_step()
            now = time.time()
            print(json.dumps({"time": now, "step": step, "world": manager.num_participants()}), flush=True)
            epoch = epoch or (step - 1) // len(loader) + 1
            if settings.audit:
                told = json.dumps({"rows": len(dataset), "time": now, "taken": [(epoch, step, row.tolist())]}).encode()
                name = f"{began:.3f}-after-none-at-0/{step}-{rank}.json"
                open_storage(settings.storage_path).write(f"{settings.run_name}-torchft/rows/{name}", told)
    manager.shutdown()


def main() -> int:
    """Read the settings and train."""
    from ray.train.v2.torch.torchft_config import TorchftConfig  # noqa: TID251 (Ray 2.60 has it nowhere else)

    settings = with_absolute_paths(load_settings())
    TorchTrainer(
        train,
        train_loop_config={
            "plan": make_plan(settings, load_task(settings)),
            "driver": ray.util.get_node_ip_address(),  # where the lighthouse is
        },
        scaling_config=ScalingConfig(
            num_workers=settings.num_workers.most, resources_per_worker=settings.resources_per_worker or None
        ),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=RunConfig(
            name=f"{settings.run_name}-torchft",
            storage_path=settings.storage_path,
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
