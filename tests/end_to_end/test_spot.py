"""What a run loses when nodes come and go, workers die, hang, or come back from the dead; on real Ray workers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
import ray

from app.elastic.control import open_control
from app.ray_internals import reachable_nodes
from app.run.attempts import read_attempts
from app.run.failures import read_failures
from app.run.history import read_journal
from app.run.incidents import Cause, read_receipts
from app.train.probe import probe_all_nodes
from submitter.doctor.diagnose import examine
from submitter.findings import Diagnosis
from tests.harness.nodes import start_node
from tests.harness.program import Program
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    assert_complete,
    kill_all,
    newest,
    receipts_of,
    the_run,
    wait_for_receipts,
    wait_for_step,
    worker_processes,
)

SLOW = {
    "TASK": "tests.tasks.slow",
    "GLOBAL_BATCH_SIZE": 20,
    "EPOCHS": 1,
    "CHECKPOINT_EVERY_STEPS": 0,
    "REPORT_EVERY_S": 1,
}
"""About 50 steps in a second, and no checkpoint before the end of the epoch."""

ELASTIC = {**SLOW, "NUM_WORKERS": "1..2", "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}'}
PLACE = {"training-worker": 1.0}


def test_a_node_that_is_told_to_go_costs_no_step(program: Program, make_data: MakeData, ray_address: str) -> None:
    run = the_run(program)
    with start_node(ray_address, **PLACE) as going, start_node(ray_address, **PLACE):
        process = program.start(**ELASTIC, DATASET=make_data(20_000, row_group=1000, test_rows=100))
        wait_for_receipts(run, 1, process)
        time.sleep(3)
        going.reclaim()
        receipt = wait_for_receipts(run, 2, process)[-1]
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert (receipt.cause, receipt.replayed) == (Cause.PREEMPTED, 0)
    assert (receipt.world_before, receipt.world_after) == (2, 1)
    assert receipt.noticed is not None
    assert receipt.committed is not None
    assert receipt.noticed < receipt.committed < receipt.restarted < receipt.first_step
    assert newest(run).step == 1000
    assert "test_accuracy" in newest(run).metrics
    assert read_failures(run) == [], "workers that end for a restart have not failed"
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_node_that_comes_is_used_and_costs_no_step(program: Program, make_data: MakeData, ray_address: str) -> None:
    run = the_run(program)
    with start_node(ray_address, **PLACE):
        process = program.start(**ELASTIC, DATASET=make_data(60_000, row_group=1000))
        wait_for_receipts(run, 1, process)
        with start_node(ray_address, **PLACE):
            receipt = wait_for_receipts(run, 2, process)[-1]
            output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert (receipt.cause, receipt.replayed) == (Cause.SCALE_UP, 0)
    assert (receipt.world_before, receipt.world_after) == (1, 2)
    assert newest(run).step == 3000
    assert read_failures(run) == [], "workers that end for a restart have not failed"
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.parametrize("loader", ["torch", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_lost_worker_costs_the_steps_since_the_copy_in_memory(
    loader: str, program: Program, make_data: MakeData
) -> None:
    process = program.start(**SLOW, DATASET=make_data(20_000, row_group=1000), LOADER=loader)
    run = the_run(program)
    wait_for_receipts(run, 1, process)
    time.sleep(5)
    worker_processes()[0].kill()
    lost = wait_for_receipts(run, 2, process)[-1]
    assert (lost.cause, lost.tier) == (Cause.WORKER_LOST, "memory")
    assert lost.last_step > 50, "it had hardly begun"
    assert lost.replayed <= 50, "with no checkpoint in storage, all steps would have been lost"
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert newest(run).step == 1000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_driver_that_comes_back_from_the_dead_writes_nothing(program: Program, make_data: MakeData) -> None:
    """As in a network that was cut: the old job stands still while another takes over, and then goes on."""
    settings = {**SLOW, "DATASET": make_data(40_000, row_group=1000), "NUM_WORKERS": 1, "CHECKPOINT_EVERY_STEPS": 50}
    old = program.start(**settings)
    run = the_run(program)
    wait_for_step(run, 50, old)
    frozen = [psutil.Process(old.pid), *worker_processes()]
    for process in frozen:
        process.suspend()
    new = program.start(**settings)
    wait_for_receipts(run, 2, new)
    wait_for_step(run, newest(run).step + 50, new)
    before = newest(run)
    for process in frozen:
        process.resume()
    output = old.communicate(timeout=200)[0]
    assert old.returncode == 6, output
    assert "owns the run" in output
    wait_for_step(run, before.step + 50, new)
    assert newest(run).attempt == before.attempt == 2
    kill_all(new)
    [_, takeover] = receipts_of(run)
    assert takeover.cause is Cause.DRIVER_LOST
    owners = [attempt.owner for attempt in read_attempts(run)]
    assert len(owners) == len(set(owners)) == 2, "the first one came back"
    assert_audit_clean(program)


@pytest.mark.slow
def test_storage_that_stays_away_ends_the_run_at_its_limit(program: Program, make_data: MakeData) -> None:
    slow = {**SLOW, "DATASET": make_data(60_000, row_group=1000), "NUM_WORKERS": 1, "CHECKPOINT_EVERY_STEPS": 50}
    process = program.start(**slow, STORAGE_TIMEOUT_S=5)
    wait_for_step(the_run(program), 50, process)
    storage = Path(program.settings["STORAGE_PATH"])
    storage.rename(storage.with_name("away"))
    storage.touch()  # a file: nothing can be written below it
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 4, output
    assert "no checkpoint could be committed for" in output.splitlines()[-1], output
    assert "beginning an attempt" not in output, "no other worker group can mend it"


@pytest.mark.slow
def test_a_hung_rank_tells_where_and_is_started_again(program: Program, make_data: MakeData, tmp_path: Path) -> None:
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
    [diagnosed] = [finding for finding in examine(None, run).findings if finding.finding is Diagnosis.HUNG]
    assert diagnosed.details["ranks"] == [1]
    assert "stands in wait_for_ever at" in diagnosed.evidence
    assert any("in wait_for_ever" in trace for trace in diagnosed.traces)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_node_that_is_gone_keeps_no_run_from_starting(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_node(ray_address) as node:
        nodes = [one for one in ray.nodes() if one["Alive"]]
        node.lose()
        assert node.node_id not in {one["NodeID"] for one in reachable_nodes(nodes)}
        probe_all_nodes(str(tmp_path), "run", nodes)
        assert f"node {node.node_id[:12]} did not say" in capsys.readouterr().out


def test_a_notice_before_the_first_step_is_not_forgotten(ray_address: str) -> None:
    with open_control() as control:
        ray.get(control.note.remote(cause="node lost", noticed=1.0))
        assert ray.get(control.begin.remote({"attempt": 2}))["cause"] == "node lost"
        ray.get(control.restart_group.remote("reclaim", "node x", 2.0, 30.0))
        assert ray.get(control.group.remote()) == {}, "it is about to end"
        ray.get(control.recovered.remote())
        assert ray.get(control.command.remote()).restart
        again = ray.get(control.begin.remote({"attempt": 3}))
        assert (again["cause"], again["noticed"]) == ("reclaim", 2.0)
        assert not ray.get(control.command.remote()).restart
