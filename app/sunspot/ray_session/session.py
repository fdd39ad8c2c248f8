"""Starts or joins a Ray session, and sets the environment variables that its workers need."""

import logging
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sunspot.code_archive import CODE, SETUP_HOOK
from sunspot.errors import EndAtOnceError, SunspotError, shorten
from sunspot.machine.private_folder import private_folder, private_path
from sunspot.ray_internals.authentication import forget_token
from sunspot.ray_internals.output import brief_ray
from sunspot.ray_internals.processes import ray_apart_from_signals
from sunspot.ray_session.start_errors import explain_start, refuse_unreachable

RAY_ENVIRONMENT = {
    # Seconds between the controller's polls. This limits how fast a lost worker is noticed, and how often workers
    # report.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Seconds that Ray waits after a loss for a group of the old size, before it accepts fewer workers.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    # sunspot/elastic/nodes.py checks more often, and also adds workers.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # sunspot/run/logs.py already ships the workers' output. Ray would print each line twice.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray's future default, set here to avoid a warning. Workers without a GPU keep CUDA_VISIBLE_DEVICES.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Keeps workers in the driver's directory, so that relative paths in a task work.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Ray would send statistics about the cluster to its developers.
    "RAY_USAGE_STATS_ENABLED": "0",
}

FOLDER = "ray"
"""Name of the folder for Ray's sessions in the user's private folder."""

LONGEST_SOCKET = "session_2026-11-28_23-59-59_000000_4194304/sockets/plasma_store.999"
"""Longest path of a socket below that folder. A process ID has at most seven digits (Linux's PID_MAX_LIMIT)."""

MAX_SOCKET_PATH_BYTES = 103
"""Maximum length of a Unix socket's path. `sun_path` has 104 bytes on macOS, one of them for the final zero."""


@contextmanager
def ray_session() -> Iterator[None]:
    """Context manager that uses the caller's Ray session, joins the cluster at RAY_ADDRESS, or starts a local session.

    Raises `SunspotError` if Ray cannot be started or reached. A start can fail on a busy machine, because Ray 2.60
    waits only 30 s for its own processes.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        with brief_ray():
            yield
        return

    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    # The control channel prints what the user needs. Ray's actors log a line for every report, and one every second if
    # there is no dashboard. These lines stay in the session's logs.
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    code = {"runtime_env": {"worker_process_setup_hook": SETUP_HOOK}} if os.environ.get(CODE) else {}
    address = _cluster_address()
    try:
        with ray_apart_from_signals():
            if address:
                refuse_unreachable(address)
                ray.init(**quiet, **code)
            else:
                start_local_ray(num_cpus=cores_here(), **quiet, **code)
    except SunspotError:
        raise
    except Exception as error:  # Ray has no error class for a failed start
        if address:
            raise SunspotError(f"Ray cannot be reached at RAY_ADDRESS={address}: {shorten(error)}") from error
        folder = Path(os.environ["RAY_TMPDIR"], "ray") if "RAY_TMPDIR" in os.environ else _session_folder()
        raise SunspotError(explain_start(error, folder)) from error
    in_use = False
    try:
        with brief_ray():
            yield
    except EndAtOnceError:
        in_use = True  # the trainer's thread would crash without Ray; Ray's processes end with this process
        raise
    finally:
        if not in_use:
            ray.shutdown()


def starts_own_session() -> bool:
    """Return True if `ray_session` starts a session on this machine, and False if it joins an existing session."""
    import ray

    return not (ray.is_initialized() or _cluster_address())


def _cluster_address() -> str:
    """Return the address of the cluster to join, or an empty string for a new session."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address  # "local" is Ray's name for a new session


def start_local_ray(**options: Any) -> Any:
    """Start a Ray session on this machine that only this user can reach, and return the result of `ray.init`.

    `options` are additional arguments of `ray.init`. The session requires a token that only this process and its
    children know, and keeps its files in this user's private folder. The user's RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and
    RAY_TMPDIR take precedence. Raises `SettingsError` if the private folder cannot be created.
    """
    import ray

    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # Without this variable, Ray 2.60 writes a token to ~/.ray/auth_token, which every user can read. The variable
        # stays set after the session, so later sessions of this process use the same token.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        forget_token()
    folder = {} if "RAY_TMPDIR" in os.environ else {"_temp_dir": str(_session_folder())}
    return ray.init(address="local", include_dashboard=False, **folder, **options)


def _session_folder() -> Path:
    """Return this user's private folder for Ray's sessions. It is in /tmp if TMPDIR is too long for Ray's sockets."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(private_path(parent) / FOLDER / LONGEST_SOCKET)) > MAX_SOCKET_PATH_BYTES:
        parent = Path("/tmp")
    return private_folder(parent) / FOLDER


def enter_folder(folder: str) -> None:
    """Change to the driver's working directory, if it exists on this node, so that relative paths in a task work."""
    if os.path.isdir(folder):
        os.chdir(folder)


def cores_here() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
