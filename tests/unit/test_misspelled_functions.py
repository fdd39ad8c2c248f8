"""Tests that a misspelled function of a task is reported, and that a task's own helpers are not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sunspot.settings import Settings
from sunspot.tasks import describe_misspelled, load_task

NAMES = (f"task_with_names_{number}" for number in itertools.count())


def describe(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    """Return the warnings for a small task whose source also contains this text."""
    name = next(NAMES)
    (folder / f"{name}.py").write_text(f"from tests.tasks.tiny import build_model, loss\n{text}\n")
    monkeypatch.syspath_prepend(folder)
    return [*describe_misspelled(load_task(Settings(task=name)))]


@pytest.mark.parametrize(
    ("defined", "meant"),
    [
        ("build_datasets", "build_dataset"),
        ("compute_metric", "compute_metrics"),
        ("make_scheduler", "build_scheduler"),
        ("configure_optimizers", "build_optimizer"),
        ("augment_rows", "augment_row"),
    ],
)
def test_a_misspelled_function_is_reported_with_the_likely_name(
    defined: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [said] = describe(tmp_path, monkeypatch, f"def {defined}(*given): ...")
    assert f": nothing calls {defined}, defined at {tmp_path}/" in said
    assert said.endswith(f".py:2; did you mean {meant}?")


@pytest.mark.parametrize(
    "text",
    [
        "def schedule(step, total_steps): return 1.0",
        "def build_tokenizer(settings): ...",
        "def prepare_rows(settings): ...",
        "def _build_datasets(settings): ...",
        "def build_datasets(settings): ...\ndef build_dataset(settings): return [{}] * 20",
        "def make_datasets(settings): ...\nKINDS = {'plain': make_datasets}",
        "from torch.optim.swa_utils import get_ema_avg_fn as build_datasets",
        "class build_datasets: ...",
    ],
)
def test_helper_functions_are_not_reported_as_misspelled(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe(tmp_path, monkeypatch, text) == []
