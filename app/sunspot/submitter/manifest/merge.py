"""Merges a profile's `pod` fields into a pod template, and its `rayjob` fields into the RayJob.

The merge works as in kubectl. Mappings are merged by key, and lists of named items by each item's name. Except for the
fields in `Rules.free`, a merge can only add fields. A merge that would change an existing value is rejected: either
another profile key sets this value, or runs rely on it. The API server checks everything else in a dry run.
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
"""The key that identifies the items of each list (`patchMergeKey` in Kubernetes). Any other list is a single value."""

CREDENTIAL_SHOWN = "anyone who can read the manifest, the Git repository or the storage could read a credential here"

TYPES: Mapping[str, type] = {
    **dict.fromkeys(("name", "value", "secretName", "claimName", "serviceAccountName", "priorityClassName"), str),
    **dict.fromkeys((*MERGE_KEYS, "envFrom"), list),
    **dict.fromkeys(("nodeSelector", "resources", "requests", "limits", "valueFrom"), dict),
    **dict.fromkeys(("secretKeyRef", "secretRef", "secret", "configMapKeyRef", "configMapRef", "configMap"), dict),
    **dict.fromkeys(("persistentVolumeClaim", "authOptions", "gcsFaultToleranceOptions", "redisPassword"), dict),
}
"""Types of the fields that Sunspot reads before the API server has checked them."""

TYPE_NAMES: Mapping[type, str] = {str: "text, in quotes", list: "a list of mappings", dict: "a mapping"}


@dataclass(frozen=True)
class Rules:
    """Rules for what a merge can change. In a path, `*` matches any text, and `[*]` matches any list item."""

    never: Mapping[str, str]
    "The reasons why some fields can never be set, keyed by path."
    instead: Mapping[str, str]
    "Advice about fields that the manifest already has, keyed by path."
    free: Collection[str]
    "Paths of fields that a merge can change even if the manifest already has them."


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
        "spec.terminationGracePeriodSeconds": "it is derived from the notice; set notice_s in the profile",
        "spec.imagePullSecrets": "set image_pull_secrets in the profile",
        "spec.tolerations": "a merge would replace the list; set tolerations next to pod",
        "spec.nodeSelector.*": "set node_selector, gpu_selector or spot in the profile",
        "spec.affinity.*": "a merge would replace one of the profile's rules; see spot and placement",
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
        "metadata.name": "it is made from the run's name and a hash of the specification",
        "metadata.generateName": "each apply would create another run",
        "metadata.namespace": "set namespace in the profile",
        **{f"metadata.labels.{prefix}*": "Sunspot or another key of the profile sets it" for prefix in RESERVED},
        **{f"metadata.annotations.{prefix}*": "Sunspot sets it" for prefix in RESERVED},
        "spec.entrypoint": "it starts the training program; set SUNSPOT_TASK or other settings instead",
        "spec.entrypointNum*": "the driver must run on the head, which offers no resources",
        "spec.entrypointResources": "the driver must run on the head, which offers no resources",
        "spec.jobId": "each attempt has its own ID",
        "spec.submissionMode": "the other modes need a pod that a restricted namespace rejects",
        "spec.submitter*": "no pod submits the job",
        "spec.runtimeEnvYAML": "only the driver would see it; set env or settings in the profile",
        "spec.clusterSelector": "use --cluster",
        "spec.suspend": "a queue sets it; to stop a run, use `sunspot stop`",
        "spec.shutdownAfterJobFinishes": "you would keep paying for the nodes after the run has ended",
        "spec.deletionStrategy": "the operator rejects it together with shutdownAfterJobFinishes",
        "spec.rayClusterSpec.rayVersion": "it must match the Ray version in the image",
        "spec.rayClusterSpec.suspend": "a queue suspends the RayJob",
        "spec.rayClusterSpec.upgradeStrategy": "the operator rejects it in a RayJob",
        "spec.rayClusterSpec.enableInTreeAutoscaling": "it is derived from SUNSPOT_NUM_WORKERS",
        "spec.rayClusterSpec.autoscalerOptions.version": "the manifest is written for version v2",
        "spec.rayClusterSpec.autoscalerOptions.securityContext": "a restricted namespace requires its current value",
        "spec.rayClusterSpec.authOptions.mode": "without a token, anyone who can reach the head could run code on it",
        "spec.rayClusterSpec.authOptions.enableK8sTokenAuth": "the operator rejects it in a RayJob",
        "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword.value": f"{CREDENTIAL_SHOWN}; give it a valueFrom",
        "spec.rayClusterSpec.headGroupSpec.template*": "set head or head.pod in the profile",
        "spec.rayClusterSpec.workerGroupSpecs[*].template*": "set worker or worker.pod in the profile",
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
        "spec.rayClusterSpec.workerGroupSpecs[*].*": "it is derived from the profile and SUNSPOT_NUM_WORKERS",
    },
    free=(
        "metadata.annotations.*",
        "spec.rayClusterSpec.autoscalerOptions.idleTimeoutSeconds",
        "spec.rayClusterSpec.autoscalerOptions.imagePullPolicy",
        "spec.rayClusterSpec.autoscalerOptions.resources.*",
    ),
)


def merge_pod(template: dict[str, Any], pod: Mapping[str, Any], name: str) -> list[str]:
    """Merge `pod` into the template in place, and return the problems, which begin with `name` (`worker.pod`)."""
    return merge(template, pod, POD_RULES, name)


def merge_job(job: dict[str, Any], patch: Mapping[str, Any]) -> list[str]:
    """Merge `patch` into the RayJob in place, and return the problems.

    Ignores RayCluster fields if the job runs in an existing cluster, and autoscaler options if the job's own cluster
    has no autoscaler.
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
        f"rayjob.spec.rayClusterSpec.workerGroupSpecs[{group['groupName']}]: unknown group; add it to workers"
        for group in cluster.get("workerGroupSpecs", ())
        if group["groupName"] not in known
    ]
    return problems


