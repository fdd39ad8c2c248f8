"""Tests for loading a checkpoint's model safely, and for its predictions."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sunspot.checkpoint.files import load_state
from sunspot.client import Run
from sunspot.errors import ConflictError, DamageError, NotFoundError, SettingsError
from sunspot.predict.classifier import Classifier
from sunspot.run.checkpoints import MANIFEST, find_faults
from sunspot.settings import Settings
from tests.harness.finished_run import SETTINGS_OF_RUN, SIDE, TEST_ROWS, FinishedRun
from tests.tasks import tiny

SHAPE = (1, SIDE, SIDE)


@pytest.fixture(scope="module")
def classifier(finished_run: FinishedRun) -> Classifier:
    return Classifier("run", storage=finished_run.storage, task=SETTINGS_OF_RUN["TASK"])


@pytest.fixture(autouse=True)
def own_task(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set SUNSPOT_TASK to the run's task."""
    monkeypatch.setenv("SUNSPOT_TASK", SETTINGS_OF_RUN["TASK"])


def as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# ---------------------------------------------------------------------------------------------------------- predictions


def test_the_accuracy_of_a_classifier_equals_the_test_accuracy_of_its_run(
    classifier: Classifier, finished_run: FinishedRun
) -> None:
    rows = finished_run.rows()
    predictions, probabilities = classifier.predict(rows["image"])
    assert (predictions.dtype, predictions.shape) == (np.int64, (TEST_ROWS,))
    assert (probabilities.dtype, probabilities.shape) == (np.float32, (TEST_ROWS, 3))
    assert 0.5 < (predictions == rows["label"]).mean() == finished_run.newest.metrics["test_accuracy"]
    assert classifier.describe()["name"] == finished_run.newest.name
    assert probabilities.sum(axis=1) == pytest.approx(1, abs=1e-5)
    from_python = Run("run", finished_run.storage).predict(rows["image"])
    assert all((ours == theirs).all() for ours, theirs in zip(from_python, (predictions, probabilities), strict=True))


def test_forward_passes_of_a_classifier_have_no_more_rows_than_those_of_its_run() -> None:
    passes: list[int] = []

    def predict(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        passes.append(len(batch["image"]))
        return torch.zeros(len(batch["image"]), 3)

    classifier: Any = object.__new__(Classifier)
    classifier._settings = Settings(global_batch_size=64, num_workers="2..4", micro_batch_size=10)
    classifier._device = torch.device("cpu")
    classifier._model = None
    classifier._predict = predict
    classifier.shape, classifier.classes = SHAPE, 3
    assert len(classifier.predict(np.zeros((50, *SHAPE), np.uint8))[0]) == 50
    assert max(passes) == 8, "each rank takes 32 rows in four passes"


def test_forward_passes_of_a_classifier_use_the_precision_of_its_run(
    classifier: Classifier, finished_run: FinishedRun
) -> None:
    images = torch.from_numpy(finished_run.rows()["image"][:7])
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            as_trained = tiny.predict(classifier._model, images).float().softmax(dim=1)
        in_fp32 = tiny.predict(classifier._model, images).softmax(dim=1)
    _, probabilities = classifier.predict(images)
    assert (probabilities == as_trained.numpy()).all()
    assert (probabilities != in_fp32.numpy()).any()


def test_predictions_do_not_depend_on_how_images_are_passed(
    classifier: Classifier, finished_run: FinishedRun, tmp_path: Path
) -> None:
    images = finished_run.rows()["image"][:3]
    predictions, probabilities = classifier.predict(images)
    Image.fromarray(images[0, 0]).save(tmp_path / "0.png")
    np.save(tmp_path / "1.npy", images[1])
    np.save(tmp_path / "12.npy", images[1:])
    locked = images.copy()
    locked.flags.writeable = False
    for given, of in [
        (images[0], slice(0, 1)),
        (torch.from_numpy(images), slice(0, 3)),
        (locked, slice(0, 3)),
        (str(tmp_path / "0.png"), slice(0, 1)),
        ([tmp_path / "0.png", tmp_path / "1.npy"], slice(0, 2)),
        ([tmp_path / "0.png", tmp_path / "12.npy"], slice(0, 3)),
    ]:
        said, how_sure = classifier.predict(given)
        assert said.tolist() == predictions[of].tolist()
        assert how_sure == pytest.approx(probabilities[of], abs=0.02)  # bf16 differs slightly between batch sizes


@pytest.mark.parametrize(
    ("images", "seen"),
    [
        (np.zeros((2, 1, SIDE, SIDE + 1), np.uint8), r"uint8 \[2, 1, 8, 9\]"),
        (np.zeros((SIDE, SIDE), np.uint8), r"uint8 \[8, 8\]"),
        (np.zeros((0, *SHAPE), np.uint8), r"uint8 \[0, 1, 8, 8\]"),
        (np.zeros(SHAPE, np.float32), r"float32 \[1, 8, 8\]"),
        (torch.zeros(SHAPE), r"float32 \[1, 8, 8\]"),
        (torch.zeros((1, 1, 1, *SHAPE), dtype=torch.uint8), r"uint8 \[1, 1, 1, 1, 8, 8\]"),
        ([], "list"),
        (None, "NoneType"),
    ],
)
def test_the_error_for_images_of_the_wrong_shape_includes_both_shapes(
    images: Any, seen: str, classifier: Classifier
) -> None:
    with pytest.raises(SettingsError, match=f"^(the images are|images must be an array.*not) {seen}"):
        classifier.predict(images)


def test_files_without_suitable_images_are_rejected(classifier: Classifier, tmp_path: Path) -> None:
    Image.new("L", (SIDE + 1, SIDE)).save(tmp_path / "wide.png")
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "color.jpeg")
    np.save(tmp_path / "floats.npy", np.zeros(SHAPE))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "pickled.npy").write_bytes(b"")
    np.save(tmp_path / "pickled.npy", np.array([Trap(tmp_path / "trapped")], dtype=object), allow_pickle=True)
    for name, seen in {
        "wide.png": "8 x 9 .*needs gray images of 8 x 8",
        "color.jpeg": "8 x 8 .*in color.*needs gray images of 8 x 8",
        "floats.npy": r"float64 \[1, 8, 8\].*needs uint8 \[1, 8, 8\]",
        "text.png": "is not a PNG or JPEG, or is damaged",
        "pickled.npy": "an array of object",
        "missing.png": "No such file",
    }.items():
        with pytest.raises(SettingsError, match=f"{name} .*{seen}"):
            classifier.predict(tmp_path / name)
    assert not (tmp_path / "trapped").exists()


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_can_be_chosen_by_its_name_or_directory_or_as_the_newest_or_best(
    copied_run: FinishedRun, tmp_path: Path
) -> None:
    newest = copied_run.newest
    names = {path.name for path in copied_run.directory(newest).parent.iterdir()}
    older = min(names - {newest.name})
    for which in ("newest", "best"):
        assert Classifier("run", which, copied_run.storage).name == newest.name
    assert Classifier("run", older, copied_run.storage).name == older
    elsewhere = shutil.copytree(copied_run.directory(newest), tmp_path / "elsewhere")
    assert Classifier("run", str(elsewhere)).name == newest.name
    assert Classifier(f"{elsewhere}/").name == newest.name
    for run, which in [("run", "step-00000001-attempt-0001"), ("nothing", "newest"), (str(tmp_path / "not"), "newest")]:
        with pytest.raises(NotFoundError):
            Classifier(run, which, copied_run.storage)
    os.remove(elsewhere / MANIFEST)
    with pytest.raises(NotFoundError, match=r"has no manifest\.json"):
        Classifier(str(elsewhere))


