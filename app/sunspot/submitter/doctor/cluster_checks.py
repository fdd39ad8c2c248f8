"""Checks that a cluster has everything that a run needs. Each check is independent of the others."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sunspot.errors import ClusterError
from sunspot.formatting import plural
from sunspot.storage.prove import Check, Result, failure
from sunspot.submitter.cluster.api import Cluster, RefusedError, UnreachableError
from sunspot.submitter.cluster.preflight import (
    explain_refusal,
    find_missing_namespace,
    find_missing_object,
    find_missing_resources,
    find_missing_rights,
    find_pod_problems,
    find_queue_problem,
    find_quota_problems,
    find_references,
    list_if_allowed,
)
from sunspot.submitter.cluster.views import pod_view
from sunspot.submitter.doctor.schedulable_nodes import find_room
from sunspot.submitter.manifest.gpu_nodes import WHOLE_GPUS, find_split_nodes
from sunspot.submitter.manifest.pods import pod_groups
from sunspot.submitter.manifest.profile import QUEUE, manifests
from sunspot.submitter.manifest.quotas import check_quotas
from sunspot.submitter.manifest.render import Rendered
from sunspot.submitter.manifest.requirements import pod_templates
from sunspot.submitter.manifest.yaml_files import read_documents

OPERATOR = "app.kubernetes.io/component=kuberay-operator"
"""Label of the operator's pods. The network policy in k8s/base admits pods with this label."""

MIN_OPERATOR = (1, 7)

STATUS_TIMEOUT, DEFAULT_STATUS_TIMEOUT_S = "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS", 300
"""Name and default of the operator's timeout for an unresponsive head (`utils/constant.go`)."""

SHARED_POLICY = "within-clusters"
"""The network policy in k8s/base that lets runs reach each other."""

LEVEL = "pod-security.kubernetes.io/enforce"


def check_cluster(cluster: Cluster, rendered: Rendered) -> Iterator[Check]:
    """Yield checks of the cluster for a run like `rendered`.

    Stops after the first check if the API server does not answer.
    """
    try:
        version = (cluster.find("version") or {}).get("gitVersion", "of an unknown version")
        yield Check("API server", Result.OK, f"{cluster.server} is Kubernetes {version}")
    except ClusterError as error:
        yield failure("API server", error)
        return
    manifest = rendered.manifest
    knows = "the API server knows RayJobs and RayClusters (ray.io/v1)"
    rights = f"this user has all permissions that the commands need in namespace {cluster.namespace}"
    checks = {  # generators, which run when the loop below reaches them
        "KubeRay": _or_ok(find_missing_resources(cluster), "KubeRay", knows),
        "KubeRay operator": _check_operator(cluster, manifest),
        "namespace": _check_namespace(cluster),
        "permissions": _or_ok(find_missing_rights(cluster), "permissions", rights),
        "objects": _check_references(cluster, manifest),
        "k8s/base": _check_base(cluster, manifest),
        "manifest": _check_manifest(cluster, manifest),
        "nodes": _check_nodes(cluster, manifest),
        "queue": _check_queue(cluster, manifest),
        "quota": _check_quota(cluster, manifest),
    }
    for name, check in checks.items():
        try:
            yield from check
        except RefusedError as error:
            if error.status != 403:
                yield failure(name, error)
                continue
            yield Check(name, Result.WARNING, "this user is not allowed to check this", str(error))
        except UnreachableError as error:
            yield failure(name, error)
            return


def _or_ok(problems: Iterable[Check], name: str, good: str) -> Iterator[Check]:
    """Yield the problems, or a successful check with the text `good` if no problem was found."""
    yield from list(problems) or [Check(name, Result.OK, good)]


