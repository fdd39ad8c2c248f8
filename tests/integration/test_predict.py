"""Tests for `python -m sunspot.predict`, with a few images and with complete datasets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from PIL import Image

from sunspot.errors import ConflictError, DamageError, NotFoundError, SettingsError, SunspotError
from sunspot.predict import ModelWorker, model_worker
from sunspot.predict import batch as predict_batch
from sunspot.predict.__main__ import main
from sunspot.predict.actor import get_result
from sunspot.predict.classifier import Classifier
from sunspot.run.checkpoints import Checkpoint
from sunspot.storage.local import LocalStorage
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants
from tests.harness.finished_run import SETTINGS_OF_RUN, SIDE, TEST_ROWS, FinishedRun
from tests.harness.waiting import wait_until

Predict = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_task(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set SUNSPOT_TASK to the run's task."""
    monkeypatch.setenv("SUNSPOT_TASK", SETTINGS_OF_RUN["TASK"])


@pytest.fixture
def predict(finished_run: FinishedRun, capsys: pytest.CaptureFixture[str], ray_address: str) -> Predict:
    """Return a function that runs the command in this process, and returns its JSON document or its text."""

    def run(*words: str, storage: str = finished_run.storage, as_json: bool = True) -> Any:
        capsys.readouterr()
        assert main([*words, "--storage", storage, *(["--json"] if as_json else [])]) == 0
        said = capsys.readouterr().out
        return json.loads(said) if as_json else said

    return run


def read_all(output: str | Path) -> pa.Table:
    return pq.read_table(output).sort_by("row")


# --------------------------------------------------------------------------------------------------------------- images


def test_a_model_worker_makes_the_same_predictions_as_a_classifier_and_is_stopped_afterwards(
    finished_run: FinishedRun, ray_address: str
) -> None:
    images = finished_run.rows()["image"][:5]
    predictions, probabilities = Classifier("run", storage=finished_run.storage).predict(images)
    workers = []

    def ask() -> None:
        with model_worker("run", storage=finished_run.storage) as worker:
            workers.append(worker)
            said, how_sure = ray.get(worker.predict.remote(images))
            assert said.tolist() == predictions.tolist()
            assert (how_sure == probabilities).all()
            get_result(worker.predict.remote(images[0, 0]), 60, "a prediction")

    with pytest.raises(SettingsError, match=r"^the images are uint8 \[8, 8\]"):
        ask()

    def is_gone() -> bool:
        try:
            ray.get(workers[0].describe.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return True
        return False

    wait_until(is_gone)  # Ray does not wait until a killed actor has ended
    assert ray.is_initialized()  # the caller's Ray must keep running


@pytest.mark.slow
def test_an_actor_that_cannot_load_the_model_reports_why(copied_run: FinishedRun, ray_address: str) -> None:
    newest = copied_run.newest
    path = copied_run.directory(newest) / "model.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with (
        pytest.raises(DamageError, match=r"damaged: model\.pt has SHA-256") as raised,
        model_worker("run", newest.name, copied_run.storage),
    ):
        pytest.fail("it has a model")
    assert raised.value.exit_code == 7
    with pytest.raises(SunspotError, match=r"no run nothing in .*; it contains run"):
        get_result(ModelWorker.remote("nothing", "newest", copied_run.storage).describe.remote(), 60, "it")


def test_predictions_of_files_are_printed_as_a_table(
    predict: Predict, finished_run: FinishedRun, tmp_path: Path
) -> None:
    rows = finished_run.rows()
    Image.fromarray(rows["image"][0, 0]).save(tmp_path / "one.png")
    np.save(tmp_path / "two.npy", rows["image"][1:3])
    files = [str(tmp_path / "one.png"), str(tmp_path / "two.npy")]
    found = predict("run", files[0], "--checkpoint", "best", files[1])
    assert (found["checkpoint"], found["step"]) == (finished_run.newest.name, finished_run.newest.step)
    assert [(image["file"], image["index"]) for image in found["images"]] == [
        (files[0], 0),
        (files[1], 0),
        (files[1], 1),
    ]
    _, probabilities = Classifier("run", storage=finished_run.storage).predict(rows["image"][:3])
    for image, expected in zip(found["images"], probabilities.tolist(), strict=True):
        assert image["probabilities"] == expected
        assert image["probability"] == expected[image["prediction"]] == max(expected)


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "a.png", "--dataset", "sample", "--output", "x"],
        ["run", "--dataset", "sample"],
        ["run", "--output", "x"],
        ["run", "--dataset", "sample", "--output", "x", "--workers", "-1"],
    ],
)
def test_invalid_combinations_of_arguments_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(SettingsError):
        main(words)


