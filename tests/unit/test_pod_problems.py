"""Tests of the reasons why a run's pods are not running."""

from __future__ import annotations

from typing import Any

from sunspot.submitter.cluster.pod_problems import HEAD, find_past_problems, find_problems
from sunspot.submitter.cluster.views import JobView, WarningEvent, job_view, mark_lost_pods, pod_view
from sunspot.submitter.findings import Diagnosis
from tests.harness.kubernetes import pod, rayjob

CLUSTER = "run-1-x"


def job() -> JobView:
    """Return a RayJob with two workers."""
    raw = rayjob("run-1")
    raw["status"] = {"rayClusterName": CLUSTER}
    return job_view(raw)


def waiting(reason: str, message: str) -> dict[str, Any]:
    """Return the status of a pending pod with a container that cannot start."""
    container = {"name": "ray", "image": "sunspot:1", "state": {"waiting": {"reason": reason, "message": message}}}
    return {"phase": "Pending", "containerStatuses": [container]}


def test_a_running_pod_has_no_problem() -> None:
    pods = [pod_view(pod("head", CLUSTER, head=True)), *(pod_view(pod(name, CLUSTER)) for name in ("a", "b"))]
    old = WarningEvent("a", "FailedMount", 'secret "keys" not found', 0.0)
    assert find_problems(job(), pods, [old]) == []


def test_a_pods_problem_is_read_from_its_status_or_a_warning_event() -> None:
    head = pod_view(pod("head", CLUSTER, head=True, **waiting("ImagePullBackOff", "ErrImagePull: not found")))
    workers = [pod_view(pod(name, CLUSTER, phase="Pending")) for name in ("a", "b")]
    warnings = [
        WarningEvent("a", "FailedScheduling", "explained by the status", 2.0),
        WarningEvent("a", "FailedMount", 'secret "keys" not found', 1.0),
    ]
    image, missing = find_problems(job(), [head, *workers], warnings)
    assert (image.kind, image.pod, image.group) == (Diagnosis.IMAGE, "head", HEAD)
    assert image.evidence == "image sunspot:1 cannot be pulled: not found"
    assert (missing.kind, missing.pod, missing.group) == (Diagnosis.MISSING, "a", "workers")
    assert missing.evidence == 'FailedMount: secret "keys" not found'


def test_the_reason_why_a_pod_cannot_be_created_is_reported() -> None:
    head = pod_view(pod("head", CLUSTER, head=True))
    refusal = WarningEvent(CLUSTER, "FailedToCreateWorkerPod", "exceeded quota", 0.0)
    [problem] = find_problems(job(), [head], [refusal])
    assert problem.prevents_creation
    assert (problem.group, problem.evidence) == ("workers", "exceeded quota")
    [problem] = find_problems(job(), [], [refusal])
    assert problem.group == HEAD
    workers = [pod_view(pod(name, CLUSTER)) for name in ("a", "b")]
    assert find_problems(job(), [head, *workers], [refusal]) == []


def test_a_running_pod_on_a_lost_node_has_a_problem() -> None:
    pods = [pod_view(pod("head", CLUSTER, head=True)), *(pod_view(pod(name, CLUSTER)) for name in ("a", "b"))]
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    nodes = [{"metadata": {"name": f"node-of-{name}"}, "status": ready} for name in ("head", "a")]
    [problem] = find_problems(job(), mark_lost_pods(pods, nodes), ())
    assert (problem.kind, problem.pod) == (Diagnosis.NODES, "b")
    assert str(problem).startswith("its node node-of-b no longer exists; another pod replaces it")


def test_the_newest_warning_of_each_kind_explains_the_problems_of_deleted_pods() -> None:
    warnings = [
        WarningEvent("run-1-w-head", "FailedScheduling", "new", 2.0),
        WarningEvent("run-1-w-head", "FailedScheduling", "old", 1.0),
        WarningEvent("run-1-w-a", "Unhealthy", "no reason", 1.0),
        WarningEvent("run-1-w-a", "Failed", "cannot pull", 0.0),
    ]
    unplaced, image = find_past_problems(job(), warnings)
    assert (unplaced.kind, unplaced.group, unplaced.evidence) == (Diagnosis.NO_NODE, HEAD, "new")
    assert (image.kind, image.group, image.pod) == (Diagnosis.IMAGE, "workers", "run-1-w-a")
