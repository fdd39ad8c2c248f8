"""Tests of `sunspot doctor` without a run: checks of the cluster, of the bucket and from pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sunspot.run import Run, open_run
from sunspot.storage import open_storage
from sunspot.storage.local import LocalStorage
from sunspot.storage.prove import FOLDER, LARGE, Check, Result, probe_path, probe_storage
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.doctor.cluster_checks import check_cluster
from sunspot.submitter.doctor.probe_pods import LABEL, make_pod, read_checks
from sunspot.submitter.doctor.schedulable_nodes import find_room
from sunspot.submitter.manifest.profile import manifests
from sunspot.submitter.manifest.quantities import parse_quantity
from tests.harness import REPOSITORY, s3
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import CORE, FakeCluster, answer, pod
from tests.harness.manifests import OF_THE_IMAGE, render
from tests.harness.s3 import FaultProxy, delay

NETWORK = "/apis/networking.k8s.io/v1/namespaces/sunspot/networkpolicies"
BUDGETS = "/apis/policy/v1/namespaces/sunspot/poddisruptionbudgets"
QUEUES = "/apis/kueue.x-k8s.io/v1beta2/namespaces/sunspot/localqueues"


def node(name: str = "node-1", **spec: Any) -> dict[str, Any]:
    """Return a node with room for any pod of the kind profile."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **OF_THE_IMAGE}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "8", "memory": "32Gi", "ephemeral-storage": "100Gi", "pods": "110"},
        },
    }


@pytest.fixture(autouse=True)
def quick(set_constants: SetConstants) -> None:
    """Measure the throughput with an object that needs no upload in parts, and accept any throughput."""
    set_constants("sunspot.storage.prove", LARGE_TIMES=1, MIN_MB_PER_S=0.0, LARGE=1 << 20)


