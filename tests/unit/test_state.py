"""Tests of the state of a run, for every combination of KubeRay's two states and the status in storage."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sunspot.run import open_run
from sunspot.run.overview import RunSummary
from sunspot.run.seen import RunSeen
from sunspot.run.status import RunState, Status
from sunspot.submitter.cluster import state as states
from sunspot.submitter.cluster.observation import RunSnapshot
from sunspot.submitter.cluster.state import CLOCK_SKEW_S, ClusterSeen
from sunspot.submitter.cluster.views import JobView, PodView, WarningEvent, job_view, pod_view, warning_event
from sunspot.submitter.manifest.pods import set_variable
from tests.harness.kubernetes import DEPLOYMENT_STATUSES, JOB_STATUSES, pod, rayjob, submitted, timestamp

NOW = time.time()
CREATED = NOW - 300
RUN = open_run("nowhere", "run")

STORED = [
    *("nothing", "starting", "running", "running, a while ago", "failed, in the try before", "failed", "lost"),
    *("stopped", "stopped, as was asked", "succeeded", "another's, from before", "another's, that trains now"),
]
"""Kinds of statuses in storage."""

CASES = list(itertools.product(STORED, DEPLOYMENT_STATUSES, JOB_STATUSES))

NONE_OF_ITS_OWN = ("nothing", "failed, in the try before", "another's, from before")
BEFORE_THE_CLUSTER = ("", "Initializing", "Waiting", "Suspending", "Suspended")

RULES: list[tuple[str, Callable[[str, str, str], bool], RunState]] = [
    (
        "a run that another RayJob has taken over has that one's state",
        lambda stored, deployment, ray: stored == "another's, that trains now",
        RunState.RUNNING,
    ),
    (
        "a run that has succeeded stays succeeded, whatever the operator reports",
        lambda stored, deployment, ray: stored == "succeeded",
        RunState.SUCCEEDED,
    ),
    (
        "a run that was asked to stop and has stopped stays stopped",
        lambda stored, deployment, ray: stored == "stopped, as was asked",
        RunState.STOPPED,
    ),
    (
        "a run that the operator refuses or gives up has failed",
        lambda stored, deployment, ray: deployment in ("Failed", "ValidationFailed"),
        RunState.FAILED,
    ),
    (
        "a run without a cluster is pending",
        lambda stored, deployment, ray: deployment in BEFORE_THE_CLUSTER,
        RunState.PENDING,
    ),
    (
        "a run between two clusters is retrying",
        lambda stored, deployment, ray: deployment == "Retrying",
        RunState.RETRYING,
    ),
    (
        "a driver that has stopped unasked, as on SIGTERM, has stopped once the operator has concluded",
        lambda stored, deployment, ray: (stored, deployment) == ("stopped", "Complete"),
        RunState.STOPPED,
    ),
    (
        "a run that the driver or Ray calls failed has failed",
        lambda stored, deployment, ray: stored == "failed" or ray == "FAILED",
        RunState.FAILED,
    ),
    (
        "a complete RayJob whose Ray job succeeded has succeeded",
        lambda stored, deployment, ray: (deployment, ray) == ("Complete", "SUCCEEDED"),
        RunState.SUCCEEDED,
    ),
    (
        "a complete RayJob whose Ray job was stopped has stopped",
        lambda stored, deployment, ray: (deployment, ray) == ("Complete", "STOPPED"),
        RunState.STOPPED,
    ),
    (
        "a complete RayJob whose Ray job never ended is lost",
        lambda stored, deployment, ray: deployment == "Complete",
        RunState.LOST,
    ),
    (
        "a Ray job that starts after its driver has ended or fallen silent is a retry",
        lambda stored, deployment, ray: (
            ray in ("", "PENDING") and stored in ("running, a while ago", "lost", "stopped")
        ),
        RunState.RETRYING,
    ),
    (
        "a run whose driver or Ray job has stopped is stopping until the operator concludes",
        lambda stored, deployment, ray: stored == "stopped" or ray == "STOPPED",
        RunState.STOPPING,
    ),
    (
        "a run whose Ray job has succeeded is finishing until the operator concludes",
        lambda stored, deployment, ray: ray == "SUCCEEDED",
        RunState.FINISHING,
    ),
    (
        "a run that trains without heartbeats is silent",
        lambda stored, deployment, ray: stored == "running, a while ago",
        RunState.SILENT,
    ),
    (
        "a run whose driver reports that it trains is running",
        lambda stored, deployment, ray: stored == "running",
        RunState.RUNNING,
    ),
    (
        "a run whose driver has reported nothing of this try, or only the loss of the last one, is starting",
        lambda stored, deployment, ray: stored in (*NONE_OF_ITS_OWN, "starting", "lost"),
        RunState.STARTING,
    ),
]
"""Rules that map the kind of status, `jobDeploymentStatus` and `jobStatus` to a state. The first match decides."""


def as_seen(status: Status | None = None, stop_wanted: bool = False, **trouble: Any) -> RunSeen:
    return RunSeen(RUN, RunSummary(exists=status is not None, stop_requested=stop_wanted), status, **trouble)


def judge(job: JobView, pods: Any = (), warnings: Any = (), now: float = NOW, **stored: Any) -> tuple[RunState, str]:
    return states.judge(ClusterSeen((job,), pods, warnings, time=now), as_seen(**stored))


def job(deployment: str = "Running", ray: str = "RUNNING", name: str = "run-1", **more: Any) -> JobView:
    raw = rayjob(name, created=CREATED, **more.pop("spec", {}))
    raw["metadata"].update(more.pop("metadata", {}))
    raw["status"] = {"jobDeploymentStatus": deployment, "jobStatus": ray, "rayClusterName": "run-1-x", **more}
    return job_view(raw)


def status(state: RunState, owner: str = "run-1", age: float = 5, **more: Any) -> Status:
    return Status(
        state, owner, time=NOW - age, **{"began": NOW - age, "world_size": 2, "step": 7, "total_steps": 10, **more}
    )


def in_storage(kind: str) -> Status | None:
    if kind == "nothing":
        return None
    if kind == "another's, from before":
        return status(RunState.SUCCEEDED, "run-0#1", age=1000)
    if kind == "another's, that trains now":
        return status(RunState.RUNNING, "run-2#1")
    name, _, when = kind.partition(",")
    return status(RunState(name), age={"": 5, " a while ago": 100, " in the try before": 290}.get(when, 5))


def state_of(stored: str, deployment: str, ray: str) -> RunState:
    view = job(deployment, ray, startTime=timestamp(NOW - 200))
    stopped = stored == "stopped, as was asked"
    state, reason = judge(view, status=in_storage(stored), now=NOW, stop_wanted=stopped)
    assert reason
    assert "\n" not in reason
    return state


@pytest.mark.parametrize("stored", STORED)
def test_the_first_matching_rule_determines_the_state_of_a_run(stored: str) -> None:
    for deployment, ray in itertools.product(DEPLOYMENT_STATUSES, JOB_STATUSES):
        rule, expected = next((rule, state) for rule, holds, state in RULES if holds(stored, deployment, ray))
        assert state_of(stored, deployment, ray) is expected, (rule, deployment, ray)


def test_a_stop_request_does_not_hide_the_end_of_the_run() -> None:
    for case in CASES:
        stored, deployment, ray = case
        before, _ = judge(job(deployment, ray), status=in_storage(stored), now=NOW)
        after, _ = judge(job(deployment, ray), status=in_storage(stored), now=NOW, stop_wanted=True)
        if stored.startswith("stopped"):
            assert after is RunState.STOPPED, case
        else:
            taken_over = stored == "another's, that trains now"
            assert after is (before if before.terminal or taken_over else RunState.STOPPING), case


@pytest.mark.parametrize("ray", JOB_STATUSES)
def test_a_failure_is_not_final_while_retries_remain(ray: str) -> None:
    tries = {"spec": {"backoffLimit": 2}}
    failed = status(RunState.FAILED, reason="the disk is full")
    assert judge(job("Running", ray, failed=1, **tries), status=failed, now=NOW)[0] is RunState.RETRYING
    assert judge(job("Running", ray, failed=2, **tries), status=failed, now=NOW)[0] is RunState.FAILED
    state, reason = judge(job("Retrying", "FAILED", failed=1, **tries), status=failed, now=NOW)
    assert (state, reason) == (RunState.RETRYING, "attempt 1 of 3 failed: the disk is full; a new cluster follows")
    state, reason = judge(job("Initializing", "", failed=1, **tries), status=failed, now=NOW)
    assert state is RunState.RETRYING
    assert "the disk is full" in reason


TRIES = {"failed": 2, "startTime": timestamp(NOW - 30), "spec": {"backoffLimit": 2}}
BEFORE_STORAGE = "2 of 3 attempts have failed before they could write to storage"


@pytest.mark.parametrize("deployment", ["Retrying", "", "Initializing", "Running"])
def test_failed_attempts_missing_from_storage_are_counted(deployment: str) -> None:
    ray = {"Retrying": "FAILED", "Running": "RUNNING"}.get(deployment, "")
    state, reason = judge(job(deployment, ray, **TRIES))
    assert (state, reason.partition(";")[0]) == (RunState.RETRYING, BEFORE_STORAGE)
    said = judge(job(deployment, ray, message="...\nerror: SignatureDoesNotMatch; check the key", **TRIES))[1]
    assert said.startswith(f"{BEFORE_STORAGE}: SignatureDoesNotMatch; check the key; ")
    away = judge(job("Initializing", "", **TRIES), trouble="no route to host")[1]
    assert away.startswith("2 of 3 attempts have failed; "), "their status is unknown"


def test_a_job_fails_if_its_driver_failed_permanently() -> None:
    message = "failed for good with exit code 4, so it is not tried again\nerror: SignatureDoesNotMatch; check the key"
    view = job("Complete", "STOPPED", message=message, spec={"backoffLimit": 2})
    assert judge(view) == (RunState.FAILED, "SignatureDoesNotMatch; check the key")
    own = status(RunState.FAILED, reason="SignatureDoesNotMatch")
    assert judge(view, status=own) == (RunState.FAILED, "SignatureDoesNotMatch")
    assert judge(job("Complete", "STOPPED", message="Job was intentionally stopped."))[0] is RunState.STOPPED
    drained = status(RunState.STOPPED, age=250)  # written by the previous attempt when its node was reclaimed
    again = job("Complete", "STOPPED", message=message, failed=1, startTime=timestamp(NOW - 200))
    assert judge(again, status=drained) == (RunState.FAILED, "SignatureDoesNotMatch; check the key")
    behind = job("Running", "STOPPED", message=message, spec={"backoffLimit": 2})
    assert judge(behind) == (RunState.FAILED, "SignatureDoesNotMatch; check the key"), "no other try follows"
    assert judge(behind, status=own) == (RunState.FAILED, "SignatureDoesNotMatch")


OUTAGE = (
    "its Ray job is running; storage does not answer, so its progress is unknown; if the run's own processes are "
    "cut off as well, they keep training for up to 600 s (STORAGE_TIMEOUT_S)"
)


@pytest.mark.parametrize("last", [None, status(RunState.RUNNING, age=250)], ids=["first look", "since a while"])
def test_unreachable_storage_does_not_make_a_run_silent(last: Status | None) -> None:
    assert judge(job(), status=last, trouble="no route to host") == (RunState.RUNNING, OUTAGE)
    refused = judge(job(), status=last, trouble="AccessDenied", refused=True)[1]
    assert refused == "its Ray job is running; this user has no access to its storage, so its progress is unknown"


@pytest.mark.parametrize("deployment", ["Initializing", "Suspended"])
def test_pods_that_cannot_be_listed_are_not_described(deployment: str) -> None:
    seen = ClusterSeen((job(deployment, ""),), time=NOW, unseen_pods="nobody looked at its pods")
    reason = states.judge(seen, as_seen())[1]
    assert reason == {"Initializing": "nobody looked at its pods"}.get(
        deployment, "suspended: suspend is true in its spec"
    )


def test_an_unreadable_status_is_not_reported_as_missing() -> None:
    state, reason = judge(job("Complete", "SUCCEEDED"), trouble="no route to host")
    assert state is RunState.SUCCEEDED
    assert "wrote no" not in reason
    snapshot = RunSnapshot(ClusterSeen(), as_seen(trouble="no route to host"))
    assert snapshot.state()[0] is RunState.SILENT, "and not lost for good, which would end `wait`"


def test_a_status_written_before_the_job_was_replaced_is_ignored() -> None:
    old = status(RunState.STOPPED, "run-1#1a2b3c4d")
    again = job_view(submitted(job("Initializing", "").raw))
    assert judge(again, status=old, now=NOW)[0] is RunState.PENDING
    # GitOps recreated it. The owner's name is the same, and only the time differs.
    old = status(RunState.FAILED, "run-1", age=1000)
    assert judge(job("Running", "RUNNING"), status=old, now=NOW)[0] is RunState.STARTING


@pytest.mark.parametrize(
    ("job_id", "owner", "same"),
    [
        ("run-1#1a2b3c4d", "run-1#1a2b3c4d@sunspot/aaaaaaaaaa", True),
        ("run-1#1a2b3c4d", "run-1#1a2b3c4d@sunspot", True),
        ("run-1#1a2b3c4d", "run-1#1a2b3c4d", True),
        ("run-1#1a2b3c4d", "run-1#5e6f7a8b@sunspot/aaaaaaaaaa", False),
        ("run-1#1a2b3c4d", "run-1@sunspot/aaaaaaaaaa", False),
        ("run-1#1a2b3c4d", "run-1#1", False),
        ("run-1", "run-1@sunspot/aaaaaaaaaa", True),
        ("run-1", "run-1@teamb/aaaaaaaaaa", False),
        ("run-1", "run-1@sunspot/bbbbbbbbbb", False),
        ("run-1", "run-2@sunspot/aaaaaaaaaa", False),
        ("run-1", "run-1#12345678", False),
    ],
)
def test_an_owner_matches_by_name_and_namespace_and_cluster_and_submission(job_id: str, owner: str, same: bool) -> None:
    raw = rayjob("run-1")
    set_variable(raw, "SUNSPOT_JOB_ID", job_id)
    raw["metadata"]["namespace"] = "sunspot"
    assert states.owns(job_view(raw, "aaaaaaaaaa"), owner) is same
    assert states.owns(job_view(raw), owner) is (same or owner.endswith("b" * 10)), "the cluster is not known"


def test_an_exceeded_deadline_is_a_failure_even_if_the_ray_job_runs() -> None:
    late = job("Failed", "RUNNING", reason="DeadlineExceeded", spec={"activeDeadlineSeconds": 60})
    state, reason = judge(late, status=status(RunState.RUNNING), now=NOW)
    assert state is RunState.FAILED
    assert "activeDeadlineSeconds (60 s)" in reason
    never = job("Failed", "", reason="PreRunningDeadlineExceeded", spec={"preRunningDeadlineSeconds": 600})
    state, reason = judge(never, [view(head(waiting("ImagePullBackOff", "no such image")))], now=NOW)
    assert state is RunState.FAILED
    assert (
        "within preRunningDeadlineSeconds (600 s): the head pod cannot start: image sunspot:1 cannot be pulled"
        in reason
    )


def test_a_message_from_the_program_takes_precedence_over_a_message_from_the_operator() -> None:
    failed = job("Failed", "FAILED", reason="AppFailed", message="Job entrypoint command failed with exit code 1")
    own = status(RunState.FAILED, reason="row 7 of train.parquet has no label")
    assert judge(failed, status=own, now=NOW)[1] == "row 7 of train.parquet has no label"
    assert judge(failed, now=NOW)[1] == "Job entrypoint command failed with exit code 1"
    quoted = (
        "ended with exit code 6, last available logs: ...\nrun x in s3://b/x\nerror: begun with other settings:\n  A"
    )
    assert judge(job("Failed", "FAILED", message=quoted), now=NOW)[1] == "begun with other settings: A"
    refused = job("ValidationFailed", "", message="the name is too long")
    assert judge(refused, now=NOW)[1] == "the operator rejects the manifest: the name is too long"


def test_a_rejected_job_is_not_reported_as_taken_over() -> None:
    """The run's own job came first and keeps training or has ended."""
    failed = job("Failed", "FAILED", message="\nerror: begun with other settings")
    for state in (RunState.RUNNING, RunState.SUCCEEDED):
        first = status(state, owner="run-0", began=CREATED - 60)
        assert judge(failed, status=first, now=NOW) == (RunState.FAILED, "begun with other settings")


