r"""`python -m scripts.bench.loops stock` (`notice`, `torchft`): train as in Ray's guides, as yardsticks for recovery.

Task, data, batch, workers, MAX_STEPS, CHECKPOINT_EVERY_STEPS and MAX_FAILURES come from the SUNSPOT_ settings.

- `stock` follows the guides to PyTorch, fault tolerance and elastic training, and changes none of Ray's defaults. A
  checkpoint has no position in the data, so a restart begins the epoch again.
- `notice` adds the code of the guide to preemption: after each step, it checks for a notice, and then saves once.
- `torchft` follows the example of `TorchftConfig` in Ray 2.60, with torchft 0.2. Each worker is a replica. The others
  continue without a lost replica, and send the state to its replacement. Nothing is reported to Ray or saved. The
  example's sampler leaves out the rows of a missing replica. So here, the replicas take the next batches of one common
  order, by `batches_committed`. A step has as many batches as there are workers, even if fewer replicas take part.

Rank 0, or each replica, prints a JSON object per line for each step: `{"time", "step", "world"}`. `stock` also prints
`{"time", "event": "start", "from_step", "checkpoint_step", "world"}` for each start of the workers, after which the
steps from `from_step` are repeated. With AUDIT, the rows of each step are written in the format that
scripts/failures/rows.py reads.

Only the driver needs this file, because Ray sends the function to the workers. An image for `torchft` has torchft next
to sunspot/, and the exporter of OpenTelemetry that it imports:

    pip install --no-deps --target torchft torchft==0.2.0 opentelemetry-exporter-otlp-proto-http==1.45.2 \
      opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-common==0.66b2 \
      opentelemetry-exporter-http-transport==0.66b2
    FROM sunspot:0.1.0
    COPY torchft /sunspot
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from math import ceil
from typing import Any
from urllib.parse import urlsplit

import ray.train
import ray.train.collective
import ray.train.torch
import ray.util
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader, TensorDataset

from sunspot.data.source import read_rows, rows_in
from sunspot.errors import run_and_exit
from sunspot.plan import Plan, make_plan, with_absolute_paths
from sunspot.settings import load_settings
from sunspot.storage import Storage, open_storage
from sunspot.tasks import load_task

FILE = "checkpoint.pt"

Taken = list[tuple[int, int, list[int]]]
"""Steps that a worker took: the epoch and the number of each, and the ids of the worker's rows."""


