"""Nodes as Ray sees them: which were told to go, which still answer, and how to send one away.

ray._private.state.state.get_draining_nodes   which nodes are preempted, and until when: no public API tells
ray._private.worker._global_node              whether this process has started Ray itself: the public API does not
                                              distinguish a local session from a cluster
node:__internal_head__                        the resource of the head's node: the public API does not say which node
                                              that is
ray._raylet.GcsClient.drain_node              to give back nodes of a group that better ones have come for: of the
                                              public API, only `ray start` drains, and its own node
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
"""The kernel of a live machine accepts a connection at once, however busy the machine is."""

CONNECTIONS = 32
"""Nodes that are tried at the same time, as the timeouts of unreachable ones would add up."""


def is_own_session() -> bool:
    """Return True if this process started Ray itself, so that all of the session's processes are on this machine."""
    import ray._private.worker

    node = getattr(ray._private.worker, "_global_node", None)
    return node is not None and bool(node.is_head())


def name_node(node_id: str) -> str:
    """Return the host name of a node, in Kubernetes its pod's name, or Ray's id if Ray does not know the node."""
    nodes = ray.nodes() if ray.is_initialized() else []
    hosts = [str(node["NodeManagerHostname"]) for node in nodes if node["NodeID"] == node_id]
    return hosts[0] if hosts else f"node {node_id[:12]}"


def head_nodes() -> set[str]:
    """Return Ray's ids of the nodes on which the cluster's head runs."""
    return {str(node["NodeID"]) for node in ray.nodes() if "node:__internal_head__" in node["Resources"]}


def draining_nodes() -> dict[str, float | None]:
    """The deadlines of draining nodes, by Ray's id of the node, in seconds since the epoch; None: not known.

    As Ray Train's own preemption watcher asks (ray/train/v2/_internal/execution/preemption.py).
    """
    import ray._private.state

    try:
        ask = ray._private.state.state.get_draining_nodes
    except AttributeError as error:
        warn_once(
            log, f"losing a node that was told to go costs steps: this Ray does not tell which those are ({error})"
        )
        return {}
    return {node: deadline_ms / 1000 or None for node, deadline_ms in ask().items()}


def drain_nodes(nodes: Iterable[str], why: str = "better nodes have come") -> None:
    """Have nodes, by Ray's id, leave the cluster as soon as nothing runs on them any more; nothing new begins there.

    The autoscaler deletes the pod of a node that has left; `ray start --block` in it goes on by itself.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    no_deadline = 0
    for node in nodes:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, refusal = client.drain_node(node, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, why, no_deadline)
        if not accepted:
            log.warning(f"node {node[:12]} is not given back: {refusal}")


def reachable_nodes(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the nodes (as in `ray.nodes()`) that are alive and whose raylet accepts connections.

    To Ray a lost node is alive until its health checks have failed a few times: by default 14 s after it was killed,
    and 64 s after its power failed. The loss of its workers is known within 2 s.
    """
    nodes = [node for node in nodes if node["Alive"]]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return [node for node, reachable in zip(nodes, pool.map(_is_reachable, nodes), strict=True) if reachable]


def staying_nodes() -> list[dict[str, Any]]:
    """The nodes (as in `ray.nodes()`) that are reachable and not draining."""
    draining = draining_nodes()
    return reachable_nodes([node for node in ray.nodes() if node["NodeID"] not in draining])


def _is_reachable(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
