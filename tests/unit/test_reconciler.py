"""Tests of `sunspot wait --all`: restarts of a namespace's runs, and the annotations of their RayJobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from sunspot.run import Run
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.cluster.waiting import Reconciler
from sunspot.submitter.manifest.pods import set_variable
from tests.harness.commands import Command
from tests.harness.kubernetes import FakeCluster, answer, kept, rayjob, submitted
from tests.harness.runs import set_status
from tests.harness.waiting import wait_until

GIVEN_UP = {"deployment": "Failed", "ray": "RUNNING", "reason": "JobStatusCheckTimeoutExceeded"}

SAVED = {"checkpoint": "step-00000005-attempt-0001", "checkpoint_time": 1764104400.0}


@pytest.fixture
def shown() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def reconciler(cluster: FakeCluster, run: Run, shown: list[tuple[str, str]]) -> Reconciler:
    return Reconciler(connect(), run.storage.locate(""), lambda name, state, reason: shown.append((name, str(state))))


def another(job: dict[str, Any]) -> dict[str, Any]:
    """Return a RayJob with the name of one that is gone."""
    return {**job, "metadata": {**job["metadata"], "uid": "another"}}


def annotations(cluster: FakeCluster, name: str) -> dict[str, str]:
    return cluster.jobs[name]["metadata"].get("annotations", {})


def changes(cluster: FakeCluster) -> list[str]:
    return [method for method, _ in cluster.requests if method in ("PATCH", "DELETE")]


def test_a_local_path_in_a_rayjob_is_not_read(
    cluster: FakeCluster, run: Run, shown: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    set_status(run, RunState.RUNNING, owner="run-1", step=4)
    job = rayjob("run-1")
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "SUNSPOT_STORAGE_PATH", "value": run.storage.locate("")})
    cluster.put_job(job)
    reconciler = Reconciler(connect(), None, lambda name, state, reason: shown.append((name, str(state))))
    for _ in range(2):
        reconciler.reconcile()
    assert (shown, changes(cluster)) == ([], [])
    assert (
        capsys.readouterr().err.count(
            f"the location {run.storage.locate('')} of run run is known only from the RayJob run-1"
        )
        == 1
    )


def test_a_rayjob_is_annotated_with_the_state_of_its_run(
    cluster: FakeCluster, run: Run, reconciler: Reconciler, shown: list[tuple[str, str]]
) -> None:
    cluster.put_job(rayjob("run-0", created=time.time() - 100))
    cluster.put_job(rayjob("run-1"))
    reconciler.reconcile()
    assert annotations(cluster, "run-1") == {"sunspot/state": "pending"}
    cluster.set_status("run-1", "Running", "RUNNING")
    set_status(run, RunState.RUNNING, step=7, **SAVED)
    reconciler.reconcile()
    expected = {
        "sunspot/state": "running",
        "sunspot/step": "7",
        "sunspot/total-steps": "10",
        "sunspot/checkpoint": "5",
        "sunspot/checkpoint-time": "2025-11-25T21:00:00Z",
    }
    assert annotations(cluster, "run-1") == expected
    before = len(changes(cluster))
    reconciler.reconcile()
    assert len(changes(cluster)) == before, "nothing has changed"
    set_status(run, RunState.SUCCEEDED, step=10, **SAVED)
    cluster.set_status("run-1", "Complete", "SUCCEEDED")
    reconciler.reconcile()
    reconciler.reconcile()
    assert annotations(cluster, "run-1")["sunspot/state"] == "succeeded"
    assert shown == [("run", "pending"), ("run", "running"), ("run", "succeeded")]
    assert annotations(cluster, "run-0") == {}, "another has taken its place"


def test_a_run_that_moves_within_a_namespace_is_shown_as_running(
    cluster: FakeCluster, run: Run, reconciler: Reconciler, shown: list[tuple[str, str]]
) -> None:
    cluster.put_job(rayjob("run-1", created=time.time() - 100))
    cluster.set_status("run-1", "Running", "RUNNING")
    coming = rayjob("run-2")
    set_variable(coming, "SUNSPOT_MOVES_FROM", "run-1")
    cluster.put_job(coming)
    set_status(run, RunState.RUNNING, step=7, **SAVED)
    reconciler.reconcile()
    assert shown == [("run", "running")]
    assert annotations(cluster, "run-1")["sunspot/state"] == "running"
    assert annotations(cluster, "run-2") == {}, "it is not training yet"


def put_failed_move(cluster: FakeCluster) -> None:
    """Add a RayJob that trains the run, and a failed newer one to which the run should have moved."""
    cluster.put_job(submitted(rayjob("run-1", created=time.time() - 100)))
    cluster.set_status("run-1", "Running", "RUNNING")
    coming = rayjob("run-2")
    set_variable(coming, "SUNSPOT_MOVES_FROM", "run-1")
    cluster.put_job(coming)
    cluster.set_status("run-2", "Failed", "FAILED")


def test_a_run_is_still_watched_after_its_move_has_failed(
    cluster: FakeCluster, run: Run, reconciler: Reconciler
) -> None:
    put_failed_move(cluster)
    set_status(run, RunState.RUNNING, step=7, **SAVED)
    reconciler.reconcile()
    set_status(run, RunState.RUNNING, step=8, **SAVED)
    reconciler.reconcile()
    assert annotations(cluster, "run-1")["sunspot/step"] == "8"


def test_a_job_whose_head_stops_answering_after_a_failed_move_is_restarted(
    cluster: FakeCluster, run: Run, reconciler: Reconciler
) -> None:
    put_failed_move(cluster)
    set_status(run, RunState.RUNNING, step=7, **SAVED)
    cluster.set_status("run-1", **GIVEN_UP)
    reconciler.reconcile()
    wait_until(lambda: "status" not in cluster.jobs.get("run-1", {"status": "gone"}), seconds=20)
    assert "status" in cluster.jobs["run-2"]


def test_a_restart_by_gitops_does_not_delay_other_runs(
    cluster: FakeCluster, reconciler: Reconciler, shown: list[tuple[str, str]]
) -> None:
    for name in ("one", "two"):
        cluster.put_job(kept(rayjob(f"{name}-1", run=name)))
        cluster.set_status(f"{name}-1", **GIVEN_UP)
    cluster.put_job(rayjob("by-hand-1", run="by-hand"))
    cluster.set_status("by-hand-1", **GIVEN_UP)
    reconciler.reconcile()
    wait_until(lambda: list(cluster.jobs) == ["by-hand-1"], seconds=20)
    cluster.put_job(another(kept(rayjob("two-1", run="two"))))
    reconciler.reconcile()
    cluster.put_job(another(kept(rayjob("one-1", run="one"))))
    wait_until(lambda: not [each for each in threading.enumerate() if "_start_again" in each.name], seconds=20)
    expected = {("one", "retrying"), ("two", "retrying"), ("two", "pending"), ("by-hand", "failed")}
    assert len(shown) == 4
    assert set(shown) == expected


def test_submitted_runs_are_restarted_if_the_user_can_create_rayjobs(
    cluster: FakeCluster, run: Run, reconciler: Reconciler, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.put_job(submitted(rayjob("run-1")))
    cluster.set_status("run-1", **GIVEN_UP)
    cluster.forbidden.add("create rayjobs")
    reconciler.reconcile()
    said = "has no permission to create it again; ask for the Role sunspot-submitter"
    wait_until(lambda: said in capsys.readouterr().err, seconds=20)
    assert "run-1" in cluster.jobs
    cluster.forbidden.clear()
    Reconciler(connect(), run.storage.locate(""), lambda *words: None).reconcile()
    wait_until(lambda: "status" not in cluster.jobs.get("run-1", {"status": "gone"}), seconds=20)


def test_a_failed_update_is_retried_but_its_error_is_printed_once(
    cluster: FakeCluster, run: Run, reconciler: Reconciler, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.put_job(rayjob("run-1"))
    cluster.on("PATCH", "rayjobs", answer(403, 'User "me" cannot patch rayjobs'), times=2)
    for _ in range(3):
        reconciler.reconcile()
    assert capsys.readouterr().err.count('run: User "me" cannot patch rayjobs') == 1
    assert annotations(cluster, "run-1") == {"sunspot/state": "pending"}
    cluster.down()
    reconciler.reconcile()
    cluster.up()
    reconciler.reconcile()
    said = capsys.readouterr().err
    assert "the API server has been unreachable for" in said
    assert "the API server is back" in said


def test_a_rayjob_that_disappears_is_not_an_error(cluster: FakeCluster) -> None:
    cluster.put_job(rayjob("run-1"))
    api = connect()
    [job] = api.list_jobs()
    cluster.delete_job("run-1")
    api.annotate(job, {"sunspot/state": "running"})
    cluster.put_job(another(rayjob("run-1")))
    api.annotate(job, {"sunspot/state": "running"})
    assert annotations(cluster, "run-1") == {}


def test_an_interrupt_ends_the_wait_for_all_runs(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    for words in ([], ["run", "--all"], ["--all", "--timeout", "1"]):
        assert sunspot("wait", *words) == 2
        assert "pass either the name of a run or --all" in sunspot.err
    cluster.put_job(rayjob("run-1"))
    command = [sys.executable, "-m", "sunspot.cli", "wait", "--all", "--storage", run.storage.locate("")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout
        assert waiting.stdout.readline() == "run: pending\n"
        os.kill(waiting.pid, signal.SIGINT)
        _, said = waiting.communicate(timeout=20)
    assert waiting.returncode == 130
    assert "Traceback" not in said
    cluster.on("GET", "rayjobs", answer(403, 'User "me" cannot list rayjobs'))
    assert sunspot("wait", "--all") == 4