def test_a_running_job_with_an_old_status_is_silent() -> None:
    state, reason = judge(job(), status=status(RunState.RUNNING, age=250), now=NOW)
    assert state is RunState.SILENT
    assert re.fullmatch(
        r"no sign of life since \d{4}-.* UTC, 4 min ago, but its Ray job is running; "
        r"it might be frozen, cut off or gone",
        reason,
    )
    state, reason = judge(job(), status=status(RunState.RUNNING, age=250), now=NOW, stop_wanted=True)
    assert (state, reason.partition(" since")[0]) == (RunState.STOPPING, "told to stop; no sign of life")
    another = status(RunState.RUNNING, "run-2#1", age=250)
    state, reason = judge(job(), status=another, now=NOW)
    assert state is RunState.SILENT
    assert reason.startswith("run-2 has taken the run over from run-1: no sign of life since")
    assert judge(job(), status=status(RunState.RUNNING), now=NOW)[1] == "2 workers train"


def test_a_run_is_finishing_once_it_has_taken_all_steps() -> None:
    for owner in ("run-1", "run-2#1"):
        finishing = status(RunState.FINISHING, owner, reason="all steps are taken", began=CREATED + 1)
        state, reason = judge(job(), status=finishing, now=NOW)
        assert (state, reason.endswith("all steps are taken")) == (RunState.FINISHING, True)


