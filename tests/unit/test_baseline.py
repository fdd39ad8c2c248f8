"""Tests that the plain baseline learns with torch alone and rejects settings that it would ignore."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sunspot.baseline.__main__ import main
from sunspot.errors import SettingsError
from tests.harness import REPOSITORY

ROWS = 640


@pytest.fixture
def few_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the baseline few rows, and return the folder of its storage."""
    from torch.utils.data import Subset

    from sunspot.baseline import train

    training, test = train.load_digits()
    few = Subset(training, range(ROWS)), Subset(test, range(200))
    monkeypatch.setattr(train, "load_digits", lambda: few)
    monkeypatch.setenv("SUNSPOT_STORAGE_PATH", str(tmp_path))
    return tmp_path


def test_the_baseline_learns(few_digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sunspot.baseline import train

    monkeypatch.setenv("SUNSPOT_GLOBAL_BATCH_SIZE", "32")
    assert main([]) == 0
    folder = few_digits / "mnist-baseline"
    with open(folder / "metrics.csv") as lines:
        history = list(csv.DictReader(lines))
    assert [record["epoch"] for record in history] == ["1", "2"]
    assert float(history[1]["loss"]) < float(history[0]["loss"]) / 2
    assert float(history[1]["accuracy"]) > 0.6
    model = train.build_model()
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    assert train.evaluate(model, train.load_digits()[1]) == float(history[1]["accuracy"])


@pytest.mark.parametrize("setting", ["MAX_STEPS=2", "TASK=sunspot.tasks.gpt", "STORAGE_PATH=s3://models/runs"])
def test_a_setting_that_the_baseline_would_ignore_is_rejected(
    setting: str, few_digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = f"SUNSPOT_{setting}".partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"^{name}.*(the baseline|set it to a local folder)"):
        main([])
    assert not any(few_digits.iterdir())


def test_the_baseline_imports_only_plain_pytorch() -> None:
    lines = (REPOSITORY / "app/sunspot/baseline/train.py").read_text().splitlines()
    imported = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported == {"csv", "pathlib", "pyarrow", "torch", "torchvision"}
