"""Measures how long a checkpoint stalls the training thread, compared with PyTorch's and Ray's asynchronous saves.

Sunspot and Ray write to S3. PyTorch has no S3 client, so it writes to the local disk. No way waits for the end of the
upload.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from scripts.bench import Figures
from scripts.bench.product import start_ray
from sunspot.checkpoint import CheckpointManager, SavedObjects
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, claim, read_attempts
from sunspot.settings import Settings

ROUNDS = 7
BUCKET = "bench"
WIDTH = 4096
"""Width of the only layer. 4096 x 4096 weights in fp32 take 67 MB, and Adam's state twice as much: 201 MB in total."""

Waits = tuple[Callable[[], object], Callable[[], object]]
"""Functions that wait until the state may change, and until a save is stored."""


def measure(most: int) -> Figures:
    """Return the milliseconds for which a checkpoint stalls the training thread of one worker."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures")
        start_ray()
        TorchTrainer(
            on_worker,
            train_loop_config={"storage": f"s3://{BUCKET}/ours", "most": most, "out": str(out)},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="theirs", storage_path=f"s3://{BUCKET}"),
        ).fit()
        return dict(json.loads(out.read_text()))


def on_worker(config: dict[str, Any]) -> None:
    """Measure all ways with the same model in turns, with forward and backward passes between them as in training."""
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(64, WIDTH)
    makers: dict[str, Callable[[], Way]] = {
        "Sunspot": lambda: Ours(config["storage"], SavedObjects(model, optimizer)),
        "`dcp.async_save`, staged by a thread, written by a separate process": lambda: Dcp("PROCESS"),
        "the same, written by a thread": lambda: Dcp("THREAD"),
        "`torch.save` and `report()`, Ray uploads after it returns": lambda: Report("ASYNC"),
        "`torch.save` and `report()`, Ray uploads before it returns": lambda: Report("SYNC"),
    }
    ways = {name: make() for name, make in islice(makers.items(), config["most"])}
    stalls: Figures = {name: [] for name in ways}
    for step in range(1, 2 + ROUNDS):
        for name, way in ways.items():
            model(rows).square().mean().backward()
            optimizer.step()
            began = time.perf_counter()
            copied, stored = way.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            stall = time.perf_counter() - began
            model(rows).square().mean().backward()
            began = time.perf_counter()
            copied()
            stall += time.perf_counter() - began
            stored()
            if step > 1:  # the first step allocates memory
                stalls[name].append(1000 * stall)
    Path(config["out"]).write_text(json.dumps(stalls))


def nothing() -> None:
    """Return at once, because the state is copied already."""


class Way(Protocol):
    """A way to save a checkpoint."""

    def save(self, step: int, state: dict[str, Any]) -> Waits:
        """Start saving a checkpoint."""


class Ours:
    """Sunspot's way, without copies that outlive the process."""

    def __init__(self, storage: str, saved: SavedObjects) -> None:
        run = open_run(storage, "run")
        attempt = Attempt(1, "bench", None, 0)
        claim(run, read_attempts(run), attempt)
        plan = Plan(Settings(checkpoints_to_keep=1), EmptySource((1,), 1), None, Steps(6400, 64), 100)
        self._checkpoints = CheckpointManager(run, attempt, plan, saved)

    def save(self, step: int, state: dict[str, Any]) -> Waits:
        self._checkpoints.took_step(step, None)
        self._checkpoints.save(step, {"loss": 0.0})
        return self._checkpoints.wait_for_copy, self._checkpoints.drain


class Dcp:
    """PyTorch's way, with all its options against stalls on this device. Staging in a thread works on a CPU, too."""

    def __init__(self, writer: str) -> None:
        cuda = torch.cuda.is_available()
        options = StagingOptions(use_pinned_memory=cuda, use_shared_memory=True, use_non_blocking_copy=cuda)
        self._kind, self._stager = AsyncCheckpointerType[writer], DefaultStager(options)
        self._folder = tempfile.TemporaryDirectory()

    def save(self, step: int, state: dict[str, Any]) -> Waits:
        place = f"{self._folder.name}/{step}"
        begun = async_save(state, checkpoint_id=place, async_checkpointer_type=self._kind, async_stager=self._stager)
        copied: Callable[[], object]
        if isinstance(begun, AsyncSaveResponse):
            copied, upload = begun.staging_completion.result, begun.upload_completion
        else:
            copied, upload = nothing, begun

        def stored() -> None:
            upload.result()
            shutil.rmtree(place)

        return copied, stored


class Report:
    """Ray's way, as in its guide to checkpoints."""

    def __init__(self, mode: str) -> None:
        self._mode = ray.train.CheckpointUploadMode[mode]

    def save(self, step: int, state: dict[str, Any]) -> Waits:
        folder = tempfile.mkdtemp()
        torch.save(state, os.path.join(folder, "state.pt"))
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_upload_mode=self._mode,
            delete_local_checkpoint_after_upload=True,
        )
        return nothing, ray.train.get_all_reported_checkpoints