def train_stock(config: dict[str, Any]) -> None:
    """Train like a worker in Ray's guides."""
    began = time.time()
    plan: Plan = config["plan"]
    settings = plan.settings
    storage = open_storage(settings.storage_path)
    context = ray.train.get_context()
    world = context.get_world_size()
    rank = context.get_world_rank()

    task: Any = load_task(settings)
    model = ray.train.torch.prepare_model(task.build_model(settings, plan.source))
    bare = model.module if world > 1 else model
    optimizer = task.build_optimizer(bare, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: task.schedule(min(step, plan.total_steps - 1), plan.total_steps)
    )
    loader = DataLoader(dataset_of(plan), batch_size=settings.global_batch_size // world, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)

    saved_on_notice = config["name"] == "stock"
    first_epoch = step = checkpoint_step = 0
    start = ray.train.collective.broadcast_from_rank_zero(f"{began:.3f}")
    parent = "none"
    resumed = ray.train.get_checkpoint()
    if resumed:
        with resumed.as_directory() as folder:
            state = torch.load(os.path.join(folder, FILE))
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"]
        step = state["epoch_began"]
        checkpoint_step = state["step"]
        parent = state["start"]
    if rank == 0:
        print_event(time=began, event="start", from_step=step, checkpoint_step=checkpoint_step, world=world)

    taken: Taken = []
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
            noticed = not saved_on_notice and ray.train.get_preemption_info() is not None
            saved_on_notice |= noticed
            if over or noticed or (every and step % every == 0) or step == plan.total_steps:
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
                lineage = f"{start}-after-{parent}-at-{checkpoint_step}"
                write_rows(plan, storage, f"-{config['name']}/rows/{lineage}/{step}-{rank}.json", taken)
                taken = []
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        torch.save(state, os.path.join(folder, FILE))
                    checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                    ray.train.report({"loss": loss.item(), "step": step}, checkpoint=checkpoint)
            if step == plan.total_steps:
                return


def train_torchft(config: dict[str, Any]) -> None:
    """Train like a worker in Ray's TorchFT example."""
    import torchft  # type: ignore[import-not-found]
    from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]

    plan: Plan = config["plan"]
    settings = plan.settings
    storage = open_storage(settings.storage_path)
    context = ray.train.get_context()
    world = context.get_world_size()
    task: Any = load_task(settings)
    bare = task.build_model(settings, plan.source)
    inner = task.build_optimizer(bare, settings)
    rates = [group["lr"] for group in inner.param_groups]

    def load_state(state: dict[str, Any]) -> None:
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=10))
    manager = torchft.Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"worker-{context.get_world_rank()}",
        # Other pods can only resolve addresses, not the names of pods.
        hostname=ray.util.get_node_ip_address(),
        lighthouse_addr=f"http://{config['driver']}:{urlsplit(os.environ['TORCHFT_LIGHTHOUSE']).port}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model, optimizer = resilient(torchft.DistributedDataParallel)(manager, bare), torchft.Optimizer(manager, inner)
    dataset = dataset_of(plan)
    size = settings.global_batch_size // world
    model.train()
    while (step := manager.batches_committed() // world) < plan.total_steps:
        for place, param_group in enumerate(inner.param_groups):
            param_group["lr"] = rates[place] * task.schedule(step, plan.total_steps)
        optimizer.zero_grad()  # begins to find the replicas that take part
        rank = manager.participating_rank()  # None if this replica receives the state, and its step does not count
        first, before = manager.batches_committed(), manager.current_step()
        _, places = batch_of(len(dataset), size, first + (rank or 0))
        image, label, _ = dataset[places]
        losses, _ = task.loss(model, {"image": image, "label": label})
        losses.mean().backward()
        optimizer.step()
        if rank is not None and manager.current_step() > before:  # committed
            committed = manager.batches_committed()
            step = committed // world
            print_event(time=time.time(), step=step, world=manager.num_participants())
            # Each replica writes the complete step into the same file, because one that dies now has taken part in it.
            batches = [batch_of(len(dataset), size, number) for number in range(first, committed)]
            taken = [(epoch, step, dataset[places][-1].tolist()) for epoch, places in batches]
            write_rows(plan, storage, f"-torchft/rows/0-after-none-at-0/{committed}-0.json", taken)
    manager.shutdown()


def resilient(distributed: type) -> type:
    """Return TorchFT's DDP with a different hook. TorchFT 0.2's hook ends the replica after a failed all-reduce."""

    class Resilient(distributed):  # type: ignore[misc]
        @staticmethod
        def _comm_hook(manager, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotation that is a string
            manager.allreduce(bucket.buffer()).wait()  # the manager records a failure, and does not commit the step
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    return Resilient


def batch_of(rows: int, size: int, number: int) -> tuple[int, torch.Tensor]:
    """Return the epoch, from 1, and the rows' positions of batch `number`, which is the same for all replicas."""
    batches = ceil(rows / size)
    epoch, place = number // batches + 1, number % batches * size
    return epoch, torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))[place : place + size]


def dataset_of(plan: Plan) -> TensorDataset:
    """Return all rows, loaded into memory."""
    columns = read_rows(plan.source, 0, rows_in(plan.source))
    return TensorDataset(*(torch.from_numpy(columns[name]) for name in ("image", "label", "row")))


def print_event(**event: Any) -> None:
    """Print an event as a line, which Ray forwards to the driver's output."""
    print(json.dumps(event), flush=True)


def write_rows(plan: Plan, storage: Storage, name: str, taken: Taken) -> None:
    """Write the ids of the consumed rows if AUDIT is set."""
    if plan.settings.audit:
        record = {"rows": plan.steps.rows, "time": time.time(), "taken": taken}
        storage.write(plan.settings.run_name + name, json.dumps(record).encode())


def main(name: str) -> int:
    """Read the settings and train."""
    torchft = name == "torchft"
    options: dict[str, Any] = {}
    if torchft:
        from ray.train.v2.torch.torchft_config import TorchftConfig  # noqa: TID251 (Ray 2.60 has it nowhere else)

        # As in TorchFT's README. By default, the lighthouse waits 0.1 s for a late replica. On a busy machine, two of
        # three replicas then continued without the third, which received the state and left out another one.
        lighthouse = {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10000}
        options["torch_config"] = TorchftConfig(lighthouse_kwargs=lighthouse, backend="gloo")
    settings = with_absolute_paths(load_settings())
    workers = settings.num_workers
    ray.train.torch.TorchTrainer(
        train_torchft if torchft else train_stock,
        train_loop_config={
            "plan": make_plan(settings, load_task(settings)),
            "name": name,
            "driver": ray.util.get_node_ip_address(),  # address of the lighthouse
        },
        scaling_config=ScalingConfig(
            num_workers=(workers.least, workers.most) if workers.elastic and not torchft else workers.most,
            use_gpu=settings.use_gpu == "true",
            resources_per_worker=settings.resources_per_worker or None,
        ),
        run_config=RunConfig(
            name=f"{settings.run_name}-{name}",
            storage_path=settings.storage_path,
            # With the default of 0, the first loss of a worker would end the run.
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
        **options,
    ).fit()
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1]))
