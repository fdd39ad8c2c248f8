"""Pods that would share a node with several GPUs, each with a part of them. Pure.

NCCL takes every pod for a host of its own, so between two pods of a node gradients cross the network and not NVLink.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

WHOLE = ("nvidia.com/gpu", "amd.com/gpu")
"""Resources that are whole GPUs; parts of one have no NVLink."""

COUNTS = ("nvidia.com/gpu.count", "karpenter.k8s.aws/instance-gpu-count", "cloud.google.com/gke-accelerator-count")
"""Labels whose value is a node's number of GPUs."""

TYPES = {
    r"a[23]-(high|mega|ultra)gpu-8g|a4-highgpu-8g": 8,
    r"p[456]\w*\.(24|48)xlarge|g\w+\.48xlarge": 8,
    r"Standard_ND96\w*": 8,
}
"""Types of nodes with several GPUs, each with their number."""


def count_by_labels(pod: Mapping[str, Any]) -> int:
    """Count the GPUs of a node, by the labels that a pod selects it by; 0 if they do not tell."""
    labels = pod.get("nodeSelector", {})
    counts = [int(labels[label]) for label in COUNTS if labels.get(label, "").isdigit()]
    instance = labels.get("node.kubernetes.io/instance-type", "")
    return max(counts + [number for pattern, number in TYPES.items() if re.fullmatch(pattern, instance)], default=0)


def find_split_nodes(
    manifest: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int] = count_by_labels
) -> Iterator[tuple[str, str]]:
    """Find groups of training pods of which several would share a node, and what to set instead.

    `count` counts the GPUs of the node of a pod.
    """
    for group in manifest["spec"].get("rayClusterSpec", {}).get("workerGroupSpecs", ()):
        pod = group["template"]["spec"]
        limits = pod["containers"][0]["resources"].get("limits", {})
        taken = sum(int(limits.get(name, 0)) for name in WHOLE)
        if taken and group["maxReplicas"] > 1 and (there := count(pod)) >= 2 * taken:
            yield (
                f"{group['groupName']}: a pod takes {taken} of a node's {there} GPUs, and pods of one node talk "
                "through the network, not NVLink",
                f"set worker.gpus to {there}, for one pod with {there} workers",
            )
