"""Tests that a stopped run saves, stays stopped, and continues without losing or repeating a row."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from sunspot.errors import SunspotError
from sunspot.run.attempts import read_attempts
from sunspot.run.logs import rank_stream, read_stream
from sunspot.run.requests import request_stop
from sunspot.run.status import RunState, read_status
from sunspot.submitter.cluster.deletion import deletion_order
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.doctor.diagnose import examine
from sunspot.submitter.findings import Diagnosis
from tests.harness.constants import SetConstants
from tests.harness.finished_run import STEPS, FinishedRun, driver_output
from tests.harness.program import Program
from tests.harness.training import assert_audit_clean, audit, newest, the_run, wait_for_step
from tests.harness.waiting import wait_until

SLOW = {
    "TASK": "tests.tasks.slow",
    "GLOBAL_BATCH_SIZE": 20,
    "EPOCHS": 6,
    "CHECKPOINT_EVERY_STEPS": 50,
    "REPORT_EVERY_S": 1,
}


def test_a_stopped_run_does_not_train_until_it_is_resumed(finished_run: FinishedRun) -> None:
    run = finished_run.run
    first, second = read_attempts(run)  # the start before `resume` made no attempt
    assert (first.step, finished_run.state_when_stopped) == (0, RunState.STOPPED)
    how = "to continue, run `sunspot resume run`"
    assert f"stopped by `sunspot stop` at step {second.step} of {STEPS}; {how}" in finished_run.stopped
    assert STEPS // 2 < second.step < STEPS, "stopped where a checkpoint was due anyway, or not at all"
    assert f"stopped by `sunspot stop`; {how}" in finished_run.refused
    assert f"from: step-{second.step:08d}-attempt-0001" in finished_run.output
    status = read_status(run)
    assert (status.state, status.step, status.checkpoint) == (RunState.SUCCEEDED, STEPS, finished_run.newest.name)
    assert audit(finished_run.storage) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "job", "code", "state", "said"),
    [
        (signal.SIGTERM, "job", 1, RunState.FAILED, "told to end by SIGTERM"),
        (signal.SIGTERM, "", 143, RunState.STOPPED, "told to end by SIGTERM: the run saves"),
        (signal.SIGINT, "", 130, RunState.STOPPED, "Press Ctrl-C again to end without saving"),
    ],
    ids=["a pod's", "a process's", "Ctrl-C"],
)
def test_a_driver_that_receives_a_signal_saves_before_it_exits(
    program: Program,
    make_data: Callable[..., str],
    told: signal.Signals,
    job: str,
    code: int,
    state: RunState,
    said: str,
) -> None:
    settings = {**SLOW, "DATASET": make_data(2000), "JOB_ID": job}
    run = the_run(program)
    process = program.start(**settings)
    wait_for_step(run, 50, process)
    process.send_signal(told)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == code, output
    assert said in output
    assert "the same command continues from there" in output
    terminated_at = newest(run).step
    assert terminated_at % 50, "it did not save when it was told to end"
    status = read_status(run)
    assert (status.state, status.step) == (state, terminated_at)

    program.run(**settings)
    assert [attempt.step for attempt in read_attempts(run)] == [0, terminated_at]
    status = read_status(run)
    assert (status.state, status.step, status.checkpoint) == (RunState.SUCCEEDED, 600, newest(run).name)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_second_ctrl_c_stops_the_driver_immediately(program: Program, make_data: Callable[..., str]) -> None:
    run = the_run(program)
    process = program.start(**SLOW, DATASET=make_data(2000), JOB_ID="")
    wait_for_step(run, 50, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    status = read_status(run)
    assert status
    assert status.state is RunState.STOPPED


@pytest.mark.slow
def test_worker_output_is_stored(program: Program, make_data: Callable[..., str]) -> None:
    run = the_run(program)
    with pytest.raises(Exception, match="training failed"):
        program.run(TASK="tests.tasks.talking", DATASET=make_data(100), GLOBAL_BATCH_SIZE=20, MAX_FAILURES=0)
    for rank in (0, 1):
        text = read_stream(run, rank_stream(1, rank)).decode()
        assert f"attempt 1: rank {rank} of 2 on cpu of " in text
        assert text.count("printed by python") == 1
        assert "written by a library" in text
        assert "ValueError: the task is broken" in text, "the end of a failed worker is what one looks for"
    text = driver_output(run).decode()
    assert "from: the beginning" in text
    assert "the task is broken" in text
    status = read_status(run)
    assert status.state is RunState.FAILED
    assert "the task is broken" in status.reason

    [failed] = examine(RunAccess(run)).findings
    assert failed.finding is Diagnosis.FAILED
    assert failed.details["ranks"] == [0, 1], "one error, that both met"
    assert str(failed.details["file"]).endswith("tests/tasks/talking.py")
    assert (failed.details["function"], failed.details["message"]) == ("loss", "the task is broken")


@pytest.mark.slow
def test_a_deleted_run_stops_training_and_leaves_no_files(program: Program, make_data: Callable[..., str]) -> None:
    run = the_run(program)

    def files() -> set[str]:
        return {entry.key for entry in run.storage.list(run.name)}

    process = program.start(
        TASK="tests.tasks.slow",
        DATASET=make_data(2000),
        GLOBAL_BATCH_SIZE=20,
        EPOCHS=1000,
        NUM_WORKERS=1,
        CHECKPOINT_EVERY_STEPS=5,
        REPORT_EVERY_S=0.5,
    )
    wait_for_step(run, 5, process)
    for group in deletion_order(run, sorted(files())):  # like on a machine that cannot see the process
        run.storage.delete_many(group)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 6, output
    assert "was deleted while attempt 1 trained" in output
    assert not read_attempts(run), "the run did not start again"
    left = {key.split("/")[1] for key in files()}
    assert not left & {"run.json", "status", "metrics"}
    assert not any(key.endswith("manifest.json") for key in files())


@pytest.mark.slow
def test_a_bug_in_the_task_ends_the_run_at_once_and_its_location_is_reported(
    program: Program, make_data: Callable[..., str]
) -> None:
    told = r"rank 0, 1: NameError: name 'functional' is not defined, in loss at tests/tasks/buggy\.py:[0-9]+"
    with pytest.raises(SunspotError, match=told) as ended:
        program.run(TASK="tests.tasks.buggy", DATASET=make_data(100), GLOBAL_BATCH_SIZE=20)
    assert str(ended.value).endswith("; `sunspot check` tries the task in seconds\n`sunspot doctor run` explains more")
    assert "Traceback" not in str(ended.value)
    assert len(read_attempts(the_run(program))) == 1


@pytest.mark.slow
def test_a_stop_request_ends_a_run_that_waits_for_nodes(program: Program, set_constants: SetConstants) -> None:
    set_constants("sunspot.train.group", NO_ROOM_S=0.2)
    set_constants("sunspot.run.outcome", DRIVER_CHECK_EVERY_S=0.2)
    run = the_run(program)
    training = program.begin(RESOURCES_PER_WORKER='{"CPU": 100}')
    wait_until(lambda: read_status(run) is not None, training)
    request_stop(run, "test")
    assert training.result(50) == 0, "no node has room for a worker, so the run waits for a group only for NO_ROOM_S"

    status = read_status(run)
    assert status
    assert (status.state, status.step) == (RunState.STOPPED, 0)
