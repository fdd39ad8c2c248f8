"""Runs a real MLflow server on this machine. Tests can kill it and restart it with the same data."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 120
"""Seconds for the server to start. It takes about 15 s on an idle machine."""


class Server:
    """An MLflow server with its database and artifacts in a folder that outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server's processes without waiting for them."""
        # The server need not run jobs.
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        place = ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        place += ["--artifacts-destination", str(self._folder / "artifacts")]
        place += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *place],
                env={**os.environ, **quiet},
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> str:
        """Wait until the server answers, and return its address."""
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                assert answer.status == 200
                return self.url
            log = self._folder / "server.log"
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the server and its workers."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start the server for all tests, without waiting for it. A test that kills it restarts it."""
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()