def test_a_job_that_no_operator_has_handled_for_some_time_is_reported() -> None:
    assert "check that the KubeRay operator is running" in judge(job("", ""), now=NOW)[1]
    assert "operator" not in judge(job("", ""), now=CREATED + 5)[1]


def test_a_deleted_job_is_stopping_and_a_suspended_job_is_pending() -> None:
    assert judge(job(metadata={"deletionTimestamp": timestamp(NOW)}), now=NOW)[0] is RunState.STOPPING
    queued = job("Suspended", "", metadata={"labels": {"kueue.x-k8s.io/queue-name": "gpus"}})
    assert judge(queued, now=NOW) == (RunState.PENDING, "suspended: the queue gpus has not admitted it")


# ----------------------------------------------------------------------------------------------------------------- pods


def waiting(reason: str, message: str, name: str = "ray") -> dict[str, Any]:
    container = {"name": name, "image": "sunspot:1", "state": {"waiting": {"reason": reason, "message": message}}}
    return {"containerStatuses": [container]}


def head(more: dict[str, Any] | None = None, phase: str = "Pending") -> dict[str, Any]:
    return pod("run-1-x-head", "run-1-x", head=True, phase="Running" if more is None else phase, **(more or {}))


def worker(number: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
    phase = "Running" if more is None else "Pending"
    return pod(f"run-1-x-worker-{number}", "run-1-x", phase=phase, **(more or {}))


def view(raw: dict[str, Any]) -> PodView:
    return pod_view(raw)


UNSCHEDULABLE = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector. preemption: none",
        }
    ]
}
CRASHED = {"containerStatuses": [{"name": "ray", "state": {}, "lastState": {"terminated": {"reason": "OOMKilled"}}}]}


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        ([], ["its pods are about to be created"]),
        ([head({})], ["the head pod is starting"]),
        ([head(), worker(1)], ["2 worker pods wanted, 1 running; the others are starting"]),
        ([head(), worker(1), worker(2)], ["its pods are ready"]),
        ([head(UNSCHEDULABLE)], ["the head pod cannot start: no node takes it (0/4 nodes", "selector); unless"]),
        ([head(), worker(1), worker(2, UNSCHEDULABLE)], ["2 worker pods wanted, 1 running: no node takes it (0/4"]),
        (
            [head(waiting("ImagePullBackOff", 'Back-off pulling image "sunspot:1": ErrImagePull: not found'))],
            ["image sunspot:1 cannot be pulled: not found; push the image, or correct --image"],
        ),
        ([head(waiting("ErrImagePull", "not found"))], ["image sunspot:1 cannot be pulled: not found; push the image"]),
        (
            [head(waiting("CreateContainerConfigError", 'secret "sunspot-storage" not found'))],
            ['CreateContainerConfigError: secret "sunspot-storage" not found; create what is missing'],
        ),
        (
            [head(), worker(1, CRASHED), worker(2)],
            ["1 running: container ray ran out of memory (OOMKilled); raise its memory"],
        ),
        ([head(waiting("ContainerCreating", ""))], ["the head pod is starting"]),
        (
            [head({"reason": "Evicted", "message": "low on disk"}, "Failed")],
            ["the head pod cannot start: Evicted: low on"],
        ),
    ],
)
def test_the_reason_why_a_run_is_pending_is_read_from_its_pods(pods: list[dict[str, Any]], said: list[str]) -> None:
    state, reason = judge(job("Initializing", ""), [view(raw) for raw in pods], now=NOW)
    assert state is RunState.PENDING
    for part in said:
        assert part in reason


