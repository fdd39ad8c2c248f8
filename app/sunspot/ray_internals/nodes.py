"""Finds out from Ray which nodes are draining and which still answer, and releases nodes.

ray._private.state.state.get_draining_nodes   returns the preempted nodes and their deadlines, which no public API does
ray._private.worker._global_node              tells whether this process has started Ray itself. The public API does not
                                              distinguish a local session from a cluster.
node:__internal_head__                        is a resource that only the head's node has. The public API does not
                                              tell which node that is.
ray._raylet.GcsClient.drain_node              drains any node of the cluster. In the public API, only `ray start`
                                              drains a node, and only its own.
"""

import logging
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from sunspot.log import warn_once

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
"""Seconds to wait for a connection. A live machine's kernel accepts one at once, even if the machine is busy."""

CONNECTIONS = 32
"""Number of nodes that are contacted at the same time. If they were contacted one after the other, the timeouts of
unreachable nodes would add up."""


def is_own_session() -> bool:
    """Return True if this process started Ray itself, which means that the whole session is on this machine."""
    import ray._private.worker

    node = getattr(ray._private.worker, "_global_node", None)
    return node is not None and bool(node.is_head())


def name_node(node_id: str) -> str:
    """Return the host name of a node, or its Ray ID if Ray does not know the node.

    On Kubernetes, the host name is the pod's name.
    """
    nodes = ray.nodes() if ray.is_initialized() else []
    hosts = [str(node["NodeManagerHostname"]) for node in nodes if node["NodeID"] == node_id]
    return hosts[0] if hosts else f"node {node_id[:12]}"


def head_nodes() -> set[str]:
    """Return the Ray IDs of all head nodes that Ray knows."""
    return {str(node["NodeID"]) for node in ray.nodes() if "node:__internal_head__" in node["Resources"]}


def draining_nodes() -> dict[str, float | None]:
    """Return the deadline of each draining node, keyed by Ray's node ID.

    A deadline is in Unix seconds, or None if it is unknown.

    Ray Train's own preemption watcher makes the same call (ray/train/v2/_internal/execution/preemption.py).
    """
    import ray._private.state

    try:
        ask = ray._private.state.state.get_draining_nodes
    except AttributeError as error:
        warn_once(
            log, f"losing a preempted node costs steps, as this version of Ray does not report preemptions ({error})"
        )
        return {}
    return {node: deadline_ms / 1000 or None for node, deadline_ms in ask().items()}


def drain_nodes(nodes: Iterable[str], why: str = "better nodes have come") -> None:
    """Drain the nodes with these Ray IDs: nothing new is scheduled on them, and they leave the cluster once idle.

    The autoscaler then deletes the pod of a drained node, because the pod's `ray start --block` would keep running.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    no_deadline = 0
    for node in nodes:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, refusal = client.drain_node(node, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, why, no_deadline)
        if not accepted:
            log.warning(f"node {node[:12]} cannot be released: {refusal}")


def reachable_nodes(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes (as in `ray.nodes()`) that are alive and have a raylet that accepts connections.

    Ray considers a lost node alive until its health checks have failed a few times. By default, this takes 14 s after
    the node was killed, and 64 s after a power failure. The loss of the node's workers is known earlier, within 2 s.
    """
    nodes = [node for node in nodes if node["Alive"]]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return [node for node, reachable in zip(nodes, pool.map(_is_reachable, nodes), strict=True) if reachable]


def staying_nodes() -> list[dict[str, Any]]:
    """Return the nodes (as in `ray.nodes()`) that are reachable and not draining."""
    draining = draining_nodes()
    return reachable_nodes([node for node in ray.nodes() if node["NodeID"] not in draining])


def _is_reachable(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
