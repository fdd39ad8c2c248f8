"""The steady-state step of the training loop: against plain DDP under torchrun, with and without copies in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import torch

from app.plan import make_plan
from app.run.history import read_journal
from app.settings import Settings, load_settings
from app.tasks import load_task
from scripts.bench.product import train

PAIRS = 5
STEPS = 80
WARM_UP = 20
WORKERS = 2


def measure() -> list[tuple[float, float]]:
    """Milliseconds of a step, (torchrun, ours), alternately."""
    return [(torchrun(), ours()) for _ in range(PAIRS)]


def measure_copies() -> list[tuple[float, float]]:
    """Milliseconds of a step, (without copies in memory, with them), alternately."""
    return [(ours(SNAPSHOT_COST="0"), ours()) for _ in range(PAIRS)]


def settings(storage: str, **more: str) -> Settings:
    """ResNet-18 on the sample, two workers of one core."""
    return load_settings(
        {
            **more,
            "STORAGE_PATH": storage,
            "MAX_STEPS": str(STEPS),
            "NUM_WORKERS": str(WORKERS),
            "RESOURCES_PER_WORKER": '{"CPU": 1}',
            "CHECKPOINT_EVERY_S": "0",
            "REPORT_EVERY_S": "1",
        }
    )


def ours(**more: str) -> float:
    """From the first record after the warm-up to the last, including whatever else the loop does."""
    with tempfile.TemporaryDirectory() as storage:
        run, _ = train(settings(storage, **more))
        records = [record for record in read_journal(run, "metrics") if record["step"] >= WARM_UP]
    first, last = records[0], records[-1]
    return 1000 * (last["time"] - first["time"]) / (last["step"] - first["step"])


def torchrun() -> float:
    """`plain_ddp` of this file: the same model, rows and threads."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    output = subprocess.run([*command, "-m", "scripts.bench.step"], check=True, capture_output=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1]))


def plain_ddp() -> None:
    """Plain DistributedDataParallel as in its tutorial; rank 0 prints the milliseconds of a step."""
    import time

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from app.data.torch_loader import load_rows

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.set_num_threads(1)
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    chosen = settings("unused")
    task = load_task(chosen)
    plan = make_plan(chosen, task)
    rows = load_rows(plan.source)
    dataset = TensorDataset(rows["image"], rows["label"])
    model = DistributedDataParallel(task.build_model(chosen, plan.source).to(device))
    optimizer = task.build_optimizer(model, chosen)
    loader = DataLoader(dataset, chosen.global_batch_size // WORKERS, sampler=DistributedSampler(dataset))
    for step, (image, label) in enumerate(loader):
        if step == WARM_UP:
            began = time.perf_counter()
        losses, _ = task.loss(model, {"image": image.to(device), "label": label.to(device)})
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS - 1:
            break
    if cuda:
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(json.dumps(1000 * (time.perf_counter() - began) / (STEPS - WARM_UP)))
    dist.destroy_process_group()


if __name__ == "__main__":
    plain_ddp()
