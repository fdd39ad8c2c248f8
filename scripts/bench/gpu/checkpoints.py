"""What a checkpoint costs the training thread, from 0.1 to 8 GB, beside PyTorch's own ways.

Every way gets the same state on the GPU, the same work on it between the call and the next optimizer step, and writes
to the same local disk.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from scripts.bench.gpu.ceilings import synchronize
from sunspot.checkpoint import CheckpointManager
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, claim, read_attempts
from sunspot.settings import Settings

SAVES = 4
"""Of each way; the first allocates and is left out."""

WORK_S = 0.15
"""Seconds of forward and backward passes between a save and the next optimizer step."""

Save = Callable[[int], tuple[Callable[[], Any], Callable[[], Any]]]
"""Begins a checkpoint of a step; returns the wait before the next optimizer step, and that for the end of it all."""


def measure(device: torch.device) -> None:
    """Print a line for each size."""
    for gigabytes in (0.1, 1, 8) if device.type == "cuda" else (0.01, 0.1):
        model = build_model(round(gigabytes * 1e9), device)
        optimizer = torch.optim.Adam(model.parameters())
        cells = []
        for name, way in {"Sunspot": sunspot, "dcp.async_save": dcp_async, "torch.save": torch_save}.items():
            with tempfile.TemporaryDirectory() as folder:
                stalls, ends = stall(way(Path(folder), model, optimizer), model, optimizer, device)
            cells.append(f"{name} {1000 * median(stalls):8.1f} ms, done after {median(ends):5.2f} s")
        print(f"{gigabytes:5} GB  " + "   ".join(cells), flush=True)
        del model, optimizer


def build_model(size: int, device: torch.device) -> torch.nn.Module:
    """Square layers whose weights, with Adam's two averages, take `size` bytes."""
    width = 4096 if size > 4e8 else 1024
    layers = max(1, round(size / (12 * width**2)))
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)


def stall(
    save: Save, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds that each save takes from the training, and until it is done: stored, or committed."""
    rows = torch.randn(64, model[0].in_features, device=device)  # type: ignore[index, arg-type]
    stalls, ends = [], []
    for step in range(1, 2 + SAVES):
        undisturbed = training_step(model, optimizer, rows, device, lambda: None)
        began = time.perf_counter()
        wait, finish = save(step)
        lost = training_step(model, optimizer, rows, device, wait, began) - undisturbed
        finish()
        if step > 1:
            stalls.append(lost)
            ends.append(time.perf_counter() - began)
    return stalls, ends


def training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor,
    device: torch.device,
    wait: Callable[[], Any],
    began: float = 0.0,
) -> float:
    """Seconds from `began`, or from now, through WORK_S of passes and an optimizer step."""
    began = began or time.perf_counter()
    work_began = time.perf_counter()
    passes = 0
    while passes == 0 or time.perf_counter() - work_began < WORK_S:
        model(rows).square().mean().backward()
        synchronize(device)
        passes += 1
    ended = time.perf_counter()
    wait()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(device)
    return time.perf_counter() - ended + (work_began - began)


def sunspot(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Save:
    """The product, without copies that outlive the process."""
    run = open_run(str(folder), "run")
    attempt = Attempt(1, "bench", None, 0)
    claim(run, read_attempts(run), attempt)
    plan = Plan(Settings(checkpoints_to_keep=1), EmptySource((1,), 1), None, Steps(6400, 64), 100)
    checkpoints = CheckpointManager(run, attempt, plan, model, optimizer)

    def save(step: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        checkpoints.took_step(step, None)
        checkpoints.save(step, {"loss": 0.0})
        return checkpoints.wait_for_copy, checkpoints.drain

    return save


def dcp_async(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Save:
    """torch.distributed.checkpoint with all that makes it fast: pinned, shared memory, staged behind the training."""
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp(), "store")  # the group outlives `folder`
        dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=0, world_size=1)
    gpu = next(model.parameters()).is_cuda
    stager = DefaultStager(StagingOptions(gpu, True, True, gpu))

    def save(step: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        response: Any = async_save(state, checkpoint_id=str(folder / str(step % 2)), async_stager=stager)
        return response.staging_completion.result, response.upload_completion.result

    return save


def torch_save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Save:
    """torch.save while the training waits."""

    def save(step: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / str(step % 2))
        return lambda: None, lambda: None

    return save
