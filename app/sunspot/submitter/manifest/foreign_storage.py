"""Warns if a run's pods cannot access its storage because the storage is in a different cloud than the nodes."""

from collections.abc import Iterator, Mapping
from typing import Any

from sunspot.submitter.manifest.pods import head_group, ray_container
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of

CLOUDS = {
    "cloud.google.com/": ("gs", "Google's"),
    "eks.amazonaws.com/": ("s3", "AWS's"),
    "karpenter.k8s.aws/": ("s3", "AWS's"),
    "kubernetes.azure.com/": ("az", "Azure's"),
}
"""Each cloud's storage scheme and name, keyed by a label prefix that only its nodes have."""

SCHEMES = {"gs": "Google's storage", "s3": "S3", "az": "Azure's storage", "abfs": "Azure's storage"}
"""Names of the storage services that need credentials, keyed by scheme."""


def find_foreign_storage(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if the pods' identity cannot open the run's storage. The warning includes the fix.

    Without a Secret, pods have only an identity from their own cloud, which cannot open another cloud's storage.
    """
    path = settings_of(manifest).get(STORAGE_PATH, "")
    scheme, _, place = path.partition("://")
    cluster = manifest["spec"].get("rayClusterSpec")
    if scheme not in SCHEMES or not cluster or _has_secrets(ray_container(head_group(manifest))):
        return
    pods = [group["template"]["spec"] for group in cluster["workerGroupSpecs"]]
    labels = [label for pod in pods for label in pod.get("nodeSelector", {})]
    for own, whose in {cloud for prefix, cloud in CLOUDS.items() for label in labels if label.startswith(prefix)}:
        if SCHEMES[scheme] != SCHEMES[own]:
            yield (
                f"{path} is {SCHEMES[scheme]}, which pods on {whose} nodes cannot open with their own identity; set "
                f"SUNSPOT_STORAGE_PATH to {own}://{place}, or add a Secret with keys: `env_from_secrets: [NAME]`"
            )


def _has_secrets(container: Mapping[str, Any]) -> bool:
    """Return True if a container gets environment variables from a Secret."""
    entries = container.get("env", ())
    return bool(container.get("envFrom")) or any("secretKeyRef" in entry.get("valueFrom", {}) for entry in entries)
