"""Tests on real Ray that a live run can be profiled, and that a loss in the middle of a profile costs no step."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from sunspot.run.incidents import Cause
from sunspot.run.profiles import read_request
from tests.end_to_end.test_survivors import SURVIVING
from tests.harness.commands import process
from tests.harness.program import Program
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    assert_complete,
    newest,
    the_run,
    wait_for_receipts,
    wait_for_reported_step,
    worker_processes,
)
from tests.harness.waiting import wait_until


@pytest.mark.slow
def test_all_ranks_profile_the_same_steps_and_losing_a_worker_drops_the_profile(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    storage = program.settings["STORAGE_PATH"]
    data = make_data(20_000, row_group=1000)
    training = program.begin(**SURVIVING, NUM_WORKERS=2, DATASET=data)
    wait_for_reported_step(run, 60, training)

    answer = process("profile", "run", "--ranks", "0,1", "--json", "--storage", storage)
    assert answer.code == 0, answer.err
    first, second = answer.json["ranks"]
    assert first["first_step"] == second["first_step"]
    for rank in (first, second):
        with gzip.open(rank["trace"]) as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        steps = [name for name in names if name.startswith("ProfilerStep#")]
        assert steps == [f"ProfilerStep#{rank['first_step'] + more}" for more in range(3)]
        assert "gloo:all_reduce" in names

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(process, "profile", "run", "--steps", "50", "--ranks", "0,1", "--storage", storage)
        wait_until(lambda: read_request(run), training)
        worker_processes()[0].kill()
        dropped = asked.result(60)
    assert dropped.code == 5
    assert "the profile was dropped, because the run's workers changed or restarted" in dropped.err
    lost = wait_for_receipts(run, 2, training)[-1]
    assert (lost.cause, lost.replayed) == (Cause.WORKER_LOST, 0)
    training.result(240)
    assert newest(run).step == 1000
    assert_complete(run)
    assert_audit_clean(program)
