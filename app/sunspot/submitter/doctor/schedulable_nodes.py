"""Which nodes would take the pods of a run, by labels, taints and size. Pure.

Pods that run there already are ignored: they may end, and not everybody may see other users' pods.
"""

from collections.abc import Mapping
from typing import Any

from sunspot.submitter.manifest.quantities import parse_quantity
from sunspot.submitter.manifest.requirements import requests_of


def find_room(pod: Mapping[str, Any], node: Mapping[str, Any]) -> tuple[int, str]:
    """Find how many pods with this spec a node takes when it is empty; if none, also why."""
    if obstacle := _find_obstacle(pod, node):
        return 0, obstacle
    wanted = {name: amount for name, amount in requests_of(pod).items() if amount}
    there = {name: parse_quantity(text) for name, text in node["status"].get("allocatable", {}).items()}
    if short := [name for name, amount in wanted.items() if there.get(name, 0) < amount]:
        return 0, f"too little {', '.join(sorted(short))}"
    return int(min((there[name] // amount for name, amount in wanted.items()), default=1)), ""


def _find_obstacle(pod: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Say why a node takes none of these pods, whatever its size; empty when nothing prevents it."""
    spec = node.get("spec", {})
    labels = node["metadata"].get("labels", {})
    conditions = {c["type"]: c["status"] for c in node.get("status", {}).get("conditions", ())}
    if conditions.get("Ready") != "True":
        return "not ready"
    if spec.get("unschedulable"):
        return "cordoned"
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return f"not labelled {key}={value}"
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", ())
    if terms and not any(all(_holds(e, labels) for e in term.get("matchExpressions", ())) for term in terms):
        return "excluded by the node affinity"
    for taint in spec.get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in pod.get("tolerations", ())):
            return f"taint {taint['key']} not tolerated"
    return ""


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
