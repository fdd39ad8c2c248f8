"""Tests of `sunspot submit`, `stop` and `resume` with a fake API server and a bucket."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sunspot.run import Run, open_run
from sunspot.run.owner import Owner, cluster_identity
from sunspot.run.requests import (
    SubmissionRecord,
    clear_stop,
    newest_submission,
    read_stop,
    record_submission,
    request_stop,
    stop_requested,
)
from sunspot.run.status import RunState, Status, StatusKind, write_status
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.cluster.applied import APPLIED, without_copy
from sunspot.submitter.manifest.pods import set_variable
from sunspot.submitter.manifest.render import settings_of
from tests.harness import commands
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import CORE, JOBS, FakeCluster, Fault, answer, hang_up, kept, pod, rayjob, timestamp
from tests.harness.runs import begin


class Command(commands.Command):
    """Runs `sunspot` on a run in a bucket."""

    def submit(self, *words: str) -> int:
        return self("submit", "--run", "run", *words)


@pytest.fixture
def sunspot(s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(open_run(f"s3://{s3_bucket}/runs", "run"), capsys)


def only_job(cluster: FakeCluster) -> str:
    [name] = cluster.jobs
    return name


def owner(cluster: FakeCluster) -> str:
    """Return the owner in the manifest of the only RayJob."""
    name = only_job(cluster)
    return settings_of(cluster.jobs[name]).get("SUNSPOT_JOB_ID") or name


def end(cluster: FakeCluster, run: Run, state: RunState, **more: Any) -> None:
    """End the driver of the only RayJob, in storage and in the RayJob's status."""
    name = only_job(cluster)
    write_status(run, Status(state, owner(cluster), **more))
    if state is RunState.FAILED:
        cluster.set_status(name, "Failed", "FAILED", reason="AppFailed")
    else:
        cluster.set_status(name, "Complete", "SUCCEEDED")


def writes(cluster: FakeCluster) -> list[str]:
    """Return the requests that change something."""
    return [m for m, path in cluster.requests if m != "GET" and "review" not in path and "dryRun" not in path]


# --------------------------------------------------------------------------------------------------------------- submit


