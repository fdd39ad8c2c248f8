"""The process beside the driver that delivers a run to a tracking service while it trains.

A separate process, as the service's library takes seconds and some 180 MB to import: neither that nor a server that
hangs may affect the processes that train.
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
"""How long the driver waits at its end for the rest of the delivery, mainly the model."""

SILENT_WAIT_S = 3
"""After this part of the wait, the driver prints that it waits."""

OUTPUT_TIMEOUT_S = 5
"""How long the driver waits for the last lines of a process that has ended."""


def refuse_unusable(settings: Settings) -> None:
    """Raise `SettingsError` if the settings name a service that cannot be used here."""
    name = settings.tracking
    if not name:
        return
    if name == "tensorboard":
        if "://" in settings.storage_path:
            raise SettingsError(
                f"{PREFIX}TRACKING=tensorboard: writes files into the folder of a run on disk, and "
                f"{PREFIX}STORAGE_PATH={settings.storage_path} is a bucket; set it to mlflow, wandb or empty"
            )
        return
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # the folder `wandb` that W&B creates is found, too
        raise SettingsError(
            f"{PREFIX}TRACKING={name}: its library is missing; {how_to_install(name)}, or set it to empty"
        )
    if name == "mlflow" and (problem := find_mlflow_problem(os.environ.get("MLFLOW_TRACKING_URI", ""))):
        raise SettingsError(f"{PREFIX}TRACKING=mlflow: MLFLOW_TRACKING_URI{problem}")


def find_mlflow_problem(address: str) -> str:
    """Say why MLflow cannot keep runs at an address; empty if it can."""
    if not address:
        return " is not set; set it to the server's address, e.g. https://mlflow.example.com, or to sqlite:///mlflow.db"
    if address.startswith("file:") or ("://" not in address and not address.startswith("databricks")):
        return f"={address}: MLflow has given up its store of files; set it to sqlite:///mlflow.db, or to a server"
    if not address.startswith(("http", "databricks")) and not importlib.util.find_spec("sqlalchemy"):
        return f"={address}: a database needs all of MLflow; install mlflow, or set it to a server's address"
    return ""


@contextmanager
def tracked(run: Run, settings: Settings, driver: str = "") -> Iterator[None]:
    """Deliver the run to the service of TRACKING while the context lasts, and its end within FINISH_TIMEOUT_S after.

    Failures are printed and change nothing in the run. When this start of a `driver` has lost the run, the new owner's
    process delivers it. What is delivered is read from storage, by a process that ends when its standard input closes,
    even if this one is killed.
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
        errors="backslashreplace",  # a service's library may print in an encoding other than the locale's
        start_new_session=True,  # an interrupt from the terminal is for the driver only
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
                os.killpg(process.pid, signal.SIGKILL)  # with its library's processes
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            log.warning(f"tracking: not delivered within {FINISH_TIMEOUT_S} s; {later} goes on")
        finally:
            wait([reader], OUTPUT_TIMEOUT_S)


def _wait_for_end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(SILENT_WAIT_S)
    except subprocess.TimeoutExpired:
        print(f"tracking: delivering the end, for up to {FINISH_TIMEOUT_S} s", flush=True)
        process.wait(FINISH_TIMEOUT_S)


def command(run: Run, settings: Settings) -> str:
    """Return the command that delivers a run by hand."""
    return f"`python -m sunspot.tracking {run.name} --storage {shlex.quote(settings.storage_path)}`"


def _relay_output(
    process: subprocess.Popen[str], finishing: threading.Event, abandoned: threading.Event, later: str
) -> None:
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
    code = process.wait()
    if (code or not finishing.is_set()) and not abandoned.is_set():
        log.warning(f"tracking: its process ended with {code}; {later} delivers what is missing")
