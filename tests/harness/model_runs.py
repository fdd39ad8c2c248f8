"""One small trained run for all tests of what uses the model of one."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from app.data.source import Source, find_sources, read_rows, rows_in
from app.run import Run, open_run
from app.run.attempts import read_attempts
from app.run.checkpoints import Checkpoint, find_newest_good, write_manifest
from app.settings import load_settings
from tests.conftest import Program, images

ROWS, TEST_ROWS, SIDE = 240, 101, 8


@dataclass
class ModelRun:
    """A finished run of the tiny task in bf16, in a storage of its own."""

    storage: str
    data: str

    @property
    def run(self) -> Run:
        return open_run(self.storage, "run")

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
def model_run(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> ModelRun:
    """The run, its test rows in many row groups; not to be changed."""
    folder = tmp_path_factory.mktemp("model")
    for split, rows in (("train", ROWS), ("test", TEST_ROWS)):
        (folder / "data" / split).mkdir(parents=True)
        pq.write_table(images(rows, SIDE, seed=rows), folder / "data" / split / "part.parquet", row_group_size=16)
    settings: dict[str, Any] = {
        "TASK": "tests.tasks.tiny",
        "RUN_NAME": "run",
        "STORAGE_PATH": str(folder / "runs"),
        "DATASET": str(folder / "data"),
        "RESOURCES_PER_WORKER": '{"CPU": 1}',
        "GLOBAL_BATCH_SIZE": "24",
        "LEARNING_RATE": "0.02",
        "PRECISION": "bf16",
        "CHECKPOINT_METRIC": "test_accuracy",
        "CHECKPOINT_ORDER": "max",
    }
    with pytest.MonkeyPatch.context() as patch:
        Program(settings, ray_address, patch).run()
    return ModelRun(settings["STORAGE_PATH"], settings["DATASET"])


@pytest.fixture
def copied_run(model_run: ModelRun, tmp_path: Path) -> ModelRun:
    """A copy of it, to be damaged."""
    shutil.copytree(model_run.storage, tmp_path / "runs")
    return ModelRun(str(tmp_path / "runs"), model_run.data)
