"""Tests of RayJobs that are deleted while their runs train."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sunspot.run import Run
from sunspot.run.owner import cluster_identity
from sunspot.run.requests import SubmissionRecord, record_submission, request_stop
from sunspot.run.status import RunState, Status, write_status_as_is
from sunspot.submitter.cluster.api import connect
from tests.harness.commands import Command
from tests.harness.kubernetes import CORE, JOBS, FakeCluster, rayjob
from tests.harness.runs import age, begin, commit, start

OWNER = f"run-1#00c0ffee@sunspot/{cluster_identity('A')}"


@pytest.fixture(autouse=True)
def identity(cluster: FakeCluster) -> None:
    cluster.documents[f"{CORE}/configmaps/kube-root-ca.crt"] = {"data": {"ca.crt": "A"}}


def train(run: Run, silent_s: float = 0.0, owner: str = OWNER, **more: Any) -> None:
    """Write a checkpoint of step 42, and a status of step 41 that is `silent_s` seconds old."""
    begin(run)
    attempt = start(run, owner, tier="beginning", world_size=2)
    commit(run, attempt, 42)
    usual = {"step": 41, "total_steps": 100, "attempt": attempt.number, "world_size": 2, "driver": f"{1:08x}"}
    status = Status(**{"state": RunState.RUNNING, **usual, "time": time.time() - silent_s, "owner": owner, **more})
    write_status_as_is(run, status)
    age(run, silent_s, "status")


def state(sunspot: Command) -> tuple[str, str]:
    assert sunspot("status", "run", "--json") == 0, sunspot.err
    return sunspot.json["state"], sunspot.json["reason"]


GONE = "its RayJob run-1 is gone from namespace sunspot"


def test_every_command_reports_that_the_rayjob_is_gone(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    train(run, silent_s=40)
    said = f"{GONE}, so nothing is training it; saved at step 42; submit it again to continue from there"
    assert state(sunspot) == ("lost", said)
    assert sunspot("list", "--json") == 0
    assert (sunspot.json[0]["state"], sunspot.json[0]["reason"]) == ("lost", said)
    assert sunspot("wait", "run") == 1
    assert f"run lost: {said}" in sunspot.err
    assert sunspot("doctor", "run", "--json") == 0
    [finding] = sunspot.json["findings"]
    assert (finding["finding"], finding["severity"], finding["evidence"]) == ("lost", "error", said)
    assert "delete" not in finding["advice"]


def test_a_run_is_shown_as_stopping_while_its_processes_save(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    train(run)
    assert state(sunspot) == (
        "stopping",
        f"{GONE}; its processes are still alive, and save before they end; saved at step 42",
    )
    assert sunspot("doctor", "run", "--json") == 0
    assert [finding["finding"] for finding in sunspot.json["findings"]] == ["lost"]


def test_a_run_with_a_stop_marker_is_stopped(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    train(run, silent_s=40)
    request_stop(run, "me")
    assert state(sunspot) == ("stopped", f"told to stop; {GONE}; saved at step 42")


def test_a_succeeded_run_stays_succeeded_after_its_rayjob_is_deleted(
    cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    train(run, state=RunState.SUCCEEDED, reason="all is done")
    assert state(sunspot) == ("succeeded", "all is done")


def let_it_live(cluster: FakeCluster) -> None:
    """Make a search's RayJob train the run. The RayJob's label contains the name of the search."""
    cluster.put_job(rayjob("run-1", run="search"))


@pytest.mark.parametrize(
    ("owner", "change"),
    [
        (f"run-1#00c0ffee@sunspot/{cluster_identity('B')}", None),
        (f"run-1#00c0ffee@other/{cluster_identity('A')}", None),
        ("run-1#00c0ffee", None),
        ("a-laptop-77-0a1b2c3d", None),
        (OWNER, let_it_live),
        (OWNER, lambda cluster: cluster.forbidden.add(f"{JOBS}/run-1")),
        (OWNER, lambda cluster: cluster.forbidden.add(JOBS)),
        (OWNER, lambda cluster: cluster.forbidden.add(f"{CORE}/configmaps/kube-root-ca.crt")),
        (OWNER, lambda cluster: cluster.down()),
    ],
    ids=[
        *("another cluster", "another namespace", "an unknown place", "no RayJob at all", "a search trains it"),
        *("it may not be read", "none may be listed", "the cluster is not known", "the cluster is away"),
    ],
)
def test_a_rayjob_that_might_exist_is_not_reported_as_deleted(
    cluster: FakeCluster, run: Run, sunspot: Command, owner: str, change: Callable[[FakeCluster], Any] | None
) -> None:
    train(run, owner=owner)
    if change:
        change(cluster)
    assert state(sunspot) == ("running", "2 workers train")
    assert sunspot("list", "--json") == 0
    assert sunspot.json[0]["state"] == "running"


def submitted(run: Run, **place: str) -> None:
    record_submission(run, SubmissionRecord("run-1", **place))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"namespace": "sunspot", "cluster": cluster_identity("A")}, "lost"),
        ({"namespace": "sunspot", "server": "here"}, "lost"),
        ({"namespace": "other", "cluster": cluster_identity("A")}, "pending"),
        ({"namespace": "sunspot", "cluster": cluster_identity("B")}, "pending"),
        ({"namespace": "sunspot", "server": "https://elsewhere"}, "pending"),
        ({}, "lost"),
    ],
)
def test_a_rayjob_deleted_before_its_driver_began_is_reported(
    cluster: FakeCluster, run: Run, sunspot: Command, place: dict[str, str], expected: str
) -> None:
    here = {"server": connect().server} if place.get("server") == "here" else {}
    submitted(run, **{**place, **here})
    found, reason = state(sunspot)
    assert found == expected
    gone = f"{GONE}, and its driver never began; nothing is saved; submit it again"
    assert (reason == gone) is (expected == "lost")
    assert sunspot("list", "--json") == 0
    assert sunspot.json[0]["state"] == expected


def test_doctor_says_where_a_run_last_trained_if_this_cluster_has_no_rayjob_for_the_run(
    cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    elsewhere = f"run-1#00c0ffee@other/{cluster_identity('B')}"
    train(run, silent_s=40, owner=elsewhere)
    assert sunspot("doctor", "run", "--json") == 0
    [unseen] = sunspot.json["unseen"]
    assert f"the run has no RayJob in namespace sunspot of {connect().server}" in unseen
    place = f"run-1 in namespace other of cluster {cluster_identity('B')}"
    assert f"it was last trained by {place}" in unseen
    [finding] = sunspot.json["findings"]
    assert finding["finding"] == "silent"
    assert f"delete its RayJob ({place}), and submit again" in finding["advice"]