def test_one_worker_group_can_wait_for_pods_while_another_is_training() -> None:
    of_two = replace(job(), training_groups=("workers", "workers-2"))
    pods = [view(raw) for raw in (head(), worker(1), worker(2, UNSCHEDULABLE))]
    state, reason = judge(of_two, pods, status=status(RunState.RUNNING, world_size=1), now=NOW)
    assert state is RunState.RUNNING
    assert reason.startswith("1 of 2 workers train; 1 more worker pod requested: no node takes it (0/4")


@pytest.mark.parametrize(
    ("about", "reason", "pods", "said"),
    [
        ("run-1-x", "FailedToCreateHeadPod", [], "the head pod cannot be created: exceeded quota"),
        (
            "run-1-x",
            "FailedToCreateWorkerPod",
            [head()],
            "2 worker pods wanted, 0 running: a pod cannot be created: exceeded",
        ),
        ("run-1-x-head", "FailedMount", [head({})], "the head pod cannot start: FailedMount: exceeded quota"),
        ("run-1-x-head", "FailedScheduling", [head({})], "the head pod is starting"),
        ("other", "FailedToCreateHeadPod", [], "its pods are about to be created"),
    ],
)
def test_a_warning_event_explains_the_state_of_a_pod_without_a_reason_in_its_status(
    about: str, reason: str, pods: list[dict[str, Any]], said: str
) -> None:
    raw = {"metadata": {}, "involvedObject": {"name": about}, "reason": reason, "message": "exceeded quota."}
    fresh: WarningEvent = warning_event({**raw, "lastTimestamp": timestamp(NOW - 30)})
    assert said in judge(job("Initializing", ""), [view(p) for p in pods], [fresh], now=NOW)[1]
    overcome = warning_event({**raw, "eventTime": timestamp(NOW - 3000)})
    assert "quota" not in judge(job("Initializing", ""), [view(p) for p in pods], [overcome], now=NOW)[1]


