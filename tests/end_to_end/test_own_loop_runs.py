"""Whole runs of tasks with a loop of their own, or Keras's: killed, and resumed on another number of workers."""

from __future__ import annotations

import pytest

from app.run.attempts import read_attempts
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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["app.tasks.gan", "app.tasks.keras_mnist", "tests.tasks.nano"])
def test_a_killed_loop_goes_on_at_another_world_size(task: str, program: Program, make_data: MakeData) -> None:
    if task == "app.tasks.keras_mnist":
        pytest.importorskip("keras", reason="the extra `tensorflow` is not installed")
    settings = {"TASK": task, "GLOBAL_BATCH_SIZE": 50, "EPOCHS": 1, "CHECKPOINT_EVERY_STEPS": 20, "REPORT_EVERY_S": 600}
    settings |= {"DATASET": make_data(20_000, row_group=1000)} if task != "tests.tasks.nano" else {}
    settings |= {"LEARNING_RATE": 2e-4, "MAX_STEPS": 200, "SNAPSHOT_COST": 0}
    run = the_run(program)
    process = program.start(**settings, NUM_WORKERS=2)
    wait_for_step(run, 40, process)
    kill_all(process)
    resumed_at = newest(run).step
    program.run(**settings, NUM_WORKERS=3)
    assert [attempt.metadata["world_size"] for attempt in read_attempts(run)] == [2, 3]
    assert read_attempts(run)[-1].step == resumed_at < newest(run).step == 200
    assert sorted(consumed(run)) == list(range(1, 201))
    assert_audit_clean(program)
    program.run(**settings, NUM_WORKERS=1, RUN_NAME="uninterrupted")
    # Of a GAN, the last bit grows: to 1e-4 after 60 steps, to 3e-3 after 300.
    compared = 3 if task == "app.tasks.gan" else None
    expected = losses(the_run(program, "uninterrupted"))
    assert losses(run)[:compared] == pytest.approx(expected[:compared], rel=1e-4)
