"""Helpers for tests of complete runs: they read a run's state from storage, wait for its progress, and kill
processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from scripts.ray_processes import ray_processes
from sunspot.cli import main as sunspot
from sunspot.run import Run, open_run
from sunspot.run.attempts import lineage, read_attempts, step_of
from sunspot.run.audit import read_audit
from sunspot.run.checkpoints import MANIFEST, Checkpoint, find_faults, find_newest_good, list_directories
from sunspot.run.history import read_journal
from sunspot.run.incidents import Receipt, find_gaps, goodput, read_receipts
from sunspot.run.status import read_status
from tests.harness.program import Program
from tests.harness.waiting import wait_until

MakeData = Callable[..., str]


def the_run(program: Program, name: str = "run") -> Run:
    return open_run(program.settings["STORAGE_PATH"], name)


def newest(run: Run) -> Checkpoint:
    checkpoint, _ = find_newest_good(run, read_attempts(run))
    assert checkpoint
    return checkpoint


def newest_whole(run: Run, step: int) -> Checkpoint:
    """Return the newest checkpoint, which must be at `step` and intact."""
    checkpoint = newest(run)
    assert checkpoint.step == step
    assert find_faults(run, checkpoint) == []
    return checkpoint


def consumed(run: Run) -> dict[int, list[int]]:
    """Return the row ids of each step that leads to the newest checkpoint, in any order."""
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


def audit(storage: str) -> int:
    """Return the exit code of `sunspot audit` for the run."""
    with pytest.raises(SystemExit) as ended:
        sunspot(["audit", "run", "--storage", storage])
    return int(ended.value.code or 0)


def assert_audit_clean(program: Program) -> None:
    assert audit(program.settings["STORAGE_PATH"]) == 0


def wait_for_step(run: Run, step: int, process: Any = None, seconds: float = 240) -> None:
    """Wait until a checkpoint exists at `step` or later. Each check takes one storage request."""

    def is_there() -> bool:
        return any(step_of(name) >= step for name, files in list_directories(run).items() if MANIFEST in files)

    wait_until(is_there, process, seconds)


def wait_for_reported_step(run: Run, step: int, process: Any, seconds: float = 240) -> None:
    """Wait until the run's status has reached `step`."""

    def has_reached() -> bool:
        status = read_status(run)
        return status is not None and status.step >= step

    wait_until(has_reached, process, seconds)


def wait_for_receipts(run: Run, count: int, process: Any, seconds: float = 240) -> list[Receipt]:
    """Wait until `count` worker groups have taken their first step, and return their receipts."""
    wait_until(lambda: len(receipts_of(run)) >= count, process, seconds)
    return receipts_of(run)


def assert_complete(run: Run) -> None:
    """Check that every attempt has a receipt, and that the goodput can be computed from the receipts."""
    attempts, receipts = read_attempts(run), receipts_of(run)
    assert not find_gaps(receipts, [attempt.number for attempt in attempts])
    share = goodput(attempts, receipts, time.time())
    assert share is not None
    assert 0 < share < 1


def receipts_of(run: Run) -> list[Receipt]:
    return read_receipts(read_journal(run, "events"))


def worker_processes() -> list[psutil.Process]:
    """Return the training workers of the tests' own Ray session."""
    return ray_processes("RayTrain", psutil.Process())


def kill_all(process: Any) -> None:
    """Kill the driver and all workers of its job at the same time with SIGKILL."""
    for victim in [psutil.Process(process.pid), *worker_processes()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()
    wait_until(lambda: not worker_processes())
