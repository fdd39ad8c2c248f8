"""Tests of the findings of `sunspot doctor RUN` about pods and storage."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sunspot.run
from sunspot.errors import DamageError, RefusedStorageError, SettingsError, StorageError
from sunspot.run import Run
from sunspot.run.attempts import Attempt, give_up_damaged, newest_number, read_attempts
from sunspot.run.checkpoints import MANIFEST, Checkpoint, delete_checkpoint, find_newest_good
from sunspot.run.failures import BRING_ROWS, Failure, describe_failure, find_place, read_failures, record_failure
from sunspot.run.history import Journal
from sunspot.run.incidents import Cause
from sunspot.run.requests import SubmissionRecord, record_submission
from sunspot.run.status import RunState, Status, write_status, write_status_as_is
from sunspot.settings import load_settings
from sunspot.submitter.doctor.training.costs import MIN_WINDOWS, growth_rate, measure_throughput, slope
from sunspot.submitter.findings import Diagnosis, Finding, Severity, by_severity
from tests.harness.commands import Command
from tests.harness.kubernetes import FakeCluster, answer, pod, rayjob, timestamp
from tests.harness.runs import age, begin, commit, damage, report, start, to_columns, write_receipt

JOB, CLUSTER = "run-1", "run-1-x"
LOCAL, IN_CLUSTER = "job", "run-1@sunspot"
"""Owners of a run: a local process and a RayJob."""

MASTER = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
PREEMPTION = (
    " no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
)


def message(*reasons: str) -> str:
    """Return the message of Kubernetes 1.34's scheduler about a pod that fits on no node."""
    return f"0/3 nodes are available: {', '.join(reasons)}.{PREEMPTION}"


def unschedulable(*reasons: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message(*reasons)}
    return {"conditions": [condition]}


def waiting(reason: str, said: str) -> dict[str, Any]:
    container = {"name": "ray", "image": "sunspot:1", "state": {"waiting": {"reason": reason, "message": said}}}
    return {"containerStatuses": [container]}


def warning(about: str, reason: str, said: str, age: float = 30) -> dict[str, Any]:
    """Return a warning event."""
    times = {"lastTimestamp": timestamp(time.time() - age)}
    return {"metadata": {}, "involvedObject": {"name": about}, "reason": reason, "message": said, **times}


