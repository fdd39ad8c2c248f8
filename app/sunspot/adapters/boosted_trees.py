"""Adapter for gradient-boosted trees (sunspot/tasks/tree_models.py).

A step is a boosting round. It uses all rows and adds one tree, or one tree per class.
"""

import math
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from sunspot.data.source import Batch, Source, model_inputs
from sunspot.errors import SettingsError
from sunspot.settings import PREFIX, Settings
from sunspot.tasks.defaults import build_empty_optimizer
from sunspot.tasks.task import LOOP_FUNCTIONS, RATE_FUNCTIONS, Task, TrainingRun
from sunspot.tasks.tree_models import Trees

RAY_TRAINERS = {
    "xgboost": "ray.train.xgboost:XGBoostTrainer",
    "lightgbm": "ray.train.lightgbm:LightGBMTrainer",
}
"""The Ray trainer of each library."""

UNCALLED = {
    **dict.fromkeys(LOOP_FUNCTIONS, "trees see all rows unchanged"),
    **dict.fromkeys(RATE_FUNCTIONS, "trees have a single learning rate, which SUNSPOT_TASK_ARGS sets"),
}
"""Reasons, keyed by the functions that are never called."""

UNREAD_SETTINGS = dict.fromkeys(
    (
        *("global_batch_size", "micro_batch_size", "learning_rate", "weight_decay", "clip_norm", "schedule"),
        *("warmup_steps", "precision", "gradient_precision", "parallel", "recompute", "compile", "graph", "loader"),
        "ema",
    ),
    f"trains trees, which ignore this setting; unset it (the library's own parameters are in {PREFIX}TASK_ARGS)",
)
"""Reasons, keyed by the settings that trees ignore."""

MAX_FEATURES_SHOWN = 20
"""Maximum number of features in the report."""


class TreesTask(Task):
    """Adapter for a task that defines `build_trees(settings, source) -> Trees`."""

    full_batch = True
    uncalled = UNCALLED

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Create the adapter for a task's module. Raises `SettingsError` if a setting that trees ignore is set."""
        super().__init__(module, settings, UNREAD_SETTINGS)

    def find_ray_trainer(self, settings: Settings, source: Source) -> str:
        return RAY_TRAINERS[self.build_model(settings, source).library]

    def build_model(self, settings: Settings, source: Source) -> Trees:
        return self.module.build_trees(settings, source)

    def build_optimizer(self, model: Trees, settings: Settings) -> torch.optim.Optimizer:
        return build_empty_optimizer(model.learning_rate)

    def train(self, run: TrainingRun) -> None:
        """Train until the run ends or is stopped."""
        trees = run.model
        for number, batch in enumerate(run.batches()):
            if not run.weight:
                raise SettingsError(
                    f"{PREFIX}NUM_WORKERS={run.settings.num_workers}: there are too few rows for {run.world_size} "
                    "workers, because each worker needs rows to build trees; start fewer workers"
                )
            if number == 0:
                trees.begin(batch, run.world_size)
            run.optimizer.step()  # wait until a checkpoint has copied the state, because the trees change below
            losses, metrics = rate(trees.boost(), batch["label"])
            run.log({"loss": losses, **metrics})
            run.step()

    def schedule(self, step: int, total_steps: int) -> float:
        return 1.0

    def loss(self, model: Trees, batch: Batch) -> tuple[torch.Tensor, Batch]:
        return rate(model(batch), batch["label"])

    def predict(self, model: Trees, batch: Batch) -> torch.Tensor:
        return model(batch)

    def show(self, model: Trees, rows: Batch) -> dict[str, Any]:
        """Return a table of the features with the largest gain, for the report."""
        gains = sorted(model.importance().items(), key=lambda feature: -feature[1])
        names = names_of(rows)
        total = sum(gain for _, gain in gains)
        table = [{"feature": names[number], "share": gain / total} for number, gain in gains[:MAX_FEATURES_SHOWN]]
        return {"Features by gain": table}


def rate(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Batch]:
    """Return each row's log loss and accuracy, [B], or only its squared error if the task has no classes."""
    if scores.ndim == 1:
        return (scores - labels).square(), {}
    return functional.cross_entropy(scores, labels, reduction="none"), {"accuracy": scores.argmax(1) == labels}


def names_of(batch: Batch) -> list[str]:
    """Return the name of each feature. If a column has several features, their names contain an index."""
    names = list[str]()
    for name, column in model_inputs(batch).items():
        size = math.prod(column.shape[1:])
        names += [f"{name}[{place}]" for place in range(size)] if column.ndim > 1 else [name]
    return names
