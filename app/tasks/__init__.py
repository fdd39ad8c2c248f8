"""A task is the module with a run's model, optimizer and loss, or with a LightningModule that has all three."""

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch

from app.data.source import Batch, Source
from app.errors import SettingsError, shorten
from app.settings import Settings
from app.tasks.defaults import fill_in, refuse_unused

TASK_FUNCTIONS = ("build_model", "loss")
"""What a task has to define, unless it defines `build_module` for Lightning (app/tasks/lightning_adapter.py)."""

LIGHTNING = ("lightning", "pytorch_lightning", "torchmetrics")
"""Packages of the extra `lightning`."""


class Task(Protocol):
    """The functions of a task module. `settings.task_args` holds its own hyperparameters."""

    def build_model(self, settings: Settings, source: Source) -> torch.nn.Module:
        """The model, on the CPU, initialized with torch's default generator."""
        ...

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """The loss of each row, float [B], and any further metrics of each row by name, [B].

        Per row, so that means over all workers are exact even if their shares differ.
        """
        ...

    # Optional: the first two have defaults by the settings (app/tasks/defaults.py).

    def build_optimizer(self, model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """The optimizer, with each group at its peak learning rate."""
        ...

    def schedule(self, step: int, total_steps: int) -> float:
        """The factor on the learning rates at optimizer step 0 .. total_steps - 1."""
        ...

    # find_sources(settings) -> (training rows, held-out rows or None), each a `Source` (app/data/source.py), for rows
    # other than those of DATASET.
    # predict(model, images) -> scores, float [B, classes] before softmax, of images, uint8 [B, C, H, W], on the model's
    # device. Without it, `app.predict` cannot use the task's models, and the report shows no predictions.


Predict = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""The optional `predict` of a task."""


def load_predict(settings: Settings) -> Predict:
    """The task's `predict`; raises `SettingsError` if it defines none."""
    task = load_task(settings)
    predict: Predict | None = getattr(task, "predict", None)
    if predict is None:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: defines no predict(model, images) -> scores, so nothing can be predicted "
            "with its models; app/tasks/images.py has one to copy"
        )
    return predict


def load_task(settings: Settings) -> Task:
    """Import the task, with defaults for what it leaves out; raises `SettingsError` if it cannot be used."""
    try:
        module = importlib.import_module(settings.task)
        for_lightning = hasattr(module, "build_module")
        if for_lightning:
            from app.tasks.lightning_adapter import LightningTask
    except Exception as error:
        missing_extra = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in LIGHTNING
        fix = "install sunspot[lightning]" if missing_extra else "set it to a module on PYTHONPATH"
        raise SettingsError(f"SUNSPOT_TASK={settings.task}: cannot be imported: {shorten(error)}; {fix}") from error
    if for_lightning:
        refuse_unused(settings, own={"build_optimizer", "schedule"})
        return cast(Task, LightningTask(module, settings))
    missing = [name for name in TASK_FUNCTIONS if not hasattr(module, name)]
    if missing:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: {module.__file__} does not define {', '.join(missing)}; nor build_module, "
            "the one function of a task for Lightning"
        )
    return cast(Task, fill_in(module, settings))
