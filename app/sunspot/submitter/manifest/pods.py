"""Fills in a manifest's head pod and worker groups, and lists their prices."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.settings import HEAD, PREFIX
from sunspot.submitter.manifest.merge import merge_pod
from sunspot.submitter.manifest.profile import DataWorkers, Head, Machine, Profile, Sizes, Spot, Toleration, Worker
from sunspot.submitter.manifest.quantities import format_quantity, parse_quantity
from sunspot.submitter.manifest.shape import SLOT, Shape, pod_cpus, whole_cpus
from sunspot.submitter.manifest.yaml_files import to_yaml

RUN_LABEL = "sunspot/run"

GROUP_LABEL = "ray.io/group"
"""KubeRay's label for the name of a pod's group."""

AUTOSCALER_LABEL = "sunspot/autoscaler"
"""Label of head pods that have an autoscaler. The policies in k8s/base let only these pods reach the API server."""

PROTECTION = ("cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt")
"""Annotations in k8s/rayjob.yaml that protect the head pod from drains and autoscalers."""

GPU = "nvidia.com/gpu"

GPU_PART = "nvidia.com/mig-"
"""Prefix of NVIDIA MIG resources."""

CLAIM = "gpus"
"""Name of the GPU claim in a pod's spec."""

IDS = ("runAsUser", "runAsGroup", "fsGroup")
"""Security context fields that some namespaces assign to pods, as on OpenShift."""

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"

NOTICE = PREFIX + "NOTICE_S"

PRICES = PREFIX + "PRICES"

DRAIN_MARGIN = 0.1
"""Fraction of the notice that is left after the drain, for Ray to stop its processes."""

MIN_DRAIN_MARGIN_S = 2
"""Minimum number of seconds that are left after the drain."""

TRIAL_MEMORY = "2Gi"
"""Extra head memory for each concurrent trial after the first, because all drivers run on the head. One trial's
processes took 1.55 GB (Ray 2.60). A 5Gi head ran out of memory with two trials, and killed some of their processes."""

FEW_WORKERS = 16
"""Maximum number of workers that the default head supports without `per_worker`."""

CACHE_FOLDER = "/data-cache"
"""Folder at which the `data_cache` volume is mounted."""

CACHE_MARGIN = 1.05
"""Size of the `data_cache` volume relative to the cache's limit. The cache's directories need the rest."""

AUTOSCALER: dict[str, Any] = {
    "version": "v2",
    # With Ray's default of 60 s, a new node can be removed before the running workers restart with it.
    "idleTimeoutSeconds": 180,
    "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
    "volumeMounts": [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "autoscaler-token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True},
    ],
}

AUTOSCALER_TOKEN: dict[str, Any] = {
    "name": "autoscaler-token",
    "projected": {
        "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        ]
    },
}
"""The volume with the token that Kubernetes would otherwise mount into every container of the pod. Only the
autoscaler's container mounts it, because the user's code runs in the other container."""

AUTOSCALER_CPU_LIMIT = "1"
"""CPU limit of the autoscaler if the head has one."""


def make_cluster(
    job: dict[str, Any], profile: Profile, shape: Shape, run: str, variables: Mapping[str, str]
) -> list[str]:
    """Fill in the job's own cluster in place, and return any problems with the profile's `pod` fields."""
    cluster = job["spec"]["rayClusterSpec"]
    head = head_group(job)
    workers = worker_group(job)
    for group in (head, workers):
        _patch_pod(group["template"], profile, run, variables)
    _set_machine(head, profile.head or Machine())
    if profile.head and profile.head.image:
        ray_container(head)["image"] = profile.head.image
    if profile.head and profile.head.evictable:
        _make_evictable(head["template"]["metadata"])
    _enlarge_head(head, profile.head or Head(), shape)
    if profile.spot:
        _avoid_spot(head, profile.spot)
    training = [_training_group(workers, profile, shape, number, run) for number in range(len(profile.groups))]
    data = [_data_group(workers, profile, shape.data)] if shape.data else []
    cluster["workerGroupSpecs"] = [*training, *data]
    if shape.autoscaled:
        _add_autoscaler(cluster, profile)
    names = [f"workers.{number}" for number in range(len(training))] if profile.workers else ["worker"]
    pods = [
        ("head", profile.head, head),
        *zip(names, profile.groups, training, strict=True),
        *(("data_workers", profile.data_workers, group) for group in data),
    ]
    return [
        problem
        for name, machine, group in pods
        if machine and machine.pod
        for problem in merge_pod(group["template"], machine.pod, f"{name}.pod")
    ]


