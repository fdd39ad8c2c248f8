"""The pods of a manifest: the head and the worker groups, for a profile and a shape."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from app.settings import PREFIX
from submitter.manifest.pod_merge import merge_pod
from submitter.manifest.profile import Machine, Profile, Toleration, Worker
from submitter.manifest.shape import SLOT, Shape, parse_quantity, whole_cpus
from submitter.manifest.yaml_files import to_yaml

RUN_LABEL = "sunspot/run"

AUTOSCALER_LABEL = "sunspot/autoscaler"
"""On heads with Ray's autoscaler: the only pods that k8s/base lets talk to the API server."""

AUTOSCALER_ACCOUNT = "sunspot-autoscaler"

GPU = "nvidia.com/gpu"

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"

NOTICE = PREFIX + "NOTICE_S"

DRAIN_MARGIN = 0.1

LEAST_DRAIN_MARGIN_S = 2
"""What the drain leaves of the notice: Ray still has to end its processes."""

TRIAL_MEMORY = "2Gi"
"""Extra memory of the head for each concurrent trial after the first: all drivers run there. The processes of one took
1.55 GB (Ray 2.60), and a 5Gi head with two trials killed some of them over and over."""

AUTOSCALER: dict[str, Any] = {
    "version": "v2",
    # With Ray's default of 60 s, a new node may be removed before the running workers have restarted with it.
    "idleTimeoutSeconds": 180,
    "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}


def make_cluster(
    job: dict[str, Any], profile: Profile, shape: Shape, run: str, variables: Mapping[str, str]
) -> list[str]:
    """Shape the job's own cluster; returns what is wrong with the profile's `pod`."""
    cluster, head, workers = job["spec"]["rayClusterSpec"], head_group(job), worker_group(job)
    for group in (head, workers):
        _patch_pod(group["template"], profile, run, variables)
    _set_machine(head, profile.head or Machine())
    if shape.runs > 1:
        memory = parse_quantity(ray_container(head)["resources"]["limits"]["memory"])
        memory += (shape.runs - 1) * parse_quantity(TRIAL_MEMORY)
        _set_machine(head, Machine(memory=f"{math.ceil(memory / 2**20)}Mi"))
    if profile.spot:
        elsewhere = {"key": profile.spot.label, "operator": "NotIn", "values": [profile.spot.value]}
        required = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        head["template"]["spec"]["affinity"] = affinity
        tolerations = profile.spot.tolerations
        if tolerations is None:
            tolerations = [Toleration(key=profile.spot.label, operator="Exists")]
        _select_nodes(workers, {profile.spot.label: profile.spot.value}, tolerations)
    if shape.data:
        cluster["workerGroupSpecs"].append(_data_group(workers, shape))

    _set_pods(workers, shape.pods.least, shape.pods.most)
    machine = profile.worker or Worker()
    _set_machine(workers, machine)
    workers["resources"] |= {"CPU": str(shape.cpus), SLOT: str(shape.workers_per_pod)}
    _place(workers, machine, run)
    if shape.gpus:
        _add_gpus(workers, machine, shape.gpus)
    if shape.autoscaled:
        _add_autoscaler(cluster, profile)
    machines = {"head": profile.head, "worker": profile.worker, "data_workers": profile.data_workers}
    groups = [head, *cluster["workerGroupSpecs"]]  # one for data only if the shape has it
    return [
        problem
        for (name, machine), group in zip(machines.items(), groups, strict=False)
        if machine and machine.pod
        for problem in merge_pod(group["template"], machine.pod, f"{name}.pod")
    ]


def _patch_pod(template: dict[str, Any], profile: Profile, run: str, variables: Mapping[str, str]) -> None:
    """Set what heads and workers have in common."""
    metadata, spec = template["metadata"], template["spec"]
    container = spec["containers"][0]
    metadata["labels"] = {**metadata["labels"], RUN_LABEL: run, **(profile.labels or {})}
    if profile.annotations:
        metadata["annotations"] = {**metadata.get("annotations", {}), **profile.annotations}
    for target, field, value in (
        (spec, "serviceAccountName", profile.service_account),
        (spec, "terminationGracePeriodSeconds", profile.notice_s),
        (spec, "priorityClassName", profile.priority_class),
        (spec, "imagePullSecrets", [{"name": name} for name in profile.image_pull_secrets or ()] or None),
        (container, "image", profile.image),
        (container, "imagePullPolicy", profile.image_pull_policy),
    ):
        if value is not None:
            target[field] = value

    if profile.env_from_secrets is not None:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in profile.env_from_secrets]
    environment = {entry["name"]: entry for entry in container["env"] if not entry["name"].startswith(PREFIX)}
    values = {**(profile.env or {}), **variables}
    if profile.notice_s:
        margin_s = max(LEAST_DRAIN_MARGIN_S, math.ceil(profile.notice_s * DRAIN_MARGIN))
        values = {DRAIN: str(profile.notice_s - margin_s), **values}
    values[NOTICE] = values.get(DRAIN) or environment[DRAIN]["value"]
    for name, value in values.items():
        environment[name] = {"name": name, "value": value.replace("$", "$$")}  # in a manifest, $(NAME) is expanded
    for name, source in (profile.env_secrets or {}).items():
        environment[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": source.secret, "key": source.key}}}
    container["env"] = list(environment.values())


def _set_machine(group: dict[str, Any], machine: Machine) -> None:
    """Set requests, limits, the volumes that count against them, and the nodes for a group's pods."""
    spec = group["template"]["spec"]
    resources = ray_container(group)["resources"]
    if machine.cpu:
        resources["requests"]["cpu"] = machine.cpu
    for name, amount, volume in (
        ("memory", machine.memory, "shared-mem"),
        ("ephemeral-storage", machine.ephemeral_storage, "tmp"),
    ):
        if amount:
            resources["requests"][name] = resources["limits"][name] = amount
            next(v for v in spec["volumes"] if v["name"] == volume)["emptyDir"]["sizeLimit"] = amount
    _select_nodes(group, machine.node_selector, machine.tolerations)


def _select_nodes(
    group: dict[str, Any], labels: Mapping[str, str] | None, tolerations: list[Toleration] | None
) -> None:
    spec = group["template"]["spec"]
    if labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **labels}
    if tolerations:
        added = [toleration.model_dump(exclude_none=True) for toleration in tolerations]
        spec["tolerations"] = [*spec.get("tolerations", ()), *added]