@pytest.fixture
def job(cluster: FakeCluster) -> dict[str, Any]:
    """A RayJob with pods that are about to be created."""
    job = rayjob(JOB, preRunningDeadlineSeconds=600)
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    container = {"name": "ray", "resources": {"requests": {"cpu": "64", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}}
    group["template"] = {"spec": {"containers": [container], "nodeSelector": {"gpu": "l4"}}}
    cluster.put_job(job)
    cluster.set_status(JOB, "Initializing", rayClusterName=CLUSTER)
    return job


def head(**more: Any) -> dict[str, Any]:
    return pod(f"{CLUSTER}-head", CLUSTER, head=True, **more)


def worker(number: int, **more: Any) -> dict[str, Any]:
    return pod(f"{CLUSTER}-worker-{number}", CLUSTER, **more)


def findings(sunspot: Command, *words: str) -> dict[str, dict[str, Any]]:
    """Run `sunspot doctor`, check that every finding is complete, and return the findings keyed by name."""
    assert sunspot("doctor", "run", "--json", *words) == 0, sunspot.err
    assert {"run", "state", "findings", "unseen"} <= set(sunspot.json)
    assert sunspot.json["findings"], "there is always a finding"
    for finding in sunspot.json["findings"]:
        assert finding["finding"] in list(Diagnosis)
        assert finding["severity"] in list(Severity)
        assert finding["evidence"]
        assert finding["advice"]
    return {name: next(f for f in sunspot.json["findings"] if f["finding"] == name) for name in names(sunspot)}


def names(sunspot: Command) -> list[str]:
    """Return the names of the findings in order."""
    return list(dict.fromkeys(finding["finding"] for finding in sunspot.json["findings"]))


# -------------------------------------------------------------------------------------------------------------- pending


def test_doctor_reports_a_selector_that_no_node_matches(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    refused = unschedulable(MASTER, "2 node(s) didn't match Pod's node affinity/selector")
    cluster.pods = [head(), worker(1, phase="Pending", **refused), worker(2, phase="Pending", **refused)]
    found = findings(sunspot)
    assert list(found) == ["no node matches"], "the control plane is not what keeps it waiting"
    finding = found["no node matches"]
    assert finding["severity"] == "error"
    assert finding["selector"] == {"gpu": "l4"}
    assert finding["pods"] == [f"{CLUSTER}-worker-1", f"{CLUSTER}-worker-2"]
    assert "worker.node_selector" in finding["advice"]
    assert "gpu=l4" in finding["evidence"]


def test_doctor_reports_a_taint_that_a_pod_does_not_tolerate(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    refused = unschedulable(MASTER, "2 node(s) had untolerated taint {dedicated: vision}")
    cluster.pods = [head(phase="Pending", **refused)]
    found = findings(sunspot)
    assert list(found) == ["taint"]
    assert (found["taint"]["taint"], found["taint"]["value"], found["taint"]["nodes"]) == ("dedicated", "vision", 2)
    assert "head.tolerations: [{key: dedicated, operator: Exists}]" in found["taint"]["advice"]


def test_doctor_reports_the_resource_that_a_pending_pod_lacks(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    cluster.pods = [head(), worker(1, phase="Pending", **unschedulable(MASTER, "2 Insufficient cpu"))]
    found = findings(sunspot)
    assert list(found) == ["insufficient resources"]
    finding = found["insufficient resources"]
    assert (finding["resource"], finding["asked"], finding["nodes"]) == ("cpu", "64", 2)
    assert "lower worker.cpu in the profile" in finding["advice"]
    assert "too little cpu is left" in finding["evidence"]


def test_doctor_explains_an_exceeded_quota(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    said = (
        f'Failed to create worker Pod sunspot/{CLUSTER}-worker-2, pods "{CLUSTER}-worker-2" is forbidden: exceeded '
        "quota: sunspot, requested: requests.cpu=64, used: requests.cpu=65, limited: requests.cpu=100"
    )
    cluster.pods = [head(), worker(1)]
    cluster.events = [warning(CLUSTER, "FailedToCreateWorkerPod", said)]
    found = findings(sunspot)
    assert list(found) == ["quota"]
    quota = found["quota"]
    assert (quota["quota"], quota["requested"]) == ("sunspot", "requests.cpu=64")
    assert (quota["used"], quota["limited"]) == ("requests.cpu=65", "requests.cpu=100")
    assert quota["advice"].startswith("request less"), "its own two workers need more than the quota has"
    cluster.pods = [head(), worker(1), worker(2)]
    assert "quota" not in findings(sunspot), "it has all its pods now"


def test_doctor_reports_an_exceeded_quota_once_and_ignores_earlier_attempts(
    cluster: FakeCluster, job: Any, sunspot: Command
) -> None:
    said = "forbidden: exceeded quota: team, requested: pods=1, used: pods=9, limited: pods=9"
    refused = message("1 node(s) had untolerated taint(s)", "2 node(s) didn't match Pod's node affinity/selector")
    cluster.events = [
        warning(CLUSTER, "FailedToCreateHeadPod", said),
        warning("run-1-w-head", "FailedScheduling", refused),
        *(warning(f"run-1-w-workers-{number}", "FailedScheduling", refused) for number in range(3)),
    ]
    assert list(findings(sunspot)) == ["quota"]
    [quota] = sunspot.json["findings"]
    assert quota["advice"].startswith("end other runs in the namespace")
    cluster.events = [warning("run-1-w-head", "FailedScheduling", refused, age=300)]
    assert list(findings(sunspot)) == ["starting"], "pods of an earlier try do not matter"


def test_doctor_reads_a_taint_from_the_nodes_if_the_scheduler_omits_it(
    cluster: FakeCluster, job: Any, sunspot: Command
) -> None:
    """The scheduler of Kubernetes 1.34 does not name taints, but the nodes show them if the user can list nodes."""
    unnamed, labels = "1 node(s) had untolerated taint(s)", "2 node(s) didn't match Pod's node affinity/selector"
    refused = unschedulable(unnamed, labels)
    cluster.pods = [head(), worker(1, phase="Pending", **refused), worker(2, phase="Pending", **refused)]
    cluster.forbidden.add("/api/v1/nodes")
    assert list(findings(sunspot)) == ["no node matches", "taint"]
    assert any(text.startswith("its nodes: ") for text in sunspot.json["unseen"])
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "96", "memory": "64Gi"}}
    main = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
    specs = [main, {}, {"taints": [{"key": "team", "value": "b", "effect": "NoSchedule"}]}]
    names = [cluster.pods[0]["spec"]["nodeName"], "n1", "n2"]
    nodes = [
        {"metadata": {"name": name, "labels": {}}, "spec": spec, "status": ready}
        for name, spec in zip(names, specs, strict=True)
    ]
    for waiting_pod in cluster.pods[1:]:
        waiting_pod["spec"] = {}
    cluster.documents["/api/v1/nodes"] = {"items": nodes}
    cluster.forbidden.clear()
    assert list(findings(sunspot)) == ["no node matches"]
    nodes[2]["metadata"] |= {"labels": {"gpu": "l4"}}
    assert list(findings(sunspot)) == ["taint", "no node matches"]
    assert sunspot.json["findings"][0]["taint"] == "team"


def test_doctor_reports_a_policy_that_rejects_a_pod(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    said = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    cluster.events = [warning(CLUSTER, "FailedToCreateHeadPod", said)]
    assert "restricted" in findings(sunspot)["refused"]["evidence"]


def test_doctor_reports_an_image_that_cannot_be_pulled(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    cluster.pods = [head(phase="Pending", **waiting("ImagePullBackOff", "Back-off: ErrImagePull: not found"))]
    found = findings(sunspot)
    assert list(found) == ["image"]
    assert found["image"]["evidence"].endswith("image sunspot:1 cannot be pulled: not found")
    assert "push the image" in found["image"]["advice"]


def test_doctor_warns_if_pods_pulled_different_images_under_one_tag(
    cluster: FakeCluster, job: Any, run: Run, sunspot: Command
) -> None:
    trains(run, owner=JOB)
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    cluster.pods = [head(), worker(1), worker(2)]
    for each, letter in zip(cluster.pods, "aab", strict=True):
        each["spec"]["containers"] = [{"name": "ray", "image": "registry.example/sunspot:1"}]
        digest = f"registry.example/sunspot@sha256:{letter * 8}"
        each["status"]["containerStatuses"] = [{"name": "ray", "image": "sunspot:1", "imageID": digest}]
    finding = findings(sunspot)["image"]
    assert finding["severity"] == "warning"
    assert finding["evidence"].endswith(
        "the pods pulled different images as registry.example/sunspot:1: "
        f"sha256:aaaaaaaa in 2 pods ({CLUSTER}-head, {CLUSTER}-worker-1), sha256:bbbbbbbb in pod {CLUSTER}-worker-2"
    )
    cluster.pods.pop()
    assert "image" not in findings(sunspot)


def test_doctor_reports_missing_secrets(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    missing = waiting("CreateContainerConfigError", 'secret "sunspot-storage" not found')
    cluster.pods = [head(), worker(1, phase="Pending", **missing), worker(2, phase="Pending")]
    cluster.events = [warning(f"{CLUSTER}-worker-2", "FailedMount", 'secret "certificates" not found')]
    assert list(findings(sunspot)) == ["missing object"]
    assert [finding["evidence"] for finding in sunspot.json["findings"]] == [
        f'pod {CLUSTER}-worker-1: CreateContainerConfigError: secret "sunspot-storage" not found',
        f'pod {CLUSTER}-worker-2: FailedMount: secret "certificates" not found',
    ]


def test_doctor_reports_a_container_that_ran_out_of_memory(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    ended = {"name": "ray", "state": {}, "lastState": {"terminated": {"reason": "OOMKilled"}}}
    cluster.pods = [head(), worker(1, phase="Pending", containerStatuses=[ended])]
    assert findings(sunspot)["out of memory"]["severity"] == "error"
    cluster.pods = [head(), worker(1, containerStatuses=[ended]), worker(2)]
    found = findings(sunspot)["out of memory"]
    assert found["severity"] == "warning", "it runs again"
    assert "ran out of memory (OOMKilled, limit 3Gi) and was restarted" in found["evidence"]


def test_doctor_reports_a_queue_that_has_not_admitted_the_run(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    cluster.put_job(job)
    cluster.set_status(JOB, "Suspended")
    found = findings(sunspot)
    assert list(found) == ["not admitted"]
    assert found["not admitted"]["queue"] == "gpus"


def test_doctor_reports_a_missing_operator(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.put_job(rayjob(JOB, created=time.time() - 100))
    assert list(findings(sunspot)) == ["no operator"]


def test_doctor_uses_past_events_to_explain_a_missed_deadline(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    """The job's pods are gone by then, but their events remain."""
    cluster.set_status(JOB, "Failed", "", reason="PreRunningDeadlineExceeded")
    refused = message(MASTER, "2 Insufficient cpu")
    cluster.events = [warning(f"{CLUSTER}-workers-worker-{n}", "FailedScheduling", refused, age=700) for n in (1, 2)]
    found = findings(sunspot)
    assert list(found) == ["deadline", "insufficient resources"]
    assert found["deadline"]["limit_s"] == 600
    assert "pre_running_deadline_s" in found["deadline"]["advice"]
    assert len(found["insufficient resources"]["pods"]) == 2


def test_doctor_reports_a_job_that_exceeded_its_deadline(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    cluster.put_job(rayjob(JOB, activeDeadlineSeconds=60))
    trains(run, owner=JOB)
    cluster.set_status(JOB, "Failed", "RUNNING", reason="DeadlineExceeded", rayClusterName=CLUSTER)
    found = findings(sunspot)
    assert list(found) == ["deadline"], "the failure itself explains nothing more"
    assert "activeDeadlineSeconds (60 s)" in found["deadline"]["evidence"]


def test_a_run_that_is_starting_is_not_reported_as_an_error(cluster: FakeCluster, job: Any, sunspot: Command) -> None:
    cluster.pods = [head(), worker(1), worker(2, phase="Pending")]
    found = findings(sunspot)
    assert list(found) == ["starting"]
    assert found["starting"]["severity"] == "note"
    assert "the operator gives up" in found["starting"]["advice"]


def test_a_pending_pod_causes_only_a_warning_while_the_run_is_training(
    cluster: FakeCluster, job: Any, run: Run, sunspot: Command
) -> None:
    trains(run, owner=JOB)
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    cluster.pods = [head(), worker(1), worker(2, phase="Pending", **unschedulable("2 Insufficient cpu"))]
    assert findings(sunspot)["insufficient resources"]["severity"] == "warning"


# ------------------------------------------------------------------------------------------------------------- storage


SETTINGS = {"SUNSPOT_CHECKPOINT_EVERY_S": "60", "SUNSPOT_HANG_TIMEOUT_S": "300"}


def trains(run: Run, owner: str = LOCAL, age: float = 0.0, **more: Any) -> Attempt:
    """Start a run of two ranks that took step 7 just now. Its status was written `age` seconds ago."""
    begin(run)
    metadata = {"world_size": 2, "nodes": {"0": "a", "1": "b"}, "settings": SETTINGS, "tier": "beginning"}
    attempt = start(run, owner, **metadata, driver=more.get("driver", "00000000"))
    now = time.time()
    usual = {"state": RunState.RUNNING, "step": 7, "total_steps": 100, "began": now - 500}
    usual |= {"attempt": attempt.number, "world_size": 2}
    write_status_as_is(run, Status(owner=owner, **{**usual, "heartbeat": now - 1, "time": now - age, **more}))
    return attempt


def window(step: int, seconds: float = 10.0, **ranks: list[float]) -> dict[str, Any]:
    """Return a metric window of ten steps in which two ranks have equal values, except the given ones."""
    usual = {"data_wait_s": 0.1, "forward_s": 2.0, "steps_s": 9.5, "seconds": seconds, "resident_mib": 500.0}
    usual |= {"memory_left_mib": 1000.0, "throttled_s": 0.0, "throttled_share": 0.0, "gpu_memory_mib": 0.0}
    both = [{name: ranks.get(name, [value] * 2)[rank] for name, value in usual.items()} for rank in (0, 1)]
    return {"step": step, "epoch": 1, "steps": 10, "time": step * seconds / 10, "seconds": seconds, "ranks": both}


def windows(count: int, **ranks: list[float]) -> list[dict[str, Any]]:
    return [window(10 * number, **ranks) for number in range(1, count + 1)]


def test_a_healthy_run_is_reported_with_its_step_time(run: Run, sunspot: Command) -> None:
    attempt = trains(run, owner=IN_CLUSTER)
    report(run, attempt, *windows(5))
    found = findings(sunspot)
    assert list(found) == ["healthy"]
    assert found["healthy"]["evidence"].startswith("step 50 of 100, 950 ms a step, 1% of it waiting for rows")
    assert sunspot.json["state"] == "running"
    [text] = sunspot.json["unseen"]
    assert text.startswith("the cluster: no cluster"), "the cluster could not be asked"
    trains(run)
    findings(sunspot)
    assert sunspot.json["unseen"] == [], "a local run needs no cluster"


def lost(run: Run, cause: Cause, **fields: Any) -> None:
    """Start a second attempt after a loss."""
    first = trains(run)
    write_receipt(run, first, 0, Cause.BEGIN)
    second = start(run, LOCAL, commit(run, first, 5).name, world_size=2, tier="storage", driver="00000000")
    write_receipt(run, second, 1, cause, worker_seconds_lost=20.0, **fields)
    events = Journal(run, "events", second.number)
    events.note(cause, 5, FIGURES)
    events.flush()


def silent(run: Run, seconds: float) -> None:
    trains(run, age=seconds)
    age(run, seconds)


LOCAL_CASES: dict[str, Callable[[Run], Any]] = {
    "silent": lambda run: silent(run, 60),
    "lost": lambda run: silent(run, 1000),
    "starting": lambda run: trains(run, state=RunState.STARTING, heartbeat=None, reason="it waits"),
    "fewer workers": lambda run: trains(run, world_size=1),
    "throttled": lambda run: report(run, trains(run), *windows(5, throttled_share=[0.1, 0.9])),
    "straggler": lambda run: report(run, trains(run), *windows(5, forward_s=[2.0, 3.5])),
    "data-bound": lambda run: report(run, trains(run), *windows(5, data_wait_s=[4.0, 4.2])),
    "out of memory": lambda run: lost(run, Cause.OUT_OF_MEMORY),
    "low goodput": lambda run: lost(run, Cause.WORKER_LOST),
    "checkpoint damaged": lambda run: damage(run, ended(run, 8, 10)[1]),
}


@pytest.mark.parametrize("name", LOCAL_CASES)
def test_advice_on_a_local_run_does_not_mention_a_cluster(run: Run, sunspot: Command, name: str) -> None:
    LOCAL_CASES[name](run)
    assert name in findings(sunspot)
    assert sunspot("doctor", "run") == 0
    assert not re.search(r"cluster|kubectl|RayJob|\bpods?\b|profile|submit", sunspot.out + sunspot.err), sunspot.out


def test_a_run_is_finishing_once_it_has_taken_all_steps(run: Run, sunspot: Command) -> None:
    report(
        run, trains(run, step=100, state=RunState.FINISHING, reason="all steps are taken", world_size=0), *windows(10)
    )
    assert list(findings(sunspot)) == ["healthy"]
    assert sunspot.json["state"] == "finishing"
    assert sunspot("status", run.name) == 0
    assert "workers train" not in sunspot.out


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ({"data_wait_s": [4.0, 4.2]}, ["data-bound"]),
        ({"data_wait_s": [1.0, 4.2]}, ["straggler"]),
        ({"forward_s": [2.0, 3.5]}, ["straggler"]),
        ({"forward_s": [8.0, 9.2]}, ["healthy"]),
        ({"forward_s": [2.0, 2.3]}, ["healthy"]),
        ({"forward_s": [0.004, 0.015], "steps_s": [0.1, 0.1], "data_wait_s": [0.0, 0.0]}, ["healthy"]),
        ({"throttled_share": [0.1, 0.9], "forward_s": [2.0, 4.0]}, ["throttled", "straggler"]),
        ({"throttled_share": [0.2, 0.2]}, ["healthy"]),
    ],
)  # fmt: skip
def test_doctor_finds_out_why_a_run_is_slow(
    run: Run, sunspot: Command, ranks: dict[str, list[float]], expected: list[str]
) -> None:
    report(run, trains(run), *windows(5, **ranks))
    found = findings(sunspot)
    assert list(found) == expected
    for name in {"throttled", "straggler"} & set(found):
        assert (found[name]["rank"], found[name]["host"]) == (1, "b")


def as_stored(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "ranks": to_columns(record["ranks"])}


def test_throughput_is_measured_in_recent_windows_but_not_in_the_first_window() -> None:
    slow = as_stored({"attempt": 1, **window(10, data_wait_s=[9.0, 9.0])})
    later = [as_stored({"attempt": 1, **window(step)}) for step in (20, 30)]
    assert measure_throughput([slow]).windows == []
    assert measure_throughput([slow, *later]).data_share == pytest.approx(0.1 / 9.5)
    much_later = as_stored({"attempt": 1, **window(1000)})
    assert len(measure_throughput([slow, *later, much_later]).windows) == 1
    assert len(measure_throughput([slow, *later, {**much_later, "attempt": 2}]).windows) == 0


def test_an_occasionally_slow_rank_is_not_reported_as_a_straggler(run: Run, sunspot: Command) -> None:
    now_and_then = [window(10 * n, forward_s=[2.0, 9.0 if n % 3 == 0 else 1.9]) for n in range(1, 10)]
    report(run, trains(run), *now_and_then)
    assert list(findings(sunspot)) == ["healthy"]


CLIMBS: dict[str, tuple[Callable[[int], float], bool]] = {
    "steady": (lambda n: 500 + 20 * n, True),
    "noisy": (lambda n: 500 + 20 * n + (37 * n) % 50, True),
    "beginning": (lambda n: 500 + min(n, 8) * 40, False),
    "a step": (lambda n: 500 + 400 * (n > 10), False),
    "level": (lambda n: 500 + (37 * n) % 50, False),
    "little": (lambda n: 5000 + 10 * n, False),
}


@pytest.mark.parametrize("name", CLIMBS)
def test_doctor_reports_memory_that_keeps_growing(run: Run, sunspot: Command, name: str) -> None:
    size, climbs = CLIMBS[name]
    report(run, trains(run), *(window(10 * n, resident_mib=[500.0, size(n)]) for n in range(1, 21)))
    found = findings(sunspot)
    assert ("memory climbing" in found) == climbs
    if name == "steady":
        finding = found["memory climbing"]
        assert (finding["rank"], finding["host"]) == (1, "b")
        assert finding["mib_per_s"] == pytest.approx(2.0)
        assert finding["limit_in_s"] == pytest.approx(500)
        assert "120 MiB a minute, 2 MiB a step; at this rate it reaches the limit in 8 min" in finding["evidence"]


def test_a_single_outlier_is_not_reported_as_memory_growth() -> None:
    times = [float(n) for n in range(20)]
    assert slope([(time, 3 * time + (1000 if time == 7 else 0)) for time in times]) == pytest.approx(3)
    assert growth_rate(times, [100 + 50 * time for time in times]) == pytest.approx(50)
    assert growth_rate(times[: MIN_WINDOWS - 1], [50 * time for time in times[: MIN_WINDOWS - 1]]) == 0
    assert growth_rate(times, [None] * 20) == 0


def test_doctor_reports_growing_gpu_memory(run: Run, sunspot: Command) -> None:
    report(run, trains(run), *(window(10 * n, gpu_memory_mib=[900.0, 500 + 50.0 * n]) for n in range(1, 21)))
    assert findings(sunspot)["memory climbing"]["memory"] == "gpu_memory_mib"


# --------------------------------------------------------------------------------------------------------------- stuck


def test_doctor_reports_a_live_run_that_takes_no_steps(run: Run, sunspot: Command) -> None:
    trains(run, heartbeat=time.time() - 120, step_time_s=0.5)
    found = findings(sunspot)
    assert list(found) == ["no step"]
    assert found["no step"]["evidence"].startswith("no step for 2 min, after step 7")
    assert "300 s" in found["no step"]["advice"]
    trains(run, heartbeat=time.time() - 120, step_time_s=20.0)
    assert list(findings(sunspot)) == ["healthy"], "six step times are not long enough"


def test_doctor_reports_a_run_that_does_not_end_after_its_last_step(run: Run, sunspot: Command) -> None:
    trains(run, state=RunState.FINISHING, step=100, heartbeat=time.time() - 700)
    found = findings(sunspot)
    assert list(found) == ["not ended"]
    assert found["not ended"]["evidence"] == "all steps were taken 11 min ago, but the run has not ended"
    assert "The last step is not saved yet" in found["not ended"]["advice"]
    trains(run, state=RunState.FINISHING, step=100, heartbeat=time.time() - 500)
    assert list(findings(sunspot)) == ["healthy"], "the last evaluation and checkpoint take a while"


def test_a_long_first_step_is_not_reported(run: Run, sunspot: Command) -> None:
    trains(run, heartbeat=None)
    assert list(findings(sunspot)) == ["healthy"]


def test_doctor_does_not_report_missing_resources_right_after_losing_a_node(run: Run, sunspot: Command) -> None:
    """The driver started long ago, but its workers were lost just now."""
    begin(run)
    now, reason = time.time(), "no sign of life from its workers"
    for heartbeat, severity in ((now - 20, "note"), (None, "warning")):
        status = Status(
            RunState.STARTING, "job", reason=reason, began=now - 4000, heartbeat=heartbeat, driver="0123abcd"
        )
        write_status_as_is(run, status)
        assert findings(sunspot)["starting"]["severity"] == severity


def test_doctor_reports_a_silent_run(cluster: FakeCluster, job: Any, run: Run, sunspot: Command) -> None:
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    cluster.pods = [head(), worker(1), worker(2)]
    job["metadata"]["creationTimestamp"] = timestamp(time.time() - 1000)
    cluster.put_job({**job, "status": cluster.jobs[JOB]["status"]})
    trains(run, owner=JOB, age=400)
    age(run, 400, "status")
    found = findings(sunspot)
    assert list(found) == ["silent"]
    assert found["silent"]["severity"] == "error"


def test_doctor_reports_hung_ranks_with_their_stacks(run: Run, sunspot: Command) -> None:
    attempt = trains(run)
    for rank, waits in ((0, True), (1, False)):
        journal = Journal(run, "events", attempt.number)
        where = "waits for other ranks in train at loop.py:7" if waits else "stands in read at my_task.py:12"
        detail = f"rank {rank}: no step for 300 s; {where}"
        event = {"event": "hung", "step": 7, "time": time.time(), "rank": rank, "detail": detail, "waiting": waits}
        journal.append({**event, "stacks": f"Training thread of rank {rank}\n"})
        journal.flush()
    hung = findings(sunspot)["hung"]
    assert hung["severity"] == "error"
    assert hung["ranks"] == [1]
    assert hung["places"] == [{"rank": 1, "host": "b", "node": None}]
    assert hung["evidence"] == (
        "after step 7, rank 1 (b): no step for 300 s; stands in read at my_task.py:12; rank 0 waited for it"
    )
    assert sunspot("doctor", "run") == 0
    assert "Training thread" not in sunspot.out
    assert "--stacks" in sunspot.err
    assert sunspot("doctor", "run", "--stacks") == 0
    assert "Training thread of rank 1" in sunspot.out

    after = start(run, "job", commit(run, attempt, 5).name, tier="storage")
    write_receipt(run, after, 1, Cause.HUNG)
    assert findings(sunspot)["hung"]["severity"] == "warning", "the run was restarted"


def test_a_rank_that_hung_at_the_start_of_a_group_is_reported(run: Run, sunspot: Command) -> None:
    """The rank's group had not claimed an attempt, so the rank's host is unknown."""
    attempt = trains(run)
    journal = Journal(run, "events", attempt.number)
    detail = "rank 0: not all ranks answered for 300 s, while the group agreed on its start; waits for other ranks"
    event = {"event": "hung", "step": 0, "time": time.time(), "rank": 0, "detail": detail, "waiting": True}
    journal.append({**event, "world_size": 3, "starting": True, "stacks": ""})
    journal.flush()
    hung = findings(sunspot)["hung"]
    assert hung["ranks"] == [1, 2]
    assert hung["places"] == [{"rank": rank, "host": None, "node": None} for rank in (1, 2)]
    assert hung["evidence"].startswith(
        "when the group after attempt 1 began, rank 1: left no stacks: it was stopped, or lost with"
    )


def test_doctor_reports_ranks_that_got_no_rows(run: Run, sunspot: Command) -> None:
    attempt = trains(run)
    for rank in (0, 1):
        journal = Journal(run, "events", attempt.number)
        detail = f"rank {rank}: no step for 300 s; waits for rows of Ray Data in _next_part at ray_loader.py:7"
        event = {"event": "hung", "step": 7, "time": time.time(), "rank": rank, "detail": detail, "waiting": False}
        journal.append({**event, "loading": True, "stacks": ""})
        journal.flush()
    found = findings(sunspot)
    assert "hung" not in found
    assert "waits for rows of Ray Data" in found["no rows"]["evidence"]
    assert found["no rows"]["advice"] == BRING_ROWS


# -------------------------------------------------------------------------------------------------------------- failed


def failed(run: Run, reason: str = "training failed") -> None:
    write_status_as_is(
        run, Status(RunState.FAILED, "job", attempt=newest_number(run), reason=reason, began=time.time() - 100)
    )


def raises() -> ValueError:
    try:
        raise ValueError("wrong\nand more")
    except ValueError as error:
        return error


def test_the_first_error_is_reported_once_for_all_ranks(run: Run, sunspot: Command) -> None:
    trains(run)
    failed(run)
    now = time.time()
    frames = 'Traceback:\n  File "/w/my_task.py", line 31, in loss\nValueError: wrong'
    consequence = Failure(1, 2, 6, "RuntimeError", "[gloo/pair.cc] Connection closed by peer", "...", time=now - 50)
    record_failure(run, consequence)
    for rank in (0, 1):
        error = Failure(1, rank, 6, "ValueError", "wrong", frames, "/w/my_task.py", 31, "loss", time=now - rank)
        record_failure(run, error)
    record_failure(run, Failure(1, 3, 6, "OSError", "of long ago", "", time=now - 1000))
    found = findings(sunspot)
    assert list(found) == ["failed"]
    failure = found["failed"]
    assert failure["severity"] == "error"
    assert (failure["file"], failure["line"], failure["function"]) == ("/w/my_task.py", 31, "loss")
    assert (failure["ranks"], failure["step"]) == ([0, 1], 6)
    assert failure["evidence"] == (
        "ValueError: wrong in loss at /w/my_task.py:31; ranks 0, 1, after step 6; then 1 RuntimeError"
    )
    assert failure["traces"] == [frames]

    record_failure(run, Failure(1, 2, 6, "RuntimeError", "written late, by what was frozen", "", time=now))
    trains(run, driver="0123abcd")
    assert "failed" not in findings(sunspot), "the errors are not the new owner's"


def test_advice_mentions_a_checkpoint_only_if_one_exists(run: Run, sunspot: Command) -> None:
    attempt = trains(run)
    failed(run)
    record_failure(run, Failure(1, 0, 6, "SettingsError", "SUNSPOT_TASK=mine: its loss is a mean", "..."))
    found = findings(sunspot)["failed"]
    assert found["evidence"] == "SUNSPOT_TASK=mine: its loss is a mean; rank 0, after step 6"
    assert found["advice"] == "fix the problem that the message describes; then start the run again"
    commit(run, attempt, 5)
    again = (
        "fix the problem that the message describes; then start the run again: it continues from the last checkpoint"
    )
    assert findings(sunspot)["failed"]["advice"] == again


def test_the_location_of_a_sunspot_error_is_in_user_code_or_empty() -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings({"EPOCHS": "many"})
    assert describe_failure(raised.value, 1, 0, 0).file == os.path.relpath(__file__)
    assert describe_failure(raised.value.with_traceback(raised.tb.tb_next), 1, 0, 0).file == ""


def diverges(run: Run, **more: Any) -> Checkpoint:
    """Write a run with a NaN loss since step 5, and return the newest checkpoint before that step."""
    attempt = trains(run, loss=math.nan, **{"nan_since": 5, **more})
    good = commit(run, attempt, 4, loss=1.0)
    commit(run, attempt, 6, loss=math.nan, nan_since=5, nan_weights=1)
    report(run, attempt, {"step": 7, "epoch": 1, "steps": 1, "time": time.time(), "loss": math.nan})
    return good


def test_a_loss_that_is_not_finite_is_the_first_finding(run: Run, sunspot: Command) -> None:
    good = diverges(run)
    found = findings(sunspot)
    assert next(iter(found)) == "not finite"
    assert "healthy" not in found
    told = found["not finite"]
    assert (told["severity"], told["since"], told["checkpoint"]) == ("error", 5, good.name)
    assert told["evidence"] == "the loss is NaN or infinite since step 5; the newest step is 7"
    assert told["advice"].startswith(
        "it ends after 3 windows of metrics (SUNSPOT_MAX_NAN_WINDOWS); then lower SUNSPOT_LEARNING_RATE"
    )
    assert told["advice"].endswith(f"and start it again: it resumes from step 4, {good.name}")


def test_a_run_that_ended_with_a_nan_loss_has_only_one_finding(run: Run, sunspot: Command) -> None:
    good = diverges(run)
    now, said = time.time(), "the loss is not finite since step 5, for 3 windows"
    status = Status(RunState.FAILED, "job", attempt=newest_number(run), reason=said, began=now - 100, nan_since=5)
    write_status_as_is(run, status)
    record_failure(run, Failure(1, 0, 7, "DivergedError", said, "", time=now))
    found = findings(sunspot)
    assert list(found) == ["not finite"]
    assert found["not finite"]["advice"].endswith(f"and start it again: it resumes from step 4, {good.name}")


def test_advice_on_a_nan_loss_in_a_run_of_an_older_version_suggests_a_checkpoint(run: Run, sunspot: Command) -> None:
    """Earlier versions did not check weights, so a start resumes from the newest checkpoint."""
    attempt = trains(run, loss=math.nan)
    commit(run, attempt, 4, loss=1.0)
    commit(run, attempt, 6, loss=math.nan)
    told = findings(sunspot)["not finite"]
    assert (told["since"], told["checkpoint"]) == (None, None)
    assert told["evidence"] == "the loss is NaN or infinite at step 7"
    assert "with SUNSPOT_INIT_FROM set to model.pt of a checkpoint with a finite loss" in told["advice"]


def test_the_json_output_of_status_reports_a_nan_loss(run: Run, sunspot: Command) -> None:
    """JSON has no NaN, so the loss is null."""
    good = diverges(run)
    assert sunspot("status", "run", "--json") == 0
    shown = {name: sunspot.json[name] for name in ("state", "loss", "nan_since", "warning", "checkpoint")}
    warning = "the loss or the weights have been NaN or infinite since step 5"
    assert shown == {"state": "running", "loss": None, "nan_since": 5, "warning": warning, "checkpoint": good.name}
    assert sunspot("list", "--json") == 0
    assert [(each["loss"], each["nan_since"]) for each in sunspot.json] == [(None, 5)]
    assert sunspot("checkpoints", "ls", "run", "--json") == 0
    assert [(each["step"], each["finite"]) for each in sunspot.json] == [(4, True), (6, False)]
    assert sunspot("checkpoints", "ls", "run") == 0
    assert "weights are NaN or infinite in step-00000006-attempt-0001;" in sunspot.err
    assert sunspot("status", "run") == 0
    assert f"  warning:    {warning}\n" in sunspot.out
    assert (
        "  skipped:    step-00000006-attempt-0001: not finite, some of its weights are NaN or infinite" in sunspot.out
    )


def test_a_failure_without_a_traceback_is_reported(run: Run, sunspot: Command) -> None:
    trains(run)
    failed(run, "no checkpoint could be committed for 600 s")
    found = findings(sunspot)
    assert list(found) == ["failed"]
    assert "no checkpoint could be committed" in found["failed"]["evidence"]
    assert "sunspot logs run" in found["failed"]["advice"]


def test_the_location_of_an_error_is_the_innermost_user_frame() -> None:
    def text(*files: str) -> str:
        return "".join(f'  File "{file}", line {n}, in f{n}\n    code\n' for n, file in enumerate(files, 1))

    ours = sunspot.run.__file__
    assert find_place(text(ours, "/w/my_task.py", "/v/site-packages/torch/nn.py")) == ("/w/my_task.py", 2, "f2")
    assert find_place(text(ours, "/v/site-packages/torch/nn.py")) == (ours, 1, "f1")
    assert find_place(text("/usr/lib/python3.11/json.py")) == ("/usr/lib/python3.11/json.py", 1, "f1")
    assert find_place("") == ("", 0, "")
    own = ours.replace("run/__init__.py", "tasks/mine.py")
    assert find_place(text(ours, own, ours)) == (own, 2, "f2")


def test_a_recorded_failure_is_read_unchanged(run: Run) -> None:
    assert read_failures(run) == []
    driver = describe_failure(raises(), 0, None, 3)
    assert (driver.file, driver.function, driver.message) == (os.path.relpath(__file__), "raises", "wrong\nand more")
    record_failure(run, driver)
    worker = describe_failure(raises(), 2, 7, 3)
    record_failure(run, worker)
    assert read_failures(run) == [driver, worker]


def test_doctor_reports_a_lost_run(run: Run, sunspot: Command) -> None:
    trains(run, age=100_000)
    for entry in run.storage.list(run.name):
        os.utime(run.storage.locate(entry.key), (1, 1))
    assert list(findings(sunspot)) == ["lost"]


def test_doctor_reports_a_stopped_run(run: Run, sunspot: Command) -> None:
    trains(run)
    write_status_as_is(run, Status(RunState.STOPPED, "job", attempt=1, step=7))
    found = findings(sunspot)
    assert list(found) == ["stopped"]
    assert found["stopped"]["severity"] == "note"
    assert found["stopped"]["advice"] == "`sunspot resume run` continues it"
    write_status_as_is(run, Status(RunState.STOPPED, "job", "interrupted: step 7 is kept", attempt=1, step=7))
    assert findings(sunspot)["stopped"]["advice"].startswith("repeat the command that started it")


# ------------------------------------------------------------------------------------------------ storage and incidents


def test_doctor_reports_a_damaged_checkpoint(run: Run, sunspot: Command) -> None:
    attempt = trains(run)
    commit(run, attempt, 3)
    commit(run, attempt, 5)
    run.storage.write(run.key("checkpoints", "step-00000005-attempt-0001", "model.pt"), b"?")
    damaged = findings(sunspot)["checkpoint damaged"]
    assert "step-00000005-attempt-0001" in damaged["evidence"]
    assert damaged["advice"].startswith("the run continues from the previous checkpoint")


def ended(run: Run, *steps: int) -> list[Checkpoint]:
    """Write a finished run with checkpoints of these steps. Its second attempt began after an expensive loss."""
    first = trains(run)
    write_receipt(run, first, 0, Cause.BEGIN)
    second = start(run, "job", commit(run, first, 5).name, world_size=2, tier="storage")
    write_receipt(run, second, 1, Cause.NODE_LOST, worker_seconds_lost=20.0, last_step=7)
    made = [commit(run, second, step) for step in steps]
    last = {"step": steps[-1], "total_steps": steps[-1], "checkpoint": made[-1].name}
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job", attempt=second.number, driver="0123abcd", **last))
    return made


def test_doctor_reports_a_damaged_final_checkpoint(run: Run, sunspot: Command) -> None:
    _, newest = ended(run, 8, 10)
    run.storage.write(run.key("checkpoints", newest.name, "model.pt"), b"?")
    found = findings(sunspot)
    assert list(found) == ["checkpoint damaged", "low goodput"]
    assert found["checkpoint damaged"]["severity"] == "error"
    assert "starts from step 8, and repeats steps 9 to 10" in found["checkpoint damaged"]["advice"]
    assert "continues from the previous checkpoint" not in found["checkpoint damaged"]["advice"], "it has ended"


def test_doctor_reports_a_missing_final_checkpoint(run: Run, sunspot: Command) -> None:
    """A bucket's lifecycle rule can delete a checkpoint that the run would keep."""
    made = ended(run, 8, 10)
    delete_checkpoint(run, made[1].name)
    found = findings(sunspot)
    assert list(found) == ["checkpoint gone", "low goodput"]
    assert found["checkpoint gone"]["checkpoints"] == [made[1].name]
    assert "starts from step 8, and repeats steps 9 to 10" in found["checkpoint gone"]["advice"]
    assert sunspot("status", "run") == 0
    assert f"  skipped:    {made[1].name}: gone" in sunspot.out
    assert sunspot("checkpoints", "verify", "run") == 7
    assert f"{made[1].name}  missing, although it is the run's last checkpoint" in sunspot.out

    for name in ("step-00000005-attempt-0001", made[0].name):
        delete_checkpoint(run, name)
    found = findings(sunspot)
    assert list(found) == ["checkpoint gone", "low goodput"]
    assert "SUNSPOT_ACCEPT" in found["checkpoint gone"]["advice"]
    assert sunspot("checkpoints", "verify", "run") == 7
    assert "`sunspot doctor run` explains what to do" in sunspot.err


def test_leftovers_of_killed_commits_are_not_reported_as_damage(run: Run, sunspot: Command) -> None:
    attempt = trains(run)
    commit(run, attempt, 3)
    left = commit(run, attempt, 5)
    run.storage.delete(run.key("checkpoints", left.name, MANIFEST))
    assert list(findings(sunspot)) == ["healthy"], "it is being committed"
    failed(run)
    found = findings(sunspot)
    assert list(found) == ["failed", "leftovers"]
    assert left.name in found["leftovers"]["evidence"]
    assert "sunspot checkpoints gc run" in found["leftovers"]["advice"]


def test_advice_on_a_full_disk_says_how_to_free_space(
    run: Run, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error itself and the commands that show the run say how to free space."""
    trains(run)

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        with pytest.raises(StorageError) as full:
            run.storage.write("x", b"x")
    failed(run, str(full.value))
    found = findings(sunspot)["failed"]
    assert "SUNSPOT_STORAGE_PATH can be read and written" not in found["evidence"]
    assert found["advice"].startswith("free space: `sunspot checkpoints gc run`")
    record_failure(run, describe_failure(full.value, 1, 0, 7))
    assert findings(sunspot)["failed"]["advice"] == found["advice"]


def test_doctor_reports_failing_commits(run: Run, sunspot: Command) -> None:
    attempt = trains(run)
    journal = Journal(run, "events", attempt.number)
    journal.append({"step": 5, "time": time.time() - 60, "event": "commit failed", "detail": "503 SlowDown"})
    journal.flush()
    trouble = findings(sunspot)["storage trouble"]
    assert "503 SlowDown" in trouble["evidence"]
    assert "600 s" in trouble["advice"]
    commit(run, attempt, 6)
    assert "storage trouble" not in findings(sunspot), "the last commit succeeded"


def test_doctor_reports_a_checkpoint_that_is_too_old(
    run: Run, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = trains(run)
    commit(run, attempt, 5)
    assert "checkpoint too old" not in findings(sunspot)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 300)
    write_status_as_is(
        run, Status(RunState.RUNNING, "job", attempt=1, heartbeat=time.time(), time=time.time(), save_s=2.0)
    )
    age(run, -300, "status")
    assert "due every 60 s and took 2.0 s" in findings(sunspot)["checkpoint too old"]["evidence"]
    journal = Journal(run, "events", attempt.number)
    journal.append({"step": 7, "time": time.time() - 60, "event": "commit failed", "detail": "503 SlowDown"})
    journal.flush()
    found = findings(sunspot)
    assert "storage trouble" in found
    assert "checkpoint too old" not in found, "that is why"


def test_doctor_reports_a_save_that_takes_longer_than_the_preemption_notice(run: Run, sunspot: Command) -> None:
    trains(run, warning="a checkpoint takes 40 s to commit", save_s=40.0, notice_s=27.0)
    notice = findings(sunspot)["save exceeds notice"]
    assert (notice["save_s"], notice["notice_s"]) == (40.0, 27.0)


@pytest.mark.parametrize(
    ("steps", "at_least", "advice"),
    [(2, False, "2 steps"), (2, True, "at least 2 steps"), (0, True, "an unknown number of steps")],
)
def test_doctor_reports_the_goodput_lost_to_incidents(
    steps: int, at_least: bool, advice: str, run: Run, sunspot: Command
) -> None:
    first = trains(run)
    write_receipt(run, first, 0, Cause.BEGIN)
    second = start(run, "job", commit(run, first, 5).name, world_size=2, tier="storage")
    lost = {"worker_seconds_lost": 20.0, "last_step": 5 + steps, "at_least": at_least}
    write_receipt(run, second, 1, Cause.NODE_LOST, **lost)
    low = findings(sunspot)["low goodput"]
    assert low["worker_seconds_lost"] == {"node lost": 20}
    assert (low["steps_replayed"], low["replayed_at_least"]) == (steps, at_least)
    assert "1 node lost (20 worker-seconds)" in low["evidence"]
    assert f"; {advice} had to be repeated; more frequent checkpoints" in low["advice"]


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (Cause.HUNG, "look at the call in which the ranks hung"),
        (Cause.OUT_OF_MEMORY, "give the workers enough memory (worker.memory in the profile)"),
        (Cause.WORKER_FAILED, "fix the error that ends the workers"),
        (Cause.NO_ROWS, BRING_ROWS),
        (Cause.NODE_LOST, "reclaimed less often"),
    ],
)
def test_advice_on_low_goodput_addresses_the_costliest_cause(
    cause: Cause, advice: str, run: Run, sunspot: Command
) -> None:
    first = trains(run, owner=IN_CLUSTER)
    write_receipt(run, first, 0, Cause.BEGIN)
    second = start(run, "job", commit(run, first, 5).name, world_size=2, tier="storage")
    write_receipt(run, second, 1, cause, worker_seconds_lost=20.0)
    third = start(run, "job", commit(run, second, 7).name, world_size=2, tier="storage")
    write_receipt(run, third, 2, Cause.PREEMPTED, worker_seconds_lost=2.0)
    assert advice in findings(sunspot)["low goodput"]["advice"]


FIGURES = "out of memory: 2.90 of 3.00 GiB in use on run-1-x-worker-2, 2.70 GiB of them by this process"


def test_workers_that_ran_out_of_memory_are_the_first_finding(run: Run, sunspot: Command) -> None:
    first = trains(run, owner=IN_CLUSTER)
    write_receipt(run, first, 0, Cause.BEGIN)
    second = start(run, "job", commit(run, first, 5).name, world_size=2, tier="storage", driver="00000000")
    write_receipt(run, second, 1, Cause.OUT_OF_MEMORY, worker_seconds_lost=20.0, last_step=7, detail=FIGURES)
    events = Journal(run, "events", second.number)
    events.note("out of memory", 5, FIGURES)
    events.flush()
    found = findings(sunspot)
    assert next(iter(found)) == "out of memory"
    memory = found["out of memory"]
    assert (memory["severity"], memory["evidence"]) == ("warning", f"{FIGURES}; 1 worker ended for this reason")
    assert memory["advice"].startswith("raise worker.memory in the profile above the present 3.00 GiB")
    assert memory["gib"] == {"used": 2.9, "limit": 3.0}
    start(run, "job", commit(run, second, 9).name, world_size=2, tier="storage", driver="11111111")
    assert "out of memory" not in findings(sunspot), "it has been submitted again since, perhaps with more memory"


def test_running_out_of_memory_is_the_first_finding_for_a_failed_run(run: Run, sunspot: Command) -> None:
    reason = f"training failed: rank 0: lost after step 9: {FIGURES}; 4 times in a row"
    trains(run, state=RunState.FAILED, reason=f"{reason}\nstep 9 of 20 is kept")
    found = findings(sunspot)
    assert list(found) == ["out of memory"]
    assert found["out of memory"]["evidence"] == f"{reason}; 1 worker ended for this reason"
    assert found["out of memory"]["severity"] == "error"


# ------------------------------------------------------------------------------------------------------ missing access


def test_doctor_exits_with_code_3_for_an_unknown_run(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot("doctor", "nowhere") == 3
    assert "nowhere" in sunspot.err


def test_doctor_examines_storage_if_the_cluster_is_unreachable(
    cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    report(run, trains(run), *windows(5, data_wait_s=[5.0, 5.0]))
    cluster.down()
    found = findings(sunspot)
    assert "data-bound" in found
    assert any("cannot be reached" in text for text in sunspot.json["unseen"])


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RUNNING, RunState.SUCCEEDED])
def test_a_rejected_credential_is_the_first_finding_for_a_cluster_run(
    cluster: FakeCluster, run: Run, sunspot: Command, state: RunState
) -> None:
    begin(run)
    write_status(run, Status(state, "run-1#1a2b3c4d@sunspot/0123456789"))
    cluster.on("GET", "/rayjobs", answer(401, "Unauthorized"))
    ended = state is RunState.SUCCEEDED
    assert sunspot("doctor", "run", "--json") == (0 if ended else 4)
    assert ("cluster not seen" in names(sunspot)[:1]) is not ended
    sunspot("doctor", "run")
    if not ended:
        assert sunspot.out.startswith(f"run: {state}\n\n1. cluster not seen (error)\n   http://127.0.0.1")
        assert "ask again; the other findings are from storage" in sunspot.out
        assert sunspot.err == "error: run's cluster could not be examined; the first finding explains why\n"
    assert (sunspot.out + sunspot.err).count("rejected these credentials") == 1


@pytest.mark.parametrize(("state", "code"), [(RunState.STARTING, 4), (RunState.RUNNING, 0)])
def test_a_missing_cluster_is_reported_only_if_storage_does_not_explain_the_state_of_the_run(
    run: Run, sunspot: Command, state: RunState, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    begin(run)
    write_status(run, Status(state, "run-1#1a2b3c4d@sunspot/0123456789"))
    assert sunspot("doctor", "run", "--json") == code
    assert (names(sunspot)[0] == "cluster not seen") is (code == 4)


def test_a_rejected_credential_is_ignored_for_a_local_run(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    report(run, trains(run), *windows(5, data_wait_s=[5.0, 5.0]))
    cluster.on("GET", "/rayjobs", answer(401, "Unauthorized"))
    assert "data-bound" in findings(sunspot)


def test_doctor_examines_the_cluster_if_storage_is_unreachable(
    cluster: FakeCluster, job: Any, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: Any) -> None:
        raise StorageError("the bucket is gone")

    monkeypatch.setattr("sunspot.run.seen.read_status", refuse)
    cluster.pods = [head(phase="Pending", **unschedulable("2 Insufficient memory"))]
    assert "insufficient resources" in findings(sunspot)
    assert any("the bucket is gone" in text for text in sunspot.json["unseen"])


@pytest.mark.parametrize(
    ("kind", "severity", "advice"),
    [
        (StorageError, "warning", "they keep training for up to 600 s (STORAGE_TIMEOUT_S); check the storage server"),
        (RefusedStorageError, "error", "give this user read access, or run the command as a user who has it"),
    ],
)
def test_doctor_reports_unreadable_storage_of_a_live_run(
    kind: type[StorageError],
    severity: str,
    advice: str,
    cluster: FakeCluster,
    job: Any,
    sunspot: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*words: Any) -> None:
        raise kind("no answer")

    monkeypatch.setattr("sunspot.run.seen.read_status", refuse)
    monkeypatch.setattr("sunspot.submitter.doctor.diagnose.list_submissions", refuse)
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    cluster.pods = [head(), worker(1), worker(2)]
    [found] = findings(sunspot).values()
    assert (found["finding"], found["severity"], found["evidence"]) == ("storage trouble", severity, "no answer")
    assert advice in found["advice"]


@pytest.mark.parametrize(
    ("message", "evidence", "advice"),
    [
        (
            "...\nerror: SignatureDoesNotMatch; check it",
            ": SignatureDoesNotMatch; check it",
            "fix the problem that the message describes",
        ),
        ("", "", "kubectl get rayjob run-1 --watch -o jsonpath='{.status.message}' prints the reason"),
    ],
)
def test_doctor_reports_attempts_that_failed_before_writing_anything(
    message: str, evidence: str, advice: str, cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    record_submission(run, SubmissionRecord(JOB))
    cluster.put_job(rayjob(JOB, backoffLimit=2))
    cluster.set_status(JOB, "Retrying", "FAILED", rayClusterName=CLUSTER, failed=2, message=message)
    [found] = findings(sunspot).values()
    said = f"2 of 3 attempts have failed before they could write to storage{evidence}"
    assert (found["finding"], found["severity"], found["evidence"]) == ("failed", "error", said)
    assert advice in found["advice"]
    assert sunspot("logs", "run") == 3
    assert said in sunspot.err
    assert sunspot("events", "run") == 0
    assert said in sunspot.err


def test_pod_problems_are_listed_before_an_unexplained_failed_attempt(
    cluster: FakeCluster, run: Run, job: Any, sunspot: Command
) -> None:
    record_submission(run, SubmissionRecord(JOB))
    cluster.put_job(job | {"spec": job["spec"] | {"backoffLimit": 2}})
    cluster.set_status(JOB, "Initializing", rayClusterName=CLUSTER, failed=1)
    cluster.pods = [head(phase="Pending", **waiting("ImagePullBackOff", "not found"))]
    assert list(findings(sunspot)) == ["image", "failed"]


@pytest.mark.parametrize("kind", [None, RefusedStorageError])
def test_a_failed_rayjob_is_reported_regardless_of_storage(
    kind: type[StorageError] | None, cluster: FakeCluster, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: Any) -> None:
        assert kind
        raise kind("no answer")

    if kind:
        monkeypatch.setattr("sunspot.run.seen.read_status", refuse)
    cluster.put_job(rayjob(JOB))
    cluster.set_status(JOB, "Failed", "FAILED", reason="AppFailed", message="...\nerror: cannot import my_task")
    found = findings(sunspot)
    assert list(found) == ["failed", *(["storage trouble"] if kind else [])]
    assert found["failed"]["evidence"] == "cannot import my_task"


def test_a_user_who_cannot_list_pods_gets_findings_about_the_rayjob(
    cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    record_submission(run, SubmissionRecord(JOB))
    cluster.put_job(rayjob(JOB, backoffLimit=2))
    cluster.set_status(JOB, "Initializing", rayClusterName=CLUSTER, failed=2)
    cluster.on("GET", "/pods", answer(403, 'User "me" cannot list pods'))
    assert list(findings(sunspot)) == ["failed"]
    assert sunspot("status", "run", "--json") == 0
    failed = "2 of 3 attempts have failed before they could write to storage"
    assert sunspot.json["reason"] == f"{failed}; this user is not allowed to list its pods, which would show why"


def test_an_unreadable_folder_of_a_run_is_reported(run: Run, sunspot: Command) -> None:
    ended(run, 10)
    folder = Path(run.storage.locate(run.key("checkpoints")))
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder)  # a loop, which is a fault for a superuser, too
    found = findings(sunspot)
    assert list(found) == ["storage trouble"]
    assert found["storage trouble"]["severity"] == "error"
    assert f"{folder}: {os.strerror(errno.ELOOP)}" in found["storage trouble"]["evidence"]
    assert sunspot("status", "run") == 0
    assert str(folder) in sunspot.err
    assert "only from the cluster" not in sunspot.err, "no cluster was asked"


def test_a_damaged_attempt_is_reported(run: Run, sunspot: Command) -> None:
    first = trains(run)
    whole = commit(run, first, 5)
    commit(run, start(run, "job", whole.name), 9)
    run.storage.write(run.key("attempts", "0002.json"), b"{")
    for verb in ("status", "doctor", "audit"):
        assert sunspot(verb, "run") == 7
        assert "The file should record attempt 2" in sunspot.err
        assert "SUNSPOT_ACCEPT=loss-of-attempt-0002" in sunspot.err

    give_up_damaged(run, {"SUNSPOT_ACCEPT": "loss-of-attempt-0001"})
    with pytest.raises(DamageError):
        read_attempts(run)
    give_up_damaged(run, {"SUNSPOT_ACCEPT": "loss-of-attempt-0001,loss-of-attempt-0002"})
    attempts = read_attempts(run)
    assert attempts[0] == first, "what can be read is not given up"
    assert find_newest_good(run, attempts)[0] == whole
    assert start(run, "another job", whole.name, driver="11111111").number == 3, "its number is not used again"


def test_doctor_fails_if_neither_cluster_nor_storage_answers(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.on("GET", "/rayjobs", answer(403, "forbidden"))
    assert sunspot("doctor", "run") == 4


def test_findings_are_sorted_by_severity_and_cost() -> None:
    def finding(name: Diagnosis, severity: Severity, cost: float = 0.0) -> Finding:
        return Finding(name, severity, "seen", "do", cost=cost)

    note = finding(Diagnosis.HEALTHY, Severity.NOTE)
    wait = finding(Diagnosis.DATA_BOUND, Severity.WARNING, 0.6)
    lag = finding(Diagnosis.STRAGGLER, Severity.WARNING, 0.2)
    old = finding(Diagnosis.OLD_CHECKPOINT, Severity.WARNING)
    end = finding(Diagnosis.FAILED, Severity.ERROR)
    assert by_severity([note, old, lag, wait, end]) == [end, wait, lag, old, note]