# ------------------------------------------------------------------------------------------------------------ a dataset


def test_the_accuracy_on_a_dataset_equals_the_test_accuracy_of_the_run(
    predict: Predict, finished_run: FinishedRun, tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(predict_batch, PART_ROWS=30)
    output = str(tmp_path / "out")
    words = ["run", "--dataset", finished_run.data, "--output", output, "--workers", "2"]
    found = predict(*words)
    assert found == {
        "checkpoint": finished_run.newest.name,
        "step": finished_run.newest.step,
        "dataset": finished_run.data,
        "split": "test",
        "rows": TEST_ROWS,
        "accuracy": finished_run.newest.metrics["test_accuracy"],
        "output": output,
        "parts": 4,
        "kept": 0,
    }
    table, rows = read_all(output), finished_run.rows()
    assert table.schema.remove_metadata() == pa.schema(
        {"row": pa.int64(), "label": pa.int64(), "prediction": pa.int64(), "probabilities": pa.list_(pa.float32())}
    )
    assert table["row"].to_pylist() == list(range(TEST_ROWS))
    assert table["label"].to_pylist() == rows["label"].tolist()
    predictions, probabilities = Classifier("run", storage=finished_run.storage).predict(rows["image"])
    assert table["prediction"].to_pylist() == predictions.tolist()
    assert np.array(table["probabilities"].to_pylist()) == pytest.approx(probabilities, abs=0.02)

    # Only the missing file is written again.
    files = sorted(Path(output).glob("*.parquet"))
    files[1].unlink()
    times = {file: file.stat().st_mtime_ns for file in files if file.exists()}
    again = predict(*words)
    assert again == {**found, "kept": 3}
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert read_all(output) == table
    assert "accuracy" in predict(*words, as_json=False)

    # The folder cannot contain predictions of another checkpoint or of other data.
    newest = finished_run.newest
    older = min({path.name for path in finished_run.directory(newest).parent.iterdir()} - {newest.name})
    with pytest.raises(ConflictError, match=rf"checkpoint: {newest.name} -> {older}\n(.*\n)*.*choose another"):
        predict(*words, "--checkpoint", older)
    with pytest.raises(ConflictError, match=r"rows: 101 -> 240"):
        predict(*words, "--split", "train")
    files[2].write_bytes(files[0].read_bytes())
    with pytest.raises(DamageError, match=f"{files[2].name} cannot be used.*delete it"):
        predict(*words)


@pytest.mark.slow
def test_a_killed_prediction_job_resumes_with_the_missing_output_files(
    predict: Predict, finished_run: FinishedRun, tmp_path: Path, set_constants: SetConstants, ray_address: str
) -> None:
    output = tmp_path / "out"
    words = ["run", "--dataset", finished_run.data, "--output", str(output), "--workers", "1"]
    program = "from sunspot.predict import __main__, batch; batch.PART_ROWS = 1; __main__.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, "--storage", finished_run.storage],
        env={**os.environ, "RAY_ADDRESS": ray_address},
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while len(list(output.glob("*.parquet"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    _, said = process.communicate()
    assert b"max_restarts" not in said, "users can do nothing about this warning from Ray"
    there = {file: file.stat().st_mtime_ns for file in output.glob("*.parquet")}
    assert 2 <= len(there) < TEST_ROWS
    set_constants(predict_batch, PART_ROWS=1)
    found = predict(*words)
    assert (found["kept"], found["rows"]) == (len(there), TEST_ROWS)
    assert found["accuracy"] == finished_run.newest.metrics["test_accuracy"]
    assert {file: file.stat().st_mtime_ns for file in there} == there
    assert read_all(output)["row"].to_pylist() == list(range(TEST_ROWS))


@pytest.mark.slow
def test_rows_without_labels_are_predicted(predict: Predict, finished_run: FinishedRun, tmp_path: Path) -> None:
    table = pq.read_table(f"{finished_run.data}/test/part.parquet")
    pq.write_table(table.drop_columns("label"), tmp_path / "unlabeled.parquet")
    words = ["--dataset", str(tmp_path / "unlabeled.parquet"), "--output", str(tmp_path / "out"), "--workers", "1"]
    found = predict(str(finished_run.directory(finished_run.newest)), *words)
    assert (found["accuracy"], found["rows"], found["split"]) == (None, TEST_ROWS, "train")
    predictions, _ = Classifier("run", storage=finished_run.storage).predict(finished_run.rows()["image"])
    written = read_all(tmp_path / "out")
    assert written.column_names == ["row", "prediction", "probabilities"]
    assert written["prediction"].to_pylist() == predictions.tolist()


def table_of(*rows: int) -> pa.Table:
    return pa.table({"row": pa.array(rows, pa.int64()), "label": [0] * len(rows), "prediction": [0] * len(rows)})


def test_predictions_of_different_weights_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was deleted and started again has a checkpoint with the same name."""
    monkeypatch.setattr(predict_batch, "rows_in", lambda source: 2)
    storage, parts = LocalStorage(str(tmp_path)), [predict_batch.OutputFile(0, 2)]
    source: Any = SimpleNamespace(fingerprint="layout-content")

    def open_for(sha256: str) -> set[Any]:
        files = {"model.pt": {"size": 1, "sha256": sha256}}
        model: Any = SimpleNamespace(checkpoint=Checkpoint("step-00000001-attempt-0001", 1, 1, 1, 1, 1, files=files))
        return predict_batch.open_output(storage, model, source, parts)

    assert open_for("a" * 64) == open_for("a" * 64) == set()
    with pytest.raises(ConflictError, match="contains predictions other than the requested ones"):
        open_for("b" * 64)


@pytest.mark.parametrize("rows", [(4, 5), (0, 1, 3), (0, 1, 2, 3, 4)])
def test_predictions_for_rows_that_were_not_requested_are_rejected(tmp_path: Path, rows: tuple[int, ...]) -> None:
    storage, parts = LocalStorage(str(tmp_path)), [predict_batch.OutputFile(0, 4)]
    returned: Any = SimpleNamespace(iter_batches=lambda **_: [table_of(*rows)])
    with pytest.raises(SunspotError, match="rows that were not requested"):
        predict_batch.write_parts(storage, returned, parts, 4)
    assert storage.list("") == []


def test_a_file_with_rows_outside_the_range_in_its_name_is_rejected(tmp_path: Path) -> None:
    storage, parts = LocalStorage(str(tmp_path)), [predict_batch.OutputFile(0, 2)]
    pq.write_table(table_of(0, 1), tmp_path / parts[0].key)
    assert predict_batch.count_correct(storage, parts) == (True, 2)
    pq.write_table(table_of(1, 2), tmp_path / parts[0].key)
    with pytest.raises(DamageError, match="the row numbers do not match the range in the file's name"):
        predict_batch.count_correct(storage, parts)


def test_rows_that_do_not_fit_the_model_are_rejected_before_writing(
    predict: Predict, finished_run: FinishedRun, copied_run: FinishedRun, make_data: Callable[..., str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    wide = make_data(4, side=SIDE + 1)
    to = ["--output", str(output)]
    with pytest.raises(SettingsError, match=r"has the shape \[1, 9, 9\].*needs \[1, 8, 8\]"):
        predict("run", "--dataset", wide, *to)
    with pytest.raises(SettingsError, match="has no held-out rows"):
        predict("run", "--dataset", wide, "--split", "test", *to)
    with pytest.raises(NotFoundError):
        predict("run", "--checkpoint", "step-00000001-attempt-0001", "--dataset", finished_run.data, *to)
    newest = copied_run.newest
    (copied_run.directory(newest) / "model.pt").write_bytes(b"")
    words = ["run", "--checkpoint", newest.name, "--dataset", finished_run.data]
    with pytest.raises(DamageError, match=r"model\.pt has 0 bytes"):
        predict(*words, *to, storage=copied_run.storage)
    assert not output.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(SettingsError, match="is not empty, but contains no predictions"):
        predict("run", "--dataset", finished_run.data, "--output", str(tmp_path / "mine"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


@pytest.mark.slow
def test_predict_reads_a_run_and_a_dataset_from_s3_and_writes_its_output_to_s3(
    finished_run: FinishedRun, s3_bucket: str
) -> None:
    from sunspot.storage import open_storage

    bucket = open_storage(f"s3://{s3_bucket}")
    for folder in (Path(finished_run.storage), Path(finished_run.data)):
        for path in folder.rglob("*"):
            if path.is_file():
                bucket.write(str(path.relative_to(Path(finished_run.storage).parent)), path.read_bytes())
    # This test starts its own Ray, because workers inherit the AWS environment of the process that starts Ray.
    words = ["run", "--storage", f"s3://{s3_bucket}/runs", "--dataset", f"s3://{s3_bucket}/data", "--json"]
    said = subprocess.run(
        [sys.executable, "-m", "sunspot.predict", *words, "--output", f"s3://{s3_bucket}/out"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout
    assert json.loads(said)["accuracy"] == finished_run.newest.metrics["test_accuracy"]
    assert {entry.key for entry in bucket.list("out")} == {
        "out/_predictions.json",
        "out/rows-00000000-00000101.parquet",
    }