def test_a_damaged_checkpoint_is_skipped_unless_requested_by_name(copied_run: FinishedRun) -> None:
    newest = copied_run.newest
    path = copied_run.directory(newest) / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    passed_over = Classifier("run", storage=copied_run.storage)
    assert passed_over.step < newest.step
    assert f"passed over {newest.name}: damaged, optimizer.pt" in "passed over " + passed_over.warnings[0]
    for words in [("run", newest.name, copied_run.storage), (str(copied_run.directory(newest)),)]:
        with pytest.raises(DamageError, match=r"damaged: optimizer\.pt has SHA-256"):
            Classifier(*words)


@pytest.mark.parametrize("file", ["model.pt", "extra_state.pt"])
@pytest.mark.parametrize("matching", [False, True])
def test_code_in_a_checkpoint_is_never_executed(
    file: str, matching: bool, copied_run: FinishedRun, tmp_path: Path
) -> None:
    newest, trap = copied_run.newest, tmp_path / "trapped"
    for content in (pickle.dumps(Trap(trap)), as_bytes({"model": Trap(trap)})):
        if matching:
            copied_run.replace(newest, file, content)
            assert not find_faults(copied_run.run, copied_run.newest)
        else:
            (copied_run.directory(newest) / file).write_bytes(content)
        error = ConflictError if matching else DamageError
        with pytest.raises(error, match="more than tensors" if matching else "damaged"):
            Classifier("run", newest.name, copied_run.storage)
        assert not trap.exists()


def test_unreadable_manifests_and_missing_models_are_reported_as_damage(copied_run: FinishedRun) -> None:
    directory = copied_run.directory(copied_run.newest)
    content = (directory / MANIFEST).read_bytes()
    for damaged in (b"", b"[]", b"{}", content.replace(b'"step": ', b'"step": 1')):
        (directory / MANIFEST).write_bytes(damaged)
        with pytest.raises(DamageError):
            Classifier(str(directory))


def test_the_error_for_a_task_without_a_predict_function_includes_the_name_of_the_task(copied_run: FinishedRun) -> None:
    newest = copied_run.newest
    extra = load_state(copied_run.run, newest, "extra_state.pt")
    extra["settings"]["SUNSPOT_TASK"] = "tests.tasks.batch_norm"
    copied_run.replace(newest, "extra_state.pt", as_bytes(extra))
    with pytest.raises(SettingsError, match=r"SUNSPOT_TASK=tests\.tasks\.batch_norm: does not define predict"):
        Classifier("run", newest.name, copied_run.storage, task="tests.tasks.batch_norm")


def test_a_required_but_missing_gpu_is_reported_immediately(finished_run: FinishedRun) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(SettingsError, match="USE_GPU=true"):
        Classifier("run", storage=finished_run.storage, use_gpu="true")