def _check_operator(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    name = "KubeRay operator"
    pods = cluster.list_all("all pods", OPERATOR)
    running = [pod for pod in pods if pod_view(pod).ready]
    if not running:
        seen = f"no pod labeled {OPERATOR} runs in any namespace"
        if pods:
            seen = f"none of the {plural(len(pods), 'pod')} labeled {OPERATOR} are ready"
        fix = "install it, or find out why it is not running; without it, runs wait forever"
        hidden = _is_on_gke(cluster)
        if hidden:
            fix = "check that the cluster has GKE's Ray operator add-on, whose pods are hidden, or install the operator"
        let_in = "; an operator with other labels must be admitted in k8s/base/network.yaml"
        yield Check(name, Result.WARNING if hidden else Result.FAILED, seen, fix + let_in)
        return
    container = running[0]["spec"]["containers"][0]
    image = container["image"]
    where = f"{image} in namespace {running[0]['metadata'].get('namespace', '')}"
    found = re.search(r":v?(\d+)\.(\d+)", image)
    if found and (int(found[1]), int(found[2])) < MIN_OPERATOR:
        yield Check(name, Result.WARNING, where, "upgrade it, because rendered manifests need 1.7 or later")
    else:
        yield Check(name, Result.OK, where)
    yield _check_status_timeout(container, manifest)


def _is_on_gke(cluster: Cluster) -> bool:
    """Return True if the cluster's nodes belong to GKE. Returns False if this user cannot list nodes."""
    nodes = list_if_allowed(cluster, "nodes") or ()
    return any(node.get("spec", {}).get("providerID", "").startswith("gce://") for node in nodes)


def _check_status_timeout(operator: dict[str, Any], manifest: dict[str, Any]) -> Check:
    """Check that the operator's timeout for a lost head is at least the profile's deadline for a new head."""
    name = "time for a new head"
    value = {entry["name"]: entry.get("value", "") for entry in operator.get("env", ())}.get(STATUS_TIMEOUT, "")
    limit_s = int(value) if value.isdecimal() and int(value) else DEFAULT_STATUS_TIMEOUT_S
    needed_s = manifest["spec"]["preRunningDeadlineSeconds"]
    seen = f"KubeRay fails a run permanently if its head has not answered for {limit_s} s"
    if limit_s >= needed_s:
        return Check(name, Result.OK, seen)
    seen += f"; a new head can take {needed_s} s to get a node and an image (preRunningDeadlineSeconds)"
    fix = f"set {STATUS_TIMEOUT}={needed_s} on the operator's container; otherwise only `sunspot wait` restarts a run"
    return Check(name, Result.WARNING, seen, fix)


def _check_namespace(cluster: Cluster) -> Iterator[Check]:
    there = cluster.find("namespace", cluster.namespace)
    if there is None:
        yield from find_missing_namespace(cluster)
        return
    level = there["metadata"].get("labels", {}).get(LEVEL, "privileged")
    seen = f"{cluster.namespace} enforces the Pod Security Standard {level}"
    if level == "restricted":
        yield Check("namespace", Result.OK, seen)
    else:
        fix = f"runs need no more than restricted; label it {LEVEL}=restricted, as k8s/base does"
        yield Check("namespace", Result.WARNING, seen, fix)


def _check_references(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    """Check the existence of every object that the run's pods refer to."""
    for kind, name in sorted(set(find_references(manifest))):
        yield from _or_ok(find_missing_object(cluster, kind, name), f"{kind} {name}", "exists")


def _check_base(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    """Check that the NetworkPolicies and PodDisruptionBudgets in k8s/base exist.

    Missing objects only cause a warning, because pods start even without them.
    """
    files = sorted((manifests() / "base").glob("*.yaml"))
    objects = [item for file in files for item in read_documents(file) if "metadata" in item]
    if manifest["spec"]["rayClusterSpec"].get("networkPolicy"):
        objects = [item for item in objects if item["metadata"]["name"] != SHARED_POLICY]
        if cluster.exists("NetworkPolicy", SHARED_POLICY):
            seen = f"{SHARED_POLICY} lets all runs here reach each other, despite each run's own policy"
            yield Check("NetworkPolicy", Result.WARNING, seen, "remove it by applying k8s/runs-apart")
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        names = [item["metadata"]["name"] for item in objects if item["kind"] == kind]
        there = {name: cluster.exists(kind, name) for name in names}
        missing = ", ".join(name for name in names if there[name] is False)
        hidden = ", ".join(name for name in names if there[name] is None)
        if missing:
            seen = f"missing in {cluster.namespace}, but part of k8s/base: {missing}"
            yield Check(kind, Result.WARNING, seen, "`kubectl apply -k k8s/base` creates it")
        elif hidden:
            yield Check(kind, Result.WARNING, f"this user cannot see {hidden}", "ask someone who can see it")
        else:
            yield Check(kind, Result.OK, f"as in k8s/base: {', '.join(names)}")


def _check_manifest(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    """Check with a dry run that the API server accepts the RayJob and its pods."""
    try:
        expected = cluster.apply(manifest, dry_run=True)
        yield from find_queue_problem(expected)
        quotas = list(find_quota_problems(cluster, manifest))  # `_check_quota` yields these
        yield from (each for each in find_pod_problems(cluster, manifest, quotas) if each.result is Result.FAILED)
        yield Check("manifest", Result.OK, "the API server accepts a RayJob with this profile in a dry run")
    except RefusedError as error:
        if error.status == 404:
            return  # other checks report that KubeRay or the namespace is missing
        yield failure("manifest", ClusterError(explain_refusal(error)))


def list_groups(manifest: dict[str, Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return each group's name, initial number of pods, and pod spec."""
    pods = {name: int(group.get("replicas", 1)) for name, group in pod_groups(manifest["spec"]).items()}
    return [(name, pods[name], template["spec"]) for name, template in pod_templates(manifest).items()]


def _check_nodes(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    nodes = cluster.list_all("nodes")
    for name, wanted, pod in list_groups(manifest):
        rooms = [find_room(pod, node) for node in nodes]
        room, matching = sum(pods for pods, _ in rooms), sum(pods > 0 for pods, _ in rooms)
        others = "; ".join(f"{number} {why}" for why, number in Counter(why for _, why in rooms if why).most_common())
        seen = f"{matching} of {plural(len(nodes), 'node')} match{'es' if matching == 1 else ''}"
        seen += f", and would have room for {plural(room, 'pod')} if nothing else ran there; the run needs {wanted}"
        seen += f" (other nodes: {others})" if others else ""
        if room >= wanted:
            yield Check(f"nodes for {name}", Result.OK, seen)
        else:
            fix = (
                "unless an autoscaler adds matching nodes, add them, or correct selectors and resources in the profile"
            )
            yield Check(f"nodes for {name}", Result.WARNING, seen, fix)

    def count(pod: Mapping[str, Any]) -> int:
        taking = [node for node in nodes if find_room(pod, node)[0]]
        amounts = [node["status"]["allocatable"].get(name, 0) for node in taking for name in WHOLE_GPUS]
        return max(map(int, amounts), default=0)

    for what, fix in find_split_nodes(manifest, count):
        yield Check("GPUs of a node", Result.WARNING, what, fix)


def _check_queue(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    name = manifest["metadata"]["labels"].get(QUEUE)
    if not name:
        return
    queue = cluster.find("LocalQueue", name) or cluster.find("older LocalQueue", name)
    if queue is None:
        seen = f"there is no LocalQueue {name} in namespace {cluster.namespace}, or no Kueue"
        yield Check("queue", Result.FAILED, seen, "create it, or correct or remove --queue or the profile's queue")
        return
    active = {c["type"]: c for c in queue.get("status", {}).get("conditions", ())}.get("Active", {})
    if active.get("status") == "False":
        seen = f"LocalQueue {name} admits nothing: {active.get('message', '')}"
        yield Check("queue", Result.FAILED, seen, "create or correct its ClusterQueue")
    else:
        yield Check("queue", Result.OK, f"LocalQueue {name} exists")


def _check_quota(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    quotas = cluster.list_all("quotas")
    if not quotas:
        yield Check("quota", Result.OK, f"none in namespace {cluster.namespace}")
    yield from check_quotas(quotas, list_if_allowed(cluster, "limit ranges"), manifest)
