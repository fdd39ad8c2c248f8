"""Checks a run against the namespace's ResourceQuotas and LimitRanges before it is submitted.

The API server checks one pod at a time. This module adds up all pods that a run needs at the same time: the head and
the smallest number of workers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sunspot.storage.prove import Check, Result
from sunspot.submitter.manifest.quantities import format_like, parse_quantity
from sunspot.submitter.manifest.requirements import Pod, PodSet, pod_sets, requests_of

CPU_LIMIT = "set cpu_limit of head, worker and data_workers in the profile"
"""The fix if a quota counts CPU limits or a default limit is below the request."""

ASK_FOR_LESS = "request less (lower SUNSPOT_NUM_WORKERS, or the pod sizes in the profile)"

JOBS = "count/rayjobs.ray.io"

STATED = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
"""Resources that each container must specify if a quota counts them (`PodConstraints` in Kubernetes' pkg/quota)."""

EXCEEDED = re.compile(r"exceeded quota: ([^,]+), requested: (.+?), used: (.+?), limited: ([^;\s]+)")
"""Pattern of the API server's error for a pod that exceeds a quota."""

ROUNDING = 1e-6
"""Amounts that differ by less than this count as equal, because sums of fractional CPUs are not exact."""


@dataclass(frozen=True)
class Demand:
    """A run's demand for one resource of a quota, in base units."""

    resource: str
    sets: Mapping[str, PodSet]
    rules: Sequence[Mapping[str, Any]] = ()
    "The quota's scopes. The quota counts only pods that match all scopes."
    objects: float = 0.0
    "Number of objects of this kind that the run creates, not counting pods."

    def of_pod(self, pod: Pod) -> float:
        """Return how much of the quota one pod uses."""
        return amount_of(pod, self.resource) if all(matches(rule, pod) for rule in self.rules) else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The amounts that the run needs to start, except zeros, keyed by text such as `2 workers`."""
        taken = {
            f"{each.least} {name}" if each.least > 1 else name: each.least_amount(each.least, self.of_pod)
            for name, each in self.sets.items()
        }
        return {name: amount for name, amount in taken.items() if amount}

    @property
    def least(self) -> float:
        """The total amount that the run needs to start."""
        return sum(self.parts.values()) + self.objects

    def most_workers(self, room: float) -> int:
        """Return how many of the run's worker pods fit into `room`, or the run's minimum if fewer fit."""
        workers = self.sets["workers"]
        others = self.least - workers.least_amount(workers.least, self.of_pod)
        fit = (n for n in range(workers.most, workers.least, -workers.step) if self._fits(others, n, room))
        return next(fit, workers.least)

    def _fits(self, others: float, workers: int, room: float) -> bool:
        return others + self.sets["workers"].least_amount(workers, self.of_pod) - room <= ROUNDING


def check_quotas(
    quotas: Sequence[Mapping[str, Any]], ranges: Sequence[Mapping[str, Any]] | None, manifest: Mapping[str, Any]
) -> Iterator[Check]:
    """Yield a check for each ResourceQuota. The check is FAILED if the run can never fit into the quota.

    `ranges` are the LimitRanges, which set default requests, or None if they are unknown.
    """
    sets = {
        name: replace(each, groups={group: with_defaults(pod, ranges or ()) for group, pod in each.groups.items()})
        for name, each in pod_sets(manifest).items()
    }
    pods = [pod for each in sets.values() for pod in each.groups.values()]
    for quota in quotas:
        name, rules = quota["metadata"]["name"], scopes_of(quota)
        hard = quota.get("spec", {}).get("hard") or quota.get("status", {}).get("hard", {})
        counted = [pod for pod in pods if all(matches(rule, pod) for rule in rules)]
        unstated = [each for each in STATED if each in hard and any(not states(pod, each) for pod in counted)]
        if unstated:
            seen = f"{name} counts {', '.join(unstated)}, so it admits only pods that specify all of these"
            yield Check("quota", Result.WARNING if ranges is None else Result.FAILED, seen, CPU_LIMIT)
            continue
        objects = {} if rules else objects_of(manifest)  # a quota with scopes counts only pods
        demands = [Demand(resource, sets, rules, objects.get(resource, 0.0)) for resource in hard]
        yield _compare(quota, hard, demands)


def _compare(quota: Mapping[str, Any], hard: Mapping[str, str], demands: Sequence[Demand]) -> Check:
    """Compare a quota's limits and free amounts with the run's demand."""
    name, used = quota["metadata"]["name"], quota.get("status", {}).get("used", {})
    never: list[str] = []
    later: list[str] = []
    partly: list[str] = []
    for demand in demands:
        resource, text = demand.resource, hard[demand.resource]
        workers = demand.sets.get("workers")
        limit = parse_quantity(text)
        free = max(0.0, limit - parse_quantity(used.get(resource, "0")))
        left = f"{format_like(free, text)} free of {text}"
        needed = f"{resource}: {format_like(demand.least, text)} needed"
        if demand.least and demand.least - limit > ROUNDING:
            parts = " + ".join(f"{part} {format_like(amount, text)}" for part, amount in demand.parts.items())
            never.append(f"{needed} ({parts or 'the run'}) of only {text}")
        elif demand.least and demand.least - free > ROUNDING:
            (never if resource == JOBS else later).append(f"{needed}, {left}")  # a RayJob does not wait to be created
        elif workers and demand.most_workers(free) < workers.most:
            ever = demand.most_workers(limit)
            room, number = (text, ever) if ever < workers.most else (left, demand.most_workers(free))
            partly.append(f"{resource}: {room}, enough for {number} of {workers.least}..{workers.most} worker pods")
    seen = f"{name}: {'; '.join(never + later + partly)}"
    raised = f"ask for a larger ResourceQuota {name}"
    if never:
        fix = f"the run can never fit; {ASK_FOR_LESS}, or {raised}"
        if all(text.startswith(JOBS) for text in never):
            fix = f"RayJobs that have ended also count; delete some (`sunspot delete`), or {raised}"
        return Check("quota", Result.FAILED, seen, fix)
    if later:
        fix = f"wait until other runs end or are deleted (see `sunspot list`), {ASK_FOR_LESS}, or {raised}"
        return Check("quota", Result.WARNING, seen, fix)
    if partly:
        return Check("quota", Result.WARNING, seen, f"the run trains with fewer workers; for more, {raised}")
    return Check("quota", Result.OK, f"{name} has room for a run")


def amount_of(pod: Pod, resource: str) -> float:
    """Return how much of a quota's resource a pod uses, in base units."""
    if resource in ("pods", "count/pods"):
        return 1.0
    if resource == "count/resourceclaims.resource.k8s.io":
        return float(sum("resourceClaimTemplateName" in claim for claim in pod.get("resourceClaims") or ()))
    if resource.startswith("limits."):
        return requests_of(pod, "limits").get(resource.removeprefix("limits."), 0.0)
    of_class, dot, counted = resource.rpartition(".storageclass.storage.k8s.io/")
    if counted in ("requests.storage", "persistentvolumeclaims", "count/persistentvolumeclaims"):
        claims = [v["ephemeral"]["volumeClaimTemplate"]["spec"] for v in pod.get("volumes") or () if "ephemeral" in v]
        claims = [claim for claim in claims if not dot or claim.get("storageClassName") == of_class]
        sizes = [parse_quantity(claim["resources"]["requests"]["storage"]) for claim in claims]
        return sum(sizes) if counted == "requests.storage" else float(len(sizes))
    return requests_of(pod).get(resource.removeprefix("requests."), 0.0)


def objects_of(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return how many objects of each kind the run creates, keyed by the kind's name in a ResourceQuota.

    Pods are not included.
    """
    cluster = manifest["spec"].get("rayClusterSpec")
    if not cluster:
        return {JOBS: 1.0}
    names = [JOBS, "count/rayclusters.ray.io", "services", "count/services"]
    tokens = cluster.get("authOptions", {})
    if tokens.get("mode") == "token" and "secretName" not in tokens:  # the operator creates one
        names += ["secrets", "count/secrets"]
    if cluster.get("enableInTreeAutoscaling"):
        names += ["count/roles.rbac.authorization.k8s.io", "count/rolebindings.rbac.authorization.k8s.io"]
    return dict.fromkeys(names, 1.0)


def states(pod: Pod, resource: str) -> bool:
    """Return True if the pod or all its containers specify the request or limit that a quota counts."""
    name = resource.rpartition(".")[2]
    kinds = ("limits",) if resource.startswith("limits.") else ("requests", "limits")

    def stated(holder: Mapping[str, Any]) -> bool:
        return any(name in ((holder.get("resources") or {}).get(kind) or {}) for kind in kinds)

    return stated(pod) or all(map(stated, [*pod["containers"], *(pod.get("initContainers") or ())]))


# --------------------------------------------------------------------------------------------------------------- scopes


def scopes_of(quota: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the scopes of a ResourceQuota as `scopeSelector` expressions."""
    spec = quota.get("spec", {})
    named = [{"scopeName": scope, "operator": "Exists"} for scope in spec.get("scopes") or ()]
    return [*named, *((spec.get("scopeSelector") or {}).get("matchExpressions") or ())]


def matches(rule: Mapping[str, Any], pod: Pod) -> bool:
    """Return True if a quota's scope covers the pod. Unknown scopes cover no pods."""
    scope = rule["scopeName"]
    if scope in ("Terminating", "NotTerminating"):
        return ("activeDeadlineSeconds" in pod) is (scope == "Terminating")
    if scope in ("BestEffort", "NotBestEffort"):
        asks = {**requests_of(pod), **requests_of(pod, "limits")}
        return any(asks.get(name) for name in ("cpu", "memory")) is (scope == "NotBestEffort")
    if scope == "CrossNamespacePodAffinity":
        return "'namespaces'" in str(pod.get("affinity")) or "'namespaceSelector'" in str(pod.get("affinity"))
    if scope != "PriorityClass":
        return False
    priority, operator = pod.get("priorityClassName", ""), rule["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return bool(priority) is (operator == "Exists")
    return (priority in (rule.get("values") or ())) is (operator == "In")


# --------------------------------------------------------------------------------------------------------- limit ranges


def with_defaults(pod: Pod, ranges: Sequence[Mapping[str, Any]]) -> Pod:
    """Return the pod's spec with the LimitRanges' default requests and limits filled in."""
    limits: dict[str, Any] = {}
    requests: dict[str, Any] = {}
    for item in _items(ranges, "Container"):
        limits = {**(item.get("default") or {}), **limits}
        requests = {**(item.get("defaultRequest") or {}), **requests}

    def complete(container: Mapping[str, Any]) -> Mapping[str, Any]:
        own = container.get("resources") or {}
        asked = {**requests, **(own.get("limits") or {}), **(own.get("requests") or {})}
        return {**container, "resources": {**own, "limits": {**limits, **(own.get("limits") or {})}, "requests": asked}}

    if not (limits or requests):
        return pod
    lists = [name for name in ("containers", "initContainers") if pod.get(name)]
    return {**pod, **{name: [complete(container) for container in pod[name]] for name in lists}}


def check_limit_ranges(ranges: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Iterator[Check]:
    """Yield a failed check for each reason why LimitRanges would reject the run's pods."""
    for each in pod_sets(manifest).values():
        for group, spec in each.groups.items():
            pod = with_defaults(spec, ranges)
            holders = [("Container", {"containers": [container]}) for container in pod["containers"]]
            found = [text for kind, held in [*holders, ("Pod", pod)] for text in _find_outside(ranges, kind, held)]
            for text in dict.fromkeys(found):
                fix = CPU_LIMIT if "cpu" in text else "change the profile, or ask for another LimitRange"
                yield Check("limits", Result.FAILED, f"pods of group {group} would be rejected: {text}", fix)


def _find_outside(ranges: Sequence[Mapping[str, Any]], kind: str, pod: Pod) -> Iterator[str]:
    """Yield a description of each request or limit that is outside the ranges for this kind of object."""
    asked, limits = requests_of(pod), requests_of(pod, "limits")
    for name, amount in asked.items() if kind == "Container" else ():
        if name in limits and amount - limits[name] > ROUNDING:
            yield f"the default {name} limit is below the container's request"
    for item in _items(ranges, kind):
        for name, text in (item.get("max") or {}).items():
            if name not in limits:
                yield f"a {kind} can have at most {text} of {name}, but has no limit"
            elif max(limits[name], asked.get(name, 0.0)) - parse_quantity(text) > ROUNDING:
                yield f"a {kind} can have at most {text} of {name}, but has {format_like(limits[name], text)}"
        for name, text in (item.get("min") or {}).items():
            if parse_quantity(text) - asked.get(name, 0.0) > ROUNDING:
                asks = format_like(asked.get(name, 0.0), text)
                yield f"a {kind} must request at least {text} of {name}, but requests {asks}"
        for name, ratio in (item.get("maxLimitRequestRatio") or {}).items():
            if limits.get(name, 0.0) - parse_quantity(ratio) * asked.get(name, 0.0) > ROUNDING:
                yield f"a {kind}'s {name} limit can be at most {ratio} times its request"


def _items(ranges: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (item for each in ranges for item in each["spec"].get("limits") or () if item.get("type") == kind)


# ------------------------------------------------------------------------------------------------------------- refusals


class ExceededQuota(NamedTuple):
    """A quota that a pod would exceed, parsed from the API server's error."""

    name: str
    requested: str
    used: str
    limited: str

    def never_fits(self, manifest: Mapping[str, Any]) -> bool:
        """Return True if the run needs more of a resource than the quota's limit."""
        sets = pod_sets(manifest)
        limits = dict(pair.partition("=")[::2] for pair in self.limited.split(","))
        return any(Demand(name, sets).least - parse_quantity(text) > ROUNDING for name, text in limits.items())


def parse_exceeded(message: str) -> ExceededQuota | None:
    """Return the exceeded quota that an error from the API server names.

    Returns None if the error has another cause or was truncated.
    """
    found = EXCEEDED.search(message)
    return ExceededQuota(*(part.strip() for part in found.groups())) if found and "..." not in found[0] else None
