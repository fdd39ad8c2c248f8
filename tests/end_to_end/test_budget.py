"""Tests that a run whose budget is spent saves, stops, and continues with a larger budget."""

from __future__ import annotations

import json
from collections.abc import Callable

from sunspot.run.attempts import read_attempts
from sunspot.run.requests import clear_stop
from sunspot.run.status import RunState, read_status
from tests.harness.constants import SetConstants
from tests.harness.program import Program
from tests.harness.training import assert_audit_clean, newest, the_run

STEPS = 400


def test_a_run_that_has_spent_its_budget_saves_and_continues_with_a_larger_budget(
    program: Program, make_data: Callable[..., str], set_constants: SetConstants
) -> None:
    set_constants("sunspot.train.budget", CHECK_EVERY_S=0.1)
    settings = {
        "TASK": "tests.tasks.slow",
        "GLOBAL_BATCH_SIZE": 20,
        "EPOCHS": 4,
        "DATASET": make_data(2000),
        "PRICES": json.dumps({"workers": {"price": 3600}}),  # 1 a second
    }
    run = the_run(program)
    program.run(**settings, BUDGET="0.5")

    status = read_status(run)
    assert status
    assert status.state is RunState.STOPPED
    assert status.reason.startswith("stopped by its spent budget of 0.5, because it has cost ")
    assert 0 < newest(run).step == status.step < STEPS

    program.run(**settings, BUDGET="0.5")  # a retry of the job does not train
    assert len(read_attempts(run)) == 1

    clear_stop(run)
    program.run(**settings, BUDGET="100000")
    assert newest(run).step == STEPS
    assert [attempt.step for attempt in read_attempts(run)] == [0, status.step]
    assert_audit_clean(program)
