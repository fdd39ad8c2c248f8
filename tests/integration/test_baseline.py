"""The plain baseline: the same task without Ray, and as one Ray task."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sunspot.baseline.__main__ import main
from tests.harness.program import Program


@pytest.mark.parametrize("words", [[], pytest.param(["--on-ray"], marks=pytest.mark.slow)])
def test_the_baseline_learns(
    words: list[str], program: Program, make_data: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["baseline", *words])
    data = make_data(241, test_rows=30)
    for name, value in program.environment(DATASET=data, GLOBAL_BATCH_SIZE=20, EPOCHS=3).items():
        monkeypatch.setenv(name, value)
    assert main() == 0
    results = Path(program.settings["STORAGE_PATH"], "run-baseline")
    with open(results / "metrics.csv") as lines:
        history = list(csv.DictReader(lines))
    assert [record["epoch"] for record in history] == ["1", "2", "3"]
    assert float(history[-1]["loss"]) < float(history[0]["loss"])
    assert float(history[-1]["test_accuracy"]) > 0.9
    assert torch.load(results / "model.pt", weights_only=True)