def _place(group: dict[str, Any], machine: Worker, run: str) -> None:
    """Spread the pods over nodes (k8s/rayjob.yaml), or pack them into a zone."""
    spec = group["template"]["spec"]
    (constraint,) = spec["topologySpreadConstraints"]
    selector = {"matchLabels": {**constraint["labelSelector"]["matchLabels"], RUN_LABEL: run}}
    constraint["labelSelector"] = selector
    if machine.placement == "pack":
        del spec["topologySpreadConstraints"]
        near = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": selector}
        preferred = [{"weight": 100, "podAffinityTerm": near}]
        spec["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _add_gpus(group: dict[str, Any], machine: Worker, gpus: int) -> None:
    resource = machine.gpu_resource or GPU
    resources = ray_container(group)["resources"]
    resources["requests"][resource] = resources["limits"][resource] = str(gpus)
    group["resources"]["GPU"] = str(gpus)
    tolerations = [Toleration(key=resource, operator="Exists"), *(machine.gpu_tolerations or ())]
    _select_nodes(group, machine.gpu_selector, tolerations)


def _data_group(workers: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """A group of CPU pods like the training pods, for Ray Data."""
    assert shape.data
    group = copy.deepcopy(workers)
    group["groupName"] = "data"
    del group["template"]["spec"]["topologySpreadConstraints"]
    _set_pods(group, shape.data.min, shape.data.max)
    _set_machine(group, shape.data)
    group["resources"] = {"CPU": str(whole_cpus(shape.data.cpu)), "GPU": "0"}
    return group


def _set_pods(group: dict[str, Any], least: int, most: int) -> None:
    """Start with the least: the job is not submitted before all of them are ready."""
    group["replicas"] = group["minReplicas"] = least
    group["maxReplicas"] = most


def _add_autoscaler(cluster: dict[str, Any], profile: Profile) -> None:
    """Add Ray's autoscaler beside the head. It changes the RayCluster's replicas, so only this pod gets a token."""
    head = cluster["headGroupSpec"]["template"]
    container = head["spec"]["containers"][0]
    cluster["enableInTreeAutoscaling"] = True
    cluster["autoscalerOptions"] = {
        **AUTOSCALER,
        "imagePullPolicy": container["imagePullPolicy"],
        "securityContext": container["securityContext"],
    }
    head["metadata"]["labels"][AUTOSCALER_LABEL] = "true"
    head["spec"]["automountServiceAccountToken"] = True
    head["spec"]["serviceAccountName"] = profile.service_account or AUTOSCALER_ACCOUNT


def set_variable(job: dict[str, Any], name: str, value: str) -> None:
    """Set an environment variable on every pod, or in the runtime environment of a job without pods."""
    spec = job["spec"]
    if "rayClusterSpec" not in spec:
        spec["runtimeEnvYAML"] = to_yaml({"env_vars": {**parse_runtime_env(spec["runtimeEnvYAML"]), name: value}})
        return
    for group in (spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]):
        ray_container(group)["env"].append({"name": name, "value": value})


def head_group(job: Mapping[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    return head


def worker_group(job: Mapping[str, Any]) -> dict[str, Any]:
    """The group of the training pods: always the first."""
    group: dict[str, Any] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    return group


def ray_container(group: Mapping[str, Any]) -> dict[str, Any]:
    """The container that Ray runs in: always the first."""
    container: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return container


def parse_runtime_env(text: str) -> dict[str, str]:
    import yaml

    return dict((yaml.safe_load(text) or {}).get("env_vars", {}))
