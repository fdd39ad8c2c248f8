"""Any task, with a line in a file for each time that the host waits for the GPU after the first step."""

import importlib
import traceback
import warnings
from typing import Any

import torch
from torch import nn

from sunspot.data.source import Batch, Source
from sunspot.data.source import find_sources as of_images
from sunspot.settings import Settings

_task: Any = None


def build_model(settings: Settings, source: Source) -> nn.Module:
    global _task
    _task = importlib.import_module(settings.task_args["counted_task"])
    return _task.build_model(_inner(settings), source)  # type: ignore[no-any-return]


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    out = settings.task_args["waits"]

    def note(message: Warning | str, *rest: Any, **more: Any) -> None:
        if "synchroniz" in str(message):
            own = [f for f in traceback.extract_stack() if "/sunspot/" in f.filename]
            with open(out, "a") as lines:
                lines.write(" < ".join(f"{f.filename.split('/sunspot/')[-1]}:{f.lineno}" for f in own[-1:-4:-1]) + "\n")

    warnings.simplefilter("always")
    warnings.showwarning = note
    return _task.build_optimizer(model, _inner(settings))  # type: ignore[no-any-return]


def schedule(step: int, total_steps: int) -> float:
    if step == 1:
        torch.cuda.set_sync_debug_mode("warn")
    if step == total_steps - 1:
        torch.cuda.set_sync_debug_mode("default")
    return _task.schedule(step, total_steps)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    return _task.loss(model, batch)  # type: ignore[no-any-return]


def find_sources(settings: Settings) -> Any:
    task = importlib.import_module(settings.task_args["counted_task"])
    return getattr(task, "find_sources", of_images)(_inner(settings))


def _inner(settings: Settings) -> Settings:
    args = {name: value for name, value in settings.task_args.items() if name not in ("counted_task", "waits")}
    return settings.model_copy(update={"task_args": args})
