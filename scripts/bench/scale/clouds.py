"""A commit and a restore in each kind of bucket, beside what the cloud's own client does with a file of the same size.

The servers are emulators on this machine: the rows compare ways, not clouds. The clients move the bytes and no more; a
commit also hashes them, knows that they arrived, and a restore verifies them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from scripts import object_stores
from scripts.bench.scale import Figure
from scripts.bench.scale.transfer import BUCKET, commit, make_state, restore, seconds
from sunspot.run import Run
from sunspot.storage import open_storage

SIZE = 200 << 20
"""Bytes."""

NAME = "plain"


def measure() -> Iterator[Figure]:
    """Each kind of bucket whose server is installed."""
    with object_stores.s3_server() as port:
        keys = {**object_stores.S3_KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        yield from _measure("s3", keys, _s3_client)
    if object_stores.FAKE_GCS.exists():
        with object_stores.google_server() as port:
            yield from _measure("gs", {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}, _google_client)
    if object_stores.AZURITE.exists():
        with object_stores.azure_server() as port:
            connection = object_stores.azure_connection(port)
            yield from _measure("az", {"AZURE_STORAGE_CONNECTION_STRING": connection}, _azure_client)


def _measure(scheme: str, environment: dict[str, str], client: Callable[[], Any]) -> Iterator[Figure]:
    with patch.dict(os.environ, {**environment, "NO_PROXY": "127.0.0.1"}):
        upload, download = client()
        content, at = bytes(SIZE), f"{scheme}://, {SIZE / 1e6:.0f} MB"
        run = Run(open_storage(f"{scheme}://{BUCKET}"), "run")
        state = make_state(SIZE)
        there, took = seconds(lambda: upload(content)), seconds(lambda: commit(run, state))
        yield Figure("seconds of a commit; before: a copy by the cloud's client", at, took, "s", there)
        back, took = seconds(download), seconds(lambda: restore(run))
        yield Figure("seconds of a restore; before: a copy by the cloud's client", at, took, "s", back)


def _s3_client() -> Any:
    import boto3

    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket=BUCKET)
    return (
        lambda content: s3.upload_fileobj(io.BytesIO(content), BUCKET, NAME),
        lambda: s3.download_fileobj(BUCKET, NAME, io.BytesIO()),
    )


def _google_client() -> Any:
    from google.cloud import storage

    blob = storage.Client().create_bucket(BUCKET).blob(NAME)
    return (lambda content: blob.upload_from_file(io.BytesIO(content), size=len(content)), blob.download_as_bytes)


def _azure_client() -> Any:
    from azure.storage.blob import BlobServiceClient

    container = BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"])
    blob = container.create_container(BUCKET).get_blob_client(NAME)
    return (
        lambda content: blob.upload_blob(content, overwrite=True, max_concurrency=8),
        lambda: blob.download_blob(max_concurrency=8).readall(),
    )