@pytest.fixture
def sunspot(s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(open_run(f"s3://{s3_bucket}/runs", "run"), capsys)


@pytest.fixture
def fit(cluster: FakeCluster, s3_bucket: str) -> FakeCluster:
    """A cluster and a bucket without faults."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    operator = pod("kuberay-operator", "")
    operator["metadata"] |= {"namespace": "ray", "labels": {"app.kubernetes.io/component": "kuberay-operator"}}
    patient = {"name": "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS", "value": "600"}
    operator["spec"]["containers"] = [{"image": "quay.io/kuberay/operator:v1.7.0", "env": [patient]}]
    cluster.documents = {
        "/version": {"gitVersion": "v1.34.4"},
        CORE: {"metadata": {"name": "sunspot", "labels": labels}},
        "/api/v1/pods": {"items": [operator]},
        "/api/v1/nodes": {"items": [node(), node("node-2")]},
        f"{CORE}/resourcequotas": {"items": []},
    }
    policies = ("deny-by-default", "within-clusters", "from-operator", "to-dns", "to-storage", "to-tracking")
    cluster.objects |= {f"{NETWORK}/{name}" for name in (*policies, "to-workload-identity", "autoscaler-to-api-server")}
    cluster.objects |= {f"{BUDGETS}/sunspot-head"}
    rule = {
        "ID": "x",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3},
    }
    s3.plain_client().put_bucket_lifecycle_configuration(Bucket=s3_bucket, LifecycleConfiguration={"Rules": [rule]})
    return cluster


def checks(sunspot: Command, *words: str, code: int = 0) -> dict[str, dict[str, str]]:
    """Run the command, and return the checks keyed by name."""
    assert sunspot("doctor", "--json", *words) == code, sunspot.out + sunspot.err
    assert sunspot.json["fit"] is (code == 0)
    return {check["check"]: check for check in sunspot.json["checks"]}


def of_cluster(profile: str) -> dict[str, Check]:
    """Return only the cluster's checks, keyed by name."""
    return {check.check: check for check in check_cluster(connect(), render(profile, {}))}


# ---------------------------------------------------------------------------------------------------------- all is well


def test_a_suitable_cluster_and_bucket_pass_every_check(sunspot: Command, fit: FakeCluster) -> None:
    found = checks(sunspot)
    assert {name: check["result"] for name, check in found.items() if check["result"] != "ok"} == {}
    assert set(found) == {
        *("API server", "KubeRay", "KubeRay operator", "namespace", "permissions", "Secret sunspot-storage"),
        *("ServiceAccount sunspot-train", "NetworkPolicy", "PodDisruptionBudget", "manifest", "nodes for head"),
        "time for a new head",
        *("nodes for workers", "quota", "storage access", "storage latency", "clock", "storage throughput", "versions"),
        "unfinished uploads",
    }
    assert "v1.34.4" in found["API server"]["seen"]
    assert "operator:v1.7.0 in namespace ray" in found["KubeRay operator"]["seen"]
    assert "2 of 2 nodes match" in found["nodes for workers"]["seen"]
    assert not fit.jobs
    assert not sunspot.run.storage.list(""), "no object is left"
    assert s3.leftover_uploads(sunspot.run.storage.bucket) == []
    assert sunspot("doctor") == 0
    assert "ok       API server: http://127.0.0.1" in sunspot.out
    assert "ready for a run: 20 checks, 0 with a warning" in sunspot.out


def test_every_network_policy_of_k8s_base_is_checked(sunspot: Command, fit: FakeCluster) -> None:
    checks(sunspot)
    text = (manifests() / "base" / "network.yaml").read_text()
    asked = {path.rpartition("/")[2] for _, path in fit.requests if path.startswith(NETWORK)}
    assert len(asked) == text.count("kind: NetworkPolicy") == 8


# ---------------------------------------------------------------------------------------------------------- the cluster


def test_storage_is_checked_even_if_the_cluster_is_unreachable(
    sunspot: Command, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    found = checks(sunspot, "--profile", "kind", code=4)
    assert found["API server"]["result"] == "failed"
    assert "set KUBECONFIG" in found["API server"]["fix"]
    assert found["storage access"]["result"] == "ok"


@pytest.mark.parametrize("installed", [True, False])
def test_doctor_checks_the_local_machine_if_there_is_no_kubeconfig(
    installed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setattr("sunspot.submitter.local_training.find_spec", lambda package: None)
    sunspot = Command(open_run(str(tmp_path / "runs"), "run"), capsys)
    found = checks(sunspot, code=0 if installed else 2)
    assert list(found) == ["training here", "storage access", "storage latency", "clock", "storage throughput"]
    assert f"{tmp_path}/runs" in found["storage access"]["seen"]
    assert found["training here"]["result"] == ("ok" if installed else "failed")
    assert sunspot("doctor") == (0 if installed else 2)
    assert "cluster" not in sunspot.out + sunspot.err


def test_only_one_check_fails_if_the_cluster_is_unreachable(sunspot: Command, fit: FakeCluster) -> None:
    fit.down()
    found = checks(sunspot, code=4)
    assert "cannot be reached" in found["API server"]["seen"]
    assert "KubeRay" not in found


def make_old(cluster: FakeCluster) -> None:
    [operator] = cluster.documents["/api/v1/pods"]["items"]
    operator["spec"]["containers"][0]["image"] = "quay.io/kuberay/operator:v1.6.2"


def crash_operator(cluster: FakeCluster) -> None:
    """Make the operator's pod Running but not ready, like a crashing pod between restarts."""
    [operator] = cluster.documents["/api/v1/pods"]["items"]
    operator["status"]["conditions"] = [{"type": "Ready", "status": "False"}]


def hide_operator(cluster: FakeCluster) -> None:
    cluster.documents["/api/v1/pods"]["items"] = []
    for each in cluster.documents["/api/v1/nodes"]["items"]:
        each["spec"]["providerID"] = "gce://project/zone/node"


def set_status_timeout(value: str | None) -> Any:
    def act(cluster: FakeCluster) -> None:
        [operator] = cluster.documents["/api/v1/pods"]["items"]
        env = [] if value is None else [{"name": "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS", "value": value}]
        operator["spec"]["containers"][0]["env"] = env

    return act


def fill_quota(used: str, hard: str) -> Any:
    def act(cluster: FakeCluster) -> None:
        status = {"hard": {"requests.memory": hard, "requests.nvidia.com/gpu": "0"}, "used": {"requests.memory": used}}
        quota = {"metadata": {"name": "team"}, "spec": {"hard": status["hard"]}, "status": status}
        cluster.documents[f"{CORE}/resourcequotas"] = {"items": [quota]}

    return act


def limit_cpus(cluster: FakeCluster) -> None:
    quota = {"metadata": {"name": "corp"}, "spec": {"hard": {"limits.cpu": "100"}}}
    cluster.documents[f"{CORE}/resourcequotas"] = {"items": [quota]}


@pytest.mark.parametrize(
    ("name", "change", "result", "seen", "fix"),
    [
        (
            "KubeRay",
            lambda c: setattr(c, "has_operator", False),
            "failed",
            "does not know rayjobs",
            "install the KubeRay",
        ),
        (
            "KubeRay operator",
            lambda c: c.documents.update({"/api/v1/pods": {"items": []}}),
            "failed",
            "no pod labeled app.kubernetes.io/component=kuberay-operator runs",
            "without it, runs wait forever",
        ),
        ("KubeRay operator", crash_operator, "failed", "1 pod labeled", "find out why it is not running"),
        ("KubeRay operator", hide_operator, "warning", "no pod labeled", "add-on, whose pods are hidden"),
        ("KubeRay operator", make_old, "warning", "operator:v1.6.2", "upgrade it"),
        (
            "time for a new head",
            set_status_timeout(None),
            "warning",
            "not answered for 300 s; a new head can take 600 s",
            "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS=600",
        ),
        (
            "time for a new head",
            set_status_timeout("soon"),
            "warning",
            "has not answered for 300 s",
            "the operator's container",
        ),
        ("time for a new head", set_status_timeout("1800"), "ok", "has not answered for 1800 s", ""),
        (
            "KubeRay operator",
            lambda c: c.forbidden.add("/api/v1/pods"),
            "warning",
            "not allowed to check this",
            "the owner of the cluster",
        ),
        (
            "namespace",
            lambda c: (c.documents.pop(CORE), c.objects.discard(CORE)),
            "failed",
            "no namespace sunspot",
            "kubectl apply -k k8s/base",
        ),
        (
            "namespace",
            lambda c: c.documents.update({CORE: {"metadata": {"name": "sunspot"}}}),
            "warning",
            "Standard privileged",
            "enforce=restricted",
        ),
        ("permissions", lambda c: c.forbidden.add("create rayjobs"), "failed", "no permission to create", "submitter"),
        (
            "Secret sunspot-storage",
            lambda c: c.objects.discard(f"{CORE}/secrets/sunspot-storage"),
            "failed",
            "is not in namespace sunspot",
            "kubectl -n sunspot create secret",
        ),
        (
            "Secret sunspot-storage",
            lambda c: c.forbidden.add(f"{CORE}/secrets/sunspot-storage"),
            "warning",
            "this user cannot see whether Secret sunspot-storage exists",
            "pods cannot start without it",
        ),
        (
            "NetworkPolicy",
            lambda c: c.objects.discard(f"{NETWORK}/to-dns"),
            "warning",
            "missing in sunspot, but part of k8s/base: to-dns",
            "kubectl apply -k k8s/base",
        ),
        (
            "manifest",
            lambda c: c.on("PATCH", "rayjobs", answer(422, "backoffLimit: Invalid value")),
            "failed",
            "Invalid value",
            "",
        ),
        (
            "pods",
            lambda c: c.on("POST", "/pods?dryRun=All", answer(403, 'pods "x" is forbidden: violates PodSecurity')),
            "failed",
            "pods of group workers would be rejected now",
            "ask the owner of the namespace to allow it",
        ),
        (
            "nodes for workers",
            lambda c: c.documents.update({"/api/v1/nodes": {"items": [node(unschedulable=True)]}}),
            "warning",
            "0 of 1 node match, and would have room for 0 pods if nothing else ran there; the run needs 2 "
            "(other nodes: 1 cordoned)",
            "unless an autoscaler adds matching nodes",
        ),
        (
            "nodes",
            lambda c: c.forbidden.add("/api/v1/nodes"),
            "warning",
            "not allowed to check this",
            "the owner of the cluster",
        ),
        (
            "quota",
            fill_quota("30Gi", "40Gi"),
            "warning",
            "team: requests.memory: 11Gi needed, 10Gi free of 40Gi",
            "wait until other runs end",
        ),
        (
            "quota",
            fill_quota("0", "10Gi"),
            "failed",
            "team: requests.memory: 11Gi needed (head 5Gi + 2 workers 6Gi) of only 10Gi",
            "the run can never fit; request less",
        ),
        ("quota", fill_quota("0", "40Gi"), "ok", "team has room for a run", ""),
        (
            "quota",
            limit_cpus,
            "failed",
            "corp counts limits.cpu, so it admits only pods that specify all of these",
            "set cpu_limit of head",
        ),
        (
            "pods",
            lambda c: c.on("POST", "/pods?dryRun=All", answer(403, "failed quota: corp: must specify limits.cpu")),
            "failed",
            "must specify limits.cpu",
            "set cpu_limit of head, worker and data_workers",
        ),
    ],
)
def test_each_cluster_fault_is_reported_with_its_fix(
    sunspot: Command, fit: FakeCluster, name: str, change: Any, result: str, seen: str, fix: str
) -> None:
    change(fit)
    found = checks(sunspot, code=4 if result == "failed" else 0)
    assert found[name]["result"] == result
    assert seen in found[name]["seen"]
    assert fix in found[name]["fix"]
    others = {other for other, check in found.items() if check["result"] == "failed"}
    assert others <= {name, "manifest"}, "each fault is reported once"
    assert found["storage access"]["result"] == "ok"


@pytest.mark.parametrize(
    ("queue", "result", "seen"),
    [
        (None, "failed", "no LocalQueue team in namespace sunspot"),
        ({"status": {"conditions": [{"type": "Active", "status": "True"}]}}, "ok", "LocalQueue team exists"),
        (
            {"status": {"conditions": [{"type": "Active", "status": "False", "message": "no ClusterQueue"}]}},
            "failed",
            "admits nothing: no ClusterQueue",
        ),
    ],
)
def test_the_queue_in_the_profile_is_checked(
    sunspot: Command, fit: FakeCluster, tmp_path: Path, queue: Any, result: str, seen: str
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: kind\nqueue: team\n")
    found = checks(sunspot, "--profile", str(profile), code=4)
    assert found["Kueue"]["seen"].endswith("so the job would ignore the queue's quota")
    fit.has_kueue = True
    if queue:
        fit.documents[f"{QUEUES}/team"] = queue
    found = checks(sunspot, "--profile", str(profile), code=4 if result == "failed" else 0)
    assert found["queue"]["result"] == result
    assert seen in found["queue"]["seen"]


def test_invalid_arguments_are_rejected(sunspot: Command, fit: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sunspot("doctor", "--profile", "kinnd") == 2
    assert "did you mean kind?" in sunspot.err
    assert sunspot("doctor", "run", "--from-pods") == 2
    assert "omit either RUN or these options" in sunspot.err
    monkeypatch.setenv("SUNSPOT_EPOCH", "3")
    assert sunspot("doctor") == 2
    assert "SUNSPOT_EPOCHS" in sunspot.err


# ------------------------------------------------------------------------------------------------------------ the nodes


def test_doctor_matches_pods_to_nodes_as_the_scheduler_does() -> None:
    spot, gpu = {"cloud.google.com/gke-spot": "true"}, "nvidia.com/gpu"
    settings = {"RUN_NAME": "run", "NUM_WORKERS": "2", "STORAGE_PATH": "s3://b/p"}
    cluster = render("gke-spot", settings).manifest["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]

    def gpu_node(labels: dict[str, str], taints: list[dict[str, str]], gpus: str = "1") -> dict[str, Any]:
        made = node(taints=taints)
        made["metadata"]["labels"] |= labels
        made["status"]["allocatable"][gpu] = gpus
        return made

    tainted = [{"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}]
    tainted += [{"key": gpu, "value": "present", "effect": "NoSchedule"}]
    good, two = gpu_node(spot, tainted), gpu_node(spot, tainted, "2")
    nodes = [
        *(good, two),
        gpu_node({}, []),
        gpu_node(spot, [*tainted, {"key": "team", "effect": "NoExecute"}]),
        gpu_node(spot, [], "0"),
    ]
    assert [find_room(worker, each) for each in nodes] == [
        *[(1, "")] * 2,  # by the CPUs, two GPUs of one node serve one pod
        (0, "not labeled cloud.google.com/gke-spot=true"),
        (0, "taint team not tolerated"),
        (0, f"without {gpu}"),
    ]
    assert find_room(head, good) == (0, "excluded by the node affinity")
    assert find_room(head, node())[0]
    broken = node()
    broken["status"]["conditions"][0]["status"] = "Unknown"
    assert find_room(head, broken) == (0, "not ready")


def test_a_quota_on_cpu_limits_is_checked(fit: FakeCluster, tmp_path: Path) -> None:
    """The autoscaler's container also counts."""
    limit_cpus(fit)
    profile = tmp_path / "mine.yaml"
    limits = "head: {cpu_limit: 1}\nworker: {cpu_limit: 2}"
    profile.write_text(f"extends: kind\nsettings: {{NUM_WORKERS: 1..2}}\n{limits}")
    assert of_cluster(str(profile))["quota"].seen == "corp has room for a run"
    profile.write_text("extends: kind\nhead: {cpu_limit: 1}")
    assert of_cluster(str(profile))["quota"].result is Result.FAILED


def test_doctor_warns_if_a_shared_policy_connects_isolated_runs(fit: FakeCluster, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: kind\nrayjob: {spec: {rayClusterSpec: {networkPolicy: {mode: DenyAll}}}}")
    seen = [check.seen for check in check_cluster(connect(), render(str(profile), {}))]
    assert any("within-clusters lets all runs here reach each other" in text for text in seen)
    fit.objects.remove(f"{NETWORK}/within-clusters")
    assert of_cluster(str(profile))["NetworkPolicy"].result is Result.OK
    assert of_cluster("kind")["NetworkPolicy"].result is Result.WARNING


def test_doctor_warns_if_several_pods_would_share_the_gpus_of_a_node(fit: FakeCluster) -> None:
    made = node(taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
    made["status"]["allocatable"] |= {"nvidia.com/gpu": "8", "cpu": "96"}
    fit.documents["/api/v1/nodes"]["items"].append(made)
    found = of_cluster("on-demand")["GPUs of a node"]
    assert found.seen.startswith("workers: a pod takes 1 of a node's 8 GPUs")
    assert found.fix == "set worker.gpus to 8 to get one pod with 8 workers per node"
    made["status"]["allocatable"]["nvidia.com/gpu"] = "1"
    assert "GPUs of a node" not in of_cluster("on-demand")


@pytest.mark.parametrize(
    ("text", "number"), [("250m", 0.25), ("5Gi", 5 * 2**30), ("2", 2), ("1e3", 1000), ("3k", 3000), (4, 4)]
)
def test_kubernetes_quantities_are_parsed(text: Any, number: float) -> None:
    assert parse_quantity(text) == number


# ----------------------------------------------------------------------------------------------------------- the bucket


def test_the_storage_check_fails_if_writing_to_the_bucket_is_forbidden(
    sunspot: Command, fit: FakeCluster, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on("PutObject", s3.answer(403, "AccessDenied"))
    found = checks(sunspot, code=4)
    assert "AccessDenied" in found["storage"]["seen"]
    assert "s3:PutObject" in found["storage"]["fix"]
    assert found["manifest"]["result"] == "ok"
    assert "not ready for a run: 1 of 15 checks failed, starting with storage" in sunspot.err


def test_the_storage_check_fails_if_conditional_writes_are_ignored(
    sunspot: Command, fit: FakeCluster, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on("PutObject", s3.without_header("If-None-Match"))
    found = checks(sunspot, code=4)["storage"]
    assert "created twice, because this store ignores 'If-None-Match: *'" in found["seen"]
    assert "conditional writes" in found["fix"]
    assert not sunspot.run.storage.list("")


def test_the_storage_check_fails_if_multipart_uploads_are_rejected(
    sunspot: Command, fit: FakeCluster, s3_proxy: FaultProxy, set_constants: SetConstants
) -> None:
    set_constants("sunspot.storage.prove", LARGE=LARGE)
    s3_proxy.on("UploadPart", s3.answer(403, "AccessDenied"))
    found = checks(sunspot, code=4)
    assert found["storage latency"]["result"] == "ok"
    assert "AccessDenied" in found["storage"]["seen"]
    assert not sunspot.run.storage.list("")
    assert s3.leftover_uploads(sunspot.run.storage.bucket) == []


def test_doctor_warns_if_a_bucket_keeps_deleted_objects(sunspot: Command, fit: FakeCluster, s3_bucket: str) -> None:
    client = s3.plain_client()
    client.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": "Enabled"})
    client.delete_bucket_lifecycle(Bucket=s3_bucket)
    found = checks(sunspot)
    assert found["versions"]["result"] == found["unfinished uploads"]["result"] == "warning"
    assert "noncurrent versions" in found["versions"]["fix"]
    assert "AbortIncompleteMultipartUpload" in found["unfinished uploads"]["fix"]


@pytest.mark.parametrize(
    ("prefix", "status", "drops"), [("runs/", "Enabled", True), ("other/", "Enabled", False), ("", "Disabled", False)]
)
def test_only_enabled_lifecycle_rules_for_the_storage_prefix_are_considered(
    s3_bucket: str, prefix: str, status: str, drops: bool
) -> None:
    rule = {"ID": "x", "Status": status, "Filter": {"Prefix": prefix}}
    rule["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": 3}
    s3.plain_client().put_bucket_lifecycle_configuration(Bucket=s3_bucket, LifecycleConfiguration={"Rules": [rule]})
    assert open_storage(f"s3://{s3_bucket}/runs").drops_unfinished() is drops


def test_a_missing_permission_for_a_bucket_check_causes_only_a_warning(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    for query in ("versioning", "lifecycle"):
        s3_proxy.on(lambda request, query=query: query in request.query, s3.answer(403, "AccessDenied"))
    found = {check.check: check for check in probe_path(f"s3://{s3_bucket}/runs")}
    for name, right in (("versions", "s3:GetBucketVersioning"), ("unfinished uploads", "s3:GetLifecycleConfiguration")):
        assert found[name].result is Result.WARNING
        assert right in found[name].fix


def test_slow_storage_and_clock_skew_cause_warnings(
    s3_bucket: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants("sunspot.storage.prove", MAX_LATENCY_S=0.02, MIN_MB_PER_S=1e6)
    s3_proxy.on("GetObject", delay(0.03))
    really = time.time
    monkeypatch.setattr("sunspot.storage.prove.time.time", lambda: really() - 100)
    found = {check.check: check for check in probe_path(f"s3://{s3_bucket}/runs")}
    assert found["storage latency"].result is found["storage throughput"].result is Result.WARNING
    assert found["clock"].result is Result.WARNING
    clocks = "the clocks of this machine and of the storage"
    assert found["clock"].seen in [f"{clocks} differ by {apart} s" for apart in (99, 100, 101)]


def test_storage_in_a_directory_is_checked(tmp_path: Path) -> None:
    found = {check.check: check for check in probe_storage(LocalStorage(str(tmp_path)))}
    assert {check.result for check in found.values()} == {Result.OK}
    assert set(found) == {"storage access", "storage latency", "clock", "storage throughput"}
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ from pods


def finish(pod: dict[str, Any], message: str, phase: str = "Succeeded", code: int = 0) -> None:
    ended = {"terminated": {"exitCode": code, "message": message}}
    pod["spec"]["nodeName"] = f"node-of-{pod['metadata']['name']}"
    pod["status"] = {"phase": phase, "containerStatuses": [{"name": "ray", "state": ended}]}


GOOD = '[{"check": "storage access", "result": "ok", "seen": "all of it", "fix": ""}]'


@pytest.fixture
def patient(set_constants: SetConstants) -> None:
    set_constants("sunspot.submitter.doctor.probe_pods", POLL_EVERY_S=0.02)


def test_probe_pods_resemble_the_pods_of_a_run(fit: FakeCluster, sunspot: Command, patient: None) -> None:
    made: list[dict[str, Any]] = []

    def end(pod: dict[str, Any]) -> None:
        made.append(json.loads(json.dumps(pod)))
        threading.Timer(0.2, lambda: finish(pod, GOOD)).start()

    fit.on_create = end
    found = checks(sunspot, "--from-pods", "--image", "sunspot:9")
    for kind in ("head", "worker", "second worker"):
        check = found[f"from a {kind} pod: storage access"]
        assert check["result"] == "ok"
        assert check["seen"].startswith("on node-of-")
    for one, memory in zip(made, ("5Gi", "3Gi", "3Gi"), strict=True):
        labels, spec = one["metadata"]["labels"], one["spec"]
        [container] = spec["containers"]
        assert "sunspot/run" not in labels
        assert labels["app.kubernetes.io/part-of"] == "sunspot", "for the network policies"
        assert spec["serviceAccountName"] == "sunspot-train"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 900)
        assert container["image"] == "sunspot:9"
        assert container["envFrom"] == [{"secretRef": {"name": "sunspot-storage"}}]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["requests"]["memory"] == memory
    assert [name for name, _ in fit.deleted] == [one["metadata"]["name"] for one in made]
    assert not fit.pods
    head, *workers = made
    assert "--meeting" not in head["spec"]["containers"][0]["command"]
    assert [one["spec"]["containers"][0]["command"][-4:] for one in workers] == [
        ["--meeting", workers[0]["metadata"]["name"][-8:], "--rank", rank] for rank in ("0", "1")
    ]
    [rule] = workers[1]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    beside = rule["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert [beside.items() <= one["metadata"]["labels"].items() for one in made] == [False, True, True]


@pytest.mark.parametrize("why", ["one pod", "one node", "a policy", "a policy of the run", "a sidecar"])
def test_doctor_says_why_the_network_between_nodes_is_not_tested(
    fit: FakeCluster, sunspot: Command, patient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    own = {
        "a policy of the run": "rayjob: {spec: {rayClusterSpec: {networkPolicy: {mode: DenyAll}}}}",
        "a sidecar": "worker: {pod: {spec: {containers: [{name: daemon, image: daemon:1}]}}}",
    }
    (tmp_path / "mine.yaml").write_text(f"extends: kind\n{own.get(why, '')}\n")
    if why == "one pod":
        monkeypatch.setenv("SUNSPOT_NUM_WORKERS", "1..4")
        fit.objects.add(f"{CORE}/serviceaccounts/sunspot-autoscaler")
    if why == "a policy":
        fit.objects.discard(f"{NETWORK}/within-clusters")

    def end(pod: dict[str, Any]) -> None:
        finish(pod, GOOD)
        pod["spec"]["nodeName"] = "node-1"

    fit.on_create = end
    found = checks(sunspot, "--from-pods", "--profile", str(tmp_path / "mine.yaml"))
    assert len(fit.deleted) == (3 if why == "one node" else 2)
    said = found.get("from pods: network between nodes", {"result": "", "seen": ""})
    assert said["result"] == ("" if why == "one pod" else "warning")
    told = {"one node": "both worker pods were on node-1", "a sidecar": "sidecars", "one pod": ""}
    assert told.get(why, "let pods reach only pods of their own run") in said["seen"]


def test_the_probe_pod_for_workers_runs_on_spot_nodes_if_the_profile_uses_them() -> None:
    manifest = render("gke-spot", {"RUN_NAME": "run"}).manifest
    head, worker = (make_pod(manifest, kind, "x")["spec"] for kind in ("head", "worker"))
    assert worker["nodeSelector"] == {"cloud.google.com/gke-spot": "true", **OF_THE_IMAGE}
    assert {toleration["key"] for toleration in worker["tolerations"] if "tolerationSeconds" not in toleration} == {
        "cloud.google.com/gke-spot",
        "nvidia.com/gpu",
    }
    assert head["nodeSelector"] == OF_THE_IMAGE
    assert head["affinity"]["nodeAffinity"]
    tried = [" ".join(pod["containers"][0]["command"]) for pod in (head, worker)]
    assert ["--gpus 0 " in tried[0], "--gpus 1 " in tried[1]] == [True, True], "only workers get a node of their own"
    [rule] = worker["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert rule["podAffinityTerm"]["labelSelector"] == {"matchLabels": {LABEL: "worker-x"}}, "the run has no pods yet"
    run = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert run["metadata"]["labels"]["sunspot/run"] == "run", "the manifest is unchanged"


@pytest.mark.parametrize(
    ("message", "phase", "code", "said"),
    [
        (
            "No module named sunspot.train.pod_probe",
            "Failed",
            1,
            "ended with 1: No module named sunspot.train.pod_probe",
        ),
        (GOOD.replace('"ok"', '"failed"'), "Succeeded", 0, "all of it"),
    ],
)
def test_probe_pods_are_deleted_even_if_their_checks_fail(
    fit: FakeCluster, sunspot: Command, patient: None, message: str, phase: str, code: int, said: str
) -> None:
    fit.on_create = lambda pod: finish(pod, message, phase, code)
    checks(sunspot, "--from-pods", code=4)
    assert said in sunspot.out
    assert not fit.pods


def test_a_check_fails_if_probe_pods_fit_on_no_node(
    fit: FakeCluster, sunspot: Command, patient: None, set_constants: SetConstants
) -> None:
    set_constants("sunspot.submitter.doctor.probe_pods", WITHIN_S=0.3)
    condition = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 Insufficient cpu"}
    fit.on_create = lambda pod: pod.update(status={"phase": "Pending", "conditions": [condition]})
    found = checks(sunspot, "--from-pods", code=4)
    assert "no node takes it (0/2 nodes are available: 2 Insufficient cpu)" in found["from a head pod"]["seen"]
    assert not fit.pods


def test_the_first_probe_pod_is_deleted_if_the_second_is_rejected(
    fit: FakeCluster, sunspot: Command, patient: None
) -> None:
    forbidden = 'pods "sunspot-doctor-worker" is forbidden: exceeded quota: team'
    fit.on_create = lambda pod: fit.on("POST", f"{CORE}/pods", answer(403, forbidden))
    found = checks(sunspot, "--from-pods", code=4)
    assert "exceeded quota: team" in found["from pods"]["seen"]
    assert "Role" not in found["from pods"]["seen"]
    assert not fit.pods
    fit.faults.insert(0, ("POST", f"{CORE}/pods", answer(403, 'User "me" cannot create pods'), 9))
    found = checks(sunspot, "--from-pods", code=4)
    assert "ask for the Role sunspot-doctor of k8s/base" in found["from pods"]["seen"]


def test_the_output_of_the_probe_command_can_be_read(tmp_path: Path) -> None:
    output = tmp_path / "message"
    environment = {**os.environ, "SUNSPOT_STORAGE_PATH": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "sunspot.train.pod_probe", "--output", str(output)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(output.read_bytes()) < 4096
    pod: dict[str, Any] = {"metadata": {"name": "x"}, "spec": {}}
    finish(pod, output.read_text())
    found = list(read_checks("head", pod))
    assert {check.result for check in found} == {Result.OK}
    assert "from a head pod: storage throughput" in [check.check for check in found]
    broken = {**environment, "SUNSPOT_STORAGE_PATH": "/proc/no/such"}
    done = subprocess.run(command, cwd=REPOSITORY, env=broken, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [check] = [Check(**record) for record in json.loads(output.read_text())]
    assert (check.check, check.result) == ("storage", "failed")


def test_an_interrupt_deletes_the_probe_pods(
    fit: FakeCluster, sunspot: Command, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sunspot.submitter.doctor.probe_pods.time.sleep", interrupt)
    assert sunspot("doctor", "--from-pods") == 130
    assert len(fit.deleted) == 3
    assert not fit.pods


def test_the_folder_of_the_storage_check_is_not_listed_as_a_run(run: Run, sunspot: Command) -> None:
    sunspot.run.storage.write(f"{FOLDER}/x/small", b"left by a killed one")
    assert sunspot("list", "--json") == 0
    assert sunspot.json == []
