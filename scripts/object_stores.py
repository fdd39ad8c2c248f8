"""Runs an S3 server on this machine for tests and benchmarks. The server only listens on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

START_S = 60.0

S3_KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Run VersityGW if it is installed, otherwise moto, and yield the port. The keys are S3_KEYS."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        versitygw = shutil.which("versitygw")
        if versitygw:
            names = {"ROOT_ACCESS_KEY": "AWS_ACCESS_KEY_ID", "ROOT_SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
            keys = {theirs: S3_KEYS[ours] for theirs, ours in names.items()}
            # With --keep-alive, some of Arrow's requests are refused as invalid HTTP (VersityGW 1.8.0, pyarrow 26).
            command = [versitygw, "--quiet", "--port", f"127.0.0.1:{port}", "posix"]
            command += ["--data-integrity-etag", folder]  # MD5 would take more CPU time than all other work
        else:
            keys, command = {}, [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with serve(command, port, keys):
            yield port


@contextlib.contextmanager
def s3_bucket(name: str) -> Iterator[None]:
    """Create a bucket on the server in the AWS environment, or otherwise on a local server, inside the context.

    Workers of a Ray session started inside the context find the bucket.
    """
    import boto3

    with contextlib.ExitStack() as stack:
        if not os.environ.get("AWS_ENDPOINT_URL"):
            url = f"http://127.0.0.1:{stack.enter_context(s3_server())}"
            os.environ.update(S3_KEYS, AWS_ENDPOINT_URL=url, AWS_DEFAULT_REGION=S3_KEYS["AWS_REGION"])
            stack.callback(os.environ.pop, "AWS_ENDPOINT_URL")
        client = boto3.client("s3", region_name=os.environ.get("AWS_REGION", "us-east-1"))
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            client.create_bucket(Bucket=name)
        yield


@contextlib.contextmanager
def serve(command: list[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a server inside the context, which begins when the server listens on the port."""
    everything = {**os.environ, **(environment or {})}
    server = subprocess.Popen(command, env=everything, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while not _listens(port):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{Path(command[0]).name} does not listen on port {port}")
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
