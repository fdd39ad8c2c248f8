"""Merges a profile's own Kubernetes fields into the manifest: `pod` into a pod template, `rayjob` into the RayJob.

The merge comes last, and works as in kubectl: mappings are merged by key, and lists of named items such as containers,
variables and volumes by the name of each item. A merge only adds fields. It is refused if the manifest already has a
field with another value: then either another key of the profile sets this field, or a run relies on its value. The API
server checks all other fields, because `submit` and `doctor` first send it the RayJob as a dry run.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.credentials import is_credential
from sunspot.settings import cut
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
"""Key by which the items of a list are merged; any other list is one value (`patchMergeKey` in Kubernetes' core/v1)."""

CREDENTIAL_SHOWN = "a credential here could be read by anyone who sees the manifest, Git or the storage"

TYPES: Mapping[str, type] = {
    **dict.fromkeys(("name", "value", "secretName", "claimName", "serviceAccountName", "priorityClassName"), str),
    **dict.fromkeys((*MERGE_KEYS, "envFrom"), list),
    **dict.fromkeys(("nodeSelector", "resources", "requests", "limits", "valueFrom"), dict),
    **dict.fromkeys(("secretKeyRef", "secretRef", "secret", "configMapKeyRef", "configMapRef", "configMap"), dict),
    **dict.fromkeys(("persistentVolumeClaim", "authOptions", "gcsFaultToleranceOptions", "redisPassword"), dict),
}
"""Types of the fields that Sunspot reads before the API server has seen them."""

TYPE_NAMES: Mapping[type, str] = {str: "text, in quotes", list: "a list of mappings", dict: "a mapping"}


@dataclass(frozen=True)
class Rules:
    """Paths that a merge may or may not change. In a path, `*` matches any text, and `[*]` any item of a list."""

    never: Mapping[str, str]
    "Reason why a merge may never set a field, by path."
    instead: Mapping[str, str]
    "Advice for a field that the manifest already has, by path."
    free: Collection[str]
    "Paths of fields that the manifest already has and a merge may still change."


POD_RULES = Rules(
    never={
        "spec.restartPolicy": "KubeRay decides on restarts",
        "spec.activeDeadlineSeconds": "it would end the pods of a healthy run; set active_deadline_s in the profile",
        "spec.containers[ray].command": "KubeRay starts Ray in this container",
        "spec.containers[ray].args": "KubeRay starts Ray in this container",
        "spec.containers[ray].lifecycle": "a preStop hook delays the SIGTERM that makes Ray drain",
        "spec.containers[ray].env[SUNSPOT_*]": "set it under settings",
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
        "spec.tolerations": "a merge would replace the list; set tolerations next to pod",
        "spec.nodeSelector.*": "set node_selector, gpu_selector or spot in the profile",
        "spec.affinity.*": "a merge would replace a rule of the profile; see spot and placement",
        "spec.containers[ray].image": "set image in the profile",
        "spec.containers[ray].imagePullPolicy": "set image_pull_policy in the profile",
        "spec.containers[ray].env[*].*": "set env in the profile",
        "spec.containers[ray].envFrom": "set env_from_secrets in the profile",
        "spec.containers[ray].resources.*": "set cpu, memory, ephemeral_storage or gpus next to pod",
        "spec.volumes[tmp].*": "set ephemeral_storage next to pod",
        "spec.volumes[shared-mem].*": "set memory next to pod",
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
        "metadata.name": "it consists of the run's name and a hash of the specification",
        "metadata.generateName": "each apply would create another run",
        "metadata.namespace": "set namespace in the profile",
        **{f"metadata.labels.{prefix}*": "Sunspot sets it, or the profile has a key for it" for prefix in RESERVED},
        **{f"metadata.annotations.{prefix}*": "Sunspot sets it" for prefix in RESERVED},
        "spec.entrypoint": "it starts the training program; set SUNSPOT_TASK or other settings instead",
        "spec.entrypointNum*": "the driver belongs on the head, which offers no resources",
        "spec.entrypointResources": "the driver belongs on the head, which offers no resources",
        "spec.jobId": "each attempt has its own ID",
        "spec.submissionMode": "the other modes need a pod that a restricted namespace refuses",
        "spec.submitter*": "the job is submitted without a pod",
        "spec.runtimeEnvYAML": "only the driver would see it; set env or settings in the profile",
        "spec.clusterSelector": "use --cluster",
        "spec.suspend": "a queue sets it, and `sunspot stop` stops a run",
        "spec.shutdownAfterJobFinishes": "you would pay for the nodes of a run that has ended",
        "spec.deletionStrategy": "the operator refuses it together with shutdownAfterJobFinishes",
        "spec.rayClusterSpec.rayVersion": "it is the version of Ray in the image",
        "spec.rayClusterSpec.suspend": "a queue suspends the RayJob",
        "spec.rayClusterSpec.upgradeStrategy": "the operator refuses it in a RayJob",
        "spec.rayClusterSpec.enableInTreeAutoscaling": "it follows from SUNSPOT_NUM_WORKERS",
        "spec.rayClusterSpec.autoscalerOptions.version": "the manifest is written for version v2",
        "spec.rayClusterSpec.autoscalerOptions.securityContext": "a restricted namespace requires its present value",
        "spec.rayClusterSpec.authOptions.mode": "without a token, anyone who reaches the head could run any code",
        "spec.rayClusterSpec.authOptions.enableK8sTokenAuth": "the operator refuses it in a RayJob",
        "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword.value": f"{CREDENTIAL_SHOWN}; give it a valueFrom",
        "spec.rayClusterSpec.headGroupSpec.template*": "set head in the profile, or pod under it",
        "spec.rayClusterSpec.workerGroupSpecs[*].template*": "set worker in the profile, or pod under it",
        "spec.rayClusterSpec.workerGroupSpecs[*].numOfHosts": "a worker group has one pod per host",
        "spec.rayClusterSpec.workerGroupSpecs[*].suspend": "the driver decides how many pods a group has",
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
    """Merge `pod` into the template in place. Returns each problem; `name` (`worker.pod`) begins its path."""
    return merge(template, pod, POD_RULES, name)


def merge_job(job: dict[str, Any], patch: Mapping[str, Any]) -> list[str]:
    """Merge `patch` into the RayJob in place, and return each problem.

    Fields of the RayCluster are ignored if the job runs in an existing cluster, and those of the autoscaler if the
    cluster has no autoscaler.
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
        f"rayjob.spec.rayClusterSpec.workerGroupSpecs[{group['groupName']}]: no such group; add it to workers"
        for group in cluster.get("workerGroupSpecs", ())
        if group["groupName"] not in known
    ]
    return problems


def merge(under: dict[str, Any], over: Mapping[str, Any], rules: Rules, name: str) -> list[str]:
    """Merge `over` into `under` in place. Returns each problem; `name` (`worker.pod`) begins its path."""
    return [f"{name}.{problem}" for problem in _merge(under, over, "", rules)]


def _merge(under: dict[str, Any], over: Mapping[str, Any], above: str, rules: Rules) -> Iterator[str]:
    for key, value in over.items():
        path = f"{above}.{key}".lstrip(".")
        may_be_set = key not in under or _matches(rules.free, path)
        never = _find_reason(rules.never, path)
        if never:
            yield f"{path}: {never}; leave it out"
        elif may_be_set and not _has_type(key, value):
            yield f"{path}={cut(repr(value))}: set it to {TYPE_NAMES[TYPES[key]]}"
        elif isinstance(value, dict) and isinstance(under.get(key, {}), dict):
            yield from _merge(under.setdefault(key, {}), value, path, rules)
        elif key in MERGE_KEYS and isinstance(value, list) and isinstance(under.get(key, []), list):
            yield from _merge_items(under.setdefault(key, []), value, path, rules)
        elif may_be_set:
            under[key] = value
        elif value != under[key]:
            advice = _find_reason(rules.instead, path) or "a run relies on it"
            yield f"{path}: the manifest already has {cut(repr(under[key]))}: {advice}"


def _merge_items(under: list[dict[str, Any]], over: list[Any], path: str, rules: Rules) -> Iterator[str]:
    kind = path.rpartition(".")[2]
    by = MERGE_KEYS[kind]
    for item in over:
        if not isinstance(item, dict) or not isinstance(item.get(by), TYPES.get(by, (str, int))):
            yield f"{path}: an item has no {by}, by which items are matched; add it"
            continue
        item_path = f"{path}[{item[by]}]"
        reason = _find_reason(rules.never, item_path)
        if reason:
            yield f"{item_path}: {reason}; leave it out"
            continue
        if kind == "env" and is_credential(str(item[by]), str(item.get("value", ""))):
            yield f"{item_path}: {CREDENTIAL_SHOWN}; give it a valueFrom with secretKeyRef instead of the value"
            continue
        same = next((known for known in under if known.get(by) == item[by]), None)
        if same is None:
            same = {by: item[by]}
            under.append(same)
        yield from _merge(same, item, item_path, rules)
        if kind in ("containers", "initContainers") and not isinstance(same.get("image"), str):
            yield f"{item_path}.image={same.get('image')!r}: set it to the reference of an image"


def _has_type(key: str, value: Any) -> bool:
    """Return True unless Sunspot reads this field and the value has another type than it expects."""
    wanted = TYPES.get(key, object)
    if not isinstance(value, wanted):
        return False
    return not isinstance(value, list) or wanted is object or all(isinstance(item, dict) for item in value)


def _find_reason(reasons: Mapping[str, str], path: str) -> str:
    return next((reason for pattern, reason in reasons.items() if _matches((pattern,), path)), "")


def _matches(patterns: Collection[str], path: str) -> bool:
    expressions = (re.escape(each).replace(r"\[\*\]", r"\[[^\]]*\]").replace(r"\*", ".*") for each in patterns)
    return any(re.fullmatch(expression, path) for expression in expressions)
