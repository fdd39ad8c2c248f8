"""A forward pass: the task's loss of each row, in the run's precision, through the model as it is or compiled."""

import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from sunspot.data.source import Batch
from sunspot.errors import SettingsError
from sunspot.parallel.sharding import find_blocks, has_several, is_fsdp
from sunspot.plan import Plan
from sunspot.train.learner import Learner

COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}
"""By kind of device: the variable that names the compiler for what torch.compile writes, and where else to look."""


def in_precision(learner: Learner) -> AbstractContextManager[None]:
    """Autocast, as PRECISION says."""
    bf16 = learner.plan.settings.precision == "bf16"
    return torch.autocast(learner.place.device.type, torch.bfloat16, enabled=bf16)


def row_losses(learner: Learner, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Compute the task's loss of each row of a batch, [B], and its metrics, [B] each.

    Under COMPILE every pass has the same number of rows, so that one graph serves all: short passes are padded by
    repeating rows, of which no loss is returned. Only where rows see each other (batch norm) do these count.
    """
    rows = len(batch["row"])
    missing = learner.plan.pass_rows(learner.place.world_size) - rows
    if missing > 0:
        again = torch.arange(rows + missing, device=batch["row"].device) % rows
        batch = {name: column[again] for name, column in batch.items()}
    with in_precision(learner):
        losses, metrics = refuse_means(learner, learner.task.loss(model, batch), rows + max(0, missing))
    if missing > 0:
        losses, metrics = losses[:rows], {name: values[:rows] for name, values in metrics.items()}
    return losses, metrics


def refuse_means(learner: Learner, returned: Any, rows: int) -> tuple[torch.Tensor, Batch]:
    """Return the loss and the metrics of each row; raises `SettingsError` for anything else, such as their means."""
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    values = {"the losses": losses, **metrics} if isinstance(metrics, Mapping) else {"its metrics": metrics}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != (rows,):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise SettingsError(
                f"SUNSPOT_TASK={learner.plan.settings.task}: its loss: {name}: a {type(value).__name__}{shape}; return "
                f'the loss of each of the {rows} rows, a tensor of shape [{rows}] (reduction="none"), and a dict of '
                "metrics of that shape"
            )
    return losses, metrics


def compile_model(model: torch.nn.Module, plan: Plan, world_size: int, device: torch.device) -> None:
    """Have a model compile itself in its first passes, as COMPILE says; in place, so that its names stay as they are.

    Under fsdp each block does so by itself: between them parameters are gathered. Raises `SettingsError` where there
    is no compiler.
    """
    settings = plan.settings
    if settings.compile == "off":
        return
    if problem := find_compiler_problem(device):
        raise SettingsError(f"SUNSPOT_COMPILE={settings.compile}: {problem}")
    mode: str = settings.compile
    if mode == "max-autotune" and (is_fsdp(model) or plan.passes(world_size) > 1):
        # CUDA graphs want parameters to stay where they are, and gradients to be used before the next pass.
        mode = "max-autotune-no-cudagraphs"
    blocks = list(find_blocks(model)) if is_fsdp(model) else list(model.children()) if has_several(model) else []
    for module in blocks or [model]:
        module.compile(mode=mode, dynamic=False)


def find_compiler_problem(device: torch.device) -> str:
    """Say why torch.compile would fail here; empty if it would not."""
    variable, *names = COMPILERS[device.type]
    if any(map(shutil.which, filter(None, (os.environ.get(variable), *names)))):
        return ""
    return (
        f"torch.compile needs {' or '.join(names)}, and {socket.gethostname()} has none; install it in the image (or "
        f"name one in {variable}), or set it to off"
    )