def group_name(number: int) -> str:
    """Return the name of the training group at a position in the profile."""
    return f"workers-{number + 1}" if number else "workers"


def _training_group(workers: dict[str, Any], profile: Profile, shape: Shape, number: int, run: str) -> dict[str, Any]:
    """Return one group of training pods, made from the common template."""
    machine = profile.groups[number]
    several = len(profile.groups) > 1
    group = copy.deepcopy(workers)
    name = group["groupName"] = group_name(number)
    if profile.spot and machine.spot is False:
        _avoid_spot(group, profile.spot)
    elif profile.spot:
        _choose_spot(group, profile.spot)
    _set_pods(group, 0 if several else shape.pods.least, shape.group_pods[number])
    _set_machine(group, machine)
    _add_data_cache(group, machine.data_cache)
    group["resources"]["CPU"] = str(pod_cpus(machine, int(group["resources"]["CPU"])))
    # If there are several groups, each group offers a resource with the group's name. The driver uses it to request and
    # recognize the group's nodes (sunspot/elastic/groups.py).
    group["resources"] |= dict.fromkeys([SLOT, name] if several else [SLOT], str(shape.workers_per_pod))
    _place(group, machine, run, len(profile.groups))
    if shape.gpus:
        _add_gpus(group, machine, shape.gpus)
    return group


def _choose_spot(group: dict[str, Any], spot: Spot) -> None:
    any_value = [Toleration(key=spot.label, operator="Exists")]
    _select_nodes(group, {spot.label: spot.value}, any_value if spot.tolerations is None else spot.tolerations)


def _avoid_spot(group: dict[str, Any], spot: Spot) -> None:
    elsewhere = {"key": spot.label, "operator": "NotIn", "values": [spot.value]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    group["template"]["spec"]["affinity"] = affinity


def _enlarge_head(head: dict[str, Any], machine: Head, shape: Shape) -> None:
    """Enlarge the head if there are several concurrent trials or more than FEW_WORKERS workers."""
    requests = ray_container(head)["resources"]["requests"]
    sizes = {name: parse_quantity(requests[name.replace("_", "-")]) for name in Sizes.model_fields}
    sizes["memory"] += (shape.runs - 1) * parse_quantity(TRIAL_MEMORY)
    given = machine.per_worker.model_dump(exclude_none=True) if machine.per_worker else {}
    for name, each in given.items():
        sizes[name] += max(0, shape.workers - FEW_WORKERS) * parse_quantity(each)
    written = {name: format_quantity(amount, of_cpus=name == "cpu") for name, amount in sizes.items()}
    _set_machine(head, Machine.model_validate(written))


def _make_evictable(metadata: dict[str, Any]) -> None:
    """Allow drains and autoscalers to evict the pod.

    Removes the annotations in PROTECTION, and excludes the pod from the disruption budget.
    """
    metadata["annotations"] = {name: v for name, v in metadata["annotations"].items() if name not in PROTECTION}
    metadata["labels"]["sunspot/evictable"] = "true"


def _patch_pod(template: dict[str, Any], profile: Profile, run: str, variables: Mapping[str, str]) -> None:
    """Set the fields common to head and worker pods."""
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

    if profile.assigned_ids:
        spec["securityContext"] = {name: v for name, v in spec["securityContext"].items() if name not in IDS}
    if profile.env_from_secrets is not None:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in profile.env_from_secrets]
    environment = {entry["name"]: entry for entry in container["env"] if not entry["name"].startswith(PREFIX)}
    values = {**(profile.env or {}), **variables}
    if profile.notice_s:
        margin_s = max(MIN_DRAIN_MARGIN_S, math.ceil(profile.notice_s * DRAIN_MARGIN))
        values = {DRAIN: str(profile.notice_s - margin_s), **values}
    values[NOTICE] = values.get(DRAIN) or environment[DRAIN]["value"]
    for name, value in values.items():
        environment[name] = {"name": name, "value": value.replace("$", "$$")}  # Kubernetes expands $(NAME)
    for name, source in (profile.env_secrets or {}).items():
        environment[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": source.secret, "key": source.key}}}
    container["env"] = list(environment.values())


def _set_machine(group: dict[str, Any], machine: Machine) -> None:
    """Set the requests, limits, volume sizes, node selector and tolerations of a group's pods."""
    spec = group["template"]["spec"]
    resources = ray_container(group)["resources"]
    if machine.cpu:
        resources["requests"]["cpu"] = machine.cpu
    if machine.cpu_limit:
        resources["limits"]["cpu"] = machine.cpu_limit
    for name, amount, volume in (
        ("memory", machine.memory, "shared-mem"),
        ("ephemeral-storage", machine.ephemeral_storage, "tmp"),
    ):
        if amount:
            resources["requests"][name] = resources["limits"][name] = amount
            next(v for v in spec["volumes"] if v["name"] == volume)["emptyDir"]["sizeLimit"] = amount
    _select_nodes(group, machine.node_selector, machine.tolerations)


def _add_data_cache(group: dict[str, Any], size: str | None) -> None:
    """Add a volume for the dataset cache. The kubelet counts it toward the pod's ephemeral storage limit."""
    if not size:
        return
    bytes_in_all = math.ceil(parse_quantity(size) * CACHE_MARGIN)
    container = ray_container(group)
    for amounts in container["resources"]["requests"], container["resources"]["limits"]:
        amounts["ephemeral-storage"] = format_quantity(parse_quantity(amounts["ephemeral-storage"]) + bytes_in_all)
    group["template"]["spec"]["volumes"].append(
        {"name": "data-cache", "emptyDir": {"sizeLimit": format_quantity(bytes_in_all)}}
    )
    container["volumeMounts"].append({"name": "data-cache", "mountPath": CACHE_FOLDER})
    values = {PREFIX + "DATA_CACHE": CACHE_FOLDER, PREFIX + "DATA_CACHE_GB": f"{parse_quantity(size) / 1e9:g}"}
    container["env"] = [entry for entry in container["env"] if entry["name"] not in values]
    container["env"] += [{"name": name, "value": value} for name, value in values.items()]


def _select_nodes(
    group: dict[str, Any], labels: Mapping[str, str] | None, tolerations: list[Toleration] | None
) -> None:
    spec = group["template"]["spec"]
    if labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **labels}
    if tolerations:
        added = [toleration.model_dump(exclude_none=True) for toleration in tolerations]
        spec["tolerations"] = [*spec.get("tolerations", ()), *added]


