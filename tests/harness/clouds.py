"""Runs object stores as separate programs. Their tests are skipped if the programs are not installed."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import object_stores
from tests.harness.s3 import make_bucket

BUCKETS = {"s3": "s3_bucket", "gs": "google_bucket", "az": "azure_container"}
"""Fixtures of an empty bucket, keyed by URL scheme."""

VERSITYGW = pytest.param("versitygw", marks=pytest.mark.xdist_group("versitygw"))
"""Parameter for S3 tests that use the server of `versity_bucket`."""

CLOUDS = [pytest.param(scheme, marks=pytest.mark.xdist_group(scheme)) for scheme in ("gs", "az")]
"""Parameters for tests of all clouds. One process runs all tests of an emulator."""


EMULATORS = Path(sys.prefix, "emulators")
"""Folder in which `make emulators` installs Google's and Azure's emulators."""

AZURE_ACCOUNT = "devstoreaccount1"

AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Public key from Azurite's documentation."""


@pytest.fixture(scope="session")
def google_server() -> Iterator[int]:
    """Run an emulator of Google Cloud Storage and yield its port."""
    program = EMULATORS / "fake-gcs-server"
    _skip_without(program)
    port = object_stores.free_port()
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-log-level", "error", "-public-host", f"127.0.0.1:{port}", "-external-url", f"http://127.0.0.1:{port}"]
    with object_stores.serve(command, port):
        yield port


@pytest.fixture(scope="session")
def azure_server() -> Iterator[int]:
    """Run an emulator of Azure Blob Storage and yield its port."""
    program = EMULATORS / "node_modules" / ".bin" / "azurite-blob"
    _skip_without(program)
    port = object_stores.free_port()
    command = [str(program), "--blobPort", str(port), "--silent", "--skipApiVersionCheck", "--loose"]
    with object_stores.serve([*command, "--disableTelemetry", "--inMemoryPersistence"], port):
        yield port


def _skip_without(program: Path) -> None:
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: make emulators")


@pytest.fixture(scope="session")
def versity_server() -> Iterator[int]:
    """Run an S3 server that verifies uploads and yield its port."""
    if not shutil.which("versitygw"):
        pytest.skip("versitygw is not on PATH")
    with object_stores.s3_server() as port:
        yield port


@pytest.fixture
def versity_bucket(versity_server: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty bucket. The AWS environment points to its server."""
    return make_bucket(f"http://127.0.0.1:{versity_server}", monkeypatch)


@pytest.fixture
def google_bucket(google_server: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty bucket. Google's environment points to its server."""
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
    """Return an empty container. Azure's environment points to its server."""
    from azure.storage.blob import BlobServiceClient

    use_azure(azure_server, monkeypatch)
    name = f"test-{uuid.uuid4().hex}"
    BlobServiceClient.from_connection_string(azure_connection(azure_server)).create_container(name)
    return name


def azure_connection(port: int) -> str:
    """Return an emulator's value for AZURE_STORAGE_CONNECTION_STRING."""
    url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={url};"


def use_azure(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_connection(port))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
