"""Seconds of a commit and of a restore, with S3 behind a proxy that limits each connection.

The server is versitygw where it is on PATH, else moto, which verifies nothing, so that all is read back. It shares this
machine's cores with the client, which bounds what many connections reach together: the cases at a fifth of the speed,
with a fifth of the bytes, show the ratio where cores do not.

The way of before is run over the same storage: files one after the other, four parts in flight, each with a SHA-256 of
its own and torch's CRC-32; then one stream back. A restore read the state three times, for the driver, for rank 0 and
to load it; here it is only verified the third time, as all of that at once takes the memory of three states.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar
from unittest.mock import patch

import torch

from scripts import object_stores
from scripts.bench.scale import Figure
from sunspot.checkpoint.files import write_whole
from sunspot.checkpoint.node_state import NodeState
from sunspot.checkpoint.slots import Slot
from sunspot.checkpoint.snapshot import ChangeWatch, Snapshot
from sunspot.run import Run
from sunspot.run.attempts import Attempt, checkpoint_name, claim, read_attempts
from sunspot.run.checkpoints import Checkpoint, delete_checkpoint, find_faults, find_newest_good, write_manifest
from sunspot.storage.base import Storage
from sunspot.storage.s3 import S3Storage

Result = TypeVar("Result")

CASES = [(20e6, (0.04e9, 0.4e9, 2e9)), (90e6, (0.2e9, 2e9, 10e9))]
"""Bytes a second of a connection, and bytes of the states."""

BUCKET = "bench"

COMPLETE_S = 300
"""The server copies an object's parts when it is complete, which S3 does not; a second request meanwhile would replace
the object while it is read."""


class OneStream(S3Storage):
    """Reads an object over one connection, and has its parts hashed by botocore."""

    chunks = Storage.chunks  # type: ignore[assignment]

    @property
    def _transfers(self) -> object:  # type: ignore[override]
        return self._client


def measure() -> Iterator[Figure]:
    """Each case, the smallest state first."""
    for rate, sizes in CASES:
        with _s3(rate):
            for size in sizes:
                at = f"{size / 1e9:g} GB, {rate / 1e6:.0f} MB/s a connection"
                yield from _measure(int(size), at)


def _measure(size: int, at: str) -> Iterator[Figure]:
    state = make_state(size)
    now, before = Run(S3Storage(f"s3://{BUCKET}"), "now"), Run(OneStream(f"s3://{BUCKET}"), "before")
    with patch("sunspot.storage.parts.PARTS_IN_FLIGHT", 4):
        there, checkpoint = _timed(lambda: _commit_as_before(before, state))
        back, _ = _timed(lambda: [find_faults(before, checkpoint) for _ in range(3)])
        delete_checkpoint(before, checkpoint.name)
    took, checkpoint = _timed(lambda: commit(now, state))
    yield Figure("seconds of a commit", at, took, "s", there)
    took, _ = _timed(lambda: restore(now))
    yield Figure("seconds of a restore", at, took, "s", back)
    delete_checkpoint(now, checkpoint.name)


def make_state(size: int) -> dict[str, dict[str, torch.Tensor]]:
    """The sizes of a model's weights and of Adam's state for it, in pages of zeros that take no memory."""

    def tensor(numbers: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, 4 * numbers, flags=mmap.MAP_PRIVATE), dtype=torch.float32)

    weights, *averages = (tensor(size // 12) for _ in range(3))
    return {"model": {"weights": weights}, "optimizer": dict(zip(("exp_avg", "exp_avg_sq"), averages, strict=True))}


def _manifest(run: Run) -> Checkpoint:
    attempts = read_attempts(run)
    if not attempts:
        claim(run, attempts, Attempt(1, "bench", None, 0))
    return Checkpoint(checkpoint_name(1, 1), 1, 1, 100, 100, 1)


def commit(run: Run, state: dict[str, dict[str, torch.Tensor]]) -> Checkpoint:
    """Write a checkpoint of the state, as rank 0's thread does."""
    snapshot = Snapshot(_manifest(run), {}, state, Slot(0, None), Future(), ChangeWatch(()), [])
    files = write_whole(run, snapshot)
    write_manifest(run, checkpoint := replace(_manifest(run), files=files))
    return checkpoint


def _commit_as_before(run: Run, state: dict[str, dict[str, torch.Tensor]]) -> Checkpoint:
    torch.serialization.set_crc32_options(True)
    files = {}
    for kind, tensors in state.items():
        key = run.key("checkpoints", _manifest(run).name, f"{kind}.pt")
        with run.storage.writer(key) as writer:
            torch.save(tensors, writer)  # type: ignore[arg-type]  # it needs only write()
        assert run.storage.digest(key) == (writer.size, writer.sha256)
        files[f"{kind}.pt"] = {"size": writer.size, "sha256": writer.sha256}
    torch.serialization.set_crc32_options(False)
    write_manifest(run, checkpoint := replace(_manifest(run), files=files))
    return checkpoint


def restore(run: Run) -> None:
    """What a driver and the one worker of a node do."""
    checkpoint, _ = find_newest_good(run, read_attempts(run), trust_listing=True)
    assert checkpoint
    node = NodeState(run, None, ["node"])
    assert node.read(checkpoint) == []
    node.load(checkpoint)


def seconds(act: Callable[[], object]) -> float:
    """Wall-clock seconds."""
    return _timed(act)[0]


def _timed(act: Callable[[], Result]) -> tuple[float, Result]:
    began = time.monotonic()
    result = act()
    return time.monotonic() - began, result


@contextmanager
def _s3(rate: float) -> Iterator[None]:
    """An S3 server with a bucket, and the proxy in front of it, which the AWS environment then names."""
    import boto3

    limits = patch("sunspot.storage.bucket.READ_TIMEOUT_S", COMPLETE_S)
    with object_stores.s3_server() as port, patch.dict(os.environ, object_stores.S3_KEYS), limits:
        proxy = [sys.executable, "-m", "scripts.bench.scale.throttle", str(port), str(rate)]
        with subprocess.Popen(proxy, stdout=subprocess.PIPE, text=True) as throttle:
            try:
                assert throttle.stdout
                os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{int(throttle.stdout.readline())}"
                boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
                yield
            finally:
                throttle.terminate()
