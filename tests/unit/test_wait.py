"""Tests of `sunspot wait` and `status`, with outages of the API server and of storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sunspot.cli import main
from sunspot.run import Run, open_run
from sunspot.run.attempts import checkpoint_name
from sunspot.run.incidents import Cause
from sunspot.run.requests import request_stop
from sunspot.run.seen import RunSeen
from sunspot.run.status import RunState, Status
from sunspot.submitter.cluster.api import UnreachableError
from sunspot.submitter.cluster.observation import MAX_OUTAGE_S, RunAccess, RunSnapshot, follow
from sunspot.submitter.cluster.progress_lines import ProgressLines
from sunspot.submitter.cluster.state import ClusterSeen
from sunspot.submitter.manifest.pods import set_variable
from sunspot.submitter.manifest.render import settings_of
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster, answer, drop, hang_up, kept, pod, rayjob, submitted, timestamp
from tests.harness.runs import age, begin, commit, report, set_status, start, write_receipt

JOB = "run-1"


@pytest.fixture
def when(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call a function when `wait` shows a state for the first time."""
    steps: dict[str, Callable[[], Any]] = {}
    show = ProgressLines.__call__

    def show_and_act(self: ProgressLines, seen: RunSnapshot, state: RunState, reason: str) -> None:
        show(self, seen, state, reason)
        step = steps.pop(state, None)
        if step:
            step()

    monkeypatch.setattr(ProgressLines, "__call__", show_and_act)
    return steps.update


def later(*steps: Callable[[], Any], pause: float) -> None:
    """Call functions one after another in a thread."""

    def act() -> None:
        for step in steps:
            time.sleep(pause)
            step()

    threading.Thread(target=act, daemon=True).start()


@pytest.fixture
def job(cluster: FakeCluster) -> str:
    """A RayJob that has just been created."""
    cluster.put_job(rayjob(JOB))
    cluster.set_status(JOB, "Initializing", rayClusterName="run-1-x")
    return JOB


# ----------------------------------------------------------------------------------------------------------------- wait


def test_wait_follows_a_run_until_it_succeeds(
    cluster: FakeCluster, run: Run, sunspot: Command, job: str, when: Callable[..., None]
) -> None:
    cluster.pods = [pod("run-1-x-head", "run-1-x", head=True)]
    when(
        pending=lambda: cluster.set_status(job, "Running", "PENDING"),
        starting=lambda: (
            set_status(run, RunState.RUNNING, step=3, world_size=2),
            cluster.set_status(job, "Running", "RUNNING"),
        ),
        running=lambda: (
            set_status(run, RunState.SUCCEEDED, step=10),
            cluster.set_status(job, "Complete", "SUCCEEDED"),
        ),
    )
    assert sunspot("wait", "run", "--json", "--timeout", "60") == 0, sunspot.err
    states = [line["state"] for line in sunspot.lines]
    assert list(dict.fromkeys(states)) == ["pending", "starting", "running", "succeeded"]
    assert sunspot.lines[0]["reason"] == "2 worker pods wanted, 0 running; the others are starting"
    assert sunspot.lines[-1]["step"] == 10


def test_a_run_that_moves_within_its_namespace_is_shown_as_running(
    cluster: FakeCluster, run: Run, sunspot: Command, when: Callable[..., None]
) -> None:
    cluster.put_job(rayjob("run-0", created=time.time() - 100))
    cluster.set_status("run-0", "Running", "RUNNING", rayClusterName="run-0-x")
    cluster.pods = [pod(f"run-0-x-{name}", "run-0-x", head=name == "head") for name in ("head", "1", "2")]
    coming = rayjob(JOB)
    set_variable(coming, "SUNSPOT_JOB_ID", f"{JOB}#b@//west")
    set_variable(coming, "SUNSPOT_MOVES_FROM", "run-0")
    cluster.put_job(coming)
    cluster.set_status(JOB, "Initializing", rayClusterName="run-1-x")
    set_status(run, RunState.RUNNING, owner="run-0", step=3, world_size=2)
    assert sunspot("status", "run", "--json") == 0
    assert [sunspot.json[name] for name in ("state", "job", "pods_running")] == ["running", "run-0", 2]

    def end() -> None:
        set_status(run, RunState.SUCCEEDED, owner=f"{JOB}#b", attempt=2, step=10)
        cluster.set_status(JOB, "Complete", "SUCCEEDED")

    when(running=end)
    assert sunspot("wait", "run", "--json", "--timeout", "60") == 0, sunspot.err
    assert [line["state"] for line in sunspot.lines] == ["running", "succeeded"]
    said = "2 workers train; its next place, west, is being warmed up: its pods are about to be created"
    assert sunspot.lines[0]["reason"] == said


