"""Tests that a run that moves to another driver repeats no step and loses no row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sunspot.run.attempts import read_attempts
from sunspot.run.incidents import Cause
from sunspot.run.owner import Owner
from sunspot.run.requests import request_stop
from sunspot.run.status import RunState, read_status
from tests.harness.constants import SetConstants
from tests.harness.program import Program
from tests.harness.training import assert_audit_clean, newest, the_run, wait_for_receipts, wait_for_step


@pytest.mark.slow
def test_a_run_that_moves_to_another_cluster_repeats_no_step(
    program: Program, make_data: Callable[..., str], set_constants: SetConstants
) -> None:
    set_constants("sunspot.run.outcome", DRIVER_CHECK_EVERY_S=0.2)
    settings = {"TASK": "tests.tasks.slow", "GLOBAL_BATCH_SIZE": 20, "EPOCHS": 500, "DATASET": make_data(2000)}
    east, west = Owner("run-1", "a", place="east"), Owner("run-2", "b", place="west")
    run = the_run(program)
    old = program.begin(**settings, JOB_ID=east)
    wait_for_step(run, 20, old)

    new = program.start(**settings, JOB_ID=west, MOVES_FROM=east)
    moved = wait_for_receipts(run, 2, new)[-1]
    assert old.result(timeout=60) == 0
    request_stop(run, "test")
    output = new.communicate(timeout=150)[0]

    assert new.returncode == 0, output
    assert "moving from run-1 in east, which keeps training until the workers here are ready" in output
    first, second = read_attempts(run)
    assert (Owner.parse(first.owner), Owner.parse(second.owner)) == (east, west)
    assert (moved.cause, moved.replayed, moved.at_least) == (Cause.RESUMED, 0, False)
    assert 20 <= second.step < newest(run).step
    assert read_status(run).state is RunState.STOPPED  # type: ignore[union-attr]
    assert_audit_clean(program)
