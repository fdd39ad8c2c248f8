"""What keeps a run from training is found before its first step."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from app.errors import SettingsError
from app.run import open_run
from app.settings import Settings
from app.train.probe import probe_here
from app.train.setup import refuse_small_micro_batches


def test_small_micro_batches_are_refused_with_batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for rows, refused in [(1, True), (2, True), (3, False), (0, False)]:
        settings = Settings(micro_batch_size=rows)
        with pytest.raises(SettingsError, match="batch norm") if refused else contextlib.nullcontext():
            refuse_small_micro_batches(model, settings)
        refuse_small_micro_batches(model[0], settings)


def test_a_node_that_does_not_see_the_storage_is_found(tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "here"), "run")
    run.storage.write(run.key("probe"), b"content")
    assert probe_here(str(tmp_path / "here"), "run", run.key("probe"), b"content") == ""
    assert "not found" in probe_here(str(tmp_path / "there"), "run", run.key("probe"), b"content")
    assert "something else" in probe_here(str(tmp_path / "here"), "run", run.key("probe"), b"other")