@pytest.mark.parametrize(
    ("state", "deployment", "ray", "code", "said"),
    [
        (RunState.STOPPED, "Complete", "SUCCEEDED", 0, "stopped"),
        (RunState.FAILED, "Failed", "FAILED", 1, "error: run failed: so it was"),
        (None, "ValidationFailed", "", 1, "error: run failed: the operator rejects the manifest: bad name"),
    ],
)
def test_wait_exits_with_the_outcome_of_the_run(
    cluster: FakeCluster,
    run: Run,
    sunspot: Command,
    job: str,
    state: RunState | None,
    deployment: str,
    ray: str,
    code: int,
    said: str,
) -> None:
    if state:
        set_status(run, state, reason="so it was")
    cluster.set_status(job, deployment, ray, message="bad name")
    assert sunspot("wait", "run") == code
    assert said in sunspot.out + sunspot.err


def test_wait_continues_until_the_cluster_confirms_a_failure(
    cluster: FakeCluster, run: Run, sunspot: Command, job: str
) -> None:
    """The operator can start another attempt, which only the API server knows about."""
    set_status(run, RunState.FAILED, reason="a lost disk")
    cluster.down()

    def finish() -> None:
        set_status(run, RunState.SUCCEEDED)
        cluster.set_status(job, "Complete", "SUCCEEDED")
        cluster.up()

    later(finish, pause=1.0)
    assert sunspot("wait", "run", "--timeout", "60") == 0, sunspot.err