def test_pods_of_an_earlier_attempt_do_not_affect_the_state() -> None:
    earlier = pod("run-1-w-head", "run-1-w", head=True)
    assert "about to be created" in judge(job("Initializing", ""), [view(earlier)], now=NOW)[1]


@pytest.mark.parametrize(("ago", "answers"), [(-20, True), (20, True), (60, False)])
def test_a_head_pod_that_is_being_deleted_is_reported_with_its_node(ago: float, answers: bool) -> None:
    ending = head()
    ending["metadata"]["deletionTimestamp"] = timestamp(NOW - ago)
    last = status(RunState.RUNNING, age=100)
    state, reason = judge(job(), [view(ending)], status=last, now=NOW)
    assert state is RunState.SILENT
    assert "the head pod is being deleted, and is replaced once it has left node node-of-run-1-x-head" in reason
    assert ("which does not answer" in reason) is not answers
    new = {**head(), "metadata": {**head()["metadata"], "name": "run-1-x-head-2"}}
    state, reason = judge(job(), [view(ending), view(new)], status=last, now=NOW)
    assert "told to go" not in reason


def test_pod_problems_are_reported_while_a_run_is_training() -> None:
    pods = [view(head()), view(worker(1)), view(worker(2, UNSCHEDULABLE))]
    state, reason = judge(job(), pods, status=status(RunState.RUNNING, world_size=1), now=NOW)
    assert state is RunState.RUNNING
    assert "2 worker pods wanted, 1 running: no node takes it" in reason


