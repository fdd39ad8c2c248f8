"""Merges what a profile adds into a manifest the way kubectl merges patches: mappings by key, and lists of named things
(containers, variables, volumes) by the name of each.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.errors import is_credential
from sunspot.settings import cut

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "workerGroupSpecs": "groupName",
}
"""Lists whose items are merged by a key; all others count as one value (`patchMergeKey` in Kubernetes' core/v1)."""

SHOWN = "a credential here would be in the manifest, in Git and in storage, for all to read"


@dataclass(frozen=True)
class Rules:
    """What a merge may not change, by paths in which `*` stands for the rest of one, or for what is in brackets."""

    never: Mapping[str, str]
    "What a run relies on that nobody else sets, with the reason."
    instead: Mapping[str, str]
    "What to set instead, of what the manifest has already."
    free: Collection[str]
    "What the manifest has already, and a merge may change."


def merge(under: dict[str, Any], over: Mapping[str, Any], rules: Rules, name: str) -> list[str]:
    """Merge `over` into `under` in place; returns what is refused, with `name` (`worker.pod`) before each place."""
    return [f"{name}.{problem}" for problem in _merge(under, over, "", rules)]


def _merge(under: dict[str, Any], over: Mapping[str, Any], above: str, rules: Rules) -> Iterator[str]:
    for key, value in over.items():
        path = f"{above}.{key}".lstrip(".")
        if reason := _reason(rules.never, path):
            yield f"{path}: {reason}; leave it out"
        elif isinstance(value, dict) and isinstance(under.get(key, {}), dict):
            yield from _merge(under.setdefault(key, {}), value, path, rules)
        elif key in MERGE_KEYS and isinstance(value, list) and isinstance(under.get(key, []), list):
            yield from _merge_items(under.setdefault(key, []), value, path, rules)
        elif key not in under or _matches(rules.free, path):
            under[key] = value
        elif value != under[key]:
            reason = _reason(rules.instead, path) or "a run relies on it"
            yield f"{path}: there is {cut(repr(under[key]))} already: {reason}"


def _merge_items(under: list[dict[str, Any]], over: list[Any], path: str, rules: Rules) -> Iterator[str]:
    by = MERGE_KEYS[path.rpartition(".")[2]]
    for item in over:
        if not isinstance(item, dict) or by not in item:
            yield f"{path}: an item without {by}, by which they are told apart; add it"
            continue
        place = f"{path}[{item[by]}]"
        if reason := _reason(rules.never, place):
            yield f"{place}: {reason}; leave it out"
            continue
        if path.endswith(".env") and is_credential(item[by], item.get("value", "")):
            yield f"{place}: {SHOWN}; give it a valueFrom with secretKeyRef in place of the value"
            continue
        same = next((known for known in under if known.get(by) == item[by]), None)
        if same is None:
            same = {by: item[by]}
            under.append(same)
        yield from _merge(same, item, place, rules)


def _reason(reasons: Mapping[str, str], path: str) -> str:
    return next((reason for pattern, reason in reasons.items() if _matches((pattern,), path)), "")


def _matches(patterns: Collection[str], path: str) -> bool:
    expressions = (re.escape(each).replace(r"\[\*\]", r"\[[^\]]*\]").replace(r"\*", ".*") for each in patterns)
    return any(re.fullmatch(expression, path) for expression in expressions)
