"""The pods that a RayJob makes: their number in each group, and their requests. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.settings import PREFIX
from sunspot.submitter.manifest.pods import pod_groups, ray_container
from sunspot.submitter.manifest.quantities import parse_quantity
from sunspot.submitter.manifest.shape import SLOT

Pod = Mapping[str, Any]
"""The spec of a pod."""


@dataclass(frozen=True)
class PodSet:
    """A number of a run's pods, each of which may be of any of some groups."""

    groups: Mapping[str, Pod]
    "The pods' spec, by group."
    room: Mapping[str, int]
    "Most pods of each group."
    least: int
    "Pods without which the run does not begin."
    most: int

    def least_amount(self, number: int, amount_of: Callable[[Pod], float]) -> float:
        """Return the least amount that `number` pods of any groups take; `amount_of` gives that of one pod."""
        total = 0.0
        for amount, group in sorted((amount_of(pod), name) for name, pod in self.groups.items()):
            taken = min(number, self.room[group])
            number -= taken
            total += taken * amount
        return total


def pod_templates(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each group's pod template, with the autoscaler in the head's; empty for an existing cluster."""
    templates = {name: group["template"] for name, group in pod_groups(manifest["spec"]).items()}
    cluster = manifest["spec"].get("rayClusterSpec") or {}
    if cluster.get("enableInTreeAutoscaling"):
        head = templates["head"]
        [ray, *others] = head["spec"]["containers"]
        options = cluster.get("autoscalerOptions", {})
        fields = ("imagePullPolicy", "resources", "securityContext", "volumeMounts", "env", "envFrom")
        beside = {"name": "autoscaler", "image": options.get("image", ray["image"])}
        beside |= {name: options[name] for name in fields if name in options}
        templates["head"] = {**head, "spec": {**head["spec"], "containers": [ray, beside, *others]}}
    return templates


def pod_sets(manifest: Mapping[str, Any]) -> dict[str, PodSet]:
    """Return a RayJob's pods as sets: head, workers, and those of other groups; empty for an existing cluster."""
    pods = {name: template["spec"] for name, template in pod_templates(manifest).items()}
    groups = pod_groups(manifest["spec"])
    if not groups:
        return {}
    head = groups.pop("head")
    least = {name: int(group.get("replicas") or 0) for name, group in groups.items()}
    room = {name: int(group.get("maxReplicas") or least[name]) for name, group in groups.items()}

    def pod_set(names: list[str], numbers: tuple[int, int]) -> PodSet:
        return PodSet({name: pods[name] for name in names}, {name: room[name] for name in names}, *numbers)

    training = [name for name, group in groups.items() if SLOT in group.get("resources", {})] or list(groups)[:1]
    workers = sum(least[name] for name in training), sum(room[name] for name in training)
    if len(training) > 1:  # then the driver asks for all of them, and the RayJob begins with none
        variables = {entry["name"]: entry.get("value", "") for entry in ray_container(head).get("env", ())}
        numbers = variables.get(f"{PREFIX}NUM_WORKERS", "").split("..")
        per_pod = int(groups[training[0]]["resources"][SLOT])
        if numbers[0].isdigit():
            workers = math.ceil(int(numbers[0]) / per_pod), math.ceil(int(numbers[-1]) / per_pod)
    others = {name: pod_set([name], (least[name], room[name])) for name in groups if name not in training}
    head_set = PodSet({"head": pods["head"]}, {"head": 1}, 1, 1)
    return {"head": head_set, "workers": pod_set(training, workers), **others}


def requests_of(pod: Pod, kind: str = "requests") -> dict[str, float]:
    """Sum up a pod's requests (or `limits`) by resource, in base units, as the scheduler and quotas do.

    Init containers run one after another, before the others; those with a restart policy stay. What the pod itself
    states replaces the sum of its containers.
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
    """Return the requests or limits of a container, or those that a pod has itself."""
    resources = holder.get("resources") or {}
    amounts = resources.get(kind) or {}
    if kind == "requests":
        amounts = {**(resources.get("limits") or {}), **amounts}  # a limit implies the request
    return {name: parse_quantity(text) for name, text in amounts.items()}


def _add(*parts: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}