def test_a_status_written_before_the_job_existed_is_ignored() -> None:
    """A deleted RayJob with the same name wrote the status."""
    old = status(RunState.SUCCEEDED, owner="run-1", age=NOW - CREATED + 2 * CLOCK_SKEW_S)
    assert judge(job(), status=old, now=NOW)[0] is RunState.STARTING
    assert judge(job(), status=status(RunState.SUCCEEDED, owner="run-1"), now=NOW)[0] is RunState.SUCCEEDED


def next_job(deployment: str, ray: str, **more: Any) -> JobView:
    """Return the RayJob in the west to which a run moves from the RayJob run-1 in the east."""
    raw = {**job(deployment, ray, "run-2", **more).raw}
    raw["metadata"]["creationTimestamp"] = timestamp(NOW - 60)
    raw["status"]["rayClusterName"] = "run-2-x"
    set_variable(raw, "SUNSPOT_JOB_ID", "run-2#b@//west")
    set_variable(raw, "SUNSPOT_MOVES_FROM", "run-1")
    return job_view(raw)


@pytest.mark.parametrize(
    ("deployment", "ray", "reason"),
    [
        ("Initializing", "", "its next place, west, is being warmed up: its pods are about to be created"),
        ("Running", "RUNNING", "its next place, west, is being warmed up: its workers are starting"),
        ("Failed", "FAILED", "its move to west has failed: no GPU"),
    ],
)
@pytest.mark.parametrize("same_namespace", [True, False])
def test_a_run_trains_while_its_next_place_is_warmed_up(
    deployment: str, ray: str, reason: str, same_namespace: bool
) -> None:
    coming = next_job(deployment, ray, message="no GPU")
    jobs = (coming, job()) if same_namespace else (coming,)
    trains = as_seen(status=status(RunState.RUNNING), time=NOW)
    assert states.judge(ClusterSeen(jobs, time=NOW), trains) == (RunState.RUNNING, f"2 workers train; {reason}")


