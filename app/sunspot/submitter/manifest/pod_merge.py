"""`pod:` of a profile, merged into a pod template.

It adds to the pod. What the template has already is either derived from a key of the profile, which is the one to set,
or something that a run relies on; both are refused, but for FREE.
"""

import difflib
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sunspot.submitter.manifest.merge import Rules, merge
from sunspot.submitter.manifest.profile import RESERVED

FREE = (
    "metadata.annotations.*",
    "spec.securityContext.*",
    "spec.containers[ray].securityContext.*",
    "spec.enableServiceLinks",
    "spec.priorityClassName",
    "spec.topologySpreadConstraints[*].*",
)
"""What the template has and `pod` may change."""

KEYS_INSTEAD = {
    "metadata.labels.*": "set labels in the profile",
    "spec.serviceAccountName": "set service_account in the profile",
    "spec.automountServiceAccountToken": "only a head with Ray's autoscaler gets a token",
    "spec.terminationGracePeriodSeconds": "it follows from the notice; set notice_s in the profile",
    "spec.imagePullSecrets": "set image_pull_secrets in the profile",
    "spec.tolerations": "a merge would replace the list; set tolerations beside pod",
    "spec.nodeSelector.*": "set node_selector, gpu_selector or spot in the profile",
    "spec.affinity.*": "a merge would replace a rule of the profile; see spot and placement",
    "spec.containers[ray].image": "set image in the profile",
    "spec.containers[ray].imagePullPolicy": "set image_pull_policy in the profile",
    "spec.containers[ray].env[*].*": "set env in the profile",
    "spec.containers[ray].envFrom": "set env_from_secrets in the profile",
    "spec.containers[ray].resources.*": "set cpu, memory, ephemeral_storage or gpus beside pod",
    "spec.volumes[tmp].*": "set ephemeral_storage beside pod",
    "spec.volumes[shared-mem].*": "set memory beside pod",
}
"""Why other things that the template has are not changed here, or what to set instead."""

NEVER = {
    "spec.restartPolicy": "KubeRay decides on restarts",
    "spec.activeDeadlineSeconds": "it would end pods of a healthy run; set active_deadline_s in the profile",
    "spec.containers[ray].command": "KubeRay starts Ray in this container",
    "spec.containers[ray].args": "KubeRay starts Ray in this container",
    "spec.containers[ray].lifecycle": "a preStop hook delays the SIGTERM on which Ray drains",
    "spec.containers[ray].env[SUNSPOT_*]": "set it below settings",
    "metadata.name": "KubeRay names the pods",
    "metadata.namespace": "set namespace in the profile",
    "metadata.labels.ray.io/*": "KubeRay sets it",
    **{f"metadata.labels.{prefix}*": "Sunspot sets it" for prefix in RESERVED},
}
"""What a run relies on that nobody else sets."""

RULES = Rules(NEVER, KEYS_INSTEAD, FREE)

TYPES = {"str": "text, in quotes", "int": "a whole number", "bool": "true or false", "float": "a number"}


def merge_pod(template: dict[str, Any], pod: Mapping[str, Any], name: str) -> list[str]:
    """Merge `pod` into the template in place; returns what is wrong, with `name` (`worker.pod`) before each place."""
    unfit = [f"{name}.{problem}" for problem in _find_unfit(pod, "V1PodTemplateSpec", "")]
    return unfit or merge(template, pod, RULES, name)


# ----------------------------------------------------------------------------------------------------- the API's schema


def _find_unfit(value: Any, kind: str, path: str) -> Iterator[str]:
    """Fields that Kubernetes does not know, and values of another type than theirs, by its Python client's models."""
    where = path.lstrip(".")
    if list_of := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        if isinstance(value, list):
            for number, item in enumerate(value):
                yield from _find_unfit(item, list_of[1], f"{path}[{number}]")
        else:
            yield f"{where}={value!r}: set it to a list"
    elif map_of := re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", kind):
        if isinstance(value, dict):
            for key, item in value.items():
                yield from _find_unfit(item, map_of[1], f"{path}.{key}")
        else:
            yield f"{where}={value!r}: set it to a mapping"
    elif kind in TYPES:
        if type(value).__name__ != kind:
            yield f"{where}={value!r}: set it to {TYPES[kind]}"
    elif kind != "object":
        fields = _fields(kind)
        if not isinstance(value, dict):
            yield f"{where or 'pod'}={value!r}: set it to a mapping with {', '.join(sorted(fields)[:3])} or others"
            return
        for key, item in value.items():
            if key in fields:
                yield from _find_unfit(item, fields[key], f"{path}.{key}")
            else:
                nearest = difflib.get_close_matches(str(key), list(fields), n=1, cutoff=0.0)[0]
                yield f"{f'{path}.{key}'.lstrip('.')}: no such key; did you mean {f'{path}.{nearest}'.lstrip('.')}?"


@functools.cache
def _fields(kind: str) -> dict[str, str]:
    """Return the type of each field of a model, by the field's name in YAML."""
    model = getattr(importlib.import_module("kubernetes.client.models"), kind)
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
