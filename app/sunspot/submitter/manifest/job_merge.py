"""`rayjob:` of a profile, merged into the RayJob last: what the operator offers beside pods.

Fields that no RayJob has are the API server's to refuse, as `submit` and `doctor` ask it before anything is sent.
"""

from collections.abc import Mapping
from typing import Any

from sunspot.submitter.manifest.merge import SHOWN, Rules, merge
from sunspot.submitter.manifest.profile import RESERVED

FREE = (
    "metadata.annotations.*",
    "spec.rayClusterSpec.autoscalerOptions.idleTimeoutSeconds",
    "spec.rayClusterSpec.autoscalerOptions.imagePullPolicy",
    "spec.rayClusterSpec.autoscalerOptions.resources.*",
)
"""What the RayJob has and `rayjob` may change."""

KEYS_INSTEAD = {
    "metadata.labels.*": "set labels in the profile",
    "spec.activeDeadlineSeconds": "set active_deadline_s in the profile",
    "spec.preRunningDeadlineSeconds": "set pre_running_deadline_s in the profile",
    "spec.backoffLimit": "set backoff_limit in the profile",
    "spec.ttlSecondsAfterFinished": "set ttl_s in the profile",
    "spec.rayClusterSpec.workerGroupSpecs[*].*": "it follows from the profile and NUM_WORKERS",
}
"""What to set instead, of what the RayJob has."""

NEVER = {
    "metadata.name": "it is the run's, and a hash of the specification",
    "metadata.generateName": "each apply would be another run",
    "metadata.namespace": "set namespace in the profile",
    **{f"metadata.labels.{prefix}*": "Sunspot sets it, or has a key for it" for prefix in RESERVED},
    **{f"metadata.annotations.{prefix}*": "Sunspot sets it" for prefix in RESERVED},
    "spec.entrypoint": "it is what trains; set TASK, or other settings",
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
    "spec.rayClusterSpec.enableInTreeAutoscaling": "it follows from NUM_WORKERS",
    "spec.rayClusterSpec.autoscalerOptions.version": "what is rendered is for v2",
    "spec.rayClusterSpec.autoscalerOptions.securityContext": "a restricted namespace wants it as it is",
    "spec.rayClusterSpec.authOptions.mode": "without a token, whoever reaches the head runs what he likes",
    "spec.rayClusterSpec.authOptions.enableK8sTokenAuth": "the operator takes it in no RayJob",
    "spec.rayClusterSpec.gcsFaultToleranceOptions.redisPassword.value": f"{SHOWN}; give it a valueFrom in its place",
    "spec.rayClusterSpec.headGroupSpec.template*": "set head in the profile, or pod below it",
    "spec.rayClusterSpec.workerGroupSpecs[*].template*": "set worker in the profile, or pod below it",
    "spec.rayClusterSpec.workerGroupSpecs[*].numOfHosts": "a pod is one place for workers",
    "spec.rayClusterSpec.workerGroupSpecs[*].suspend": "the driver says how many pods a group has",
    "spec.rayClusterSpec.workerGroupSpecs[*].scaleStrategy*": "the autoscaler writes it",
}
"""What a run relies on, or another key decides."""

RULES = Rules(NEVER, KEYS_INSTEAD, FREE)


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
    problems = merge(job, {**patch, "spec": spec}, RULES, "rayjob")
    problems += [
        f"rayjob.spec.rayClusterSpec.workerGroupSpecs[{group['groupName']}]: there is no such group; add it to workers"
        for group in cluster.get("workerGroupSpecs", ())
        if group["groupName"] not in known
    ]
    return problems
