"""Tests of the finding about a run that is training with fewer workers than requested."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sunspot.run import Run
from sunspot.run.status import RunState, Status, write_status_as_is
from sunspot.submitter.cluster.views import mark_lost_pods, pod_view
from tests.harness.commands import Command
from tests.harness.kubernetes import CORE, FakeCluster, answer, pod, rayjob, timestamp
from tests.harness.runs import begin, start

JOB, CLUSTER = "run-1", "run-1-x"


def train(run: Run, *world_sizes: int, state: RunState = RunState.RUNNING, **more: str) -> None:
    """Start one attempt per minute with these numbers of workers. The last attempt started a minute ago."""
    begin(run)
    now = time.time()
    settings = {"SUNSPOT_NUM_WORKERS": "2..3"} | {f"SUNSPOT_{name}": value for name, value in more.items()}
    for number, world_size in enumerate(world_sizes):
        at = now - 60 * (len(world_sizes) - number)
        attempt = start(run, JOB, world_size=world_size, settings=settings, tier="beginning", at=at)
    usual = {"step": 7, "total_steps": 100, "began": now - 500, "heartbeat": now, "driver": f"{len(world_sizes):08x}"}
    status = Status(state, JOB, attempt=attempt.number, world_size=world_sizes[-1], **usual)
    write_status_as_is(run, status)


@pytest.fixture
def job(cluster: FakeCluster) -> FakeCluster:
    """A running RayJob of 2 to 3 workers, with all of its pods."""
    made = rayjob(JOB)
    spec = made["spec"]["rayClusterSpec"]
    spec["workerGroupSpecs"][0] |= {"maxReplicas": 3}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        group["template"]["spec"]["containers"][0]["env"] = [{"name": "SUNSPOT_NUM_WORKERS", "value": "2..3"}]
    cluster.put_job(made)
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    workers = [pod(f"{CLUSTER}-worker-{number}", CLUSTER) for number in (1, 2, 3)]
    cluster.pods = [pod(f"{CLUSTER}-head", CLUSTER, head=True), *workers]
    return cluster


def put_nodes(cluster: FakeCluster, *not_ready: int, gone: int = 0) -> None:
    """Add a node for each pod except the one with a lost node."""
    nodes = []
    for each in cluster.pods:
        name = each["spec"]["nodeName"]
        ready = not name.endswith(tuple(f"-{number}" for number in not_ready)) if not_ready else True
        since = timestamp(1_700_000_000)
        conditions = [{"type": "Ready", "status": "True" if ready else "Unknown", "lastTransitionTime": since}]
        if not (gone and name.endswith(f"-{gone}")):
            nodes.append({"metadata": {"name": name}, "spec": {}, "status": {"conditions": conditions}})
    cluster.documents["/api/v1/nodes"] = {"items": nodes}


def findings(sunspot: Command) -> dict[str, dict[str, Any]]:
    assert sunspot("doctor", "run", "--json") == 0, sunspot.err
    return {finding["finding"]: finding for finding in sunspot.json["findings"]}


def test_a_run_with_all_its_workers_is_healthy(job: FakeCluster, run: Run, sunspot: Command) -> None:
    train(run, 3)
    assert list(findings(sunspot)) == ["healthy"]
    assert not any(path.startswith("/api/v1/nodes") for _, path in job.requests), "nothing is to be explained by them"


def test_pods_on_lost_nodes_do_not_count_as_running(job: FakeCluster, run: Run, sunspot: Command) -> None:
    """The phase of such pods is Running until Kubernetes deletes them."""
    train(run, 3, 1)
    put_nodes(job, 2, gone=3)
    found = findings(sunspot)
    assert list(found) == ["nodes unavailable", "fewer workers"]
    evidence = [finding["evidence"] for finding in sunspot.json["findings"]]
    second, third = (f"pod {CLUSTER}-worker-{number}: its node node-of-{CLUSTER}-worker-{number}" for number in (2, 3))
    assert evidence[0] == f"{second} is not ready since 2023-11-14 22:13:20 UTC"
    assert evidence[1] == f"{third} no longer exists"
    assert evidence[2].startswith("1 of 2..3 workers train since ")
    assert f"for 60 s; waiting for: pod {CLUSTER}-worker-2 (its node node-of-{CLUSTER}-worker-2 is not" in evidence[2]
    assert (found["fewer workers"]["workers"], found["fewer workers"]["severity"]) == (1, "note")
    assert found["fewer workers"]["step"] == 7
    assert sunspot("status", "run") == 0
    assert "3 worker pods wanted, 1 running" in sunspot.out
    assert "attempt:    2, 1 of 2..3 workers train" in sunspot.out


def test_pods_on_lost_nodes_are_found_while_no_worker_trains(job: FakeCluster, run: Run, sunspot: Command) -> None:
    train(run, 3, 0, state=RunState.STARTING)
    put_nodes(job, 1, 2, 3)
    assert list(findings(sunspot)) == ["nodes unavailable", "starting"]
    assert sunspot("status", "run") == 0
    assert "3 worker pods wanted, 0 running" in sunspot.out


def test_doctor_reports_that_nodes_cannot_be_listed(job: FakeCluster, run: Run, sunspot: Command) -> None:
    train(run, 3, 2)
    job.forbidden.add("/api/v1/nodes")
    found = findings(sunspot)
    assert list(found) == ["fewer workers"]
    assert "2 of 2..3 workers train" in found["fewer workers"]["evidence"]
    assert found["fewer workers"]["waits_for"] == "the workers in running pods, which have not joined yet"
    assert sunspot.json["unseen"][0].startswith("its nodes: ")
    assert sunspot("status", "run", "--json") == 0
    assert sunspot.json["reason"] == "2 of 2..3 workers train"
    assert "nodes" not in sunspot.err, "most users may not list them"


@pytest.mark.parametrize(
    ("last", "waits_for"),
    [
        (None, "1 more worker pod (the cluster was not asked for them, or has not created them yet)"),
        ({"phase": "Pending"}, f"pod {CLUSTER}-worker-3 (it is starting)"),
        (
            {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: x"}],
            },
            f"pod {CLUSTER}-worker-3 (no node takes it (0/3 nodes: x))",
        ),
    ],
)
def test_doctor_says_what_a_run_with_missing_workers_waits_for(
    job: FakeCluster, run: Run, sunspot: Command, last: dict[str, Any] | None, waits_for: str
) -> None:
    train(run, 3, 2, 2)
    job.pods[-1:] = [pod(f"{CLUSTER}-worker-3", CLUSTER, **last)] if last else []
    put_nodes(job)
    found = findings(sunspot)["fewer workers"]
    assert found["waits_for"] == waits_for
    assert found["since"] == pytest.approx(time.time() - 120, abs=20), "since the first attempt with fewer"


def test_pods_that_the_user_cannot_list_are_not_reported_as_missing(
    job: FakeCluster, run: Run, sunspot: Command
) -> None:
    train(run, 1)
    job.on("GET", f"{CORE}/pods", answer(403, "no pods"))
    assert findings(sunspot)["fewer workers"]["waits_for"] == "not known, because no cluster shows its pods"


def test_missing_workers_are_reported_even_without_a_cluster(run: Run, sunspot: Command) -> None:
    train(run, 1)
    found = findings(sunspot)
    assert list(found) == ["fewer workers"]
    assert found["fewer workers"]["waits_for"] == "room on this machine"


def test_doctor_reports_the_number_of_replicas_that_are_training(run: Run, sunspot: Command) -> None:
    train(run, 8, NUM_WORKERS="8..32", PARALLEL="hsdp", SHARD_DEGREE="8")
    assert "8 of 8..32 workers (1 of 1..4 replicas) train since" in findings(sunspot)["fewer workers"]["evidence"]


def test_only_pods_whose_nodes_are_known_to_be_lost_are_marked_as_lost() -> None:
    view = pod_view(pod("w", CLUSTER))
    ready = {"metadata": {"name": view.node}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert mark_lost_pods([view], []) == (view,), "no nodes were listed"
    assert mark_lost_pods([view], [ready]) == (view,)
    [lost] = mark_lost_pods([view], [{**ready, "metadata": {"name": "another"}}])
    assert not lost.ready
    assert "no longer exists" in lost.lost
