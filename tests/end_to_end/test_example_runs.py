"""Tests of complete runs of the documented tasks, which are killed and resumed on other numbers of workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sunspot.run.attempts import read_attempts
from tests.harness import skip_without
from tests.harness.documentation import find_example
from tests.harness.program import Program
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    consumed,
    kill_all,
    losses,
    newest,
    the_run,
    wait_for_step,
)

STEPS = 200

OTHERS: dict[str, dict[str, Any]] = {
    "sunspot.tasks.gpt": {"PARALLEL": "fsdp", "MAX_STEPS": 60},
    "my_augmentation": {"EMA": 0.99},
}
"""Additional settings of some tasks."""

WITHOUT_IMAGES = ("sunspot.tasks.gpt", "tests.tasks.nano")

COMPARED = {"sunspot.tasks.gan": 3}
"""Number of steps to compare. A GAN amplifies rounding errors, to 1e-4 after 60 steps and 3e-3 after 300."""


pytestmark = pytest.mark.slow


@pytest.fixture(
    params=[
        "my_task",
        "my_loop",
        "my_augmentation",
        "sunspot.tasks.gan",
        "sunspot.tasks.gpt",
        "sunspot.tasks.keras_mnist",
        "tests.tasks.nano",
    ]
)
def settings(
    request: pytest.FixtureRequest, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return the settings that train an example."""
    task: str = request.param
    if task == "sunspot.tasks.keras_mnist":
        skip_without("keras", "tensorflow")
    if task.startswith("my_"):
        text = find_example("python", f"# {task}.py").replace("sunspot.tasks.mnist", "tests.tasks.tiny")
        (tmp_path / f"{task}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), os.pathsep)
    data = {} if task in WITHOUT_IMAGES else {"DATASET": make_data(20_000, row_group=1000)}
    training = {"GLOBAL_BATCH_SIZE": 50, "EPOCHS": 1, "LEARNING_RATE": 2e-4, "MAX_STEPS": STEPS, **OTHERS.get(task, {})}
    return {"TASK": task, **data, **training, "CHECKPOINT_EVERY_STEPS": 20, "REPORT_EVERY_S": 600, "SNAPSHOT_COST": 0}


def test_a_killed_example_continues_at_a_different_world_size(settings: dict[str, Any], program: Program) -> None:
    run = the_run(program)
    process = program.start(**settings, NUM_WORKERS=2)
    wait_for_step(run, 40, process)
    kill_all(process)
    resumed_at = newest(run).step
    train(program, settings, NUM_WORKERS=3)
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [2, 3]
    assert read_attempts(run)[-1].step == resumed_at < newest(run).step == settings["MAX_STEPS"]
    assert sorted(consumed(run)) == list(range(1, newest(run).step + 1))
    assert_audit_clean(program)
    train(program, settings, NUM_WORKERS=1, RUN_NAME="uninterrupted")
    compared = slice(COMPARED.get(settings["TASK"]))
    expected = losses(the_run(program, "uninterrupted"))
    assert losses(run)[compared] == pytest.approx(expected[compared], rel=1e-4)


def train(program: Program, settings: dict[str, Any], **more: Any) -> None:
    process = program.start(**{**settings, **more})
    output, _ = process.communicate()
    assert process.returncode == 0, output
