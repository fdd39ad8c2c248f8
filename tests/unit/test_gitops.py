"""Tests of the Argo CD and Flux health checks in k8s/gitops for every status of RayJobs and RayClusters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from lupa import lua51

from sunspot.run import open_run
from sunspot.run.seen import RunSeen
from sunspot.run.status import RunState, Status
from sunspot.submitter.cluster.state import ClusterSeen, judge
from sunspot.submitter.cluster.views import GITOPS_TOOLS, job_view
from sunspot.submitter.cluster.waiting import RECREATED_WITHIN_S, annotations
from sunspot.submitter.manifest.profile import manifests
from tests.harness.kubernetes import DEPLOYMENT_STATUSES, JOB_STATUSES, kept, rayjob

CASES = list(itertools.product(DEPLOYMENT_STATUSES, JOB_STATUSES))


def load(file: str) -> Any:
    return yaml.safe_load((manifests() / "gitops" / file).read_text())


def argo_cd(thing: dict[str, Any]) -> tuple[str, str]:
    """Return the health and message computed by Lua 5.1 with Argo CD's libraries (util/lua/lua.go)."""
    lua = lua51.LuaRuntime()
    lua.execute("debug.setmetatable('', nil)")
    for library in ("string", "math", "io", "os", "debug", "coroutine", "python"):
        lua.globals()[library] = None
    lua.globals().obj = lua.table_from(thing, recursive=True)
    health = lua.execute(load("argocd-cm.yaml")["data"][f"resource.customizations.health.ray.io_{thing['kind']}"])
    assert set(health) <= {"status", "message"}
    return health.status, health.message


def flux(thing: dict[str, Any]) -> str:
    """Return the health from untyped expressions, evaluated in Flux's order (runtime/cel/status_evaluator.go)."""
    [check] = [check for check in load("flux.yaml")["spec"]["healthCheckExprs"] if check["kind"] == thing["kind"]]
    assert thing["apiVersion"] == check["apiVersion"]
    for health in ("failed", "current"):
        value = cel.NewEnv().compile(check[health], disable_check=True).eval(data=thing)
        if value.type() != cel.Type.BOOL:
            return "unknown"
        if value.plain_value():
            return health
    return "in progress"


