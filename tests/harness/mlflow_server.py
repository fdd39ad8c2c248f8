"""A real MLflow server on this machine, which can be killed and started again on the same data."""

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
"""It takes some 15 s on an idle machine."""


class Server:
    """The server's database and artifacts lie in a folder, and outlive it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to start it."""
        # Jobs of its own it need not run.
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
        """Return its address when it answers."""
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                assert answer.status == 200
                return self.url
            log = self._folder / "server.log"
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """End it and its workers without a word."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The suite's one server, begun to be started; a test that ends it starts it again."""
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()
