"""What a profile adds itself: `pod` to a pod template, and `rayjob` to the RayJob, merged into them last.

The merge is kubectl's: mappings by key, and lists of named things (containers, variables, volumes) by the name of each.
It only adds. What is there already is either derived from a key of the profile, which is the one to set, or something
that a run relies on; both are refused. Fields that no RayJob has are the API server's to refuse, as `submit` and
`doctor` ask it before anything is sent.
"""

import functools
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.credentials import is_credential
from sunspot.formatting import some_of
from sunspot.settings import cut
from sunspot.spelling import find_meant
from sunspot.submitter.manifest.profile import RESERVED

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


POD_RULES = Rules(
    never={
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
    },
    instead={
        "metadata.labels.*": "set labels in the profile",
        "spec.serviceAccountName": "set service_account in the profile",
        "spec.automountServiceAccountToken": "only the container of Ray's autoscaler gets a token",
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
    },
    free=(
        "metadata.annotations.*",
        "spec.securityContext.*",
        "spec.containers[ray].securityContext.*",
        "spec.enableServiceLinks",
        "spec.priorityClassName",
        "spec.topologySpreadConstraints[*].*",
    ),
)

JOB_RULES = Rules(
    never={
        "metadata.name": "it is the run's, and a hash of the specification",
        "metadata.generateName": "each apply would be another run",
        "metadata.namespace": "set namespace in the profile",
        **{f"metadata.labels.{prefix}*": "Sunspot sets it, or has a key for it" for prefix in RESERVED},
        **{f"metadata.annotations.{prefix}*": "Sunspot sets it" for prefix in RESERVED},
        "spec.entrypoint": "it is what trains; set SUNSPOT_TASK, or other settings",
        "spec.entrypointNum*": "the driver belongs on the head, which offers none",
        "spec.entrypointResources": "the driver belongs on the head, which offers none",
        "spec.jobId": "each attempt has an ID of its own",
        "spec.submissionMode": "the others bring a pod that a restricted namespace refuses",
        "spec.submitter*": "no pod submits the job",
        "spec.runtimeEnvYAML": "only the driver would see it; set env or settings in the profile",
        "spec.clusterSelector": "give --cluster",
        "spec.suspend": "a queue sets it, and `sunspot stop` stops a run",
        "spec.shutdownAfterJobFinishes": "the nodes of a run that has ended would be paid for",
        "spec.deletionStrategy": "the operator takes none beside shutdownAfterJobFinishes",
        "spec.rayClusterSpec.rayVersion": "it is the image's",
        "spec.rayClusterSpec.suspend": "a queue suspends the RayJob",
        "spec.rayClusterSpec.upgradeStrategy": "the operator takes none in a RayJob",
        "spec.rayClusterSpec.enableInTreeAutoscaling": "it follows from SUNSPOT_NUM_WORKERS",
        "spec.rayClusterSpec.autoscalerOptions.version": "what is rendered is for v2",
        "spec.rayClusterSpec.autoscalerOptions.securityContext": "a restricted namespace wants it as it is",
        "spec.rayClusterSpec.authOptions.mode": "without a token, whoever reaches the head runs what he likes",
        "spec.rayClusterSpec.authOptions.enableK8sTokenAuth": "the operator takes it in no RayJob",
        "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword.value": f"{SHOWN}; give it a valueFrom",
        "spec.rayClusterSpec.headGroupSpec.template*": "set head in the profile, or pod below it",
        "spec.rayClusterSpec.workerGroupSpecs[*].template*": "set worker in the profile, or pod below it",
        "spec.rayClusterSpec.workerGroupSpecs[*].numOfHosts": "a pod is one place for workers",
        "spec.rayClusterSpec.workerGroupSpecs[*].suspend": "the driver says how many pods a group has",
        "spec.rayClusterSpec.workerGroupSpecs[*].scaleStrategy*": "the autoscaler writes it",
    },
    instead={
        "metadata.labels.*": "set labels in the profile",
        "spec.activeDeadlineSeconds": "set active_deadline_s in the profile",
        "spec.preRunningDeadlineSeconds": "set pre_running_deadline_s in the profile",
        "spec.backoffLimit": "set backoff_limit in the profile",
        "spec.ttlSecondsAfterFinished": "set ttl_s in the profile",
        "spec.rayClusterSpec.workerGroupSpecs[*].*": "it follows from the profile and SUNSPOT_NUM_WORKERS",
    },
    free=(
        "metadata.annotations.*",
        "spec.rayClusterSpec.autoscalerOptions.idleTimeoutSeconds",
        "spec.rayClusterSpec.autoscalerOptions.imagePullPolicy",
        "spec.rayClusterSpec.autoscalerOptions.resources.*",
    ),
)


