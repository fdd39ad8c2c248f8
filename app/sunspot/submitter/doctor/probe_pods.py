"""Tests storage, GPUs and the network from pods that resemble a run's pods.

The pods use the same nodes, service account, Secrets and policies as the run. They are deleted at the end. If this
process cannot delete them, Kubernetes stops them WITHIN_S seconds after their start (`activeDeadlineSeconds`).
"""

import contextlib
import copy
import json
import time
import uuid
from collections.abc import Iterator
from itertools import chain
from typing import Any

from sunspot.errors import ClusterError
from sunspot.formatting import in_words
from sunspot.storage.prove import Check, Result
from sunspot.submitter.cluster.api import Cluster, UnreachableError
from sunspot.submitter.cluster.pod_problems import find_problem
from sunspot.submitter.cluster.views import pod_view
from sunspot.submitter.doctor.cluster_checks import SHARED_POLICY
from sunspot.submitter.manifest.pods import RUN_LABEL, head_group, worker_group
from sunspot.submitter.manifest.render import Rendered
from sunspot.submitter.manifest.shape import SLOT
from sunspot.submitter.printing import warn

LABEL = "sunspot/doctor"
"""Label of the pods. Its value differs between head and workers, and between calls."""

WITHIN_S = 900.0
"""Seconds within which the pods must finish. Adding a node and pulling an image take minutes each."""

POLL_EVERY_S = 2.0

MESSAGE = "/dev/termination-log"
"""The file that Kubernetes copies into the pod's status, up to 4096 bytes."""

MAX_OUTPUT = 400
"""Maximum number of characters of a failed container's output in a check."""


def try_from_pods(cluster: Cluster, rendered: Rendered) -> Iterator[Check]:
    """Check storage, GPUs and the network from a head pod and one or two worker pods.

    Cluster errors are yielded as failed checks.
    """
    manifest = rendered.manifest
    mark = uuid.uuid4().hex[:8]
    created: list[dict[str, Any]] = []
    try:
        kinds = ["head", "worker"]
        untried = ""
        workers, needed = worker_group(manifest), rendered.settings.num_workers.least
        if needed > int(workers["resources"][SLOT]) and workers["maxReplicas"] > 1:
            untried = why_untried(cluster, manifest)
            kinds += [] if untried else ["second worker"]
        pods = [make_pod(manifest, kind, mark) for kind in kinds]
        for rank, pod in enumerate(pods[1:] if len(pods) > 2 else ()):
            pod["spec"]["containers"][0]["command"] += ["--meeting", mark, "--rank", str(rank)]
        for pod in pods:
            created.append(cluster.create_pod(pod))  # noqa: PERF401  # deleted even if the next pod is rejected
        names = [pod["metadata"]["name"] for pod in created]
        warn(f"waiting up to {in_words(WITHIN_S)} for the pods {', '.join(names)}")
        ended = _await_end(cluster, names)
        for kind, name in zip(kinds, names, strict=True):
            yield from read_checks(kind, ended[name])
        nodes = [node for name in names[1:] if (node := (ended[name] or {"spec": {}})["spec"].get("nodeName"))]
        if len(nodes) > len(set(nodes)):
            untried = f"both worker pods were on {nodes[0]}"
        if untried:
            yield Check("from pods: network between nodes", Result.WARNING, f"not tested: {untried}")
    except ClusterError as error:
        yield Check("from pods", Result.FAILED, str(error))
    finally:
        for pod in created:
            try:
                cluster.delete_pod(pod_view(pod), 1)
            except ClusterError as error:
                warn(f"pod {pod['metadata']['name']} could not be deleted: {error}; Kubernetes will stop the pod later")


def why_untried(cluster: Cluster, manifest: dict[str, Any]) -> str:
    """Return why the test pods cannot test the network between workers, or an empty string if they can."""
    if len(worker_group(manifest)["template"]["spec"]["containers"]) > 1:
        return "these pods lack the sidecars of workers"
    denied, shared = (cluster.exists("NetworkPolicy", name) for name in ("deny-by-default", SHARED_POLICY))
    if manifest["spec"]["rayClusterSpec"].get("networkPolicy") or (denied and shared is False):
        return "network policies let pods reach only pods of their own run"
    return ""