def _place(group: dict[str, Any], machine: Worker, run: str, groups: int) -> None:
    """Spread the run's training pods over nodes, as in k8s/rayjob.yaml, or put them into one zone."""
    spec = group["template"]["spec"]
    (constraint,) = spec["topologySpreadConstraints"]
    selector: dict[str, Any] = {"matchLabels": {**constraint["labelSelector"]["matchLabels"], RUN_LABEL: run}}
    if groups > 1:
        del selector["matchLabels"][GROUP_LABEL]
        names = [group_name(number) for number in range(groups)]
        selector["matchExpressions"] = [{"key": GROUP_LABEL, "operator": "In", "values": names}]
    constraint["labelSelector"] = selector
    if machine.placement in ("pack", "zone"):
        del spec["topologySpreadConstraints"]
        near: dict[str, Any] = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": selector}
        rule = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": near}]}
        if machine.placement == "zone":
            rule = {"requiredDuringSchedulingIgnoredDuringExecution": [near]}
        spec.setdefault("affinity", {})["podAffinity"] = rule


def _add_gpus(group: dict[str, Any], machine: Worker, gpus: int) -> None:
    resource = machine.gpu_resource or GPU
    resources = ray_container(group)["resources"]
    if machine.gpu_claim:
        resources["claims"] = [{"name": CLAIM}]
        claim = {"name": CLAIM, "resourceClaimTemplateName": machine.gpu_claim}
        group["template"]["spec"]["resourceClaims"] = [claim]
    else:
        resources["requests"][resource] = resources["limits"][resource] = str(gpus)
    group["resources"]["GPU"] = str(gpus)
    # Node pools with partitioned GPUs also have the taint for whole GPUs.
    keys = [resource, GPU] if resource.startswith(GPU_PART) else [resource]
    tolerations = [Toleration(key=key, operator="Exists") for key in keys]
    _select_nodes(group, machine.gpu_selector, [*tolerations, *(machine.gpu_tolerations or ())])


