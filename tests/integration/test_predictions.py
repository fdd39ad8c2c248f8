"""Tests for the predictions that a run stores for its report."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sunspot.data.image_sources import find_sources
from sunspot.data.source import ModelData, read_rows
from sunspot.errors import StorageError
from sunspot.plan import Plan, make_plan
from sunspot.predict.classifier import Classifier
from sunspot.predict.for_report import PredictionSummary, save_predictions
from sunspot.run import Run
from sunspot.run.attempts import read_attempts
from sunspot.run.predictions import Example, Predictions, read_shown, write_shown
from sunspot.settings import load_settings
from sunspot.tasks import load_task
from tests.harness.constants import SetConstants
from tests.harness.finished_run import ROWS, SETTINGS_OF_RUN, TEST_ROWS, FinishedRun

WRONG = Example(row=3, label=1, predicted=0, probability=0.75, image=b"\x89PNG\x00\xff")
SAMPLE = Example(row=7, label=1, predicted=None, probability=None, image=b"")
PREDICTIONS = Predictions(
    checkpoint="step-00000005-attempt-0001",
    step=5,
    rows=4,
    accuracy=0.75,
    classes=2,
    confusion=[[2, 0], [1, 1]],
    mistakes=[WRONG],
    right=[replace(WRONG, row=0, predicted=1)],
    samples=[SAMPLE],
)


def test_stored_predictions_are_read_back_unchanged(run: Run) -> None:
    assert read_shown(run, Predictions) is None
    write_shown(run, PREDICTIONS)
    assert read_shown(run, Predictions) == PREDICTIONS


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"mistakes": [{"image": "?"}], "right": [], "samples": []}'])
def test_unreadable_predictions_are_ignored_with_a_warning(run: Run, content: bytes, warned: list[str]) -> None:
    run.storage.write(run.key("predictions.json"), content)
    assert read_shown(run, Predictions) is None
    assert "predictions.json cannot be used: " in warned[0]


# ----------------------------------------------------------------------------------------------- at the end of training


def test_a_run_stores_the_predictions_of_its_newest_checkpoint(finished_run: FinishedRun) -> None:
    kept = read_shown(finished_run.run, Predictions)
    newest = finished_run.newest
    rows = finished_run.rows()
    assert (kept.checkpoint, kept.step, kept.rows, kept.classes) == (newest.name, newest.step, TEST_ROWS, 3)
    assert kept.accuracy == newest.metrics["test_accuracy"]
    model = Classifier("run", storage=finished_run.storage, task=SETTINGS_OF_RUN["TASK"])
    predictions, probabilities = model.predict(rows["image"])
    wrong = np.flatnonzero(predictions != rows["label"])
    assert sum(map(sum, kept.confusion)) == TEST_ROWS
    assert [kept.confusion[label][label] for label in range(3)] == [
        int(((rows["label"] == label) & (predictions == label)).sum()) for label in range(3)
    ]
    assert {example.row for example in kept.mistakes} == set(wrong.tolist())
    assert [example.label for example in kept.right[:3]] == [0, 1, 2]
    assert len(kept.right) == len(kept.samples) == 24
    for example in (*kept.mistakes, *kept.right):
        assert example.label == rows["label"][example.row]
        assert example.predicted == predictions[example.row]
        assert example.probability == pytest.approx(probabilities[example.row].max(), abs=0.02)
        assert (pixels(example.image) == rows["image"][example.row, 0]).all()
    train = read_rows(find_sources(load_settings({"DATASET": finished_run.data}))[0], 0, ROWS)
    for example in kept.samples:
        assert (example.predicted, example.label) == (None, train["label"][example.row])
        assert (pixels(example.image) == train["image"][example.row, 0]).all()
    assert max(example.row for example in kept.samples) == ROWS - 1


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def plan_of(finished_run: FinishedRun, **settings: Any) -> Plan:
    environment = read_attempts(finished_run.run)[0].metadata.settings
    chosen = load_settings({**environment, **{name: str(value) for name, value in settings.items()}})
    return make_plan(chosen, load_task(chosen))


@pytest.mark.slow
def test_predictions_are_made_once_per_checkpoint(
    copied_run: FinishedRun, monkeypatch: pytest.MonkeyPatch, ray_address: str
) -> None:
    run, newest = copied_run.run, copied_run.newest
    before = read_shown(run, Predictions)
    assert before

    def refuse(*words: Any, **more: Any) -> Any:
        pytest.fail("it predicts again")

    with monkeypatch.context() as patch:
        patch.setattr("sunspot.predict.for_report.call_in_task", refuse)
        save_predictions(plan_of(copied_run), run, newest)
        save_predictions(plan_of(copied_run, PREDICT_ROWS=0), run, replace(newest, name="another"))
        save_predictions(plan_of(copied_run), run, replace(newest, name="another", step=newest.step - 1))
        save_predictions(replace(plan_of(copied_run), test=None), run, replace(newest, name="another"))
    assert read_shown(run, Predictions) == before

    write_shown(run, replace(before, checkpoint="another"))
    save_predictions(plan_of(copied_run, PREDICT_ROWS=40, STORAGE_PATH=copied_run.storage), run, newest)
    kept = read_shown(run, Predictions)
    assert (kept.rows, kept.checkpoint, sum(map(sum, kept.confusion))) == (40, newest.name, 40)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "tests.tasks.batch_norm",
            "the report has no predictions: SUNSPOT_TASK=tests.tasks.batch_norm: does not define",
        ),
        ("tests.tasks.tiny", "warning: the report has no predictions: storage is full"),
    ],
)
def test_the_reason_for_missing_predictions_is_logged(
    task: str,
    message: str,
    finished_run: FinishedRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*words: Any) -> Any:
        raise StorageError("storage is full")

    monkeypatch.setattr("sunspot.predict.for_report.call_in_task", fail)
    save_predictions(plan_of(finished_run, TASK=task), finished_run.run, replace(finished_run.newest, name="another"))
    assert message in capsys.readouterr().out


def test_predictions_made_before_the_time_limit_are_stored(
    copied_run: FinishedRun,
    monkeypatch: pytest.MonkeyPatch,
    set_constants: SetConstants,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def call_here(act: Any, plan: Plan, run: str, checkpoint: str, limit_s: float) -> Any:
        return act(plan, run, checkpoint, "false")

    monkeypatch.setattr("sunspot.predict.for_report.call_in_task", call_here)
    set_constants("sunspot.predict.for_report", LIMIT_S=0, READ_ROWS=30)
    copied_run.run.storage.delete(copied_run.run.key("predictions.json"))
    save_predictions(plan_of(copied_run, STORAGE_PATH=copied_run.storage), copied_run.run, copied_run.newest)
    kept = read_shown(copied_run.run, Predictions)
    assert (kept.rows, sum(map(sum, kept.confusion))) == (30, 30)
    assert f"30 of {TEST_ROWS} held-out rows predicted" in capsys.readouterr().out


def test_the_summary_contains_the_most_confident_mistakes_and_examples_of_each_class() -> None:
    random = np.random.default_rng(0)
    summary, certainties = PredictionSummary(ModelData((3, 70, 4), 5)), []
    for first in range(0, 4000, 1000):
        probabilities = random.dirichlet(np.ones(5), 1000).astype(np.float32)
        labels = np.arange(1000) % 5
        predictions = np.where(np.arange(1000) % 7 == 0, (labels + 1) % 5, labels)
        certainties += probabilities.max(axis=1)[predictions != labels].tolist()
        part = {"row": np.arange(first, first + 1000), "label": labels, "image": np.zeros((1000, 3, 70, 4), np.uint8)}
        summary.add(part, predictions, probabilities)
    found = summary.result("step-00000001-attempt-0001", 1, [])
    assert [example.probability for example in found.mistakes] == sorted(certainties, reverse=True)[:48]
    assert [example.label for example in found.right] == [*(list(range(5)) * 4), 0, 1, 2, 3]
    assert found.accuracy == 1 - len(certainties) / 4000
    assert pixels(found.mistakes[0].image).shape == (64, 4, 3)
