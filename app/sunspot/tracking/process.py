"""Starts the process that delivers a run's records to a tracking service while the run trains.

Delivery has its own process, so that training does not depend on the service: importing the service's library takes
seconds and about 180 MB, and the service can hang.
"""

import importlib.util
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress

from sunspot.background import start_thread
from sunspot.errors import SettingsError
from sunspot.extras import how_to_install
from sunspot.run import Run
from sunspot.settings import PREFIX, Settings

log = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 120
"""Seconds that the driver waits for the rest of the delivery before it exits. The rest is mainly the model."""

SILENT_WAIT_S = 3
"""Seconds after which the driver prints that it is waiting."""

OUTPUT_TIMEOUT_S = 5
"""Seconds that the driver waits for the last output of a process that has ended."""


def refuse_unusable(settings: Settings) -> None:
    """Raise `SettingsError` if the tracking service in the settings cannot be used here."""
    name = settings.tracking
    if not name:
        return
    if name == "tensorboard":
        if "://" in settings.storage_path:
            raise SettingsError(
                f"{PREFIX}TRACKING=tensorboard writes files into the run's folder on disk, but "
                f"{PREFIX}STORAGE_PATH={settings.storage_path} is a bucket; set {PREFIX}TRACKING to mlflow or wandb, "
                "or leave it empty"
            )
        return
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # W&B's output folder `wandb` is found too, but has no origin
        raise SettingsError(
            f"{PREFIX}TRACKING={name} needs a library that is not installed; {how_to_install(name)}, or "
            "leave this setting empty"
        )
    problem = find_mlflow_problem(os.environ.get("MLFLOW_TRACKING_URI", "")) if name == "mlflow" else ""
    if problem:
        raise SettingsError(f"{PREFIX}TRACKING=mlflow: MLFLOW_TRACKING_URI{problem}")


def find_mlflow_problem(address: str) -> str:
    """Return why MLflow cannot store runs at an address, or an empty string if it can."""
    if not address:
        return " is not set; set it to the server's address, e.g. https://mlflow.example.com, or to sqlite:///mlflow.db"
    if address.startswith("file:") or ("://" not in address and not address.startswith("databricks")):
        return f"={address}: MLflow no longer stores runs in files; set it to sqlite:///mlflow.db or a server's address"
    if not address.startswith(("http", "databricks")) and not importlib.util.find_spec("sqlalchemy"):
        return f"={address}: a database needs the full mlflow package; install it, or set this to a server's address"
    return ""


@contextmanager
def tracked(run: Run, settings: Settings, driver: str = "") -> Iterator[None]:
    """Context manager that delivers the run's records to the service in TRACKING.

    On exit, waits up to FINISH_TIMEOUT_S for the delivery of the last records.

    Failures are printed and do not affect the run. If another driver takes over the run from `driver`, the new driver
    starts its own delivery. The delivery process exits when its stdin is closed, which also happens if this
    process is killed.
    """
    if not settings.tracking:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "sunspot.tracking", run.name, "--storage", settings.storage_path, "--follow", driver],
        env={**os.environ, **settings.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",  # a service's library might not print in the locale's encoding
        start_new_session=True,  # an interrupt from the terminal must only reach the driver
    )
    later = command(run, settings)
    finishing, abandoned = threading.Event(), threading.Event()
    reader = start_thread(lambda: _relay_output(process, finishing, abandoned, later), "tracking output")
    try:
        yield
    finally:
        finishing.set()
        try:
            _wait_for_end(process)
        except BaseException as error:
            abandoned.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # includes the library's processes
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            log.warning(f"tracking: the delivery did not finish within {FINISH_TIMEOUT_S} s; run {later} to continue")
        finally:
            wait([reader], OUTPUT_TIMEOUT_S)


def _wait_for_end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(SILENT_WAIT_S)
    except subprocess.TimeoutExpired:
        print(f"tracking: delivering the remaining records, which can take up to {FINISH_TIMEOUT_S} s", flush=True)
        process.wait(FINISH_TIMEOUT_S)


def command(run: Run, settings: Settings) -> str:
    """Return the command that delivers a run's remaining records, in backquotes for use in messages."""
    return f"`python -m sunspot.tracking {run.name} --storage {shlex.quote(settings.storage_path)}`"


def _relay_output(
    process: subprocess.Popen[str], finishing: threading.Event, abandoned: threading.Event, later: str
) -> None:
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
    code = process.wait()
    if (code or not finishing.is_set()) and not abandoned.is_set():
        log.warning(f"tracking: the process exited with code {code}; run {later} to deliver the rest")