def test_a_run_can_lack_workers_while_its_next_place_is_warmed_up() -> None:
    jobs = (next_job("Initializing", ""), job())
    assert RunSnapshot(ClusterSeen(jobs, time=NOW), as_seen(status=status(RunState.STARTING))).lacks_workers


@pytest.mark.parametrize(("deployment", "state"), [("Initializing", RunState.PENDING), ("Failed", RunState.FAILED)])
def test_the_failure_of_the_old_rayjob_does_not_end_a_run_whose_next_rayjob_is_alive(
    deployment: str, state: RunState
) -> None:
    """The operator can fail the old RayJob before its driver writes a final status."""
    jobs = (next_job(deployment, ""), job("Failed", "RUNNING"))
    trains = status(RunState.RUNNING, began=CREATED + 10)
    snapshot = RunSnapshot(ClusterSeen(jobs, time=NOW), as_seen(status=trains, time=NOW))
    assert snapshot.state()[0] is state
    assert snapshot.training_job is jobs[state is RunState.FAILED]


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (status(RunState.RUNNING, age=100), RunState.PENDING),
        (status(RunState.STOPPED, reason="stopped by its move to run-2 in west"), RunState.PENDING),
        (status(RunState.FAILED), RunState.PENDING),
        (status(RunState.RUNNING, "run-2#b", began=NOW - 10), RunState.RUNNING),
    ],
    ids=["the old driver is silent", "the old driver has handed over", "the old driver has failed", "it has moved"],
)
def test_a_run_has_the_state_of_its_new_rayjob_once_the_old_driver_is_no_longer_training(
    last: Status, state: RunState
) -> None:
    coming = next_job("Running" if state is RunState.RUNNING else "Initializing", "RUNNING")
    set_variable(coming.raw, "SUNSPOT_JOB_ID", "run-2#b")
    found, reason = states.judge(ClusterSeen((job_view(coming.raw), job()), time=NOW), as_seen(status=last))
    assert found is state
    assert "next place" not in reason
