"""Finds pods that would run on the same node and divide its GPUs among themselves.

NCCL treats every pod as a separate host. Two pods on one node therefore exchange gradients over the network instead of
NVLink.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

WHOLE_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
"""Names of resources that are whole GPUs. GPU partitions have no NVLink."""


def find_split_nodes(
    manifest: Mapping[str, Any], count_gpus: Callable[[Mapping[str, Any]], int]
) -> Iterator[tuple[str, str]]:
    """Yield a problem and its fix for each group in which several training pods would share a node.

    `count_gpus` returns the number of GPUs on the node where a given pod would run.
    """
    for group in manifest["spec"].get("rayClusterSpec", {}).get("workerGroupSpecs", ()):
        pod = group["template"]["spec"]
        limits = pod["containers"][0]["resources"].get("limits", {})
        gpus_of_pod = sum(int(limits.get(name, 0)) for name in WHOLE_GPUS)
        gpus_of_node = count_gpus(pod)
        if gpus_of_pod and group["maxReplicas"] > 1 and gpus_of_node >= 2 * gpus_of_pod:
            yield (
                f"{group['groupName']}: a pod takes {gpus_of_pod} of a node's {gpus_of_node} GPUs, and pods on the "
                "same node communicate over the network, not NVLink",
                f"set worker.gpus to {gpus_of_node} to get one pod with {gpus_of_node} workers per node",
            )
