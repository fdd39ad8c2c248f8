"""Tests on real Ray that losses, notices and new workers hardly interrupt the other workers."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import ray

from sunspot.elastic import sick_nodes, supervisor
from sunspot.elastic.membership_channel import PROCESS_LIMIT_S
from sunspot.ray_internals.controller import live_controllers, reserved_groups
from sunspot.ray_internals.nodes import draining_nodes
from sunspot.run.attempts import IN_PLACE, read_attempts
from sunspot.run.checkpoints import find_newest_good
from sunspot.run.failures import read_failures
from sunspot.run.incidents import Cause
from sunspot.settings import WorkerRange
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.cluster.scaling import Scaled, scale_run
from tests.end_to_end.test_spot import SLOW
from tests.harness.constants import SetConstants
from tests.harness.nodes import start_node
from tests.harness.program import WORKER_NODE, Program
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    assert_complete,
    newest,
    receipts_of,
    the_run,
    wait_for_receipts,
    wait_for_reported_step,
    worker_processes,
)
from tests.harness.waiting import wait_until
from tests.tasks.interrupted_barrier import BARRIER

SURVIVING = {**SLOW, "SURVIVORS": "auto"}


@pytest.mark.slow
def test_a_killed_worker_is_replaced_while_the_other_workers_keep_training(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    training = program.begin(**SURVIVING, NUM_WORKERS=2, DATASET=make_data(40_000, row_group=1000, test_rows=100))
    wait_for_reported_step(run, 60, training)
    first, second = worker_processes()
    first.kill()
    lost = wait_for_receipts(run, 2, training)[-1]
    assert (lost.cause, lost.tier, lost.replayed) == (Cause.WORKER_LOST, IN_PLACE, 0)
    assert (lost.world_before, lost.world_after) == (2, 1)
    assert second.is_running(), "a survivor keeps its process"
    joined = wait_for_receipts(run, 3, training)[-1]
    assert (joined.cause, joined.tier, joined.replayed, joined.world_after) == (Cause.JOINED, IN_PLACE, 0, 2)
    assert second.is_running()
    training.result(240)
    assert newest(run).step == 2000
    assert "test_accuracy" in newest(run).metrics
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_run_can_be_scaled_down_and_up_again_without_a_restart(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    both = WorkerRange(1, 2)
    training = program.begin(**SURVIVING, NUM_WORKERS="1..2", DATASET=make_data(40_000, row_group=1000))
    wait_for_reported_step(run, 60, training)
    processes = worker_processes()
    assert scale_run(RunAccess(run), WorkerRange(1, 1), 60) == Scaled(WorkerRange(1, 1), both, training=1)
    left = wait_for_receipts(run, 2, training)[-1]
    assert (left.cause, left.tier, left.replayed) == (Cause.SCALE_DOWN, IN_PLACE, 0)
    assert (left.world_before, left.world_after) == (2, 1)
    assert "asked for 1 (`sunspot scale`)" in left.detail
    assert scale_run(RunAccess(run), both, 60).wanted == both
    joined = wait_for_receipts(run, 3, training)[-1]
    assert (joined.cause, joined.tier, joined.replayed, joined.world_after) == (Cause.JOINED, IN_PLACE, 0, 2)
    assert all(process.is_running() for process in processes)
    training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_run_excludes_a_sick_node_without_repeating_a_step(
    program: Program, make_data: MakeData, tmp_path: Path, ray_address: str, set_constants: SetConstants
) -> None:
    set_constants(sick_nodes, SICK_AFTER_S=4.0)
    set_constants(supervisor, SICK_CHECK_EVERY_S=0.5)
    run = the_run(program)
    sick = {"TASK": "tests.tasks.sick", "TASK_ARGS": json.dumps({"folder": str(tmp_path)}), "REPORT_EVERY_S": 0.5}
    sick |= {"NUM_WORKERS": "2..3", "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}'}
    with start_node(ray_address, **WORKER_NODE), start_node(ray_address, **WORKER_NODE) as slow:
        training = program.begin(**{**SURVIVING, **sick}, DATASET=make_data(8000, row_group=1000))
        wait_for_reported_step(run, 60, training)
        processes = worker_processes()
        (tmp_path / "sick").write_text(slow.node_id)
        left = wait_for_receipts(run, 2, training)[-1]
        assert (left.cause, left.tier, left.replayed) == (Cause.SICK_NODE, IN_PLACE, 0)
        assert (left.world_before, left.world_after) == (3, 2)
        assert "its forward passes took 0.1" in left.detail
        assert slow.node_id in draining_nodes(), "Ray schedules nothing more on it"
        assert all(process.is_running() for process in processes)
        training.result(240)
        wait_until(lambda: not (reserved_groups() or live_controllers()))
    assert len(receipts_of(run)) == 2, "no other node is left, and no restart follows"
    assert newest(run).step == 400
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_suspended_worker_that_is_alone_in_its_group_is_not_restarted(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    """The driver presumes the worker lost, but no collective fails in a group of one, so the worker does not notice."""
    run = the_run(program)
    training = program.begin(**SURVIVING, NUM_WORKERS=1, DATASET=make_data(40_000, row_group=1000))
    wait_for_reported_step(run, 60, training)
    [worker] = worker_processes()
    worker.suspend()
    time.sleep(PROCESS_LIMIT_S + 2)
    worker.resume()
    lost = wait_for_receipts(run, 2, training)[-1]
    assert (lost.cause, lost.tier, lost.replayed, lost.world_after) == (Cause.WORKER_LOST, IN_PLACE, 0, 1)
    assert worker.is_running()
    training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_two_replacement_workers_form_a_group_even_if_they_start_at_different_times(
    program: Program, make_data: MakeData, tmp_path: Path, ray_address: str
) -> None:
    """The workers that trained are gone before the second replacement starts. Only the first one is prepared."""
    run, preparing = the_run(program), {"TASK": "tests.tasks.preparing"}
    preparing |= {"TASK_ARGS": json.dumps({"folder": str(tmp_path)}), "DATASET": make_data(20_000, row_group=1000)}
    training = program.begin(**{**SURVIVING, **preparing}, NUM_WORKERS=2)
    wait_for_reported_step(run, 60, training)
    first, second = worker_processes()
    first.kill()
    wait_until((tmp_path / "begun").exists, training)
    second.kill()
    (tmp_path / "go").touch()
    training.result(240)
    assert newest(run).step == 1000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_replacement_that_fails_before_it_trains_is_replaced_while_other_workers_train(
    program: Program, make_data: MakeData, tmp_path: Path, ray_address: str
) -> None:
    run, preparing = the_run(program), {"TASK": "tests.tasks.preparing"}
    preparing |= {"TASK_ARGS": json.dumps({"folder": str(tmp_path)}), "DATASET": make_data(40_000, row_group=1000)}
    (tmp_path / "fail").touch()
    (tmp_path / "go").touch()
    training = program.begin(**{**SURVIVING, **preparing}, NUM_WORKERS=2)
    wait_for_reported_step(run, 60, training)
    first, second = worker_processes()
    first.kill()
    joined = wait_for_receipts(run, 3, training)[-1]
    assert not (tmp_path / "fail").exists()
    assert (joined.cause, joined.tier, joined.replayed, joined.world_after) == (Cause.JOINED, IN_PLACE, 0, 2)
    assert second.is_running()
    [failure] = read_failures(run)
    assert failure.type == "DataError"
    training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_workers_with_sharded_state_are_not_restarted_if_another_worker_is_lost(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    in_parts = {**SURVIVING, "PARALLEL": "fsdp", "NUM_WORKERS": 3}
    training = program.begin(**in_parts, DATASET=make_data(40_000, row_group=1000, test_rows=100))
    wait_for_reported_step(run, 60, training)
    first, *others = worker_processes()
    first.kill()
    lost = wait_for_receipts(run, 2, training)[-1]
    assert (lost.cause, lost.tier, lost.world_after) == (Cause.WORKER_LOST, "memory", 2)
    assert lost.replayed < lost.last_step, "the run continues from the copy, and not from the beginning"
    joined = wait_for_receipts(run, 3, training)[-1]
    assert (joined.cause, joined.tier, joined.replayed, joined.world_after) == (Cause.JOINED, "memory", 0, 3)
    assert all(process.is_running() for process in others)
    training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_replica_leaves_and_returns_without_a_repeated_step(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    replicas = {**SURVIVING, "PARALLEL": "hsdp", "SHARD_DEGREE": 2, "NUM_WORKERS": 4}
    replicas["RESOURCES_PER_WORKER"] = '{"CPU": 0.4}'
    training = program.begin(**replicas, DATASET=make_data(40_000, row_group=1000, test_rows=100))
    wait_for_reported_step(run, 60, training)
    first, *others = worker_processes()
    first.kill()
    lost = wait_for_receipts(run, 2, training)[-1]
    assert (lost.cause, lost.tier, lost.replayed, lost.world_after) == (Cause.WORKER_LOST, IN_PLACE, 0, 2)
    joined = wait_for_receipts(run, 3, training)[-1]
    assert (joined.cause, joined.tier, joined.replayed, joined.world_after) == (Cause.JOINED, IN_PLACE, 0, 4)
    assert all(process.is_running() for process in others)
    training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_step_counts_even_if_the_loss_of_a_worker_interrupts_the_barrier(
    program: Program, make_data: MakeData, ray_address: str, tmp_path: Path
) -> None:
    run = the_run(program)
    replicas = {**SURVIVING, "PARALLEL": "hsdp", "SHARD_DEGREE": 2, "NUM_WORKERS": 4}
    replicas |= {"TASK": "tests.tasks.interrupted_barrier", "TASK_ARGS": json.dumps({"folder": str(tmp_path)})}
    replicas["RESOURCES_PER_WORKER"] = '{"CPU": 0.4}'
    training = program.begin(**replicas, DATASET=make_data(20_000, row_group=1000))
    lost = wait_for_receipts(run, 2, training)[-1]
    assert (lost.cause, lost.tier, lost.replayed, lost.world_after) == (Cause.WORKER_LOST, IN_PLACE, 0, 2)
    assert lost.step == BARRIER
    training.result(240)
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
@pytest.mark.parametrize("survivors", ["auto", "off"])
def test_an_elastic_run_never_has_an_incomplete_replica(
    survivors: str, program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    settings = {**SURVIVING, "SURVIVORS": survivors, "PARALLEL": "hsdp", "NUM_WORKERS": "2..6"}
    settings["RESOURCES_PER_WORKER"] = '{"CPU": 0.2, "spot-worker": 1}'
    with start_node(ray_address, **{"spot-worker": 3}):
        training = program.begin(**settings, DATASET=make_data(40_000, row_group=1000))
        begun = wait_for_receipts(run, 1, training)[0]
        assert begun.world_after == 2, "there is room for three workers, and a replica has two"
        wait_for_reported_step(run, 60, training)
        with start_node(ray_address, **{"spot-worker": 2}) as second:
            grown = wait_for_receipts(run, 2, training)[-1]
            assert (grown.cause, grown.replayed, grown.world_after) == (Cause.SCALE_UP, 0, 4)
            assert {attempt.metadata.settings["SUNSPOT_SHARD_DEGREE"] for attempt in read_attempts(run)} == {"2"}
            wait_for_reported_step(run, grown.last_step + 20, training)
            second.lose()
            assert wait_for_receipts(run, 3, training)[-1].world_after == 2
            training.result(240)
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_run_finishes_without_a_preempted_node(program: Program, make_data: MakeData, ray_address: str) -> None:
    run = the_run(program)
    workers = {"NUM_WORKERS": 2, "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}'}
    with start_node(ray_address, **WORKER_NODE) as going:
        training = program.begin(**SURVIVING, **workers, DATASET=make_data(20_000, row_group=1000))
        wait_for_reported_step(run, 60, training)
        going.reclaim()
        left = wait_for_receipts(run, 2, training)[-1]
        assert (left.cause, left.tier, left.replayed) == (Cause.PREEMPTED, IN_PLACE, 0)
        assert (left.world_before, left.world_after) == (2, 1)
        training.result(240)
        wait_until(
            lambda: not (reserved_groups() or live_controllers())
        )  # otherwise, the next training would wait for these nodes
    assert len(receipts_of(run)) == 2
    assert newest(run).step == 1000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_an_elastic_run_continues_without_a_lost_node_until_another_node_joins(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    run = the_run(program)
    workers = {"NUM_WORKERS": "1..2", "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}'}
    with start_node(ray_address, **WORKER_NODE) as going:
        training = program.begin(**SURVIVING, **workers, DATASET=make_data(40_000, row_group=1000))
        begun = wait_for_receipts(run, 1, training)[0]
        assert begun.world_after == 2, "the run begins on all nodes"
        wait_for_reported_step(run, 60, training)
        going.lose()
        lost = wait_for_receipts(run, 2, training)[-1]
        assert (lost.tier, lost.replayed, lost.world_after) == (IN_PLACE, 0, 1)
        placed = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        assert [group["strategy"] for group in placed] == ["STRICT_SPREAD"], (
            "otherwise Ray's head would try to place the worker without a pause"
        )
    with start_node(ray_address, **WORKER_NODE):
        joined = wait_for_receipts(run, 3, training)[-1]
        assert (joined.cause, joined.tier, joined.replayed, joined.world_after) == (Cause.JOINED, IN_PLACE, 0, 2)
        training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_run_continues_on_a_new_node_after_all_its_nodes_were_preempted(
    program: Program, make_data: MakeData, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sees no error from the workers that saved and ended, because their nodes are gone before its next poll."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "15")
    run = the_run(program)
    workers = {"NUM_WORKERS": "1..2", "RESOURCES_PER_WORKER": '{"CPU": 1, "spot-worker": 1}'}
    spot = partial(start_node, ray_address, **{"spot-worker": 1.0})
    with spot() as first, spot() as second:
        training = program.begin(**SURVIVING, **workers, DATASET=make_data(40_000, row_group=1000))
        wait_for_reported_step(run, 60, training)
        first.reclaim()
        second.reclaim()
        wait_until(lambda: find_newest_good(run, read_attempts(run))[0], training)
        first.lose()
        second.lose()
    with spot():
        again = wait_for_receipts(run, 2, training)[-1]
        assert (again.cause, again.replayed) == (Cause.PREEMPTED, 0)
        training.result(240)
    assert newest(run).step == 2000
    assert_complete(run)
    assert_audit_clean(program)


@pytest.mark.slow
def test_workers_that_wait_for_a_hung_rank_continue_without_it(
    program: Program, make_data: MakeData, tmp_path: Path, ray_address: str
) -> None:
    hanging = {"TASK": "tests.tasks.hanging", "TASK_ARGS": json.dumps({"marker": str(tmp_path / "has hung")})}
    program.run(**{**SURVIVING, **hanging}, NUM_WORKERS=2, DATASET=make_data(2000), HANG_TIMEOUT_S=8)
    run = the_run(program)
    hung = receipts_of(run)[1]
    assert (hung.cause, hung.tier, hung.replayed, hung.world_after) == (Cause.HUNG, IN_PLACE, 0, 1)
    assert newest(run).step == 100
    assert_audit_clean(program)
