"""Provides a small finished run, which was stopped once, for tests that read, damage or continue a run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sunspot.data.image_sources import find_sources
from sunspot.data.source import Source, read_rows, rows_in
from sunspot.run import Run, open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import Checkpoint, find_newest_good, write_manifest
from sunspot.run.logs import list_streams, read_stream
from sunspot.run.requests import clear_stop, request_stop
from sunspot.run.status import RunState, read_status
from sunspot.settings import load_settings
from tests.harness.program import SETTINGS, Program, images
from tests.harness.waiting import wait_until

ROWS, TEST_ROWS = 240, 101
SIDE = 8
STEPS = 20
"""Number of steps in two epochs, with 24 rows per step."""

SETTINGS_OF_RUN = {
    **SETTINGS,
    "TASK": "tests.tasks.waiting",
    "NUM_WORKERS": "1..2",
    "GLOBAL_BATCH_SIZE": "24",
    "LEARNING_RATE": "0.003",
    "PRECISION": "bf16",
    "CHECKPOINT_METRIC": "test_accuracy",
    "CHECKPOINT_ORDER": "max",
    "PREDICT_ROWS": "10000",
}
GO_ON = {"NUM_WORKERS": 1, "PREDICT_ROWS": 0}
"""Settings that make it cheaper to continue from a copy."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of the tiny task in bf16, with some wrong predictions, in its own storage."""

    storage: str
    data: str
    output: str = ""
    "Output of the start that finished the run."
    stopped: str = ""
    "Output of the start that was stopped in the second epoch."
    state_when_stopped: RunState | None = None
    refused: str = ""
    "Output of the start between the other two, which must not train."

    @property
    def run(self) -> Run:
        return open_run(self.storage, "run")

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of the run's first start."""
        # The run cannot miss the stop: after the first epoch, it waits for the request, then slows down.
        waits = {"10": str(self.file("requested"))} | {
            str(step): [str(self.file("go on")), 3] for step in range(11, 20)
        }
        return {
            **SETTINGS_OF_RUN,
            "STORAGE_PATH": self.storage,
            "DATASET": self.data,
            "TASK_ARGS": json.dumps(waits),
        }

    def file(self, name: str) -> Path:
        """Return the path of a file that the run's steps wait for."""
        return Path(self.data).with_name(name)

    @property
    def newest(self) -> Checkpoint:
        checkpoint, _ = find_newest_good(self.run, read_attempts(self.run))
        assert checkpoint
        return checkpoint

    def directory(self, checkpoint: Checkpoint) -> Path:
        return Path(self.run.storage.locate(self.run.key("checkpoints", checkpoint.name)))

    @property
    def test(self) -> Source:
        _, test = find_sources(load_settings({"DATASET": self.data}))
        assert test
        return test

    def rows(self) -> dict[str, np.ndarray]:
        """Return all held-out rows."""
        return read_rows(self.test, 0, rows_in(self.test))

    def replace(self, checkpoint: Checkpoint, file: str, content: bytes) -> None:
        """Replace a file of a checkpoint, and write a matching manifest."""
        key = self.run.key("checkpoints", checkpoint.name, file)
        self.run.storage.write(key, content)
        [entry] = self.run.storage.list(key)
        about = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "version": entry.version}
        write_manifest(self.run, Checkpoint(**{**vars(checkpoint), "files": {**checkpoint.files, file: about}}))


@pytest.fixture(scope="session")
def finished_run(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Train the run, with its test rows in many row groups. Tests must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    for split, rows in (("train", ROWS), ("test", TEST_ROWS)):
        (folder / "data" / split).mkdir(parents=True)
        pq.write_table(images(rows, SIDE, seed=rows), folder / "data" / split / "part.parquet", row_group_size=16)
    finished = FinishedRun(str(folder / "runs"), str(folder / "data"))
    run = finished.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sunspot.run.logs.SHIP_EVERY_S", 0.5)
        patch.setattr("sunspot.run.outcome.DRIVER_CHECK_EVERY_S", 0.5)
        program = Program(finished.settings, ray_address, patch)
        with contextlib.redirect_stdout(io.StringIO()) as stopped:
            training = program.begin()
            wait_until(lambda: b"loss" in driver_output(run), training)  # output is stored while the run is in progress
            request_stop(run, "a test")
            finished.file("requested").touch()
            training.result(150)
        status = read_status(run)
        finished.file("go on").touch()
        outputs = []
        for resume in (False, True):
            if resume:
                clear_stop(run)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                program.run()
            outputs.append(output.getvalue())
    return replace(
        finished,
        output=outputs[1],
        stopped=stopped.getvalue(),
        state_when_stopped=status.state if status else None,
        refused=outputs[0],
    )


def driver_output(run: Run) -> bytes:
    """Return the stored output of the run's first driver."""
    driver = next((stream for stream in list_streams(run) if stream.startswith("driver-")), None)
    return read_stream(run, driver) if driver else b""


@pytest.fixture
def copied_run(finished_run: FinishedRun, tmp_path: Path) -> FinishedRun:
    """Return a copy of the run that a test can damage or continue."""
    shutil.copytree(finished_run.storage, tmp_path / "runs")
    return replace(finished_run, storage=str(tmp_path / "runs"))
