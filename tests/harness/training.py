"""What tests of whole runs share: a run's state as its storage has it, waiting for its steps, ending its processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from app.run import Run, open_run
from app.run.attempts import lineage, read_attempts
from app.run.checkpoints import Checkpoint, find_newest_good, list_checkpoints
from app.run.history import read_audit, read_journal
from submitter.cli import main as sunspot
from tests.conftest import Program

MakeData = Callable[..., str]


def the_run(program: Program, name: str = "run") -> Run:
    return open_run(program.settings["STORAGE_PATH"], name)


def newest(run: Run) -> Checkpoint:
    checkpoint, _ = find_newest_good(run, read_attempts(run))
    assert checkpoint
    return checkpoint


def consumed(run: Run) -> dict[int, list[int]]:
    """The row ids of each step that leads to the newest checkpoint, in no order."""
    rows: dict[int, list[int]] = {}
    for table in read_audit(run, lineage(read_attempts(run))):
        for step, row in zip(table["step"].to_pylist(), table["row"].to_pylist(), strict=True):
            rows.setdefault(step, []).append(row)
    return rows


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in read_journal(run, "metrics", lineage(read_attempts(run)))]


def weights(run: Run) -> dict[str, torch.Tensor]:
    path = run.storage.locate(run.key("checkpoints", newest(run).name, "model.pt"))
    return torch.load(path, weights_only=True)


def assert_audit_clean(program: Program) -> None:
    with pytest.raises(SystemExit) as ended:
        sunspot(["audit", "run", "--storage", program.settings["STORAGE_PATH"]])
    assert ended.value.code == 0


def wait_for_step(run: Run, step: int, process: Any = None, seconds: float = 240) -> None:
    """Return when a checkpoint at `step` or later stands."""
    deadline = time.monotonic() + seconds
    while not any(checkpoint.step >= step for checkpoint in list_checkpoints(run)):
        assert time.monotonic() < deadline, f"no checkpoint at step {step} after {seconds} s"
        assert process is None or process.poll() is None, process.stdout.read()
        time.sleep(0.2)


def worker_processes() -> list[psutil.Process]:
    """The training workers of the suite's own Ray instance."""
    return [
        process for process in psutil.Process().children(recursive=True) if _name(process).startswith("ray::RayTrain")
    ]


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def kill_all(process: Any) -> None:
    """SIGKILL the driver and all workers of its job at once."""
    for victim in [psutil.Process(process.pid), *worker_processes()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()
    while worker_processes():
        time.sleep(0.1)
