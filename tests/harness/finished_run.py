"""One small finished run for all tests that look at, damage or go on with one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from app.data.source import Source, find_sources, read_rows, rows_in
from app.run import Run, open_run
from app.run.attempts import read_attempts
from app.run.checkpoints import Checkpoint, find_newest_good, write_manifest
from app.settings import load_settings
from tests.harness.program import SETTINGS, Program, images

ROWS, TEST_ROWS, SIDE = 240, 101, 8
STEPS = 20
"""Of 24 rows each, in two epochs."""

SETTINGS_OF_RUN = {
    **SETTINGS,
    "NUM_WORKERS": "1..2",
    "GLOBAL_BATCH_SIZE": "24",
    "LEARNING_RATE": "0.003",
    "PRECISION": "bf16",
    "CHECKPOINT_METRIC": "test_accuracy",
    "CHECKPOINT_ORDER": "max",
    "PREDICT_ROWS": "10000",
}
GO_ON = {"NUM_WORKERS": 1, "PREDICT_ROWS": 0}
"""For a run that goes on from a copy, at less cost."""


@dataclass
class FinishedRun:
    """A finished run of the tiny task in bf16, not trained to perfection; in a storage of its own."""

    storage: str
    data: str
    output: str
    "What its driver printed."

    @property
    def run(self) -> Run:
        return open_run(self.storage, "run")

    @property
    def settings(self) -> dict[str, str]:
        """Those that it was begun with."""
        return {**SETTINGS_OF_RUN, "STORAGE_PATH": self.storage, "DATASET": self.data}

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
        """All held-out rows."""
        return read_rows(self.test, 0, rows_in(self.test))

    def replace(self, checkpoint: Checkpoint, file: str, content: bytes) -> None:
        """Write a file of a checkpoint anew, and a manifest that matches it."""
        key = self.run.key("checkpoints", checkpoint.name, file)
        self.run.storage.write(key, content)
        [entry] = self.run.storage.list(key)
        about = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "version": entry.version}
        write_manifest(self.run, Checkpoint(**{**vars(checkpoint), "files": {**checkpoint.files, file: about}}))


@pytest.fixture(scope="session")
def finished_run(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The run, its test rows in many row groups; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    for split, rows in (("train", ROWS), ("test", TEST_ROWS)):
        (folder / "data" / split).mkdir(parents=True)
        pq.write_table(images(rows, SIDE, seed=rows), folder / "data" / split / "part.parquet", row_group_size=16)
    finished = FinishedRun(str(folder / "runs"), str(folder / "data"), "")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        Program(finished.settings, ray_address, patch).run()
    finished.output = output.getvalue()
    return finished


@pytest.fixture
def copied_run(finished_run: FinishedRun, tmp_path: Path) -> FinishedRun:
    """A copy of it, to be damaged or trained further."""
    shutil.copytree(finished_run.storage, tmp_path / "runs")
    return FinishedRun(str(tmp_path / "runs"), finished_run.data, finished_run.output)
