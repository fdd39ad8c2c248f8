"""Tests of a Keras model as a task, without Ray: resuming, gradients, model files, and rejected input."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from sunspot.checkpoint.files import load_weights
from sunspot.data.source import Batch, EmptySource
from sunspot.errors import ConflictError, SettingsError, StorageError
from sunspot.settings import Settings
from sunspot.tasks import load_task
from tests.harness.state_files import through_a_file

if TYPE_CHECKING:
    from sunspot.adapters.keras import KerasModule

SOURCE = EmptySource((1, 6, 6), 3)
ROWS = 30


@pytest.fixture
def keras() -> Any:
    """Return Keras. Only the tests that use Keras import it, because the import takes seconds."""
    return pytest.importorskip("keras", reason="the extra `tensorflow` is not installed")


@pytest.fixture
def task(keras: Any, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a task's module with a small model."""
    module = types.ModuleType("small_keras")

    def build_keras(settings: Settings, source: Any) -> Any:
        channels, height, width = source.shape
        model = keras.Sequential(
            [
                keras.Input((height, width, channels)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(settings.task_args.get("dropout", 0.0)),
                keras.layers.Dense(settings.task_args.get("outputs", source.classes), kernel_regularizer="l2"),
            ]
        )
        model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    module.build_keras = build_keras
    monkeypatch.setitem(sys.modules, "small_keras", module)
    return module


def settings_for(**task_args: Any) -> Settings:
    return Settings(task="small_keras", task_args=task_args)


def build(**task_args: Any) -> KerasModule:
    settings = settings_for(**task_args)
    return load_task(settings).build_model(settings, SOURCE)


def make_rows() -> Batch:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (ROWS, 1, 6, 6), dtype=np.uint8)
    labels = images.reshape(ROWS, -1).mean(axis=1) // 10 % 3
    return {"image": torch.from_numpy(images), "label": torch.from_numpy(labels.astype(np.int64))}


def steps(model: KerasModule, numbers: range) -> None:
    rows = make_rows()
    for number in numbers:
        part = {name: column[number::5] for name, column in rows.items()}
        model.take_step(part, 0.01, 1 / len(part["label"]))


def same(one: KerasModule, other: KerasModule) -> bool:
    states = one.get_extra_state(), other.get_extra_state()
    return all(
        torch.equal(a, b) for kind in ("model", "optimizer") for a, b in zip(*(s[kind] for s in states), strict=True)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_resumed_keras_model_equals_the_model_of_an_uninterrupted_run(task: Any, dropout: float) -> None:
    whole = build(dropout=dropout)
    steps(whole, range(3))
    state = through_a_file(whole.state_dict())
    steps(whole, range(3, 6))
    resumed = build(dropout=dropout)
    load_weights(resumed, state, "a checkpoint")
    assert not same(resumed, whole)
    steps(resumed, range(3, 6))
    assert same(resumed, whole)


def test_all_rows_of_a_step_have_the_same_weight(task: Any) -> None:
    """Each row's loss is computed before the step, and the losses decrease from step to step."""
    model, rows = build(), make_rows()
    expected = model.losses(rows, model(rows))
    losses, outputs = model.take_step(rows, 0.01, 1 / ROWS)
    assert losses.shape == (ROWS,)
    assert torch.allclose(losses, expected, atol=1e-6)
    assert outputs.shape == (ROWS, 3)
    for _ in range(30):
        losses, _ = model.take_step(rows, 0.01, 1 / ROWS)
    assert losses.mean() < expected.mean()


def test_rows_with_zero_weight_do_not_affect_a_step(task: Any) -> None:
    """A worker without rows takes the step with padding rows. Only its layers' own losses count."""
    rows, models = make_rows(), [build(), build()]
    for number, model in enumerate(models):
        padding = {name: column[2 * number : 2 * number + 2] for name, column in rows.items()}
        model.take_step(padding, 0.01, 0.0)
    assert same(*models)
    assert not same(models[0], build())


def test_the_keras_loop_changes_no_variables_until_the_state_is_copied(task: Any) -> None:
    """Training also ends with the error of a commit that has failed for good."""
    rows, model = make_rows(), build()
    adapter = load_task(settings_for())
    optimizer = adapter.build_optimizer(model, settings_for())
    before = model.get_extra_state()["model"]

    def refuse(*_: Any) -> None:
        assert all(torch.equal(*pair) for pair in zip(before, model.get_extra_state()["model"], strict=True))
        raise StorageError("no checkpoint could be committed")

    optimizer.register_step_pre_hook(refuse)
    run: Any = SimpleNamespace(model=model, optimizer=optimizer, weight=1.0, world_size=1, batches=lambda: [rows])
    with pytest.raises(StorageError):
        adapter.train(run)


def test_a_checkpoint_contains_a_file_that_keras_can_load(keras: Any, task: Any, tmp_path: Path) -> None:
    settings = settings_for()
    model = build()
    rows = make_rows()
    steps(model, range(3))
    state, scores = model.state_dict(), model(rows)
    steps(model, range(3, 5))  # the file is written while the training continues
    files = load_task(settings).checkpoint_files(model, state)
    Path(tmp_path, "model.keras").write_bytes(files["model.keras"])
    loaded = keras.models.load_model(tmp_path / "model.keras")
    images = rows["image"].numpy().transpose(0, 2, 3, 1)
    assert np.allclose(loaded(images), scores, atol=1e-6)


def test_the_state_of_a_different_model_is_rejected(task: Any) -> None:
    with pytest.raises(ConflictError, match=r"a checkpoint: the weights do not fit.*variables differ in shape"):
        load_weights(build(outputs=4), build().state_dict(), "a checkpoint")


def test_a_setting_that_keras_ignores_is_rejected(task: Any) -> None:
    with pytest.raises(SettingsError, match=r"SUNSPOT_CLIP_NORM=1\.0: small_keras has a Keras model, which ignores"):
        load_task(Settings(task="small_keras", clip_norm=1.0))


@pytest.mark.parametrize(("given", "peak"), [(1e-3, 0.03), (0.5, 0.5)])
def test_the_learning_rate_setting_overrides_the_rate_of_the_keras_optimizer(
    keras: Any, task: Any, given: float, peak: float
) -> None:
    settings, make = Settings(task="small_keras", learning_rate=given), task.build_keras

    def build_keras(settings: Settings, source: Any) -> Any:
        model = make(settings, source)
        model.compile(keras.optimizers.SGD(0.03), model.loss)
        return model

    task.build_keras = build_keras
    saved, model = build(), build()
    steps(saved, range(1))
    model.load_state_dict(saved.state_dict())  # with the rate of its newest step
    assert load_task(settings).build_optimizer(model, settings).param_groups[0]["lr"] == peak


def test_a_keras_schedule_is_rejected(keras: Any, task: Any) -> None:
    make = task.build_keras

    def build_keras(settings: Settings, source: Any) -> Any:
        model = make(settings, source)
        model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)), model.loss)
        return model

    task.build_keras = build_keras
    with pytest.raises(
        SettingsError, match=r"schedule \(SGD with CosineDecay\), but SUNSPOT_SCHEDULE.*a fixed learning rate"
    ):
        load_task(settings_for()).build_optimizer(build(), settings_for())


def test_a_model_that_is_not_compiled_is_rejected(keras: Any, task: Any) -> None:
    task.build_keras = lambda settings, source: keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(SettingsError, match=r"build_keras returned a Sequential; return a keras\.Model with an input"):
        build()
