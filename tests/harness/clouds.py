"""Google's and Azure's object stores, as emulators that `make emulators` installs; all on 127.0.0.1."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

BUCKETS = {"s3": "s3_bucket", "gs": "google_bucket", "az": "azure_container"}
"""The fixture of a fresh bucket, by the scheme of its URL."""

CLOUDS = [pytest.param(scheme, marks=pytest.mark.xdist_group(scheme)) for scheme in ("gs", "az")]
"""Parameters of tests: one process has each emulator."""

EMULATORS = Path(sys.prefix, "emulators")

START_S = 60

AZURE_ACCOUNT = "devstoreaccount1"

AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Known to all: Azurite's documentation."""


def start(command: list[str], port: int) -> contextlib.AbstractContextManager[None]:
    """A server that runs until the context ends; skips the test where it is not installed."""
    if not Path(command[0]).exists():
        pytest.skip(f"{Path(command[0]).name} is not installed: make emulators")
    return _serve(command, port)


@contextlib.contextmanager
def _serve(command: list[str], port: int) -> Iterator[None]:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, f"{command[0]} ended"
            assert time.monotonic() < until, f"{command[0]} does not listen"
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def google_server() -> Iterator[int]:
    """The port of a Google Cloud Storage."""
    port = free_port()
    where = f"127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-log-level", "error"]
    urls = ["-public-host", where, "-external-url", f"http://{where}"]
    with start([str(EMULATORS / "fake-gcs-server"), *options, *urls], port):
        yield port


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an Azure Blob Storage."""
    port = free_port()
    command = [str(EMULATORS / "node_modules" / ".bin" / "azurite-blob"), "--blobPort", str(port), "--silent"]
    options = ["--skipApiVersionCheck", "--loose", "--disableTelemetry", "--inMemoryPersistence"]
    with start([*command, *options], port):
        yield port


@pytest.fixture
def google_bucket(google_server: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket; Google's environment points to its server."""
    from google.cloud import storage

    use_google(google_server, monkeypatch)
    name = f"test-{uuid.uuid4().hex}"
    storage.Client().create_bucket(name)
    return name


def use_google(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)


@pytest.fixture
def azure_container(azure_server: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh container; Azure's environment points to its server."""
    from azure.storage.blob import BlobServiceClient

    use_azure(azure_server, monkeypatch)
    name = f"test-{uuid.uuid4().hex}"
    BlobServiceClient.from_connection_string(connection_string(azure_server)).create_container(name)
    return name


def use_azure(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(port))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def connection_string(port: int) -> str:
    """As Azure's clients read it."""
    url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={url};"
