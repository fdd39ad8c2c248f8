"""Measures a steady-state step of the training loop, compared with the loops of other libraries' introductions.

Another benchmark compares steps with and without copies of the state in memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scripts.bench import Figures, in_turns
from scripts.bench.product import start_ray, train_ms
from sunspot.plan import make_plan
from sunspot.settings import Settings, load_settings
from sunspot.tasks import load_task

PAIRS = 5
STEPS = 80
WARM_UP = 20
WORKERS = 2

BESIDE_READING = {"CPU": 0.5}
"""Resources of a worker whose rows Ray Data reads. With both cores taken, Ray Data read no rows in 14 minutes."""


def measure(most: int) -> Figures:
    """Return the milliseconds per step of Sunspot's loop and of the loop in each introduction."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
    loops: dict[str, Callable[[], float]] = {
        "Sunspot": ours,
        "Sunspot, `SURVIVORS=off`": partial(ours, SURVIVORS="off"),
        "DistributedDataParallel under torchrun": lambda: in_a_process(*torchrun, "-m", "scripts.bench.step", "ddp"),
        "Sunspot, `LOADER=ray`": partial(ours, LOADER="ray", RESOURCES_PER_WORKER=json.dumps(BESIDE_READING)),
        "PyTorch's plain loop, one process with a thread for each worker": lambda: in_a_process(
            "-m", "scripts.bench.step", "plain"
        ),
        "Ray Train with Ray Data": ray_train,
    }
    return in_turns(dict(islice(loops.items(), most)), PAIRS)


def measure_copies(most: int) -> Figures:
    """Return the milliseconds per step with and without copies in memory."""
    return in_turns({"with them": ours, "the same without": partial(ours, SNAPSHOT_COST="0")}, PAIRS)


def settings(storage: str = "unused", **more: str) -> Settings:
    """Return settings for ResNet-18 on the sample, with two workers on one core each."""
    return load_settings(
        {
            "STORAGE_PATH": storage,
            "MAX_STEPS": str(STEPS),
            "NUM_WORKERS": str(WORKERS),
            "RESOURCES_PER_WORKER": '{"CPU": 1}',
            "CHECKPOINT_EVERY_S": "0",
            "REPORT_EVERY_S": "1",
            **more,
        }
    )


def ours(**more: str) -> float:
    """Return the milliseconds per step of a run."""
    with tempfile.TemporaryDirectory() as storage:
        return train_ms(settings(storage, **more))


def in_a_process(*words: str) -> float:
    """Run a loop of this module in another process and return the number that it prints at its end."""
    output = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])


def ray_train() -> float:
    """Return the milliseconds per step of the loop in Ray Train's introduction, with rows from Ray Data."""
    import pyarrow as pa
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    start_ray()
    images, labels = _rows().tensors
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images.numpy())
    rows = ray.data.from_arrow(pa.table({"image": tensors, "label": labels.numpy()}))
    with tempfile.TemporaryDirectory() as storage:
        out = Path(storage, "ms")  # Ray's result only has metrics from reports with a checkpoint
        TorchTrainer(
            on_ray,
            train_loop_config={"out": str(out)},
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker=BESIDE_READING),
            run_config=RunConfig(storage_path=storage),
            datasets={"train": rows},
        ).fit()
        return float(out.read_text())


def on_ray(config: dict[str, Any]) -> None:
    """Train as a worker of Ray Train. Rank 0 writes the milliseconds per step to `out`."""
    import ray.train.torch

    torch.set_num_threads(1)
    rows, size = ray.train.get_dataset_shard("train"), settings().global_batch_size // WORKERS

    def batches() -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            for batch in rows.iter_torch_batches(batch_size=size, drop_last=True):
                yield batch["image"], batch["label"]

    taken = _milliseconds(ray.train.torch.prepare_model, batches(), ray.train.torch.get_device())
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"]).write_text(str(taken))


def ddp_loop() -> None:
    """Train with DistributedDataParallel as in its tutorial. Rank 0 prints the milliseconds per step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.set_num_threads(1)
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    rows = _rows()
    loader = DataLoader(rows, settings().global_batch_size // WORKERS, sampler=DistributedSampler(rows))
    taken = _milliseconds(lambda model: DistributedDataParallel(model.to(device)), loader, device)
    if dist.get_rank() == 0:
        print(taken)
    dist.destroy_process_group()


def plain_loop() -> None:
    """Train in one process as in PyTorch's introduction, and print the milliseconds per step."""
    from torch.utils.data import DataLoader

    torch.set_num_threads(WORKERS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(_rows(), settings().global_batch_size, shuffle=True)
    print(_milliseconds(lambda model: model.to(device), loader, device))


def _rows() -> Any:
    """Return the images and labels, which are the same for all loops."""
    from torch.utils.data import TensorDataset

    from scripts.bench.product import load_rows

    rows = load_rows(make_plan(settings(), load_task(settings())).source)
    return TensorDataset(rows["image"], rows["label"])


def _milliseconds(
    prepare: Callable[[torch.nn.Module], Any],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> float:
    """Return the milliseconds per step after the warm-up. `batches` are repeated until there are enough steps."""
    task: Any = load_task(settings())
    model = prepare(task.build_model(settings(), make_plan(settings(), task).source))
    optimizer = task.build_optimizer(model, settings())
    began, step = 0.0, 0
    while True:
        for image, label in batches:
            losses, _ = task.loss(model, {"image": image.to(device), "label": label.to(device)})
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == WARM_UP:
                began = time.perf_counter()
            if step == STEPS:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                return 1000 * (time.perf_counter() - began) / (STEPS - WARM_UP)


if __name__ == "__main__":
    {"ddp": ddp_loop, "plain": plain_loop}[sys.argv[1]]()
