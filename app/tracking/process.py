"""The process beside the driver that delivers a run to a tracking service while it trains.

A process of its own: the service's library takes seconds and some 180 MB to import, and neither that nor a server that
accepts and never answers is any business of the processes that train.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from app.errors import SettingsError
from app.run import Run
from app.settings import PREFIX, Settings

FINISH_S = 120
"""How long the end of the driver waits for what is still on its way, the model above all; then it is left for later."""

SOON_S = 3
"""After which it says that it waits."""

OUTPUT_S = 5
"""How long it waits for the last lines of a process that has ended."""


def refuse_unusable(settings: Settings) -> None:
    """Raise `SettingsError` when the settings name a service that cannot be used here."""
    name = settings.tracking
    if not name:
        return
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder `wandb`, which W&B makes, is found too
        raise SettingsError(
            f"{PREFIX}TRACKING={name}: its library is missing; install sunspot[{name}], or set it to empty"
        )
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise SettingsError(
            f"{PREFIX}TRACKING=mlflow: MLFLOW_TRACKING_URI is not set; set it to the server's address, "
            "e.g. https://mlflow.example.com"
        )


@contextmanager
def tracked(run: Run, settings: Settings) -> Iterator[None]:
    """Deliver the run to the service of TRACKING while the context lasts, and its end afterwards, in FINISH_S at most.

    What went wrong is told, and changes nothing of the run. The process finds all that it delivers in storage; its
    input is only there to end, with this process if need be.
    """
    if not settings.tracking:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "app.tracking", run.name, "--storage", settings.storage_path, "--follow"],
        env={**os.environ, **settings.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # an interrupt from the terminal is for the driver
    )
    over, given_up = threading.Event(), threading.Event()
    reader = threading.Thread(target=_tell, args=(process, over, given_up, command(run, settings)), daemon=True)
    reader.start()
    try:
        yield
    finally:
        over.set()
        try:
            _wait_for_end(process)
        except BaseException as error:
            given_up.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what its library has started
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            print(f"warning: tracking: not delivered within {FINISH_S} s; {command(run, settings)} goes on", flush=True)
        finally:
            reader.join(OUTPUT_S)


def _wait_for_end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(SOON_S)
    except subprocess.TimeoutExpired:
        print(f"tracking: the end is being delivered, which is waited for up to {FINISH_S} s", flush=True)
        process.wait(FINISH_S)


def command(run: Run, settings: Settings) -> str:
    """What delivers a run by hand."""
    return f"`python -m app.tracking {run.name} --storage {shlex.quote(settings.storage_path)}`"


def _tell(process: subprocess.Popen[str], over: threading.Event, given_up: threading.Event, later: str) -> None:
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
    code = process.wait()
    if (code or not over.is_set()) and not given_up.is_set():
        print(f"warning: tracking: its process ended with {code}; {later} delivers what is missing", flush=True)
