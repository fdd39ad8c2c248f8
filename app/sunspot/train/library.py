"""Chooses Ray's trainer for the library that a task trains with: torch, or another beside torch's process group."""

from typing import Any

from ray.train.torch import TorchTrainer

from sunspot.plan import Plan
from sunspot.ray_internals.backend import BackendConfig
from sunspot.tasks import load_task


def choose_trainer(plan: Plan, timeout_s: int) -> tuple[Any, dict[str, Any]]:
    """Return Ray's trainer for the plan's task, and its argument with the backend; imports only what the task needs."""
    task = load_task(plan.settings)
    find_library = getattr(task, "find_library", None)
    library = find_library(plan.settings, plan.source) if find_library else "torch"
    trainer: Any = TorchTrainer
    if library == "torch":
        return trainer, {"torch_config": BackendConfig(timeout_s=timeout_s)}
    if library == "xgboost":
        from ray.train.xgboost import XGBoostConfig, XGBoostTrainer

        trainer, config = XGBoostTrainer, XGBoostConfig()
    elif library == "lightgbm":
        from ray.train.lightgbm import LightGBMConfig, LightGBMTrainer

        trainer, config = LightGBMTrainer, LightGBMConfig()
    else:
        from ray.train.tensorflow import TensorflowConfig, TensorflowTrainer

        trainer, config = TensorflowTrainer, TensorflowConfig()
    return trainer, {f"{library}_config": BackendConfig(timeout_s=timeout_s, library=config)}