def merge(under: dict[str, Any], over: Mapping[str, Any], rules: Rules, name: str) -> list[str]:
    """Merge `over` into `under` in place, and return the problems. Each begins with `name`, such as `worker.pod`."""
    return [f"{name}.{problem}" for problem in _merge(under, over, "", rules)]


def _merge(under: dict[str, Any], over: Mapping[str, Any], above: str, rules: Rules) -> Iterator[str]:
    for key, value in over.items():
        path = f"{above}.{key}".lstrip(".")
        may_be_set = key not in under or _matches(rules.free, path)
        never = _find_reason(rules.never, path)
        if never:
            yield f"{path}: {never}; leave it out"
        elif may_be_set and not _has_type(key, value):
            yield f"{path}={cut(repr(value))} has the wrong type; set it to {TYPE_NAMES[TYPES[key]]}"
        elif isinstance(value, dict) and isinstance(under.get(key, {}), dict):
            yield from _merge(under.setdefault(key, {}), value, path, rules)
        elif key in MERGE_KEYS and isinstance(value, list) and isinstance(under.get(key, []), list):
            yield from _merge_items(under.setdefault(key, []), value, path, rules)
        elif may_be_set:
            under[key] = value
        elif value != under[key]:
            advice = _find_reason(rules.instead, path) or "runs rely on this value"
            yield f"{path} is already {cut(repr(under[key]))} in the manifest: {advice}"


def _merge_items(under: list[dict[str, Any]], over: list[Any], path: str, rules: Rules) -> Iterator[str]:
    kind = path.rpartition(".")[2]
    by = MERGE_KEYS[kind]
    for item in over:
        if not isinstance(item, dict) or not isinstance(item.get(by), TYPES.get(by, (str, int))):
            yield f"{path}: an item has no {by}, which identifies it; add one"
            continue
        item_path = f"{path}[{item[by]}]"
        reason = _find_reason(rules.never, item_path)
        if reason:
            yield f"{item_path}: {reason}; leave it out"
            continue
        if kind == "env" and is_credential(str(item[by]), str(item.get("value", ""))):
            yield f"{item_path}: {CREDENTIAL_SHOWN}; replace the value with a valueFrom that has a secretKeyRef"
            continue
        same = next((known for known in under if known.get(by) == item[by]), None)
        if same is None:
            same = {by: item[by]}
            under.append(same)
        yield from _merge(same, item, item_path, rules)
        if kind in ("containers", "initContainers") and not isinstance(same.get("image"), str):
            yield f"{item_path}.image={same.get('image')!r} is not an image; set it to an image reference"


def _has_type(key: str, value: Any) -> bool:
    """Return False if Sunspot reads this field and the value does not have the type in TYPES."""
    wanted = TYPES.get(key, object)
    if not isinstance(value, wanted):
        return False
    return not isinstance(value, list) or wanted is object or all(isinstance(item, dict) for item in value)


def _find_reason(reasons: Mapping[str, str], path: str) -> str:
    return next((reason for pattern, reason in reasons.items() if _matches((pattern,), path)), "")


def _matches(patterns: Collection[str], path: str) -> bool:
    expressions = (re.escape(each).replace(r"\[\*\]", r"\[[^\]]*\]").replace(r"\*", ".*") for each in patterns)
    return any(re.fullmatch(expression, path) for expression in expressions)
