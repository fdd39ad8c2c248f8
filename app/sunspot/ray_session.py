"""Sessions of Ray: started here or joined, with the environment that the workers rely on."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from sunspot.code_archive import CODE, SETUP_HOOK
from sunspot.errors import EndAtOnceError, SunspotError, shorten

RAY_ENVIRONMENT = {
    # The controller's poll: it bounds how soon a lost worker is noticed, and how often workers may report.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # After a loss Ray waits so long for a group of the old size before it settles for fewer workers.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    # sunspot/elastic/nodes.py checks more often, and scales up too.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # sunspot/run/logs.py ships what workers print; Ray would add each line again.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray's future default, without its warning: workers without a GPU keep CUDA_VISIBLE_DEVICES.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Workers stay in the directory of the driver: there relative paths of a task are found.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Ray would report to its makers what the cluster has and does.
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray while the context lasts: the caller's session, the cluster at RAY_ADDRESS, or a new one on this machine.

    Raises `SunspotError` when there is none: Ray waits 30 s for its own processes (2.60), too little on a busy machine.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return

    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    # What the user needs comes through the control channel. Ray's actors log a line for every report, and one a second
    # where there is no dashboard: those are in the session's logs.
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    here = {"address": "local", "num_cpus": cores_here(), "include_dashboard": False}
    code = {"runtime_env": {"worker_process_setup_hook": SETUP_HOOK}} if os.environ.get(CODE) else {}
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(**({} if address else here), **quiet, **code)
    except Exception as error:  # Ray has no class of its own for it
        what = (
            f"reached at RAY_ADDRESS={address}"
            if address
            else "started on this machine; try again when it has less to do"
        )
        raise SunspotError(f"Ray cannot be {what}: {shorten(error)}") from error
    in_use = False
    try:
        yield
    except EndAtOnceError:
        in_use = True  # by the trainer's thread, which would crash: Ray's processes end with this one
        raise
    finally:
        if not in_use:
            ray.shutdown()


def enter_folder(folder: str) -> None:
    """Go to the driver's working directory, if this node has it: relative paths of a task mean what they mean there."""
    if os.path.isdir(folder):
        os.chdir(folder)


def cores_here() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
