"""Tests on real Ray that a run loses little when nodes come and go, or when workers die, hang, or return after a
pause."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import ray

from sunspot.elastic.control import ControlChannel, open_control
from sunspot.elastic.messages import Incident
from sunspot.formatting import as_time
from sunspot.ray_internals.nodes import reachable_nodes
from sunspot.report import read_report, render
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.failures import read_failures
from sunspot.run.history import read_journal
from sunspot.run.incidents import Cause, describe_receipt, read_receipts
from sunspot.run.logs import list_streams
from sunspot.run.seen import look, read_details
from sunspot.run.status import RunState, read_status
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.doctor.diagnose import examine
from sunspot.submitter.findings import Diagnosis
from sunspot.train.probe import probe_all_nodes
from tests.end_to_end.test_columns import write_numbers
from tests.harness import s3
from tests.harness.control import worker_group
from tests.harness.documentation import find_commands
from tests.harness.nodes import start_node
from tests.harness.program import WORKER_NODE, Program
from tests.harness.s3 import FaultProxy
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    assert_complete,
    newest,
    receipts_of,
    the_run,
    wait_for_receipts,
    wait_for_reported_step,
    wait_for_step,
    worker_processes,
)
from tests.harness.waiting import wait_until

SLOW = {
    "TASK": "tests.tasks.slow",
    "GLOBAL_BATCH_SIZE": 20,
    "EPOCHS": 1,
    "CHECKPOINT_EVERY_STEPS": 0,
    "REPORT_EVERY_S": 1,
}
"""Settings for about 50 steps per second, without a checkpoint before the end of the epoch."""

ELASTIC = {
    **SLOW,
    "SURVIVORS": "off",
    "NUM_WORKERS": "1..2",
    "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}',
}


def test_a_preemption_notice_costs_no_steps_and_a_lost_node_costs_only_a_few_steps(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    with start_node(ray_address, **WORKER_NODE) as going:
        training = program.begin(**ELASTIC, DATASET=make_data(12_000, row_group=1000, test_rows=100))
        wait_for_reported_step(run, 60, training)
        going.reclaim()
        notice = wait_for_receipts(run, 2, training)[-1]
        assert (notice.cause, notice.replayed, notice.at_least) == (Cause.PREEMPTED, 0, False)
        assert (notice.world_before, notice.world_after) == (2, 1)
        assert notice.noticed is not None
        assert notice.committed is not None
        assert notice.noticed < notice.committed < notice.restarted < notice.first_step
        assert list(notice.phases) == ["old group gone", "processes up", "group formed", "state there", "first step"]
        assert sorted(notice.phases.values()) == list(notice.phases.values())
        assert read_failures(run) == [], "workers that end for a restart have not failed"

        committed = newest(run).step
        wait_for_reported_step(run, committed + 60, training)
        worker = worker_processes()[0]
        [list_workers] = find_commands("sh workers")
        assert str(worker.pid) in subprocess.check_output(list_workers, shell=True, text=True).split()
        worker.kill()
        lost = wait_for_receipts(run, 3, training)[-1]
        assert (lost.cause, lost.tier) == (Cause.WORKER_LOST, "memory")
        assert lost.last_step > committed + 50, "the run had taken many steps since the checkpoint"
        since = lost.last_step - committed
        assert lost.replayed < since, "the copy in memory is newer than the checkpoint in storage"
        training.result(240)
    assert newest(run).step == 600
    assert "test_accuracy" in newest(run).metrics
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_node_with_a_broken_gpu_is_excluded_and_the_other_nodes_train(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    settings = {**ELASTIC, "TASK": "tests.tasks.broken_gpu", "DATASET": make_data(20_000, row_group=1000)}
    with start_node(ray_address, **WORKER_NODE) as broken:
        process = program.start(**settings)
        output = process.communicate(timeout=240)[0]
        left_out = f"node {broken.node_id[:12]} left out: its GPU had an uncorrectable error of its memory (ECC)"
        assert process.returncode == 0, output
        assert f"{left_out}; starting again, 2 of 3 SUNSPOT_MAX_FAILURES left" in output
    begin, lost = receipts_of(run)
    assert (begin.world_after, lost.world_after, lost.cause) == (2, 1, Cause.WORKER_FAILED)
    assert [event["detail"] for event in read_journal(run, "events") if event["event"] == "node left out"] == [left_out]
    assert newest(run).step == 1000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_run_grows_onto_a_new_node_without_repeating_a_step(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    process = program.start(**ELASTIC, DATASET=make_data(60_000, row_group=1000))
    wait_for_receipts(run, 1, process)
    with start_node(ray_address, **WORKER_NODE):
        receipt = wait_for_receipts(run, 2, process)[-1]
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert (receipt.cause, receipt.replayed) == (Cause.SCALE_UP, 0)
    assert (receipt.world_before, receipt.world_after) == (1, 2)
    assert newest(run).step == 3000
    assert read_failures(run) == [], "workers that end for a restart have not failed"
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["", "job"], ids=["another process", "the same job started again"])
def test_a_frozen_run_counts_as_silent_and_writes_nothing_after_it_wakes_up(
    job: str, program: Program, make_data: MakeData
) -> None:
    """All processes are frozen while others take over and finish, and then continue."""
    settings = {**SLOW, "DATASET": make_data(20_000, row_group=1000), "NUM_WORKERS": 1, "CHECKPOINT_EVERY_STEPS": 50}
    settings["JOB_ID"] = job
    old = program.start(**settings)
    run = the_run(program)
    wait_for_step(run, 50, old)
    wait_until(lambda: look(run).state is RunState.RUNNING, old)
    frozen = [psutil.Process(old.pid), *worker_processes()]
    for process in frozen:
        process.suspend()
    alive = read_status(run)
    assert alive
    wait_until(lambda: look(run).state is not RunState.RUNNING, seconds=30 - (time.time() - alive.seen))
    state, reason = look(run).judge()
    assert state is RunState.SILENT
    assert f"no sign of life since {as_time(alive.seen)}" in reason

    new = program.start(**settings)
    output = new.communicate(timeout=250)[0]
    assert new.returncode == 0, output
    before = {entry.key: entry.version for entry in run.storage.list(run.name)}
    assert (newest(run).step, newest(run).attempt, look(run).state) == (1000, 2, RunState.SUCCEEDED)

    for process in frozen:
        process.resume()
    output = old.communicate(timeout=200)[0]
    assert old.returncode == 6, output
    assert "attempt 2 of " in output
    assert "has owned the run since" in output
    after = {entry.key: entry.version for entry in run.storage.list(run.name)}
    changed = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    its_own = (
        sorted(stream for stream in list_streams(run) if stream.startswith("driver-"))[0],
        "attempt-0001-rank-0000",
    )
    assert {key.rpartition("/")[0] for key in changed} <= {f"run/logs/{stream}" for stream in its_own}
    assert look(run).state is RunState.SUCCEEDED
    [_, takeover] = receipts_of(run)
    assert takeover.cause is Cause.DRIVER_LOST
    assert len({attempt.owner for attempt in read_attempts(run)}) == (1 if job else 2)
    assert_audit_clean(program)


@pytest.mark.slow
def test_taking_over_a_live_run_is_not_recorded_as_a_lost_driver(program: Program, make_data: MakeData) -> None:
    settings = {**SLOW, "DATASET": make_data(100_000, row_group=1000), "NUM_WORKERS": 1, "CHECKPOINT_EVERY_STEPS": 50}
    run = the_run(program)
    first = program.start(**settings)
    wait_for_step(run, 50, first)
    second = program.start(**settings)
    [_, takeover] = wait_for_receipts(run, 2, second)
    assert first.wait(timeout=100) == 6
    second.terminate()
    output = second.communicate(timeout=100)[0]
    assert str(takeover.cause) == "taken over"
    assert re.fullmatch(rf"by .+-{second.pid}-\w+, from .+-{first.pid}-\w+ at step [0-9]+", takeover.detail)
    assert all(at >= 0 for at in takeover.phases.values())
    assert describe_receipt(takeover) in output
    view = read_details(look(run))
    assert (view.incidents, view.restarts) == ([], 1)
    assert not any("driver lost" in line for line in (output, render(read_report(look(run))).decode()))
    assert not [found for found in examine(RunAccess(run)).findings if "lost" in found.evidence]
    assert_audit_clean(program)


@pytest.mark.slow
def test_hanging_storage_ends_the_run_at_the_time_limit(
    program: Program, make_data: MakeData, s3_proxy: FaultProxy, s3_bucket: str
) -> None:
    """Every response arrives in small pieces, so no single socket read times out."""
    slow = {**SLOW, "DATASET": make_data(60_000, row_group=1000), "NUM_WORKERS": 2, "CHECKPOINT_EVERY_STEPS": 50}
    process = program.start(**slow, STORAGE_TIMEOUT_S=5, STORAGE_PATH=f"s3://{s3_bucket}/runs")
    wait_for_step(open_run(f"s3://{s3_bucket}/runs", "run"), 50, process)
    s3_proxy.on(lambda request: request.method == "GET", s3.trickle)
    began = time.monotonic()
    output = process.communicate(timeout=290)[0]
    assert process.returncode == 4, output
    assert "no checkpoint could be committed for" in output.splitlines()[-1], output
    assert "no answer from storage for" in output.splitlines()[-1], output
    assert time.monotonic() - began < 280


@pytest.mark.slow
def test_a_restart_caused_by_missing_ray_data_rows_is_not_counted_as_a_failure(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reads = tmp_path / "reads"
    reads.mkdir()
    program.run(
        TASK="tests.tasks.stalling",
        TASK_ARGS=json.dumps({"folder": str(reads)}),
        DATASET=write_numbers(tmp_path / "data", 40),
        LOADER="ray",
        GLOBAL_BATCH_SIZE=4,
        EPOCHS=30,
        HANG_TIMEOUT_S=8,
        MAX_FAILURES=0,
    )
    run = the_run(program)
    assert newest(run).step == 300
    hung = [event for event in read_journal(run, "events") if event["event"] == "hung"]
    assert any("waits for rows of Ray Data in" in event["detail"] for event in hung)
    [_, restart] = read_receipts(read_journal(run, "events"))
    assert restart.cause is Cause.NO_ROWS
    assert "waits for rows of Ray Data in" in restart.detail
    assert "Ray Data brought no rows: the processes" in capfd.readouterr().out
    [found] = [finding for finding in examine(RunAccess(run)).findings if finding.finding is Diagnosis.NO_ROWS]
    assert "waits for rows of Ray Data in" in found.evidence
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_hung_rank_reports_its_stack_and_restarts(program: Program, make_data: MakeData, tmp_path: Path) -> None:
    marker = tmp_path / "has hung"
    program.run(
        TASK="tests.tasks.hanging",
        TASK_ARGS=json.dumps({"marker": str(marker)}),
        DATASET=make_data(2000),
        GLOBAL_BATCH_SIZE=20,
        EPOCHS=1,
        HANG_TIMEOUT_S=8,
    )
    run = the_run(program)
    assert newest(run).step == 100
    events = read_journal(run, "events")
    hung = {event["rank"]: event for event in events if event["event"] == "hung"}
    assert sorted(hung) == [0, 1]
    assert "wait_for_ever" in hung[1]["stacks"]
    assert "wait_for_ever" not in hung[0]["stacks"]
    [_, restart] = read_receipts(events)
    assert restart.cause is Cause.HUNG
    assert "wait_for_ever" in restart.detail or "rank" in restart.detail
    [diagnosed] = [finding for finding in examine(RunAccess(run)).findings if finding.finding is Diagnosis.HUNG]
    assert diagnosed.details["ranks"] == [1]
    assert "is stuck in wait_for_ever at" in diagnosed.evidence
    assert any("in wait_for_ever" in trace for trace in diagnosed.traces)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_run_starts_even_if_ray_lists_a_node_that_is_gone(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_node(ray_address) as node:
        nodes = [one for one in ray.nodes() if one["Alive"]]
        node.lose()
        assert node.node_id not in {one["NodeID"] for one in reachable_nodes(nodes)}
        probe_all_nodes(str(tmp_path), "run", nodes)
        assert f"1 node did not answer when asked about the storage: {node.node_id[:12]} (" in capsys.readouterr().out


def test_a_preemption_notice_before_the_first_step_is_not_lost(ray_address: str) -> None:
    with open_control() as control:
        control.call(ControlChannel.add_incident_facts, Incident(Cause.NODE_LOST, noticed=1.0))
        assert control.call(ControlChannel.begin_group, worker_group(2)).cause is Cause.NODE_LOST
        control.call(ControlChannel.restart_group, Incident(Cause.PREEMPTED, "node x", 2.0), 30.0)
        lines = control.call(ControlChannel.fetch_news).lines
        assert lines == [f"{Cause.PREEMPTED}: node x; the workers will save a checkpoint and restart"]
        assert control.call(ControlChannel.group) is None, "the group is about to end"
        control.call(ControlChannel.close_incident)
        assert control.call(ControlChannel.command).restart
        again = control.call(ControlChannel.begin_group, worker_group(3))
        assert (again.cause, again.noticed) == (Cause.PREEMPTED, 2.0)
        assert not control.call(ControlChannel.command).restart
        control.call(ControlChannel.restart_group, Incident(Cause.MOVED, "from node x", 3.0), None)
        assert control.call(ControlChannel.command).moves
        control.call(ControlChannel.begin_group, worker_group(4))
        assert not control.call(ControlChannel.command).moves
