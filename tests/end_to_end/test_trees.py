"""Tests of complete runs of trees, which are killed at a round, resumed on other numbers of workers, and read by
commands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sunspot.client import Run as Client
from sunspot.run import Run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.history import read_journal
from sunspot.tasks.tree_models import KINDS
from tests.harness.program import Program
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    kill_all,
    newest,
    the_run,
    wait_for_step,
    weights,
)

ROUNDS = 8


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest, make_data: MakeData) -> dict[str, Any]:
    """Return the settings for a run with either library."""
    pytest.importorskip(request.param, reason="the extra `trees` is not installed")
    options = {"max_depth": 3} if request.param == "xgboost" else {"num_leaves": 4, "min_data_in_leaf": 3}
    return {
        "TASK": "tests.tasks.slow_trees",
        "TASK_ARGS": json.dumps({"library": request.param, **options}),
        "DATASET": make_data(240, test_rows=60),
        "EPOCHS": str(ROUNDS),
        "CHECKPOINTS_TO_KEEP": "20",
    }


def model_of(run: Run) -> bytes:
    return bytes(weights(run)["_extra_state"].numpy().tobytes())


@pytest.mark.slow
def test_trees_of_a_killed_run_equal_those_of_an_uninterrupted_run(program: Program, settings: dict[str, Any]) -> None:
    del program.settings["LEARNING_RATE"]  # trees do not use this setting
    program.settings |= settings
    program.run(RUN_NAME="whole")
    slow = json.dumps({**json.loads(settings["TASK_ARGS"]), "pause_s": 1.5})
    process = program.start(TASK_ARGS=slow)
    wait_for_step(the_run(program), 3, process)
    kill_all(process)
    stopped_at = newest(the_run(program)).step
    assert 3 <= stopped_at < ROUNDS
    program.run(TASK_ARGS=slow)
    assert model_of(the_run(program)) == model_of(the_run(program, "whole"))
    assert_audit_clean(program)

    program.run(TASK_ARGS=slow, EPOCHS=ROUNDS + 2, NUM_WORKERS=1)
    run = the_run(program)
    assert newest(run).step == ROUNDS + 2
    assert_audit_clean(program)
    losses = [record["test_loss"] for record in read_journal(run, "metrics", lineage(read_attempts(run)))]
    assert losses[-1] < losses[0] / 2
    client = Client("run", program.settings["STORAGE_PATH"])
    assert client.status()["step"] == client.metrics().num_rows == ROUNDS + 2
