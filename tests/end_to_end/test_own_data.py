"""Tests of complete runs on common data formats: training, resuming, auditing, and predicting class names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sunspot.errors import ConflictError
from sunspot.predict.__main__ import main
from sunspot.run.predictions import Predictions, read_shown
from tests.harness.program import Program
from tests.harness.training import consumed, the_run

Predict = Callable[..., dict[str, Any]]


@pytest.fixture
def predict(program: Program, capsys: pytest.CaptureFixture[str]) -> Predict:
    def ask(*words: str) -> dict[str, Any]:
        storage, task = program.settings["STORAGE_PATH"], program.settings["TASK"]
        capsys.readouterr()
        assert main(["run", "--task", task, *words, "--storage", storage, "--json"]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return ask


def write_table(folder: Path, suffix: str, rows: int) -> None:
    folder.mkdir(parents=True)
    values = np.random.default_rng(rows).normal(size=(rows, 2)).round(3)
    named = [(a, b, "above" if a > b else "below") for a, b in values.tolist()]
    if suffix == "csv":
        lines = ["a,b,label", *(f"{a},{b},{label}" for a, b, label in named)]
    else:
        lines = [json.dumps({"a": a, "b": b, "label": label}) for a, b, label in named]
    (folder / f"rows.{suffix}").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("suffix", "loader"), [("csv", "torch"), pytest.param("jsonl", "ray", marks=pytest.mark.slow)])
def test_a_run_trains_and_predicts_on_a_csv_table(
    suffix: str, loader: str, program: Program, predict: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    for split, rows in (("train", 90), ("test", 40)):
        write_table(data / split, suffix, rows)
    (tmp_path / "start").write_text("0.5")
    monkeypatch.chdir(tmp_path)  # workers must resolve relative paths like the shell
    settings = {"DATASET": "data", "LOADER": loader, "TASK": "tests.tasks.measured", "GLOBAL_BATCH_SIZE": 30}
    settings |= {"TASK_ARGS": '{"start": "start"}', "PREDICT_ROWS": 100, "LEARNING_RATE": 0.3}
    program.run(**settings, EPOCHS=1)
    program.run(**settings, EPOCHS=3)
    run = the_run(program, "run")
    assert sorted(row for rows in consumed(run).values() for row in rows) == sorted([*range(90)] * 3)
    kept = read_shown(run, Predictions)
    assert kept
    assert (kept.rows, kept.names, kept.accuracy > 0.8) == (40, ["above", "below"], True)
    found = predict("--dataset", "data", "--output", "out", "--task", settings["TASK"])
    assert (found["rows"], found["accuracy"]) == (40, kept.accuracy)
    table = pq.read_table("out").to_pydict()
    assert [kept.names[number] for number in table["prediction"]] == table["class"]
    write_table(tmp_path / "other", suffix, 93)
    (tmp_path / "other" / f"rows.{suffix}").rename(data / "train" / f"rows.{suffix}")
    with pytest.raises(ConflictError, match="data"):
        program.run(**settings, EPOCHS=4)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_a_run_trains_and_predicts_on_image_folders(
    loader: str, program: Program, predict: Predict, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 5)):
        for name, brightness in (("day", 160), ("night", 0)):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = brightness + random.integers(0, 90, (20 + number % 3, 24, 3), np.uint8)
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "data" / split / name / f"{number}.png")
    data = str(tmp_path / "data")
    program.run(DATASET=data, LOADER=loader, IMAGE_SIZE=16, GLOBAL_BATCH_SIZE=10, EPOCHS=3, PREDICT_ROWS=100)
    run = the_run(program, "run")
    assert sorted(row for rows in consumed(run).values() for row in rows) == sorted([*range(40)] * 3)
    kept = read_shown(run, Predictions)
    assert kept
    assert (kept.rows, kept.names) == (10, ["day", "night"])
    Image.new("L", (300, 200), 220).save(tmp_path / "large.jpg")
    [image] = predict(str(tmp_path / "large.jpg"))["images"]
    assert image["class"] == kept.names[image["prediction"]]
    assert predict("--dataset", data, "--output", str(tmp_path / "out"))["accuracy"] == kept.accuracy