def test_wait_prints_no_line_if_only_the_age_of_the_last_status_changes(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show, now = ProgressLines(run), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def count_lines(state: RunState, reason: str, step: int = 0, later_s: float = 0.0) -> int:
        nonlocal now
        now += later_s
        status = Status(state, "job", step=step, total_steps=1000)
        show(RunSnapshot(ClusterSeen(), RunSeen(run, status=status)), state, reason)
        return len(capsys.readouterr().out.splitlines())

    assert count_lines(RunState.SILENT, "no sign of life since 12:00:00, 26 s ago: it is frozen") == 1
    assert count_lines(RunState.SILENT, "no sign of life since 12:00:00, 119 s ago: it is frozen", later_s=93) == 0
    assert count_lines(RunState.SILENT, "no sign of life since 12:00:00, 2 min ago: it is frozen", later_s=3) == 0
    assert count_lines(RunState.RUNNING, "2 workers train", step=3) == 1
    assert count_lines(RunState.RUNNING, "1 worker trains", step=3) == 1
    assert count_lines(RunState.RUNNING, "1 worker trains", step=13, later_s=9) == 0
    assert count_lines(RunState.RUNNING, "1 worker trains", step=13, later_s=1) == 1
    assert count_lines(RunState.RUNNING, "1 worker trains", step=14, later_s=59) == 0
    assert count_lines(RunState.RUNNING, "1 worker trains", step=14, later_s=1) == 1
    assert count_lines(RunState.RUNNING, "1 worker trains", step=14, later_s=600) == 0, "no step was taken"


def test_wait_survives_an_api_server_outage(
    cluster: FakeCluster,
    run: Run,
    sunspot: Command,
    job: str,
    when: Callable[..., None],
    set_constants: SetConstants,
) -> None:
    cluster.set_status(job, "Running", "RUNNING")
    set_status(run, RunState.RUNNING)
    set_constants("sunspot.submitter.cluster.observation", OUTAGE_EVERY_S=0.3)

    def finish() -> None:
        set_status(run, RunState.SUCCEEDED)
        cluster.set_status(job, "Complete", "SUCCEEDED")

    when(running=lambda: (cluster.down(), later(cluster.up, finish, pause=1.5)))
    assert sunspot("wait", "run", "--timeout", "60") == 0, sunspot.err
    assert "the API server has been unreachable for" in sunspot.err
    assert "still waiting. The run is not affected" in sunspot.err
    assert "the API server is back after" in sunspot.err


def test_wait_fails_after_a_long_api_server_outage(
    cluster: FakeCluster, sunspot: Command, job: str, when: Callable[..., None], set_constants: SetConstants
) -> None:
    cluster.set_status(job, "Running", "RUNNING")
    set_constants("sunspot.submitter.cluster.observation", MAX_OUTAGE_S=0.5)
    when(starting=cluster.down)
    assert sunspot("wait", "run") == 4
    assert "cannot be reached" in sunspot.err


class Breaking:
    """An API server that is down for two thirds of the longest outage and then answers every second request."""

    def __init__(self) -> None:
        self.now = 0.0

    def list_jobs(self, run: str) -> list[Any]:
        self.now += MAX_OUTAGE_S * 2 / 3
        if self.now % (MAX_OUTAGE_S * 4 / 3):
            raise UnreachableError("cut off")
        return []

    def list_pods(self, jobs: Any) -> list[Any]:
        return []

    list_warnings = list_pods


def test_the_durations_of_separate_outages_are_not_added_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Breaking()
    clock = SimpleNamespace(monotonic=lambda: server.now, time=time.time, sleep=lambda seconds: None)
    monkeypatch.setattr("sunspot.submitter.cluster.observation.time", clock)
    troubles = [bool(seen.cluster.trouble) for seen, _ in zip(follow(RunAccess(run, server)), range(8), strict=False)]
    assert troubles == [True, False] * 4


@pytest.mark.parametrize(("status", "times", "code"), [(401, 3, 0), (403, 3, 0), (401, 99, 4)])
def test_expired_credentials_are_retried_for_a_while(
    cluster: FakeCluster,
    run: Run,
    sunspot: Command,
    job: str,
    when: Callable[..., None],
    set_constants: SetConstants,
    status: int,
    times: int,
    code: int,
) -> None:
    cluster.set_status(job, "Running", "RUNNING")
    set_status(run, RunState.RUNNING)
    set_constants("sunspot.submitter.cluster.observation", REFUSAL_PAUSES_S=(0.05,) * 3)

    def expire() -> None:
        cluster.on("GET", "rayjobs", answer(status, "the webhook that reviews tokens failed"), times=times)
        if code == 0:
            set_status(run, RunState.SUCCEEDED)
            cluster.set_status(job, "Complete", "SUCCEEDED")

    when(running=expire)
    assert sunspot("wait", "run", "--timeout", "60") == code, sunspot.err
    assert ("error: " in sunspot.err) == (code == 4)


def test_objects_that_the_user_cannot_list_are_reported_and_other_objects_are_shown(
    cluster: FakeCluster, run: Run, sunspot: Command, job: str, when: Callable[..., None]
) -> None:
    cluster.pods = [pod("run-1-x-head", "run-1-x", head=True)]
    cluster.on("GET", "/events", answer(403, 'User "me" cannot list events'))
    assert sunspot("status", "run") == 0
    assert "2 worker pods wanted, 0 running; the others are starting" in sunspot.out
    refusal = 'User "me" cannot list events; ask for the Role sunspot-submitter'
    assert f"the run's events cannot be shown: {refusal}" in sunspot.err
    cluster.on("GET", "/pods", answer(403, 'User "me" cannot list pods'))
    assert sunspot("status", "run") == 0
    assert "this user is not allowed to list its pods" in sunspot.out
    assert "worker pods running" not in sunspot.out
    when(pending=lambda: (set_status(run, RunState.SUCCEEDED), cluster.set_status(job, "Complete", "SUCCEEDED")))
    assert sunspot("wait", "run", "--timeout", "60") == 0, sunspot.err


def test_long_lists_are_read_page_by_page(cluster: FakeCluster, sunspot: Command, job: str) -> None:
    def event(about: str) -> dict[str, Any]:
        meta = {"creationTimestamp": timestamp(time.time())}
        about_it = {"involvedObject": {"name": about}, "reason": "FailedToCreateHeadPod", "message": "exceeded quota"}
        return {"metadata": meta, **about_it}

    cluster.events = [event("another")] * 1200 + [event("run-1-x")]
    assert sunspot("status", "run") == 0
    assert "the head pod cannot be created: exceeded quota" in sunspot.out
    assert sum("/events" in path for _, path in cluster.requests) == 3


def test_wait_sees_the_end_of_a_run_in_storage_if_the_api_server_is_down(
    cluster: FakeCluster, run: Run, sunspot: Command, job: str, when: Callable[..., None]
) -> None:
    cluster.set_status(job, "Running", "RUNNING")
    set_status(run, RunState.RUNNING)
    when(running=lambda: (cluster.down(), set_status(run, RunState.SUCCEEDED)))
    assert sunspot("wait", "run", "--timeout", "60") == 0


def test_the_reason_why_a_run_is_pending_is_shown_while_waiting(
    cluster: FakeCluster, sunspot: Command, job: str
) -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "sunspot-storage" not found'}
    container = {"name": "ray", "image": "i", "state": {"waiting": waiting}}
    cluster.pods = [pod("run-1-x-head", "run-1-x", head=True, phase="Pending", containerStatuses=[container])]
    assert sunspot("wait", "run", "--timeout", "0.5") == 5
    assert 'the head pod cannot start: CreateContainerConfigError: secret "sunspot-storage" not found' in sunspot.out
    assert "follows it again" in sunspot.err


def test_wait_follows_the_newer_of_two_rayjobs(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    cluster.put_job(rayjob("run-0", created=time.time() - 100))
    cluster.set_status("run-0", "Failed", "FAILED", reason="AppFailed")
    cluster.put_job(rayjob("run-1"))
    cluster.set_status("run-1", "Complete", "SUCCEEDED")
    set_status(run, RunState.SUCCEEDED, owner="run-1")
    assert sunspot("wait", "run") == 0


def test_wait_ends_if_the_rayjob_is_deleted(
    cluster: FakeCluster, sunspot: Command, job: str, when: Callable[..., None]
) -> None:
    when(pending=lambda: cluster.delete_job(job))
    assert sunspot("wait", "run", "--timeout", "60") == 1
    assert "its RayJob is gone" in sunspot.err


def test_an_unreadable_status_is_treated_as_missing(cluster: FakeCluster, run: Run, sunspot: Command, job: str) -> None:
    run.storage.write("run/status/attempt-0000-00000000.json", b"{")
    cluster.set_status(job, "Complete", "SUCCEEDED")
    assert sunspot("wait", "run") == 0
    assert sunspot("status", "run") == 0


# ----------------------------------------------------------------------------------------------- a lost head pod


def give_up_head(cluster: FakeCluster) -> None:
    cluster.set_status(JOB, "Failed", "RUNNING", reason="JobStatusCheckTimeoutExceeded")


def owner(cluster: FakeCluster) -> str:
    """Return the owner in the RayJob's manifest."""
    return settings_of(cluster.jobs[JOB])["SUNSPOT_JOB_ID"]


@pytest.fixture
def uids(cluster: FakeCluster) -> list[str]:
    """Return the uids of all RayJobs that have existed."""
    found: list[str] = []
    put = cluster.put_job

    def put_job(job: dict[str, Any]) -> dict[str, Any]:
        if JOB not in cluster.jobs:
            found.append(f"uid-{len(found)}")
            job["metadata"] = {**job["metadata"], "uid": found[-1], "creationTimestamp": timestamp(time.time())}
            job = {**job, "status": {}}
        return put(job)

    cluster.put_job = put_job
    return found


def test_a_run_whose_head_stopped_answering_is_restarted_as_the_same_job(
    cluster: FakeCluster, run: Run, sunspot: Command, uids: list[str], when: Callable[..., None]
) -> None:
    cluster.put_job(submitted(rayjob(JOB)))
    before = owner(cluster)
    set_status(run, RunState.RUNNING, owner=before, step=3)
    give_up_head(cluster)
    when(
        pending=lambda: (
            set_status(run, RunState.SUCCEEDED, owner=before, step=10),
            cluster.set_status(JOB, "Complete", "SUCCEEDED"),
        )
    )
    assert sunspot("wait", "run", "--json", "--timeout", "60") == 0, sunspot.err
    assert [line["state"] for line in sunspot.lines] == ["retrying", "pending", "succeeded"]
    assert "submit again" not in sunspot.lines[0]["reason"]
    assert "did not answer the operator for too long" in sunspot.lines[0]["reason"]
    assert len(uids) == 2
    assert owner(cluster) == before, (
        "the submission is the same, so the driver counts its starts, and a thawed one comes too late"
    )


def test_the_number_of_head_restarts_without_a_new_checkpoint_is_limited(
    cluster: FakeCluster, run: Run, sunspot: Command, uids: list[str], when: Callable[..., None]
) -> None:
    given = rayjob(JOB)
    [container] = given["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    container["env"].append({"name": "SUNSPOT_MAX_DRIVER_STARTS", "value": "2"})
    cluster.put_job(submitted(given))
    give_up_head(cluster)
    attempt = start(begin(run), owner(cluster))

    def fail_after_a_checkpoint() -> None:
        set_status(run, RunState.RUNNING, owner=owner(cluster), checkpoint=commit(run, attempt, 5).name)
        give_up_head(cluster)
        when(pending=fail)

    def fail() -> None:
        give_up_head(cluster)
        when(pending=fail)

    when(pending=fail_after_a_checkpoint)
    assert sunspot("wait", "run", "--timeout", "60") == 1
    assert len(uids) == 1 + 1 + 2
    assert "gave up on the run's head pod again after 2 restarts without a new checkpoint" in sunspot.err
    assert "or raise SUNSPOT_MAX_DRIVER_STARTS" in sunspot.err


@pytest.mark.parametrize("why", ["not submitted from here", "asked to stop", "other end"])
def test_a_run_is_not_restarted_if_it_was_stopped_or_exceeded_its_deadline_or_was_not_submitted_by_sunspot(
    cluster: FakeCluster, run: Run, sunspot: Command, uids: list[str], why: str
) -> None:
    cluster.put_job(rayjob(JOB) if why == "not submitted from here" else submitted(rayjob(JOB)))
    if why == "asked to stop":
        request_stop(run, "me")
    give_up_head(cluster)
    if why == "other end":
        cluster.set_status(JOB, "Failed", "RUNNING", reason="DeadlineExceeded")
    assert sunspot("wait", "run", "--timeout", "60") == 1
    assert len(uids) == 1
    assert "failed     for good" in sunspot.out


def test_a_restart_survives_an_api_server_outage(
    cluster: FakeCluster, run: Run, sunspot: Command, uids: list[str], when: Callable[..., None]
) -> None:
    cluster.put_job(submitted(rayjob(JOB)))
    give_up_head(cluster)
    cluster.on("PATCH", "rayjobs", drop, times=9)
    cluster.on("DELETE", "rayjobs", hang_up, times=1)
    when(pending=lambda: cluster.set_status(JOB, "Complete", "SUCCEEDED"))
    assert sunspot("wait", "run", "--timeout", "60") == 0, sunspot.err
    assert len(uids) == 2


@pytest.mark.parametrize("manager", ["argocd-controller", "kustomize-controller"])
def test_wait_deletes_a_rayjob_managed_by_gitops_so_that_gitops_recreates_it(
    cluster: FakeCluster, sunspot: Command, uids: list[str], when: Callable[..., None], manager: str
) -> None:
    def delete(handler: Any) -> None:
        handler.answer()
        later(lambda: cluster.put_job(kept(rayjob(JOB), manager)), pause=0.5)

    cluster.put_job(kept(rayjob(JOB), manager))
    give_up_head(cluster)
    cluster.on("DELETE", "rayjobs", delete, times=1)
    cluster.forbidden.add("create rayjobs")
    when(pending=lambda: cluster.set_status(JOB, "Complete", "SUCCEEDED"))
    assert sunspot("wait", "run", "--json", "--timeout", "60") == 0, sunspot.err
    assert [line["state"] for line in sunspot.lines] == ["retrying", "pending", "succeeded"]
    assert len(uids) == 2
    assert "PATCH" not in [method for method, _ in cluster.requests]


def test_wait_fails_if_gitops_does_not_recreate_the_rayjob(
    cluster: FakeCluster, sunspot: Command, set_constants: SetConstants
) -> None:
    set_constants("sunspot.submitter.cluster.waiting", RECREATED_WITHIN_S=0.0)
    cluster.put_job(kept(rayjob(JOB)))
    give_up_head(cluster)
    assert sunspot("wait", "run", "--timeout", "20") == 5
    assert "run-1 was deleted in order to restart it, but Argo CD has not recreated it; sync it by hand" in sunspot.err


def test_wait_deletes_no_rayjob_if_the_user_cannot_create_it_again(
    cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    cluster.put_job(submitted(rayjob(JOB)))
    give_up_head(cluster)
    cluster.forbidden.add("create rayjobs")
    assert sunspot("wait", "run", "--timeout", "20") == 4
    assert "run-1 was submitted, and this user has no permission to create it again" in sunspot.err
    assert JOB in cluster.jobs


def test_the_wait_and_status_commands_report_an_unknown_run(cluster: FakeCluster, sunspot: Command) -> None:
    for verb in ("wait", "status"):
        assert sunspot(verb, "run") == 3
        assert "no run run in" in sunspot.err
        assert f"nor in namespace sunspot of http://127.0.0.1:{cluster.port}" in sunspot.err


def test_waiting_without_a_cluster_follows_the_run_in_storage(
    run: Run,
    sunspot: Command,
    when: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    set_constants: SetConstants,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    set_constants("sunspot.submitter.cluster.observation", POLL_EVERY_S=0.05)
    set_status(run, RunState.RUNNING, step=1)
    when(running=lambda: set_status(run, RunState.FAILED, reason="no rows"))
    assert sunspot("wait", "run") == 1
    assert "error: run failed: no rows" in sunspot.err


def test_ctrl_c_does_not_affect_the_run(cluster: FakeCluster, run: Run, job: str) -> None:
    command = [sys.executable, "-m", "sunspot.cli", "wait", "run", "--storage", run.storage.locate("")]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stdout
    assert "pending" in waiting.stdout.readline()
    os.kill(waiting.pid, signal.SIGINT)
    _, err = waiting.communicate(timeout=20)
    assert waiting.returncode == 130
    assert "the run continues; `sunspot wait run --storage" in err
    assert "Traceback" not in err
    assert job in cluster.jobs


# --------------------------------------------------------------------------------------------------------------- status


def test_status_combines_information_from_the_cluster_and_from_storage(
    cluster: FakeCluster, run: Run, sunspot: Command, job: str
) -> None:
    begin(run)
    attempt = start(run, JOB)
    commit(run, attempt, 5)
    report(run, attempt, {"step": 5, "loss": 0.5, "rows_per_s": 100.0, "seconds": 1.0, "attempt": 1})
    set_status(run, RunState.RUNNING, step=7, world_size=2, loss=0.25, rows_per_s=120.0, step_time_s=2.0)
    cluster.set_status(job, "Running", "RUNNING")
    cluster.pods = [
        pod("run-1-x-head", "run-1-x", head=True),
        pod("run-1-x-worker-1", "run-1-x"),
        pod("run-1-x-worker-2", "run-1-x", phase="Pending"),
    ]
    assert sunspot("status", "run", "--json") == 0
    record = sunspot.json
    assert {"run", "state", "reason", "step", "epoch", "checkpoint", "goodput"} <= set(record)
    expected = {
        "run": "run",
        "state": "running",
        "step": 7,
        "total_steps": 10,
        "checkpoint": "step-00000005-attempt-0001",
        "loss": 0.25,
        "rows_per_s": 120.0,
        "seconds_left": 6.0,
        "attempt": 1,
        "workers_wanted": "2",
        "workers_running": 2,
        "pods_wanted": 2,
        "pods_running": 1,
        "job": JOB,
        "try": 1,
        "tries": 1,
    }
    assert {name: record[name] for name in expected} == expected
    assert sunspot("status", "run") == 0
    for part in ("run: running", "step-00000005-attempt-0001, verified", "7 of 10", "1 of 2 worker pods running"):
        assert part in sunspot.out


def test_status_prints_the_total_cost_of_incidents(cluster: FakeCluster, run: Run, sunspot: Command, job: str) -> None:
    begin(run)
    cluster.set_status(job, "Running", "RUNNING")
    warning = "a save takes 40 s, and the notice is 30 s"
    saves = {"save_s": 40.0, "notice_s": 30.0, "memory_every": 41}
    set_status(run, RunState.RUNNING, step=30, world_size=2, attempt=5, warning=warning, **saves)
    assert sunspot("status", "run", "--json") == 0
    assert (sunspot.json["goodput"], sunspot.json["incidents"], sunspot.json["incidents_by_cause"]) == (None, 0, {})

    causes = [Cause.BEGIN, Cause.PREEMPTED, Cause.PREEMPTED, Cause.RESUMED, Cause.NODE_LOST]
    for number, cause in enumerate(causes):
        attempt = start(run, JOB, checkpoint_name(number, number) if number else None, tier="memory", world_size=2)
        write_receipt(run, attempt, number, cause, last_step=2 * number)
    assert sunspot("status", "run", "--json") == 0
    expected = {
        "incidents": 3,
        "incidents_by_cause": {"preempted": 2, "node lost": 1},
        "steps_replayed": 1 + 2 + 4,
        "warning": warning,
        **saves,
    }
    assert {name: sunspot.json[name] for name in expected} == expected
    assert 0 <= sunspot.json["goodput"] <= 1
    assert sunspot("status", "run") == 0
    lines = [line.strip() for line in sunspot.out.splitlines()]
    assert "incidents:  3 (2 preempted, 1 node lost), 7 steps replayed" in lines
    assert f"warning:    {warning}" in lines
    assert "saves:      40.0 s to commit (notice: 30 s); copied to memory every 41 steps" in lines

    lost = start(run, JOB, checkpoint_name(5, 5), tier="storage", world_size=2)
    write_receipt(run, lost, len(causes), Cause.DRIVER_LOST, last_step=8, at_least=True)
    assert sunspot("status", "run", "--json") == 0
    assert (sunspot.json["steps_replayed"], sunspot.json["replayed_at_least"]) == (10, True)
    assert sunspot("status", "run") == 0
    assert "4 (2 preempted, 1 node lost, 1 driver lost), at least 10 steps replayed" in sunspot.out


@pytest.mark.parametrize("how", ["unreachable", "none", "gone"])
def test_status_works_when_the_cluster_is_gone(
    cluster: FakeCluster, run: Run, sunspot: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    set_status(run, RunState.SUCCEEDED, step=10, owner="run-1@sunspot")
    if how == "unreachable":
        cluster.down()
    if how == "none":
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert sunspot("status", "run", "--json") == 0
    assert (sunspot.json["state"], sunspot.json["step"], sunspot.json["job"]) == ("succeeded", 10, None)
    assert ("only from storage" in sunspot.err) == (how != "gone")


def test_commands_do_not_mention_a_cluster_for_a_local_run(run: Run, sunspot: Command) -> None:
    set_status(run, RunState.STOPPED, step=10, owner="laptop-4242-1a2b3c4d")
    for words in (["status"], ["doctor"], ["wait"], ["resume"], ["delete", "--yes"]):
        assert sunspot(words[0], "run", *words[1:]) == 0, sunspot.err
        assert "cluster" not in sunspot.out + sunspot.err
    assert sunspot("list") == 0
    assert sunspot.err == ""
    set_status(run, RunState.STOPPED, step=10)
    assert sunspot("status", "walk") == 3
    assert sunspot.err == f"error: no run walk in {run.storage.locate('').rstrip('/')}; it contains run\n"


def test_a_submitted_run_is_not_mistaken_for_a_local_run(run: Run, sunspot: Command) -> None:
    set_status(run, RunState.STOPPED, step=10, owner="laptop-4242-1a2b3c4d")
    age(run, 100)
    run.storage.write(run.key("submissions", "0001-run-1234.json"), b"{}")
    assert sunspot("status", "run") == 0
    assert "cannot query the cluster (no cluster" in sunspot.err
    assert "so this status comes only from storage" in sunspot.err


def test_status_works_without_storage(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    sunspot = Command(open_run(f"s3://{s3_bucket}", "run"), capsys)
    cluster.put_job(rayjob(JOB))
    cluster.set_status(JOB, "Running", "RUNNING")
    assert sunspot("status", "run", "--json") == 0
    assert (sunspot.json["state"], sunspot.json["step"]) == ("running", None)
    assert "this status comes only from the cluster" in sunspot.err
    cluster.delete_job(JOB)
    assert sunspot("status", "run") == 4


def put_job_kept_in(path: str, cluster: FakeCluster) -> None:
    """Add a running RayJob with this storage path in its settings."""
    job = rayjob(JOB)
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "SUNSPOT_STORAGE_PATH", "value": path})
    cluster.put_job(job)
    cluster.set_status(JOB, "Running", "RUNNING")


def test_read_only_commands_use_the_bucket_in_the_rayjob(
    cluster: FakeCluster, s3_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put_job_kept_in(f"s3://{s3_bucket}/runs", cluster)
    set_status(open_run(f"s3://{s3_bucket}/runs", "run"), RunState.RUNNING, step=4)
    with pytest.raises(SystemExit):
        main(["status", "run", "--json"])
    assert json.loads(capsys.readouterr().out)["step"] == 4


@pytest.mark.parametrize("verb", ["stop", "resume", "delete"])
def test_commands_that_change_a_run_ignore_the_bucket_in_its_rayjob(
    cluster: FakeCluster, s3_bucket: str, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path = f"s3://{s3_bucket}/team b"
    run = open_run(path, "run")
    set_status(run, RunState.FAILED)
    put_job_kept_in(path, cluster)
    before = run.storage.list("run")
    with pytest.raises(SystemExit, match="2"):
        main([verb, "run", *(["--yes"] if verb == "delete" else [])])
    said = capsys.readouterr().err
    assert f"the location {path} of run run is known only from the RayJob {JOB}" in said
    assert f"run `sunspot {verb} run --storage '{path}'`, or set SUNSPOT_STORAGE_PATH" in said
    assert run.storage.list("run") == before
    assert JOB in cluster.jobs


@pytest.mark.parametrize("verb", ["status", "wait", "stop", "delete", "doctor", "dashboard"])
def test_a_local_storage_path_in_a_rayjob_is_rejected(
    cluster: FakeCluster, run: Run, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    begin(run)
    put_job_kept_in(run.storage.locate(""), cluster)
    before = run.storage.list("run")
    with pytest.raises(SystemExit, match="2"):
        main([verb, "run"])
    assert f"--storage {run.storage.locate('')}`, or set SUNSPOT_STORAGE_PATH" in capsys.readouterr().err
    assert run.storage.list("run") == before


def test_a_rayjob_that_names_the_default_storage_needs_no_storage_option(
    cluster: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.storage.locate("")
    put_job_kept_in(path, cluster)
    set_status(run, RunState.FAILED)
    cluster.set_status(JOB, "Failed", "FAILED")
    monkeypatch.chdir(Path(path).parent)  # where the path "runs" is that folder
    with pytest.raises(SystemExit, match="0"):
        main(["delete", "run", "--yes"])
    assert not run.storage.list("run")


def test_a_run_with_a_stop_marker_is_stopping(cluster: FakeCluster, run: Run, sunspot: Command, job: str) -> None:
    cluster.set_status(job, "Running", "RUNNING")
    set_status(run, RunState.RUNNING)
    request_stop(run, "me")
    assert sunspot("status", "run", "--json") == 0
    assert sunspot.json["state"] == "stopping"


# ------------------------------------------------------------------------------------------------------- the transport


def test_failed_requests_are_retried(cluster: FakeCluster, run: Run, sunspot: Command, job: str) -> None:
    for fault in (hang_up, answer(429, "slow down", Retry_After="0"), answer(503, "starting")):
        cluster.on("GET", "rayjobs?", fault, times=1)
    assert sunspot("status", "run", "--json") == 0
    assert (sunspot.json["state"], sunspot.err) == ("pending", "")


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (401, "Unauthorized", "rejected these credentials (Unauthorized); renew them, or choose another --context"),
        (
            403,
            'User "me" cannot list rayjobs',
            'User "me" cannot list rayjobs; ask for the Role sunspot-submitter of k8s/base',
        ),
        (404, "the server could not find the requested resource", "install the KubeRay operator"),
        (503, "etcd is down", "503 etcd is down"),
    ],
)
def test_api_server_errors_include_the_fix(
    cluster: FakeCluster, sunspot: Command, status: int, message: str, said: str
) -> None:
    cluster.on("GET", "rayjobs", answer(status, message))
    for verb in ("wait", "status"):
        assert sunspot(verb, "run") == 4
        assert said in sunspot.err
        assert sunspot.err.count("\n") == 1


def test_an_unknown_context_is_reported(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot("status", "run", "--context", "nope") == 4
    assert "nope" in sunspot.err
    assert "`kubectl config get-contexts` lists" in sunspot.err


def test_an_unreachable_server_is_reported(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.down()
    began = time.monotonic()
    assert sunspot("status", "run") == 4
    assert time.monotonic() - began < 10
    assert "cannot be reached" in sunspot.err
    assert "Connection refused" in sunspot.err


def test_list_includes_runs_that_exist_only_in_the_cluster(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    here = {"name": "SUNSPOT_STORAGE_PATH", "value": run.storage.locate("")}
    for name in ("stored", "unheard"):
        job = rayjob(f"{name}-1", run=name)
        container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        container["env"] = [here]
        cluster.put_job(job)
    cluster.put_job(rayjob("elsewhere-1", run="elsewhere"))
    stored = begin(open_run(run.storage.locate(""), "stored"))
    set_status(stored, RunState.RUNNING, owner="stored-1", step=4)
    cluster.set_status("stored-1", "Running", "RUNNING")
    cluster.set_status("unheard-1", "Failed", reason="PreRunningDeadlineExceeded")
    assert sunspot("list", "--json") == 0
    assert {row["run"]: row["state"] for row in sunspot.json} == {"stored": "running", "unheard": "failed"}
    cluster.down()
    assert sunspot("list", "--json") == 0
    assert [row["run"] for row in sunspot.json] == ["stored"]
    assert "these states come only from storage" in sunspot.err
