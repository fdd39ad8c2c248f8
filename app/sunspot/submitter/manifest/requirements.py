"""Lists the pods that a RayJob creates, with their number in each group and their requests."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.settings import PREFIX
from sunspot.submitter.manifest.pods import pod_groups, ray_container
from sunspot.submitter.manifest.quantities import parse_quantity
from sunspot.submitter.manifest.shape import SLOT

Pod = Mapping[str, Any]
"""A pod spec."""


@dataclass(frozen=True)
class PodSet:
    """A set of pods that can be divided among several groups."""

    groups: Mapping[str, Pod]
    "Pod specs keyed by group."
    room: Mapping[str, int]
    "Maximum number of pods keyed by group."
    least: int
    "Number of pods that the run needs to start."
    most: int
    step: int = 1
    "Smallest number of pods that whole replicas of the model fill. More pods help only in multiples of this number."

    def least_amount(self, number: int, amount_of: Callable[[Pod], float]) -> float:
        """Return the smallest total of `amount_of` for `number` of these pods."""
        total = 0.0
        for amount, group in sorted((amount_of(pod), name) for name, pod in self.groups.items()):
            taken = min(number, self.room[group])
            number -= taken
            total += taken * amount
        return total


def pod_templates(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod templates keyed by group. The head's template includes the autoscaler's container.

    Returns an empty mapping if the job runs in an existing cluster.
    """
    templates = {name: group["template"] for name, group in pod_groups(manifest["spec"]).items()}
    cluster = manifest["spec"].get("rayClusterSpec") or {}
    if cluster.get("enableInTreeAutoscaling"):
        head = templates["head"]
        [ray, *others] = head["spec"]["containers"]
        options = cluster.get("autoscalerOptions", {})
        fields = ("imagePullPolicy", "resources", "securityContext", "volumeMounts", "env", "envFrom")
        autoscaler = {"name": "autoscaler", "image": options.get("image", ray["image"])}
        autoscaler |= {name: options[name] for name in fields if name in options}
        templates["head"] = {**head, "spec": {**head["spec"], "containers": [ray, autoscaler, *others]}}
    return templates


def pod_sets(manifest: Mapping[str, Any]) -> dict[str, PodSet]:
    """Return a RayJob's pod sets: one for the head, one for all training workers, and one for each other group.

    Returns an empty mapping if the job runs in an existing cluster.
    """
    pods = {name: template["spec"] for name, template in pod_templates(manifest).items()}
    groups = pod_groups(manifest["spec"])
    if not groups:
        return {}
    head = groups.pop("head")
    least = {name: int(group.get("replicas") or 0) for name, group in groups.items()}
    room = {name: int(group.get("maxReplicas") or least[name]) for name, group in groups.items()}

    def pod_set(names: list[str], numbers: tuple[int, int], step: int = 1) -> PodSet:
        return PodSet({name: pods[name] for name in names}, {name: room[name] for name in names}, *numbers, step)

    training = [name for name, group in groups.items() if SLOT in group.get("resources", {})] or list(groups)[:1]
    workers = sum(least[name] for name in training), sum(room[name] for name in training)
    variables = {entry["name"]: entry.get("value", "") for entry in ray_container(head).get("env", ())}
    per_pod = int(groups[training[0]].get("resources", {}).get(SLOT, 1)) if training else 1
    degree = variables.get(f"{PREFIX}SHARD_DEGREE", "")
    sharded = variables.get(f"{PREFIX}PARALLEL") == "hsdp" and degree.isdigit()
    step = math.lcm(max(1, int(degree)), per_pod) // per_pod if sharded else 1
    if len(training) > 1:  # the RayJob starts without workers, and the driver requests all of them
        numbers = variables.get(f"{PREFIX}NUM_WORKERS", "").split("..")
        if numbers[0].isdigit():
            workers = math.ceil(int(numbers[0]) / per_pod), math.ceil(int(numbers[-1]) / per_pod)
    others = {name: pod_set([name], (least[name], room[name])) for name in groups if name not in training}
    head_set = PodSet({"head": pods["head"]}, {"head": 1}, 1, 1)
    return {"head": head_set, "workers": pod_set(training, workers, step), **others}


def requests_of(pod: Pod, kind: str = "requests") -> dict[str, float]:
    """Return a pod's total requests (or `limits`) keyed by resource, in base units.

    The totals match those of the scheduler and of quotas. Init containers run one after another, so only the largest
    one counts. Sidecars keep running and are added. Pod-level amounts replace the sum over containers.
    """
    containers = [_amounts(container, kind) for container in pod["containers"]]
    total = _add(*containers)
    staying: dict[str, float] = {}
    before: dict[str, float] = {}
    for container in pod.get("initContainers") or ():
        amounts = _amounts(container, kind)
        if container.get("restartPolicy") == "Always":
            staying = _add(staying, amounts)
            amounts = {}
        before = _larger(before, _add(staying, amounts))
    total = _larger(_add(total, staying), before)
    total |= _amounts(pod, kind)
    overhead = {name: parse_quantity(text) for name, text in (pod.get("overhead") or {}).items()}
    if kind == "limits":
        overhead = {name: amount for name, amount in overhead.items() if name in total}
    return _add(total, overhead)


def _amounts(holder: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Return the requests or limits of a container, or those of a pod if `holder` is a pod spec."""
    resources = holder.get("resources") or {}
    amounts = resources.get(kind) or {}
    if kind == "requests":
        amounts = {**(resources.get("limits") or {}), **amounts}  # a limit implies the request
    return {name: parse_quantity(text) for name, text in amounts.items()}


def _add(*parts: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}
