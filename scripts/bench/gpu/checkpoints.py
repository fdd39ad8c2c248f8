"""Measures how long checkpoints of 0.1 to 8 GB stall the training thread, compared with PyTorch's own saves.

All ways save the same state on the GPU to the same local disk, with the same work between the save and the next
optimizer step.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.checkpoint import Dcp, Ours, Waits, Way, nothing
from scripts.bench.gpu.workloads import synchronize
from sunspot.checkpoint import SavedObjects

SAVES = 4
"""Number of measured saves of each way. One more save comes before them, because it allocates memory."""

WORK_S = 0.15
"""Seconds of forward and backward passes between a save and the next optimizer step."""


def measure(device: torch.device) -> None:
    """Print a line for each size."""
    if not dist.is_initialized():  # dcp.async_save needs a group
        store = Path(tempfile.mkdtemp(), "store")
        dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=0, world_size=1)
    for gigabytes in (0.1, 1, 8) if device.type == "cuda" else (0.01, 0.1):
        training = Training(round(gigabytes * 1e9), device)
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            ways: dict[str, Way] = {
                "Sunspot": Ours(folder, SavedObjects(training.model, training.optimizer)),
                "dcp.async_save": Dcp("THREAD"),
                "torch.save": TorchSave(Path(folder)),
            }
            for name, way in ways.items():
                stalls, ends = stall(way, training)
                cells.append(f"{name} {1000 * median(stalls):8.1f} ms, done after {median(ends):5.2f} s")
        print(f"{gigabytes:5} GB  " + "   ".join(cells), flush=True)
        del training, ways


class Training:
    """Training of square layers, whose weights and Adam's two averages take `size` bytes."""

    def __init__(self, size: int, device: torch.device) -> None:
        width = 4096 if size > 4e8 else 1024
        layers = max(1, round(size / (12 * width**2)))
        linear = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.model = torch.nn.Sequential(*linear).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self._rows, self._device = torch.randn(64, width, device=device), device

    def step(self, wait: Callable[[], object], began: float = 0.0) -> float:
        """Take a step, and call `wait` before its end. Return its seconds, or those since `began`, without its passes.

        The passes take at least WORK_S.
        """
        began = began or time.perf_counter()
        work_began = time.perf_counter()
        passes = 0
        while passes == 0 or time.perf_counter() - work_began < WORK_S:
            self.model(self._rows).square().mean().backward()
            synchronize(self._device)
            passes += 1
        ended = time.perf_counter()
        wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self._device)
        return time.perf_counter() - ended + (work_began - began)


def stall(way: Way, training: Training) -> tuple[list[float], list[float]]:
    """Return the seconds for which each save stalls the training, and the seconds until it is stored or committed."""
    stalls, ends = [], []
    for step in range(1, 2 + SAVES):
        undisturbed = training.step(nothing)
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        began = time.perf_counter()
        wait, finish = way.save(step, state)
        lost = training.step(wait, began) - undisturbed
        finish()
        if step > 1:
            stalls.append(lost)
            ends.append(time.perf_counter() - began)
    return stalls, ends


class TorchSave:
    """PyTorch's `torch.save`, for which the training waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, step: int, state: dict[str, Any]) -> Waits:
        torch.save(state, self._folder / str(step % 2))
        return nothing, nothing
