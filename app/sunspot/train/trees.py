"""Boosting rounds of XGBoost or LightGBM: the loop over them on each worker."""

import time
from typing import Any, cast

from sunspot.errors import SettingsError
from sunspot.parallel.decisions import StepDecisionBroadcast
from sunspot.tasks.trees_adapter import Trees, rate
from sunspot.train.step import after_step, make_up_evaluation
from sunspot.train.worker import Worker


def train(worker: Worker) -> None:
    """Boost from the worker's first round to the last, or until the run is stopped.

    A round is a step and an epoch: it sees every row once, each on the same worker in all rounds of the group.
    """
    trees, total_steps = cast(Trees, worker.model), worker.plan.total_steps
    consensus, window = StepDecisionBroadcast(worker.control_group), worker.open_window()
    [batch] = worker.loader.train(1, 0, 1)
    if worker.world_size > worker.plan.steps.rows:
        raise SettingsError(
            f"SUNSPOT_NUM_WORKERS={worker.plan.settings.num_workers}: {worker.plan.steps.rows} rows are fewer than the "
            f"{worker.world_size} workers, and each needs one"
        )
    trees.begin(batch, network_of(trees) if worker.world_size > 1 else {})
    if make_up_evaluation(worker):
        return

    for step in range(worker.start + 1, total_steps + 1):
        began = time.perf_counter()
        worker.checkpoints.wait_for_copy()  # from here on the trees change
        losses, metrics = rate(trees.boost(), batch["label"])
        window.add_step([{"loss": losses, **metrics}], time.perf_counter() - began, data_wait=0.0)
        if after_step(worker, consensus, window, step, batch["row"], trees.learning_rate):
            return


def network_of(trees: Trees) -> dict[str, Any]:
    """What LightGBM knows the workers by; XGBoost knows it already, from around the training function."""
    if trees.library != "lightgbm":
        return {}
    from ray.train.lightgbm import get_network_params

    found: dict[str, Any] = get_network_params()
    return found
