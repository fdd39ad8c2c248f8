"""Finds the nodes on which a run's pods fit, according to labels, taints and size.

Pods that already run on the nodes are ignored, because they might finish, and this user might not see all of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sunspot.submitter.cluster.views import is_ready
from sunspot.submitter.findings import Diagnosis
from sunspot.submitter.manifest.quantities import parse_quantity
from sunspot.submitter.manifest.requirements import requests_of

CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
"""Taints of control plane nodes, where a run's pods never run."""

NODE_STATE_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "ToBeDeletedByClusterAutoscaler")
"""Prefixes of taints that describe a node's state. Tolerating them does not help."""


class Obstacle(NamedTuple):
    """A reason why a pod cannot run even on an empty node."""

    kind: Diagnosis
    what: str
    "A taint as `KEY` or `KEY=VALUE`, the name of a missing resource, or a description."

    def __str__(self) -> str:
        if self.kind is Diagnosis.TAINT:
            return f"taint {self.what} not tolerated"
        return f"too little {self.what}" if self.kind is Diagnosis.RESOURCES else self.what


def find_room(pod: Mapping[str, Any], node: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many pods with this spec fit on an empty node, and the reason if there is no room for any."""
    obstacle = next(find_obstacles(pod, node), None)
    if obstacle:
        return 0, str(obstacle)
    wanted = {name: amount for name, amount in requests_of(pod).items() if amount}
    there = _allocatable(node)
    return int(min((there[name] // amount for name, amount in wanted.items()), default=1)), ""


def find_obstacles(pod: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Yield the reasons why pods with this spec cannot run on a node, even if the node is empty."""
    spec = node.get("spec", {})
    labels = node["metadata"].get("labels", {})
    if not is_ready(node):
        yield Obstacle(Diagnosis.NODES, "not ready")
    if spec.get("unschedulable"):
        yield Obstacle(Diagnosis.NODES, "cordoned")
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            yield Obstacle(Diagnosis.NO_NODE, f"not labeled {key}={value}")
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", ())
    if terms and not any(_holds_all(term, node) for term in terms):
        yield Obstacle(Diagnosis.NO_NODE, "excluded by the node affinity")
    for taint in spec.get("taints") or ():
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in pod.get("tolerations", ())):
            kind = kind_of_taint(taint["key"])
            if kind is Diagnosis.TAINT or (is_ready(node) and not spec.get("unschedulable")):
                yield Obstacle(kind, f"{taint['key']}={taint['value']}" if taint.get("value") else taint["key"])
    there = _allocatable(node)
    for name, amount in sorted(requests_of(pod).items()):
        if amount > there.get(name, 0.0):
            lacks = "/" in name and not there.get(name)  # a node without GPUs is the wrong kind, not too small
            yield Obstacle(Diagnosis.NO_NODE, f"without {name}") if lacks else Obstacle(Diagnosis.RESOURCES, name)


def kind_of_taint(key: str) -> Diagnosis:
    """Return `Diagnosis.NODES` if a taint describes the node's state, and `Diagnosis.TAINT` otherwise."""
    return Diagnosis.NODES if key.startswith(NODE_STATE_TAINTS) else Diagnosis.TAINT


def _allocatable(node: Mapping[str, Any]) -> dict[str, float]:
    return {name: parse_quantity(text) for name, text in node["status"].get("allocatable", {}).items()}


def _holds_all(term: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Return True if a node matches a node affinity term. No node matches an empty term."""
    of_labels, of_fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    metadata = node["metadata"]
    holds = [_holds(each, metadata.get("labels", {})) for each in of_labels]
    holds += [_holds(each, {"metadata.name": metadata.get("name", "")}) for each in of_fields]
    return bool(holds) and all(holds)


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key = expression["key"]
    operator = expression["operator"]
    values = expression.get("values", ())
    value = labels.get(key)
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) is (operator == "Exists")
    if value is None or not value.lstrip("-").isdigit():
        return False
    return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")