def make_pod(manifest: dict[str, Any], kind: str, mark: str) -> dict[str, Any]:
    """Return a copy of the run's head or worker pod that tests storage and GPUs instead of running Ray."""
    role = kind.split()[-1]
    group = head_group(manifest) if role == "head" else worker_group(manifest)
    template = copy.deepcopy(group["template"])
    labels = {name: value for name, value in template["metadata"]["labels"].items() if name != RUN_LABEL}
    labels[LABEL] = f"{role}-{mark}"
    metadata = {"name": f"sunspot-doctor-{kind.replace(' ', '-')}-{mark}", "labels": labels}
    spec = template["spec"]
    spec |= {"restartPolicy": "Never", "activeDeadlineSeconds": int(WITHIN_S), "terminationGracePeriodSeconds": 1}
    if role == "worker":
        _spread(spec, {"matchLabels": {LABEL: labels[LABEL]}})
    container = spec["containers"][0]
    spec["containers"] = [container]  # other containers would keep the pod from finishing
    gpus = int(group.get("resources", {}).get("GPU", 0))
    container |= {
        "command": ["python", "-m", "sunspot.train.pod_probe", "--gpus", str(gpus), "--output", MESSAGE],
        "terminationMessagePath": MESSAGE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _spread(spec: dict[str, Any], alike: dict[str, Any]) -> None:
    """Make a pod's affinity rules refer to the pods that `alike` selects.

    The pod prefers nodes on which none of these pods is running.
    """
    spec.pop("topologySpreadConstraints", None)
    affinity = spec.setdefault("affinity", {})
    for rule in chain(*affinity.get("podAffinity", {}).values()):
        rule.get("podAffinityTerm", rule)["labelSelector"] = alike
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": alike}
    rule = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]}
    affinity["podAntiAffinity"] = rule


def _await_end(cluster: Cluster, names: list[str]) -> dict[str, dict[str, Any] | None]:
    """Wait up to WITHIN_S for the pods to finish, and return them keyed by name. The value of a deleted pod is None."""
    deadline = time.monotonic() + WITHIN_S
    warned = ""
    latest: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
    while True:
        with contextlib.suppress(UnreachableError):
            latest = {name: cluster.find("pod", name) for name in names}
        living = [pod for pod in latest.values() if pod and not has_ended(pod)]
        if not living or time.monotonic() > deadline:
            return latest
        trouble = "; ".join(
            f"{pod['metadata']['name']}: {why}" for pod in living if (why := find_problem(pod_view(pod)))
        )
        if trouble and trouble != warned:
            warn(trouble)
            warned = trouble
        time.sleep(POLL_EVERY_S)


def has_ended(pod: dict[str, Any]) -> bool:
    """Return True if a pod has succeeded or failed."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def read_checks(kind: str, pod: dict[str, Any] | None) -> Iterator[Check]:
    """Yield the checks that a pod reported, or a failed check that explains why it reported none."""
    name = f"from a {kind} pod"
    if pod is None:
        yield Check(name, Result.FAILED, "the pod was gone before it reported anything", "try again")
        return
    node = pod["spec"].get("nodeName", "")
    statuses = {status["name"]: status for status in pod.get("status", {}).get("containerStatuses") or ()}
    container = statuses.get("ray", {})  # the cluster can have added a sidecar
    ended = container.get("state", {}).get("terminated") or {}
    output = str(ended.get("message", ""))
    with contextlib.suppress(ValueError, TypeError, KeyError):
        for record in json.loads(output):
            check = Check(**{**record, "result": Result(record["result"])})
            yield Check(f"{name}: {check.check}", check.result, f"on {node}: {check.seen}", check.fix)
        return
    trouble = find_problem(pod_view(pod))
    if trouble:
        yield Check(name, Result.FAILED, f"the pod did not run: {trouble}")
    elif not has_ended(pod):
        yield Check(name, Result.FAILED, f"the pod had not ended after {in_words(WITHIN_S)}", "look at its events")
    else:
        last = " ".join(output.split())[-MAX_OUTPUT:]
        fix = "use an image of this version of Sunspot, or one built from it"
        yield Check(name, Result.FAILED, f"on {node}: ended with {ended.get('exitCode')}: {last}", fix)