def _data_group(workers: dict[str, Any], profile: Profile, machine: DataWorkers) -> dict[str, Any]:
    """Return the group of CPU pods for Ray Data, made from the training pods' template."""
    group = copy.deepcopy(workers)
    group["groupName"] = "data"
    if profile.spot:
        _choose_spot(group, profile.spot)
    del group["template"]["spec"]["topologySpreadConstraints"]
    _set_pods(group, machine.min, machine.max)
    _set_machine(group, machine)
    _add_data_cache(group, machine.data_cache)
    group["resources"] = {"CPU": str(whole_cpus(machine.cpu)), "GPU": "0"}
    return group


def _set_pods(group: dict[str, Any], least: int, most: int) -> None:
    """Set the replica counts of a worker group.

    The group starts with only `least` pods, because KubeRay does not submit the job until all pods are ready. If there
    are several training groups, `least` is 0, and the driver requests the pods that are missing.
    """
    group["replicas"] = group["minReplicas"] = least
    group["maxReplicas"] = most


def _add_autoscaler(cluster: dict[str, Any], profile: Profile) -> None:
    """Add Ray's autoscaler to the head pod, with the token that it needs to change the RayCluster."""
    head = cluster["headGroupSpec"]["template"]
    container = head["spec"]["containers"][0]
    cluster["enableInTreeAutoscaling"] = True
    same_as_ray = {name: container[name] for name in ("imagePullPolicy", "securityContext")}
    cluster["autoscalerOptions"] = {**copy.deepcopy(AUTOSCALER), **same_as_ray}
    if profile.head and profile.head.cpu_limit:
        cluster["autoscalerOptions"]["resources"]["limits"]["cpu"] = AUTOSCALER_CPU_LIMIT
    head["metadata"]["labels"][AUTOSCALER_LABEL] = "true"
    head["spec"]["volumes"].append(copy.deepcopy(AUTOSCALER_TOKEN))
    head["spec"]["serviceAccountName"] = profile.service_account or "sunspot-autoscaler"


def set_variable(job: dict[str, Any], name: str, value: str) -> None:
    """Set an environment variable on every pod, or in the runtime environment of a job without pods."""
    spec = job["spec"]
    if "rayClusterSpec" not in spec:
        spec["runtimeEnvYAML"] = to_yaml({"env_vars": {**parse_runtime_env(spec["runtimeEnvYAML"]), name: value}})
        return
    for group in pod_groups(spec).values():
        variables = {entry["name"]: entry for entry in ray_container(group)["env"]}
        variables[name] = {"name": name, "value": value}
        ray_container(group)["env"] = list(variables.values())


def pod_groups(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod groups in a RayJob's spec, keyed by name, with the head first.

    Returns an empty mapping if the job runs in an existing cluster.
    """
    cluster = spec.get("rayClusterSpec")
    if not cluster:
        return {}
    workers = {group["groupName"]: group for group in cluster.get("workerGroupSpecs") or ()}
    return {"head": cluster["headGroupSpec"], **workers}


def head_group(job: Mapping[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    return head


def worker_group(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first group of training pods. If there are several groups, this is the preferred one."""
    group: dict[str, Any] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    return group


def ray_container(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container that runs Ray, which is always the first container."""
    container: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return container


def parse_runtime_env(text: str) -> dict[str, str]:
    import yaml

    return dict((yaml.safe_load(text) or {}).get("env_vars", {}))


@dataclass(frozen=True)
class PodPrice:
    """The number and price of the pods in the head group or a worker group."""

    name: str
    least: int
    most: int
    price: float | None
    "Price of one pod per hour, or None if the profile sets no price."


def find_prices(profile: Profile) -> dict[str, dict[str, float]]:
    """Return the profile's prices for the head and each group, in the format of the PRICES setting."""
    groups = {group_name(number): group for number, group in enumerate(profile.groups)}
    machines = {HEAD: profile.head or Head(), **groups}
    keys = {"price", "on_demand_price"}
    found = {name: machine.model_dump(include=keys, exclude_none=True) for name, machine in machines.items()}
    return {name: each for name, each in found.items() if each}


def pod_prices(manifest: Mapping[str, Any], settings: Mapping[str, str]) -> list[PodPrice]:
    """Return the number and price of each group's pods, or an empty list for a job in an existing cluster."""
    cluster = manifest["spec"].get("rayClusterSpec")
    if not cluster:
        return []
    prices = json.loads(settings.get(PRICES) or "{}")
    counts = {HEAD: (1, 1)}
    for group in cluster["workerGroupSpecs"]:
        counts[group["groupName"]] = (group["minReplicas"], group["maxReplicas"])
    return [PodPrice(name, *count, prices.get(name, {}).get("price")) for name, count in counts.items()]