def merge_pod(template: dict[str, Any], pod: Mapping[str, Any], name: str) -> list[str]:
    """Merge `pod` into the template in place; returns what is wrong, with `name` (`worker.pod`) before each place."""
    unfit = [f"{name}.{problem}" for problem in _find_unfit(pod, "V1PodTemplateSpec", "")]
    return unfit or merge(template, pod, POD_RULES, name)


def merge_job(job: dict[str, Any], patch: Mapping[str, Any]) -> list[str]:
    """Merge `patch` into the RayJob in place; returns what is wrong.

    What it says of a cluster counts for none that is there already, and of an autoscaler where there is one.
    """
    spec = dict(patch.get("spec") or {})
    cluster = job["spec"].get("rayClusterSpec", {})
    if not cluster:
        spec.pop("rayClusterSpec", None)
    elif not cluster.get("enableInTreeAutoscaling") and isinstance(spec.get("rayClusterSpec"), dict):
        spec["rayClusterSpec"] = {key: v for key, v in spec["rayClusterSpec"].items() if key != "autoscalerOptions"}
    known = {group["groupName"] for group in cluster.get("workerGroupSpecs", ())}
    problems = merge(job, {**patch, "spec": spec}, JOB_RULES, "rayjob")
    problems += [
        f"rayjob.spec.rayClusterSpec.workerGroupSpecs[{group['groupName']}]: there is no such group; add it to workers"
        for group in cluster.get("workerGroupSpecs", ())
        if group["groupName"] not in known
    ]
    return problems


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


# ----------------------------------------------------------------------------------------------------- the API's schema


TYPES = {
    "list": "a list",
    "dict": "a mapping",
    "str": "text, in quotes",
    "int": "a whole number",
    "bool": "true or false",
    "float": "a number",
}


def _find_unfit(value: Any, kind: str, path: str) -> Iterator[str]:
    """Find what Kubernetes does not know, and values of another type than theirs, by its Python client's models."""
    where = path.lstrip(".")
    outer, of = re.fullmatch(r"(\w+)(?:[\[(](?:str, )?(.+)[\])])?", kind).groups()  # type: ignore[union-attr]
    if outer.lower() in TYPES:
        if type(value).__name__ != outer.lower():
            yield f"{where}={value!r}: set it to {TYPES[outer.lower()]}"
        elif isinstance(value, list):
            for number, item in enumerate(value):
                yield from _find_unfit(item, of, f"{path}[{number}]")
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from _find_unfit(item, of, f"{path}.{key}")
    elif kind not in ("object", "datetime"):
        fields = _fields(kind)
        if not isinstance(value, dict):
            yield f"{where}={value!r}: set it to a mapping with {', '.join(sorted(fields)[:3])} or others"
            return
        for key, item in value.items():
            if key in fields:
                yield from _find_unfit(item, fields[key], f"{path}.{key}")
            else:
                meant = find_meant(str(key), fields)
                hint = (
                    f"did you mean {f'{path}.{meant}'.lstrip('.')}?"
                    if meant
                    else f"there are {some_of(sorted(fields))}"
                )
                yield f"{f'{path}.{key}'.lstrip('.')}: no such key; {hint}"


@functools.cache
def _fields(kind: str) -> dict[str, str]:
    """Return the type of each field of a model, by the field's name in YAML."""
    model = getattr(importlib.import_module("kubernetes.client.models"), kind)
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
