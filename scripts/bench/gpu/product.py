"""Measures a whole run of ResNet-18 with Ray, in a process of its own, with the default copies and reports."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version

from scripts.bench.gpu.session import Session


def measure(session: Session) -> None:
    """Write the milliseconds per step, or why they are left out."""
    try:
        ray = version("ray")
    except PackageNotFoundError:
        session.say("left out: Ray is not installed")
        return
    batch_rows, steps = (128, 3000) if session.on_gpu else (16, 10)
    command = [sys.executable, "-m", __name__, session.device.type, str(batch_rows), str(steps)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=session.left_s)
    except subprocess.TimeoutExpired:
        session.say("left out: the run did not end in time")
        return
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    step_ms = float(run.stdout.splitlines()[-1])
    session.store("ResNet-18", {"step_ms": step_ms})
    session.say(f"ResNet-18, {batch_rows} rows, tf32, a run with Ray {ray}: {step_ms:.3f} ms per step")


def train(device: str, batch_rows: int, steps: int) -> float:
    """Train a run on one worker, and return the milliseconds per step."""
    from scripts.bench.product import train_ms
    from sunspot.ray_session import ray_session
    from sunspot.settings import load_settings

    with tempfile.TemporaryDirectory() as folder, ray_session():
        settings = {
            "STORAGE_PATH": folder,
            "TASK": "scripts.bench.gpu.digits",
            "TASK_ARGS": json.dumps({"rows": batch_rows * steps}),
            "PRECISION": "tf32",
            "NUM_WORKERS": "1",
            "USE_GPU": str(device == "cuda").lower(),
            "GLOBAL_BATCH_SIZE": str(batch_rows),
            "EPOCHS": "1",
            "REPORT_EVERY_S": "1",
        }
        return train_ms(load_settings(settings))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