def with_status(thing: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return an object with this status. Empty fields are omitted, like in the API server."""
    return {**thing, "status": {key: value for key, value in status.items() if value}}


def a_rayjob(deployment: str, ray: str, **more: Any) -> dict[str, Any]:
    return with_status(rayjob("digits-1"), jobDeploymentStatus=deployment, jobStatus=ray, **more)


def a_cluster(**conditions: tuple[bool, str]) -> dict[str, Any]:
    found = [
        {"type": name, "status": str(true), "reason": "Any", "message": message}
        for name, (true, message) in conditions.items()
    ]
    return with_status({"apiVersion": "ray.io/v1", "kind": "RayCluster"}, conditions=found)


@pytest.mark.parametrize(
    ("deployment", "argo_says", "flux_says"),
    [
        ("", "Progressing", "unknown"),
        ("Initializing", "Progressing", "in progress"),
        ("Waiting", "Progressing", "in progress"),
        ("Running", "Progressing", "current"),
        ("Failed", "Degraded", "failed"),
        ("ValidationFailed", "Degraded", "failed"),
        ("Suspending", "Progressing", "in progress"),
        ("Suspended", "Suspended", "current"),
        ("Retrying", "Progressing", "in progress"),
    ],
)
def test_the_health_of_an_unfinished_rayjob_does_not_depend_on_the_ray_job_status(
    deployment: str, argo_says: str, flux_says: str
) -> None:
    """The state of one attempt's Ray job does not matter, because another attempt can follow."""
    for ray in JOB_STATUSES:
        job = a_rayjob(deployment, ray)
        assert argo_cd(job) == (argo_says, ": ".join(filter(None, [deployment, ray])))
        assert flux(job) == flux_says


@pytest.mark.parametrize("ray", JOB_STATUSES)
def test_a_completed_job_is_healthy_if_it_succeeded(ray: str) -> None:
    job = a_rayjob("Complete", ray)
    assert argo_cd(job)[0] == ("Healthy" if ray == "SUCCEEDED" else "Degraded")
    assert flux(job) == ("current" if ray == "SUCCEEDED" else "failed")


def test_the_health_checks_agree_with_sunspot_status() -> None:
    for case in CASES:
        job = a_rayjob(*case)
        state, _ = judge(ClusterSeen((job_view(job),), time=0), RunSeen(open_run("nowhere", "run")))
        assert (argo_cd(job)[0] == "Healthy") is (state is RunState.SUCCEEDED), case
        assert argo_cd(job)[0] != "Degraded" or state.terminal, case
        assert (flux(job) == "failed") is (argo_cd(job)[0] == "Degraded"), case


def test_a_job_is_progressing_before_the_operator_handles_it() -> None:
    assert argo_cd(rayjob("digits-1")) == ("Progressing", "")
    assert flux(rayjob("digits-1")) == "unknown"


def test_the_health_message_contains_the_reason_given_by_the_operator() -> None:
    message = "Job status checks have been failing since 2026-11-20 10:00:00; exceeded timeout of 300s"
    job = a_rayjob("Failed", "RUNNING", reason="JobStatusCheckTimeoutExceeded", message=message)
    assert argo_cd(job) == ("Degraded", f"Failed: RUNNING: JobStatusCheckTimeoutExceeded: {message}")


def test_the_health_message_contains_the_step_in_the_annotations() -> None:
    job = a_rayjob("Running", "RUNNING")
    job["metadata"]["annotations"] = annotations(RunState.RUNNING, Status(RunState.RUNNING, "", step=7, total_steps=10))
    assert argo_cd(job) == ("Progressing", "Running: RUNNING: step 7 of 10")


PROVISIONING = (False, "RayCluster Pods are being provisioned for first time")
PROVISIONED = (True, "All Ray Pods are ready for the first time")
REFUSED = (True, 'pods "head" is forbidden: exceeded quota: sunspot')


@pytest.mark.parametrize(
    ("cluster", "argo_says", "flux_says"),
    [
        (a_cluster(), ("Progressing", None), "unknown"),
        (
            a_cluster(HeadPodReady=(False, "Head Pod not found"), RayClusterProvisioned=PROVISIONING),
            ("Progressing", PROVISIONING[1]),
            "in progress",
        ),
        (a_cluster(HeadPodReady=(True, ""), RayClusterProvisioned=PROVISIONED), ("Healthy", PROVISIONED[1]), "current"),
        (
            a_cluster(HeadPodReady=(False, "Head Pod not found"), RayClusterProvisioned=PROVISIONED),
            ("Progressing", "Head Pod not found"),
            "in progress",
        ),
        (a_cluster(ReplicaFailure=REFUSED, RayClusterProvisioned=PROVISIONING), ("Degraded", REFUSED[1]), "failed"),
        (
            a_cluster(RayClusterSuspended=(True, ""), RayClusterProvisioned=(False, "RayCluster has been suspended")),
            ("Suspended", "RayCluster has been suspended"),
            "current",
        ),
        (
            a_cluster(RayClusterSuspended=(False, ""), HeadPodReady=(True, ""), RayClusterProvisioned=PROVISIONED),
            ("Healthy", PROVISIONED[1]),
            "current",
        ),
    ],
)
def test_the_health_of_a_raycluster_follows_its_state(
    cluster: dict[str, Any], argo_says: tuple[str, str], flux_says: str
) -> None:
    assert argo_cd(cluster) == argo_says
    assert flux(cluster) == flux_says


def test_gitops_tools_are_recognized_by_their_field_managers() -> None:
    found = {manager: job_view(kept(rayjob("digits-1"), manager)).gitops_tool for manager in (*GITOPS_TOOLS, "kubectl")}
    assert found == {**GITOPS_TOOLS, "kubectl": ""}
    assert load("application.yaml")["spec"]["syncPolicy"]["automated"] == {"prune": True, "selfHeal": True}
    assert load("flux.yaml")["spec"]["interval"] == "10m"
    assert RECREATED_WITHIN_S > 600


def test_gitops_tools_do_not_revert_changes_made_by_kueue() -> None:
    """The tools ignore only a RayJob's spec, because the name contains the spec's hash."""
    application, kustomization = load("application.yaml")["spec"], load("flux.yaml")["spec"]
    rayjobs = {"group": "ray.io", "kind": "RayJob"}
    assert application["ignoreDifferences"] == [{**rayjobs, "jsonPointers": ["/spec"]}]
    assert "RespectIgnoreDifferences=true" in application["syncPolicy"]["syncOptions"]
    assert kustomization["ignore"] == [{"paths": ["/spec"], "target": rayjobs}]
