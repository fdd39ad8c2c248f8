"""What the training thread loses to a checkpoint in S3, against the usual way with Ray Train."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from app.checkpoint import CheckpointManager
from app.data.order import Steps
from app.data.source import EmptySource
from app.plan import Plan
from app.run import open_run
from app.run.attempts import Attempt, claim, read_attempts
from app.run.history import Journal
from app.settings import Settings

PAIRS = 7
BUCKET = "bench"
WIDTH = 4096
"""One layer of 4096 x 4096 in fp32 has 67 MB, and Adam keeps twice as much again: 201 MB."""


def measure() -> list[tuple[float, float]]:
    """Milliseconds that one checkpoint takes from the training thread, (Ray's, ours), in turns on one worker."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/pairs"
        TorchTrainer(
            on_worker,
            train_loop_config={"storage": f"s3://{BUCKET}/ours", "out": out},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="theirs", storage_path=f"s3://{BUCKET}"),
        ).fit()
        with open(out) as lines:
            return [(float(a), float(b)) for a, b in (line.split() for line in lines)]


def on_worker(config: dict[str, Any]) -> None:
    """Both ways on the same model, in turns; a forward and a backward pass lie between, as in training."""
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(64, WIDTH)
    run = open_run(config["storage"], "run")
    attempt = Attempt(1, "bench", None, 0)
    claim(run, read_attempts(run), attempt)
    journals: dict[str, Journal] = {"metrics": Journal(run, "metrics", 1), "events": Journal(run, "events", 1)}
    plan = Plan(Settings(checkpoints_to_keep=1), EmptySource((WIDTH,), WIDTH), None, Steps(6400, 64), 100)
    checkpoints = CheckpointManager(run, attempt, plan, model, optimizer, journals=journals)
    with open(config["out"], "w") as out:
        for step in range(1, 2 + PAIRS):
            model(rows).square().mean().backward()
            optimizer.step()
            checkpoints.took_step(step, None)
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(folder, "state.pt"))
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))
            theirs = time.perf_counter() - began

            began = time.perf_counter()
            checkpoints.save(step, {"loss": 0.0})
            ours = time.perf_counter() - began
            model(rows).square().mean().backward()
            began = time.perf_counter()
            checkpoints.wait_for_copy()
            ours += time.perf_counter() - began
            checkpoints.drain()
            if step > 1:  # the first one allocates
                print(1000 * theirs, 1000 * ours, file=out)
    checkpoints.close(finished=True)


@contextmanager
def s3_server() -> Iterator[None]:
    """A bucket on the server that the AWS environment names, or else on one on this machine, in a process of its own.

    Workers of a Ray that is started meanwhile find it.
    """
    import socket

    import boto3

    if os.environ.get("AWS_ENDPOINT_URL"):
        client = boto3.client("s3", region_name=os.environ.get("AWS_REGION", "us-east-1"))
        with suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            client.create_bucket(Bucket=BUCKET)
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="bench",
        AWS_SECRET_ACCESS_KEY="bench",
        AWS_REGION="us-east-1",
        AWS_DEFAULT_REGION="us-east-1",
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield
    finally:
        server.terminate()
        server.wait()