def test_a_new_run_is_recorded_and_applied(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot.submit("--json") == 0, sunspot.err
    name = only_job(cluster)
    assert sunspot.json["action"] == "created"
    assert sunspot.json["job"] == name
    recorded = newest_submission(sunspot.run)
    assert (recorded.job, recorded.namespace, recorded.server) == (name, "sunspot", connect().server)
    assert recorded.manifest["spec"] == cluster.jobs[name]["spec"]
    assert Owner.parse(owner(cluster)).job == name


def test_the_submission_record_contains_the_arguments_for_submitting_the_run_again(
    cluster: FakeCluster, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUNSPOT_LEARNING_RATE", "1e-2")
    arguments = ("--set", "EPOCHS=3", "--set", 'TASK_ARGS={"hidden": 32}', "--image", "sunspot:1", "--generation", "2")
    assert sunspot.submit(*arguments) == 0, sunspot.err
    name = only_job(cluster)
    monkeypatch.delenv("SUNSPOT_LEARNING_RATE")
    cluster.delete_job(name)
    assert sunspot("submit", *newest_submission(sunspot.run).arguments) == 0, sunspot.err
    assert only_job(cluster) == name


def test_submit_announces_its_steps_on_stderr(
    cluster: FakeCluster, sunspot: Command, set_constants: SetConstants
) -> None:
    set_constants("sunspot.submitter.printing", NOTE_AFTER_S=0)
    assert sunspot.submit("--json") == 0
    assert sunspot.err.splitlines()[0] == "checking the cluster and the storage ..."
    assert f"applying {sunspot.json['job']} ..." in sunspot.err


def test_submit_applies_what_render_prints(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot("render", "--run", "run", "--set", "EPOCHS=3") == 0
    rendered = yaml.safe_load(sunspot.out)
    sunspot.submit("--set", "EPOCHS=3")
    applied = without_copy(cluster.jobs[rendered["metadata"]["name"]])
    set_variable(applied, "SUNSPOT_JOB_ID", rendered["metadata"]["name"])  # the applied name includes the submission
    assert {name: applied["metadata"][name] for name in rendered["metadata"]} == rendered["metadata"]
    assert applied["spec"] == rendered["spec"]


def test_a_dry_run_changes_nothing(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot.submit("--dry-run") == 0
    assert "would be created" in sunspot.out
    assert (cluster.jobs, writes(cluster)) == ({}, [])
    assert sunspot.run.storage.list("") == []


def test_a_search_is_submitted_with_its_settings_in_the_environment_and_is_listed(
    cluster: FakeCluster, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUNSPOT_LEARNING_RATE", "loguniform(1e-4,1e-2)")
    monkeypatch.setenv("SUNSPOT_NUM_WORKERS", "2")
    assert sunspot.submit() == 0, sunspot.err
    assert cluster.jobs[only_job(cluster)]["spec"]["entrypoint"].endswith("sunspot.tune")
    assert "sunspot wait run" in sunspot.out
    assert sunspot("status", "run") == 0, sunspot.err
    monkeypatch.setenv("SUNSPOT_EPOCHS", "-1")
    assert sunspot("status", "run") == 2, "settings that belong to no search are still refused"


def test_submitting_the_same_spec_again_attaches_to_the_job(cluster: FakeCluster, sunspot: Command) -> None:
    sunspot.submit()
    before = owner(cluster)
    cluster.set_status(only_job(cluster), "Running", "RUNNING")
    assert sunspot.submit("--json") == 0
    assert sunspot.json["action"] == "attached"
    assert owner(cluster) == before


@pytest.mark.parametrize("times", [1, 2])
def test_an_apply_request_whose_response_is_lost_is_sent_again(
    cluster: FakeCluster, sunspot: Command, times: int
) -> None:
    cluster.on("PATCH", "force=true", hang_up, times=times)
    assert sunspot.submit("--json") == 0, sunspot.err
    assert len(cluster.jobs) == 1
    assert sunspot.json["action"] == "created"


def test_a_diff_is_printed_if_a_different_spec_of_a_live_run_is_submitted(
    cluster: FakeCluster, sunspot: Command
) -> None:
    sunspot.submit()
    cluster.set_status(only_job(cluster), "Running", "RUNNING")
    assert sunspot.submit("--set", "EPOCHS=7", "--image", "other:2") == 6
    assert "SUNSPOT_EPOCHS: (unset) -> 7" in sunspot.err
    assert "headGroupSpec.template.spec.containers[ray].image: sunspot:0.1.0 -> other:2" in sunspot.err
    assert "SUNSPOT_JOB_ID" not in sunspot.err
    assert "sunspot stop run" in sunspot.err
    assert len(cluster.jobs) == 1


def test_a_diff_hides_the_values_of_credentials(cluster: FakeCluster, sunspot: Command) -> None:
    sunspot.submit()
    job = json.loads(json.dumps(cluster.jobs[only_job(cluster)]))
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "WANDB_API_KEY", "value": "canary"})
    cluster.put_job(job)
    cluster.set_status(only_job(cluster), "Running", "RUNNING")
    assert sunspot.submit("--set", "EPOCHS=7") == 6
    assert "env[WANDB_API_KEY].value: *** -> ***" in sunspot.err
    assert "canary" not in sunspot.err


def test_a_finished_run_is_reported_and_not_restarted(cluster: FakeCluster, sunspot: Command) -> None:
    sunspot.submit()
    name = only_job(cluster)
    end(cluster, sunspot.run, RunState.SUCCEEDED, step=10, total_steps=10)
    assert sunspot.submit("--json") == 0
    assert sunspot.json["action"] == "finished"
    cluster.delete_job(name)
    assert sunspot.submit("--json") == 0
    assert sunspot.json["action"] == "finished"
    assert sunspot.submit("--json", "--set", "EPOCHS=7") == 0
    assert sunspot.json["action"] == "created"


def test_a_finished_run_is_restarted_if_it_was_deleted_from_storage(cluster: FakeCluster, sunspot: Command) -> None:
    sunspot.submit()
    cluster.set_status(only_job(cluster), "Complete", "SUCCEEDED")
    assert sunspot.submit("--json") == 0
    assert sunspot.json["action"] == "replaced"


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.STOPPED])
def test_the_job_of_a_failed_or_stopped_run_is_replaced(
    cluster: FakeCluster, sunspot: Command, state: RunState
) -> None:
    sunspot.submit()
    name = only_job(cluster)
    before, zombie = cluster.jobs[name]["metadata"]["uid"], owner(cluster)
    request_stop(sunspot.run, "me")
    end(cluster, sunspot.run, state, reason="so it is")
    assert sunspot.submit("--dry-run", "--json") == 0
    assert sunspot.json["action"] == "replaced"
    assert cluster.jobs[name]["metadata"]["uid"] == before
    assert stop_requested(sunspot.run)
    assert sunspot.submit("--json") == 0
    assert sunspot.json["action"] == "replaced"
    assert "so it is" in sunspot.json["reason"]
    assert cluster.jobs[name]["metadata"]["uid"] != before
    assert owner(cluster) != zombie
    assert not stop_requested(sunspot.run)


def test_the_replacement_of_a_job_waits_until_the_old_pods_are_gone(
    cluster: FakeCluster, sunspot: Command, set_constants: SetConstants
) -> None:
    sunspot.submit()
    name = only_job(cluster)
    cluster.set_status(name, "Failed", "FAILED", rayClusterName="c")
    cluster.pods.append(pod("stays", "c"))
    set_constants("sunspot.submitter.cluster.start", GONE_WITHIN_S=0.1)
    assert sunspot.submit() == 5
    assert name not in cluster.jobs
    cluster.pods.clear()
    assert sunspot.submit() == 0
    assert name in cluster.jobs


def test_submit_does_not_wait_for_a_pod_on_a_frozen_node(
    cluster: FakeCluster, sunspot: Command, set_constants: SetConstants
) -> None:
    set_constants("sunspot.submitter.cluster.start", GONE_WITHIN_S=0.1)
    sunspot.submit()
    cluster.set_status(only_job(cluster), "Failed", "RUNNING", rayClusterName="c")
    frozen = pod("head", "c", head=True)
    frozen["metadata"]["deletionTimestamp"] = timestamp(time.time() - 60)
    cluster.pods.append(frozen)
    assert sunspot.submit() == 0, sunspot.err
    assert "replaced" in sunspot.out


def test_a_job_that_is_being_deleted_is_not_a_conflict(cluster: FakeCluster, sunspot: Command) -> None:
    old = rayjob("run-old")
    old["metadata"]["deletionTimestamp"] = timestamp(time.time())
    cluster.put_job(old)
    cluster.set_status("run-old", "Running", "RUNNING")
    assert sunspot.submit() == 0, sunspot.err
    assert "created" in sunspot.out


def test_a_job_that_was_not_applied_is_not_recorded(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.on("PATCH", "force=true", refuse_unless_dry_run)
    assert sunspot.submit() == 4
    assert newest_submission(sunspot.run) is None


def refuse_unless_dry_run(handler: Any) -> None:
    """Reject the job after a successful dry run."""
    if "dryRun" in handler.path:
        handler.answer()
    else:
        handler.refuse(400, "the namespace of the provided object does not match")


def test_submit_waits_for_a_stopping_run_to_end(
    cluster: FakeCluster, sunspot: Command, set_constants: SetConstants
) -> None:
    sunspot.submit()
    name = only_job(cluster)
    cluster.set_status(name, "Running", "RUNNING")
    write_status(sunspot.run, Status(RunState.RUNNING, owner(cluster)))
    request_stop(sunspot.run, "me")
    set_constants("sunspot.submitter.cluster.start", STOPPED_WITHIN_S=0.1)
    assert sunspot.submit() == 5
    assert "still shutting down" in sunspot.err
    end(cluster, sunspot.run, RunState.STOPPED)
    assert sunspot.submit("--json") == 0
    assert sunspot.json["action"] == "replaced"


def test_changed_identity_settings_are_rejected_before_anything_is_sent(cluster: FakeCluster, sunspot: Command) -> None:
    begin(sunspot.run, batch=64)
    assert sunspot.submit("--set", "GLOBAL_BATCH_SIZE=128") == 6
    assert "SUNSPOT_GLOBAL_BATCH_SIZE: 64 -> 128" in sunspot.err
    assert writes(cluster) == []
    assert sunspot.submit("--set", "GLOBAL_BATCH_SIZE=64") == 0
    assert cluster.jobs


def test_submit_with_the_wait_option_prints_the_outcome_of_the_run(cluster: FakeCluster, sunspot: Command) -> None:
    def succeed(handler: Any) -> None:
        if cluster.jobs:
            end(cluster, sunspot.run, RunState.SUCCEEDED)
        handler.answer()

    cluster.on("GET", "rayjobs?", succeed)
    assert sunspot.submit("--wait", "--json") == 0, sunspot.err
    lines = [json.loads(line) for line in sunspot.out.splitlines()]
    assert lines[0]["action"] == "created"
    assert lines[-1]["state"] == "succeeded"


# ------------------------------------------------------------------------------------------------------------ preflight


def test_submit_reports_all_problems_at_once(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.objects.clear()
    cluster.objects.add(CORE)
    cluster.forbidden |= {"create rayjobs", "list pods"}
    sunspot.run = open_run("s3://no-such-bucket/runs", "run")
    assert sunspot.submit() == 4
    for part in (
        "found 5 problems, so nothing was submitted",
        "no permission to create rayjobs in namespace sunspot; ask for the Role sunspot-submitter in k8s/base",
        "no permission to list pods",
        "Secret sunspot-storage is not in namespace sunspot; create it: kubectl -n sunspot create secret generic",
        "ServiceAccount sunspot-train is not in namespace sunspot; if it is one of Sunspot's, create it with `kubectl",
        "create the bucket, or correct SUNSPOT_STORAGE_PATH",
    ):
        assert part in sunspot.err
    assert writes(cluster) == []


def test_submit_warns_about_an_object_that_the_user_cannot_read(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.forbidden |= {f"{CORE}/secrets/sunspot-storage", CORE}
    assert sunspot.submit("--image", "sunspot") == 0
    assert "this user cannot see whether Secret sunspot-storage exists; pods cannot start without it" in sunspot.err
    assert "image sunspot has no version" in sunspot.err


def test_a_missing_operator_or_namespace_is_reported(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.objects.discard(CORE)
    assert sunspot.submit() == 4
    assert "there is no namespace sunspot; create the namespace sunspot with `kubectl apply -k k8s/base`" in sunspot.err
    cluster.has_operator = False
    assert sunspot.submit() == 4
    assert "install the KubeRay operator" in sunspot.err


def test_errors_include_the_message_of_the_api_server(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.on("PATCH", "dryRun=All", answer(422, "spec.entrypoint: too long"))
    assert sunspot.submit() == 4
    assert "spec.entrypoint: too long" in sunspot.err
    assert "Traceback" not in sunspot.err


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (".spec.a.runtimeClas: field not declared in schema", ".spec.a.runtimeClas: field not declared in schema"),
        (
            "errors:\n  .spec.a: field not declared in schema\n  .spec.b: expected boolean, got &{yes}",
            ".spec.a: field not declared in schema .spec.b: expected boolean, got &{yes}",
        ),
    ],
)
def test_the_error_for_an_unknown_field_names_the_field(
    cluster: FakeCluster, sunspot: Command, faults: str, said: str
) -> None:
    message = f"failed to create typed patch object (sunspot/mnist; ray.io/v1, Kind=RayJob): {faults}"
    cluster.on("PATCH", "dryRun=All", answer(500, message))
    assert sunspot.submit() == 4
    assert f"rejected the RayJob: {said}; correct pod or rayjob in the profile" in sunspot.err
    assert len([request for request in cluster.requests if request[0] == "PATCH"]) == 1, "it is not retried"


def refusing_pods(message: str, status: int = 403) -> Fault:
    """Reject pods on the host's network, like a namespace that enforces `restricted`."""

    def act(handler: Any) -> None:
        pod = json.loads(handler.body)
        name = pod["metadata"]["name"]
        if pod["kind"] == "Pod" and pod["spec"].get("hostNetwork"):
            handler.refuse(status, message.format(name))
        else:
            handler.answer()

    return act


FORBIDDEN = 'pods "{}" is forbidden: '


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (403, FORBIDDEN + 'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)', 4),
        (403, FORBIDDEN + "maximum cpu usage per Container is 250m, but limit is 500m", 4),
        (403, FORBIDDEN + "failed quota: corp: must specify limits.cpu for: ray", 4),
        (403, 'admission webhook "policy.corp" denied the request: a pod needs an owner', 0),
        (403, FORBIDDEN + "exceeded quota: team, requested: pods=1, used: pods=9, limited: pods=9", 0),
        (403, FORBIDDEN + "exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2", 4),
        (400, 'admission webhook "old.corp" does not support dry run', 0),
        (404, "the server could not find the requested resource", 0),
    ],
)
def test_pods_that_would_be_rejected_are_found_in_a_dry_run(
    cluster: FakeCluster, sunspot: Command, tmp_path: Path, status: int, said: str, code: int
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: kind\nworker: {pod: {spec: {hostNetwork: true}}}\n")
    cluster.on("POST", f"{CORE}/pods?dryRun=All", refusing_pods(said, status))
    assert sunspot.submit("--profile", str(profile)) == code, sunspot.err
    assert len(cluster.jobs) == (0 if code else 1)
    assert not cluster.pods
    told = said.partition("{}")[2] or said
    if "dry run" in said or status == 404:
        assert told not in sunspot.err
    elif code:
        assert "found 1 problem, so nothing was submitted:\n  pods of group workers would be rejected" in sunspot.err
        fix = (
            "set cpu_limit"
            if "limits.cpu" in said
            else "change the profile, or ask the owner of the namespace to allow it"
        )
        fix = "the run can never fit; request less" if "exceeded quota" in said else fix
        assert f"{told}; {fix}" in sunspot.err
    else:
        assert "warning: pods of group workers would be rejected now" in sunspot.err
        assert f"{told}; {'they wait' if 'quota' in told else 'the operator'}" in sunspot.err
        assert sunspot.submit("--profile", str(profile)) == 0
        assert "refused" not in sunspot.err, "submit attaches to a live run, whether or not it would find room again"


QUOTAS = f"{CORE}/resourcequotas"


def put_quota(cluster: FakeCluster, resource: str, hard: str, used: str = "0") -> None:
    status = {"hard": {resource: hard}, "used": {resource: used}}
    team = {"metadata": {"name": "team"}, "spec": {"hard": {resource: hard}}, "status": status}
    cluster.documents[QUOTAS] = {"items": [team]}


def test_a_run_that_can_never_fit_into_a_quota_is_rejected(cluster: FakeCluster, sunspot: Command) -> None:
    """The quota would admit each pod by itself."""
    put_quota(cluster, "requests.memory", "9Gi")
    for words in ((), ("--dry-run",)):
        assert sunspot.submit(*words) == 4
        needed = "11Gi needed (head 5Gi + 2 workers 6Gi) of only 9Gi"
        assert f"team: requests.memory: {needed}; the run can never fit; request less" in sunspot.err
        assert "wait" not in sunspot.err
    assert cluster.jobs == {}
    assert not sunspot.run.storage.list(""), "nothing is recorded either"


def test_a_quota_used_up_by_other_runs_causes_a_warning(cluster: FakeCluster, sunspot: Command) -> None:
    put_quota(cluster, "requests.memory", "20Gi", used="16Gi")
    said = FORBIDDEN + "exceeded quota: team, requested: memory=5Gi, used: memory=16Gi, limited: memory=20Gi"
    cluster.on("POST", f"{CORE}/pods?dryRun=All", refusing_pods(said, 403))
    assert sunspot.submit() == 0, sunspot.err
    assert "team: requests.memory: 11Gi needed, 4Gi free of 20Gi; wait until other runs end" in sunspot.err
    assert "would be rejected now" not in sunspot.err, "each quota is reported once"


def test_submit_warns_if_a_quota_has_room_for_only_some_workers_of_an_elastic_run(
    cluster: FakeCluster, sunspot: Command
) -> None:
    cluster.objects.add(f"{CORE}/serviceaccounts/sunspot-autoscaler")
    put_quota(cluster, "requests.memory", "12Gi")
    assert sunspot.submit("--set", "NUM_WORKERS=2..3") == 0, sunspot.err
    assert "team: requests.memory: 12Gi, enough for 2 of 2..3 worker pods" in sunspot.err


def test_submit_attaches_to_a_live_run_despite_a_full_quota(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot.submit() == 0, sunspot.err
    put_quota(cluster, "pods", "1", used="3")
    assert sunspot.submit("--json") == 0, sunspot.err
    assert sunspot.json["action"] == "attached"
    end(cluster, sunspot.run, RunState.FAILED)
    assert sunspot.submit() == 4, "it would need new pods"
    assert "team: pods: 3 needed" in sunspot.err
    put_quota(cluster, "pods", "3", used="3")
    assert sunspot.submit() == 0, "the old pods are deleted first"
    end(cluster, sunspot.run, RunState.FAILED)
    put_quota(cluster, "count/rayjobs.ray.io", "1", used="1")
    assert sunspot.submit() == 0, "the old RayJob is deleted first, too"


def test_a_user_who_cannot_list_quotas_can_still_submit(cluster: FakeCluster, sunspot: Command) -> None:
    put_quota(cluster, "pods", "1")
    cluster.forbidden.add(QUOTAS)
    assert sunspot.submit() == 0, sunspot.err


def test_limit_ranges_are_checked_if_pods_cannot_be_created_in_a_dry_run(
    cluster: FakeCluster, sunspot: Command
) -> None:
    limits = {"limits": [{"type": "Container", "max": {"memory": "4Gi"}}]}
    cluster.documents[f"{CORE}/limitranges"] = {"items": [{"metadata": {"name": "sizes"}, "spec": limits}]}
    assert sunspot.submit("--dry-run") == 0, "the API server itself would refuse a pod"
    cluster.forbidden.add("create pods")
    assert sunspot.submit() == 4
    assert "pods of group head would be rejected: a Container can have at most 4Gi of memory" in sunspot.err


def test_the_error_for_a_full_rayjob_quota_says_that_ended_rayjobs_count(
    cluster: FakeCluster, sunspot: Command
) -> None:
    full = "count/rayjobs.ray.io=9"
    said = (
        f"rayjobs is forbidden: exceeded quota: team, requested: count/rayjobs.ray.io=1, used: {full}, limited: {full}"
    )
    cluster.on("PATCH", "dryRun=All", answer(403, said))
    assert sunspot.submit() == 4
    assert "RayJobs that have ended also count; delete some (`sunspot delete`)" in sunspot.err


def test_pods_are_not_checked_if_the_user_cannot_create_them(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.forbidden.add("create pods")
    assert sunspot.submit() == 0, sunspot.err
    assert not [path for method, path in cluster.requests if method == "POST" and path.startswith(f"{CORE}/pods")]


def test_a_new_job_in_a_queue_must_be_suspended(cluster: FakeCluster, sunspot: Command) -> None:
    """Kueue's webhook suspends the job in the dry run. Without Kueue, the label has no effect, and the job begins."""
    assert sunspot.submit("--queue", "gpus") == 4
    assert "queue gpus: Kueue does not manage this job" in sunspot.err
    assert cluster.jobs == {}
    cluster.has_kueue = True
    assert sunspot.submit("--queue", "gpus") == 0, sunspot.err
    cluster.jobs[only_job(cluster)]["spec"]["suspend"] = False
    assert sunspot.submit("--queue", "gpus") == 0, "submit attaches to an admitted job"


def test_an_error_about_elastic_runs_names_the_required_kueue_version(cluster: FakeCluster, sunspot: Command) -> None:
    words = "a kueue managed job should only use autoscaling when workload slicing is enabled"
    cluster.objects.add(f"{CORE}/serviceaccounts/sunspot-autoscaler")
    cluster.on("PATCH", "dryRun=All", answer(403, words))
    assert sunspot.submit("--queue", "gpus", "--set", "NUM_WORKERS=1..2") == 4
    assert f"{words}. A variable number of pods needs Kueue 0.18 or later" in sunspot.err


def test_the_error_for_unreachable_storage_says_that_this_machine_used_its_own_endpoint(
    cluster: FakeCluster, sunspot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert sunspot.submit() == 4
    assert "This machine used its own AWS_ENDPOINT_URL" in sunspot.err
    assert "apply the output of `sunspot render`" in sunspot.err


# ------------------------------------------------------------------------------------------------------ stop and resume


def test_resume_prints_the_submit_command_if_the_run_was_stopped_while_pending(
    cluster: FakeCluster, sunspot: Command
) -> None:
    """The RayJob still waits for nodes, so it is deleted, and `resume` finds nothing in the cluster to restart."""
    sunspot.submit("--set", "EPOCHS=3")
    name = only_job(cluster)
    cluster.set_status(name, "Initializing")
    assert sunspot("stop", "run", "--json") == 0, sunspot.err
    assert (sunspot.json["state"], "submit it again" in sunspot.json["reason"]) == ("stopped", True)
    assert cluster.jobs == {}
    assert sunspot("resume", "run") == 3
    assert f"{name} is no longer in namespace sunspot of" in sunspot.err
    assert " as `sunspot submit` applied it; submit run again" in sunspot.err
    storage = sunspot.run.storage.locate("")
    command = f"sunspot submit --profile kind --run run --storage {storage} --set SUNSPOT_EPOCHS=3"
    assert command in sunspot.err
    assert stop_requested(sunspot.run)
    assert sunspot(*command.split()[1:]) == 0
    assert only_job(cluster) == name
    assert not stop_requested(sunspot.run)


def test_the_stop_command_waits_for_the_save_and_the_resume_command_restarts_the_job(
    cluster: FakeCluster, sunspot: Command
) -> None:
    sunspot.submit()
    name, before = only_job(cluster), owner(cluster)
    spec = json.dumps(cluster.jobs[name]["spec"])
    cluster.set_status(name, "Running", "RUNNING")
    write_status(sunspot.run, Status(RunState.RUNNING, before))
    assert sunspot("stop", "run", "--timeout", "0.3") == 5
    assert "has not ended after" in sunspot.err
    assert name in cluster.jobs

    def save(handler: Any) -> None:
        if stop_requested(sunspot.run):
            end(cluster, sunspot.run, RunState.STOPPED, checkpoint="step-00000007-attempt-0001")
        handler.answer()

    cluster.on("GET", "rayjobs?", save)
    assert sunspot("stop", "run") == 0, sunspot.err
    assert "saved as step-00000007-attempt-0001" in sunspot.out
    cluster.faults.clear()
    assert sunspot("resume", "run", "--json") == 0, sunspot.err
    assert (sunspot.json["action"], only_job(cluster)) == ("replaced", name)
    assert not stop_requested(sunspot.run)
    assert owner(cluster) != before, "late writes of the old owner are refused"
    assert json.dumps(cluster.jobs[name]["spec"]) == spec.replace(before, owner(cluster))


PLANTED = {"image": "evil.example/miner", "serviceAccountName": "sunspot-submitter"}


def test_resume_never_applies_a_manifest_from_storage(cluster: FakeCluster, sunspot: Command) -> None:
    """A user with write access to the bucket must not be able to run code in the cluster."""
    sunspot.submit()
    name = only_job(cluster)
    end(cluster, sunspot.run, RunState.STOPPED)
    request_stop(sunspot.run, "me")
    planted = json.loads(json.dumps(cluster.jobs[name]).replace("sunspot:0.1.0", PLANTED["image"]))
    text = yaml.safe_dump(planted)
    digest = hashlib.sha256(text.encode()).hexdigest()
    sunspot.run.storage.write(f"run/submissions/0007-{name}.yaml", f"# sha256: {digest}\n{text}".encode())
    record_submission(sunspot.run, SubmissionRecord(name, "sunspot", manifest=planted))
    assert sunspot("resume", "run") == 0, sunspot.err
    assert PLANTED["image"] not in json.dumps(cluster.jobs[name])
    cluster.delete_job(name)
    request_stop(sunspot.run, "me")
    assert sunspot("resume", "run") == 3
    assert cluster.jobs == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metadata", "name"), "other-1a2b3c4d"),
        (("metadata", "namespace"), "kube-system"),
        (("metadata", "labels", "sunspot/run"), "other"),
        (("kind",), "RayService"),
        (("spec",), None),
        (("spec", "rayClusterSpec", "headGroupSpec"), []),
        (("spec", "rayClusterSpec", "workerGroupSpecs"), [{"groupName": "workers"}]),
        (("metadata", "annotations"), ["sunspot/generation"]),
    ],
)
def test_a_rayjob_is_not_restarted_from_the_manifest_of_a_different_rayjob(
    cluster: FakeCluster, sunspot: Command, path: tuple[str, ...], value: Any
) -> None:
    sunspot.submit()
    name = only_job(cluster)
    end(cluster, sunspot.run, RunState.STOPPED)
    annotations = cluster.jobs[name]["metadata"]["annotations"]
    manifest = json.loads(annotations[APPLIED])
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    for text in (json.dumps(manifest), "[" * 100_000, "{"):
        annotations[APPLIED] = text
        before = json.dumps(cluster.jobs)
        assert sunspot("resume", "run") == 4
        assert f"does not contain its own manifest in its annotation {APPLIED}; submit the run again" in sunspot.err
        assert json.dumps(cluster.jobs) == before


def test_a_rayjob_of_another_run_is_not_overwritten(cluster: FakeCluster, sunspot: Command) -> None:
    sunspot("render", "--run", "run")
    name = yaml.safe_load(sunspot.out)["metadata"]["name"]
    cluster.put_job(rayjob(name, run="other"))
    assert sunspot.submit() == 6
    assert f"RayJob {name} in namespace sunspot belongs to another run (its label" in sunspot.err
    assert cluster.jobs[name]["metadata"]["labels"] == {"sunspot/run": "other"}


def test_resume_says_where_the_run_was_submitted(cluster: FakeCluster, sunspot: Command) -> None:
    """Nothing is applied or recorded, because a record would make the run look pending."""
    sunspot.submit()
    name = only_job(cluster)
    end(cluster, sunspot.run, RunState.STOPPED)
    request_stop(sunspot.run, "me")
    before = [entry.key for entry in sunspot.run.storage.list("run/submissions")]
    nothing: dict[str, Any] = {"items": []}
    cluster.documents |= {
        JOBS.replace("sunspot", "other"): nothing,
        f"{CORE}/events".replace("sunspot", "other"): nothing,
    }
    storage = sunspot.run.storage.locate("")
    assert sunspot("resume", "run", "--namespace", "other") == 3, sunspot.err
    server = connect().server
    assert f"run has no RayJob in namespace other of {server} to start again" in sunspot.err
    assert f"{name} was submitted to namespace sunspot of {server}" in sunspot.err
    assert f"sunspot submit --profile kind --run run --storage {storage}" in sunspot.err
    assert [entry.key for entry in sunspot.run.storage.list("run/submissions")] == before


# ------------------------------------------------------------------------------------------------------ alive elsewhere


ELSEWHERE = {
    "another namespace": "run-0#1a2b3c4d@teamb/{cluster}",
    "another cluster": "{job}@sunspot/ffffffffff",
    "a process": "laptop-4711-1a2b3c4d",
}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_run_that_is_live_elsewhere_is_taken_over_only_with_the_take_over_option(
    cluster: FakeCluster, sunspot: Command, place: str
) -> None:
    cluster.documents[f"{CORE}/configmaps/kube-root-ca.crt"] = {"data": {"ca.crt": "A"}}
    sunspot("render", "--run", "run")
    name = yaml.safe_load(sunspot.out)["metadata"]["name"]
    lives = ELSEWHERE[place].format(job=name, cluster=cluster_identity("A"))
    write_status(sunspot.run, Status(RunState.RUNNING, lives, step=7))
    for arguments in ((), ("--dry-run",)):
        assert sunspot.submit(*arguments) == 6
        assert f"alive elsewhere: {Owner.parse(lives).describe()} is training it, at step 7" in sunspot.err
        assert "--take-over" in sunspot.err
        assert (cluster.jobs, newest_submission(sunspot.run)) == ({}, None)
    assert sunspot.submit("--take-over", "--json") == 0, sunspot.err
    assert (sunspot.json["action"], only_job(cluster)) == ("created", name)
    assert f"takes the run over from {Owner.parse(lives).describe()}" in sunspot.json["reason"]
    assert sunspot.submit("--json") == 0, "its RayJob here is live"
    assert sunspot.json["action"] == "attached"


def test_a_run_with_a_silent_owner_is_taken_over_without_the_take_over_option(
    cluster: FakeCluster, sunspot: Command, set_constants: SetConstants
) -> None:
    write_status(sunspot.run, Status(RunState.RUNNING, "run-0#1a2b3c4d@teamb/ffffffffff"))
    set_constants("sunspot.run.status", SILENT_AFTER_S=-1.0)
    assert sunspot.submit("--json") == 0, sunspot.err
    assert sunspot.json["action"] == "created"


def test_an_owner_whose_rayjob_was_just_deleted_is_not_live(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.documents[f"{CORE}/configmaps/kube-root-ca.crt"] = {"data": {"ca.crt": "A"}}
    assert sunspot.submit() == 0
    write_status(sunspot.run, Status(RunState.RUNNING, f"{owner(cluster)}@sunspot/{cluster_identity('A')}"))
    cluster.delete_job(only_job(cluster))
    assert sunspot.submit("--json") == 0, sunspot.err
    assert sunspot.json["action"] == "created"


def test_an_ended_rayjob_does_not_hide_a_live_owner_in_another_namespace(
    cluster: FakeCluster, sunspot: Command
) -> None:
    """The RayJob of the old owner has ended, and `submit` exits with 6 unless --take-over is given."""
    sunspot.submit()
    name, before = only_job(cluster), owner(cluster)
    cluster.set_status(name, "Failed", "FAILED", reason="AppFailed")
    write_status(sunspot.run, Status(RunState.RUNNING, f"{name}@teamb", began=time.time() + 1))
    assert sunspot.submit() == 6
    assert sunspot("resume", "run") == 6
    assert owner(cluster) == before
    assert sunspot.submit("--take-over", "--json") == 0, sunspot.err
    assert sunspot.json["action"] == "replaced"
    assert owner(cluster) != before


def test_status_and_list_print_the_cluster_and_namespace_of_the_owner(cluster: FakeCluster, sunspot: Command) -> None:
    write_status(sunspot.run, Status(RunState.RUNNING, "run-0#1a2b3c4d@teamb/ffffffffff"))
    where = {"cluster": "ffffffffff", "namespace": "teamb", "job": "run-0"}
    for command in (("status", "run"), ("list",)):
        assert sunspot(*command, "--json") == 0, sunspot.err
        record = sunspot.json[0] if command[0] == "list" else sunspot.json
        assert record["where"] == where
        assert sunspot(*command) == 0
        assert "namespace teamb of cluster ffffffffff" in sunspot.out


def test_stop_does_not_delete_a_rayjob_that_gitops_would_recreate(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.put_job(kept(rayjob("run-1")))
    cluster.set_status("run-1", "Running", "RUNNING")
    write_status(sunspot.run, Status(RunState.RUNNING, "run-1"))

    def save(handler: Any) -> None:
        if stop_requested(sunspot.run):
            end(cluster, sunspot.run, RunState.STOPPED)
        handler.answer()

    cluster.on("GET", "rayjobs?", save)
    assert sunspot("stop", "run") == 0, sunspot.err
    assert only_job(cluster) == "run-1"


def test_stop_waits_for_the_save_while_the_next_place_is_warmed_up(cluster: FakeCluster, sunspot: Command) -> None:
    cluster.put_job(rayjob("run-1", created=time.time() - 100))
    cluster.set_status("run-1", "Running", "RUNNING")
    coming = rayjob("run-2")
    set_variable(coming, "SUNSPOT_MOVES_FROM", "run-1")
    cluster.put_job(coming)
    write_status(sunspot.run, Status(RunState.RUNNING, "run-1"))

    def save(handler: Any) -> None:
        if stop_requested(sunspot.run):
            saved = "step-00000007-attempt-0001"
            write_status(sunspot.run, Status(RunState.STOPPED, "run-1", checkpoint=saved), StatusKind.ENDED)
            cluster.set_status("run-1", "Complete", "SUCCEEDED")
        handler.answer()

    cluster.on("GET", "rayjobs?", save)
    assert sunspot("stop", "run", "--timeout", "20") == 0, sunspot.err
    assert "saved as step-00000007-attempt-0001" in sunspot.out
    assert only_job(cluster) == "run-1", "the RayJob that would start later was not deleted"


def test_stop_without_waiting_only_writes_the_stop_marker(cluster: FakeCluster, sunspot: Command) -> None:
    sunspot.submit()
    assert sunspot("stop", "run", "--no-wait") == 0
    assert stop_requested(sunspot.run)
    assert cluster.jobs


def test_stop_with_an_expired_credential_reports_that_the_stop_marker_was_written(
    cluster: FakeCluster, sunspot: Command
) -> None:
    sunspot.submit()
    cluster.set_status(only_job(cluster), "Running", "RUNNING")
    write_status(sunspot.run, Status(RunState.RUNNING, owner(cluster)))
    cluster.on("GET", "/rayjobs", answer(401, "Unauthorized"))
    assert sunspot("stop", "run") == 4
    assert "rejected these credentials (Unauthorized); renew them, or choose another --context. " in sunspot.err
    assert "the stop marker is in storage, so the run will save and stop; `sunspot stop run " in sunspot.err
    assert stop_requested(sunspot.run)
    assert cluster.jobs


def test_a_user_without_a_user_name_can_stop_a_run(
    sunspot: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user in a container can have a number but no name."""
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    write_status(sunspot.run, Status(RunState.STOPPED, "host-1"))
    assert sunspot("stop", "run") == 0, sunspot.err
    request = read_stop(sunspot.run)
    assert request
    assert request.by.startswith(f"{os.getuid()}@")


def test_stop_reports_runs_that_have_ended_or_are_unknown(cluster: FakeCluster, sunspot: Command) -> None:
    assert sunspot("stop", "run") == 3
    assert sunspot("resume", "run") == 3
    assert not stop_requested(sunspot.run)
    sunspot.submit()
    end(cluster, sunspot.run, RunState.SUCCEEDED)
    assert sunspot("stop", "run") == 0
    assert "nothing to stop" in sunspot.out
    assert not stop_requested(sunspot.run)
    cluster.delete_job(only_job(cluster))
    write_status(sunspot.run, Status(RunState.FAILED, "x"))
    assert sunspot("stop", "run") == 0
    assert stop_requested(sunspot.run)


def test_resuming_a_run_that_was_not_submitted_clears_the_stop_marker(cluster: FakeCluster, sunspot: Command) -> None:
    write_status(sunspot.run, Status(RunState.STOPPED, "host-1"))
    request_stop(sunspot.run, "me")
    assert sunspot("resume", "run") == 0
    assert "GENERATION" in sunspot.out
    assert not stop_requested(sunspot.run)


def test_the_stop_and_resume_commands_use_only_storage_if_there_is_no_cluster(
    sunspot: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    write_status(sunspot.run, Status(RunState.STOPPED, "run-1#1"))
    assert sunspot("stop", "run") == 0
    assert stop_requested(sunspot.run)
    record_submission(sunspot.run, SubmissionRecord("run-1"))
    assert sunspot("resume", "run") == 4
    assert "set KUBECONFIG" in sunspot.err
    clear_stop(sunspot.run)


def test_the_newest_of_several_rayjobs_determines_the_state(cluster: FakeCluster, sunspot: Command) -> None:
    """GitOps applied another spec while the first RayJob was live."""
    cluster.put_job(rayjob("run-old", created=time.time() - 100))
    cluster.put_job(rayjob("run-new", created=time.time() - 10))
    cluster.set_status("run-old", "Running", "RUNNING")
    cluster.set_status("run-new", "Initializing")
    assert sunspot("status", "run", "--json") == 0
    assert (sunspot.json["job"], sunspot.json["state"]) == ("run-new", "pending")
    assert "these RayJobs are also live, but will be superseded once run-new trains: run-old" in sunspot.err
    write_status(sunspot.run, Status(RunState.RUNNING, "run-new", world_size=2))
    cluster.set_status("run-old", "Failed", "FAILED")
    cluster.set_status("run-new", "Running", "RUNNING")
    assert sunspot("status", "run", "--json") == 0
    assert sunspot.json["state"] == "running"
    assert JOBS in cluster.requests[0][1]
