"""Tests of trees as a task, without Ray: resuming, metrics, model files, and rejected input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sunspot.checkpoint.files import load_weights
from sunspot.data.source import Batch, EmptySource, read_rows
from sunspot.errors import ConflictError, SettingsError
from sunspot.plan import make_plan
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.tasks.tree_models import KINDS, Trees
from tests.harness.state_files import through_a_file

ROWS, CLASSES = 120, 3


def settings_for(library: str, **more: Any) -> Settings:
    options = {"xgboost": {"max_depth": 3}, "lightgbm": {"num_leaves": 4, "min_data_in_leaf": 3}}
    return Settings(task="sunspot.tasks.trees", task_args={"library": library, **options.get(library, {}), **more})


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason="the extra `trees` is not installed")
    return str(request.param)


def make_rows(classes: int = CLASSES) -> Batch:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (ROWS, 1, 4, 4), dtype=np.uint8)
    sums = images.reshape(ROWS, -1)[:, :4].sum(axis=1) / 1020
    labels = (sums * classes).astype(np.int64).clip(0, classes - 1) if classes else sums.astype(np.float32)
    return {name: torch.from_numpy(column) for name, column in {"image": images, "label": labels}.items()}


def build(library: str, classes: int = CLASSES) -> Trees:
    settings = settings_for(library)
    return load_task(settings).build_model(settings, EmptySource((1, 4, 4), classes))


def scaled(scores: torch.Tensor) -> torch.Tensor:
    """Return scores of classes without their mean, because only differences matter."""
    return scores.log_softmax(1) if scores.ndim > 1 else scores


@pytest.mark.parametrize("classes", [CLASSES, 0])
def test_resumed_trees_equal_those_of_an_uninterrupted_run(library: str, classes: int) -> None:
    rows, whole = make_rows(classes), build(library, classes)
    whole.begin(rows, 1)
    for step in range(1, 7):
        scores = whole.boost()
        assert torch.allclose(scaled(scores), scaled(whole(rows)), atol=1e-5)
        if step == 3:
            state = through_a_file(whole.state_dict())
    resumed = build(library, classes)
    load_weights(resumed, state, "a checkpoint")
    resumed.begin(rows, 1)
    for _ in range(3):
        resumed.boost()
    assert resumed.to_bytes() == whole.to_bytes() != state["_extra_state"].numpy().tobytes()


def test_a_tree_task_learns(library: str) -> None:
    task = load_task(settings_for(library))
    rows = make_rows()
    trees = build(library)
    losses, metrics = task.loss(trees, rows)  # before the first round
    assert losses == pytest.approx(np.log(CLASSES))
    trees.begin(rows, 1)
    for _ in range(20):
        trees.boost()
    losses, metrics = task.loss(trees, rows)
    assert losses.shape == (ROWS,)
    assert metrics["accuracy"].float().mean() > 0.9
    assert task.predict(trees, rows).shape == (ROWS, CLASSES)
    assert sum(trees.importance().get(number, 0) for number in range(4)) > 0.6 * sum(trees.importance().values())


def test_the_state_of_a_tree_model_can_be_loaded_by_its_library(library: str) -> None:
    rows, trees = make_rows(), build(library)
    trees.begin(rows, 1)
    trees.boost()
    content = trees.state_dict()["_extra_state"].numpy().tobytes()
    features = rows["image"].reshape(ROWS, -1).float().numpy()
    if library == "xgboost":
        import xgboost

        scores = xgboost.Booster(model_file=bytearray(content)).inplace_predict(features, predict_type="margin")
    else:
        import lightgbm

        scores = lightgbm.Booster(model_str=content.decode()).predict(features, raw_score=True)
    assert np.allclose(scores, trees(rows).numpy(), atol=1e-6)


def test_the_state_of_a_different_library_is_rejected(library: str) -> None:
    for state in ({"weight": torch.zeros(3)}, {"_extra_state": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(ConflictError, match="run:other: the weights do not fit the model that the task builds"):
            load_weights(build(library), state, "run:other")


def test_each_boosting_round_uses_all_rows() -> None:
    plan = make_plan(Settings(task="sunspot.tasks.trees", epochs=7), load_task(Settings(task="sunspot.tasks.trees")))
    assert (plan.steps.per_epoch, plan.steps.batch, plan.total_steps) == (1, 12000, 7)


@pytest.mark.parametrize("classes", [True, False])
def test_features_are_the_columns_of_a_table(library: str, classes: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    age, income = random.integers(18, 80, ROWS), random.random(ROWS)
    label = (age > 40).astype(np.int64) if classes else age * 0.1 + income
    pq.write_table(
        pa.table({"age": age, "income": income, "label": label, "name": ["x"] * ROWS}), tmp_path / "part.parquet"
    )
    settings = settings_for(library, columns=["age", "income"], classes=classes)
    settings = settings.model_copy(update={"dataset": str(tmp_path)})
    task = load_task(settings)
    source, _ = task.find_sources(settings)
    trees = task.build_model(settings, source)
    rows = {name: torch.from_numpy(column) for name, column in read_rows(source, 0, ROWS).items()}
    trees.begin(rows, 1)
    before = task.loss(trees, rows)[0].mean()
    for _ in range(20):
        trees.boost()
    assert task.loss(trees, rows)[0].mean() < before / 4
    assert set(trees.importance()) <= {0, 1}


@pytest.mark.parametrize("columns", [["age", "label"], "age", [3]])
def test_the_columns_argument_of_a_tree_task_must_be_a_list_of_names(columns: Any) -> None:
    settings = settings_for("xgboost", columns=columns)
    with pytest.raises(SettingsError, match="columns must be a list of names without 'label'"):
        load_task(settings).find_sources(settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (settings_for("catboost"), "SUNSPOT_TASK_ARGS: library must be xgboost or lightgbm, not 'catboost'"),
        (
            settings_for("xgboost", objective="rank:ndcg"),
            "options for xgboost contain objective, which Sunspot sets itself",
        ),
        (settings_for("xgboost", max_depth="deep"), "xgboost rejects {'max_depth': 'deep'}: "),
        (settings_for("lightgbm", num_leaves="many"), "lightgbm rejects {'num_leaves': 'many'"),
    ],
    ids=lambda value: json.dumps(value.task_args) if isinstance(value, Settings) else "",
)
def test_invalid_options_of_a_tree_library_raise_a_settings_error(settings: Settings, said: str) -> None:
    for name in KINDS:
        pytest.importorskip(name, reason="the extra `trees` is not installed")
    with pytest.raises(SettingsError, match=re.escape(said)):
        load_task(settings).build_model(settings, EmptySource((1, 4, 4), CLASSES))


@pytest.mark.parametrize("name", KINDS)
def test_the_error_for_a_missing_tree_library_names_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=rf"{name} is not installed; add EXTRAS=trees to"):
        build(name)


@pytest.mark.parametrize("given", [{"parallel": "fsdp"}, {"learning_rate": 0.1, "loader": "ray"}])
def test_settings_that_trees_ignore_are_rejected(given: dict[str, Any]) -> None:
    said = ", ".join(f"SUNSPOT_{name.upper()}={value}" for name, value in given.items())
    with pytest.raises(SettingsError, match=f"{said}: sunspot.tasks.trees trains trees, which ignore this setting"):
        load_task(Settings(task="sunspot.tasks.trees", **given))
