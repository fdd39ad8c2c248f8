"""Chooses Ray's trainer for the library that a task trains with: torch, or another beside torch's process group."""

from pkgutil import resolve_name
from typing import Any

from ray.train.torch import TorchTrainer

from sunspot.plan import Plan
from sunspot.ray_internals.backend import BackendConfig, LibraryConfig
from sunspot.tasks import load_task

NAMES = {"xgboost": "XGBoost", "lightgbm": "LightGBM", "tensorflow": "Tensorflow"}
"""How the trainers of Ray's module for a library begin, and their configurations."""


def choose_trainer(plan: Plan, timeout_s: int) -> tuple[Any, dict[str, Any]]:
    """Return Ray's trainer for the plan's task, and its argument with the backend; imports only what the task needs."""
    find_library = getattr(load_task(plan.settings), "find_library", None)
    if not find_library:
        return TorchTrainer, {"torch_config": BackendConfig(timeout_s=timeout_s)}
    library = find_library(plan.settings, plan.source)
    name = f"ray.train.{library}:{NAMES[library]}"
    config = LibraryConfig(timeout_s=timeout_s, library=resolve_name(f"{name}Config")())
    return resolve_name(f"{name}Trainer"), {f"{library}_config": config}
