"""Ray, started or joined for as long as a program needs it, with the environment that our workers rely on."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.settings import Settings

RAY_ENVIRONMENT = {
    # The controller's poll also bounds how soon a lost worker is noticed and how often workers may report.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # After a loss Ray first asks for the old size again; only then does it take what is there.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    # Ours looks more often, and makes way for nodes that come, too (app/elastic/nodes.py).
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Waiting for a process group whose peer is gone would delay every restart.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    # What workers print is shipped as it is (app/observe/output.py); Ray would add each line a second time.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray's future default: workers without a GPU keep CUDA_VISIBLE_DEVICES as it is, and do not warn of it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def run_as_task(function: Callable[[Settings], str], settings: Settings) -> str:
    """Run `function(settings)` as one Ray task, on a GPU if the cluster has one and the settings allow it."""
    import ray

    with ray_session():
        gpus = 1 if ray.cluster_resources().get("GPU") and settings.use_gpu != "false" else 0
        return ray.get(
            ray.remote(num_cpus=1, num_gpus=gpus, max_retries=settings.max_failures)(function).remote(settings)
        )


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray, for as long as the context lasts: the caller's, the cluster's of RAY_ADDRESS, or one on this machine."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return

    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    # What concerns the user comes through the control channel; the rest is in the session's logs, as Ray's actors
    # write a line for every report, and without a dashboard one every second to say that it is missing.
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    here = {"address": "local", "num_cpus": cores_here(), "include_dashboard": False}
    ray.init(**({} if os.environ.get("RAY_ADDRESS") else here), **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def cores_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
