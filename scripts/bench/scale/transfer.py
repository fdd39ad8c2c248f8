"""Measures a commit and a restore through a proxy that limits the rate of each connection, as object storage does.

The server is versitygw if it is on PATH, or else moto. moto verifies nothing, so the client then reads all bytes again.
The server shares this machine's cores with the client, which limits the total rate of many connections. The proxy is a
separate process, which runs this module with the server's port. It takes little CPU time, because Linux limits the rate
and moves the bytes from socket to socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from unittest.mock import patch

import torch

from scripts import object_stores
from scripts.bench import Figure
from sunspot.checkpoint.files import WholeStateWriter
from sunspot.checkpoint.memory import Slot
from sunspot.checkpoint.node_state import NodeState
from sunspot.checkpoint.snapshot import ChangeWatch, Snapshot
from sunspot.run import Run
from sunspot.run.attempts import Attempt, checkpoint_name, claim, read_attempts
from sunspot.run.checkpoints import Checkpoint, delete_checkpoint, find_newest_good, write_manifest
from sunspot.storage.s3 import S3Storage

RATE, SIZES = 90_000_000, (0.2e9, 2e9, 10e9)
"""Rate of a connection in bytes per second, and sizes of the states in bytes."""

PIECE = 1 << 20
"""Number of bytes to move at once, which is the largest size of a user's pipe."""

SO_MAX_PACING_RATE = 47
"""Number of Linux's socket option for a rate in bytes per second. Python has no constant for it."""

BUCKET = "bench"

COMPLETE_S = 300
"""Read timeout in seconds. Unlike S3, the server copies an object's parts at the end of the upload. A repeated request
during that time would replace the object while it is read."""


def measure() -> Iterator[Figure]:
    """Yield the figures of each size, smallest first."""
    with _limited_s3():
        run = Run(S3Storage(f"s3://{BUCKET}"), "run")
        claim(run, [], Attempt(1, "bench", None, 0))
        for size in SIZES:
            at = f"{size / 1e9:g} GB, {RATE / 1e6:.0f} MB/s a connection"
            state = make_state(int(size))
            began = time.monotonic()
            checkpoint = commit(run, state)
            yield Figure("seconds of a commit", at, time.monotonic() - began, "s")
            began = time.monotonic()
            restore(run)
            yield Figure("seconds of a restore", at, time.monotonic() - began, "s")
            delete_checkpoint(run, checkpoint.name)


def make_state(size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state with the sizes of a model's weights and Adam's averages, in pages of zeros that take no memory."""

    def tensor(numbers: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, 4 * numbers, flags=mmap.MAP_PRIVATE), dtype=torch.float32)

    weights, *averages = (tensor(size // 12) for _ in range(3))
    return {"model": {"weights": weights}, "optimizer": dict(zip(("exp_avg", "exp_avg_sq"), averages, strict=True))}


def commit(run: Run, state: dict[str, dict[str, torch.Tensor]]) -> Checkpoint:
    """Write a checkpoint of the state, as the thread at rank 0 does."""
    empty = Checkpoint(checkpoint_name(1, 1), 1, 1, 100, 100, 1)
    files = WholeStateWriter(run).files(Snapshot(empty, {}, state, Slot(0, None), Future(), ChangeWatch(()), []))
    checkpoint = replace(empty, files=files)
    write_manifest(run, checkpoint)
    return checkpoint


def restore(run: Run) -> None:
    """Restore the newest checkpoint, as a driver and the only worker of a node do."""
    checkpoint, _ = find_newest_good(run, read_attempts(run), trust_listing=True)
    assert checkpoint
    node = NodeState(run, None, ["node"])
    assert node.read(checkpoint) == []
    node.load(checkpoint)


@contextmanager
def _limited_s3() -> Iterator[None]:
    """Run an S3 server with a bucket behind the proxy, to which the AWS environment points in the context."""
    import boto3

    limits = patch("sunspot.storage.bucket.READ_TIMEOUT_S", COMPLETE_S)
    with object_stores.s3_server() as port, patch.dict(os.environ, object_stores.S3_KEYS), limits:
        command = [sys.executable, "-m", "scripts.bench.scale.transfer", str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
            try:
                assert proxy.stdout
                os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{int(proxy.stdout.readline())}"
                boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
                yield
            finally:
                proxy.terminate()


def serve_limited(upstream: int) -> None:
    """Print the proxy's port, and accept connections until this process is killed."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", upstream))
            for source, sink in ((client, server), (server, client)):
                sink.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE)
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIECE)
    with suppress(OSError):
        while size := os.splice(source.fileno(), into, PIECE):
            while size:
                size -= os.splice(out, sink.fileno(), size)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
    os.close(out)
    os.close(into)


if __name__ == "__main__":
    serve_limited(int(sys.argv[1]))
