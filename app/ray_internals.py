"""Everything used of Ray that its public API does not offer; each use was checked against Ray 2.60.

In a Ray that has changed such a name the run goes on without the feature, with a warning.
"""

from __future__ import annotations

import functools
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.errors import shorten

COORDINATOR = "AutoscalingCoordinator"
"""Ray's name, and namespace, of the actor that tells Ray Train which nodes it may count on."""

COORDINATOR_START_TIMEOUT_S = 60.0
"""Starting an actor's process takes some seconds, and on a busy machine tens of them."""

RAYS_OWN_LOOKS_EVERY_S = 20.0
"""AutoscalingCoordinator.TICK_INTERVAL_S (ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py)."""

ANSWER_TIMEOUT_S = 1.0
"""A machine that lives takes a connection at once, however busy it is: that is its kernel's doing."""

ASKED_AT_ONCE = 32
"""Nodes that are asked at the same time, lest many silent ones add up."""

ROUNDING = 1e-6
"""Ray Train divides sums of floats: three times 0.33 CPU is 0.99 CPU, and 0.99 // 0.33 is 2. Ray counts in 1e-4."""

TRAIN_REQUESTER = "train-"
"""How the names begin under which Ray Train's controllers ask the coordinator."""


def draining_nodes() -> dict[str, float | None]:
    """The nodes that were told to go and are still there, by Ray's id.

    The value is when the node will be gone, in seconds since the epoch; None: nobody said. In Ray's public API such
    a node looks like any other; this is how Ray Train's own preemption watcher asks
    (ray/train/v2/_internal/execution/preemption.py).
    """
    import ray._private.state

    try:
        ask = ray._private.state.state.get_draining_nodes
    except AttributeError as error:
        _warn_once(f"losing a node that was told to go costs steps: this Ray does not tell which those are ({error})")
        return {}
    return {node: deadline_ms / 1000 or None for node, deadline_ms in ask().items()}


def answering(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the nodes (as `ray.nodes()` has them) that live and whose raylet takes connections.

    A node that was lost lives to Ray until its health checks have failed a few times, which takes 14 s by default
    when it was killed, and 64 s when its power went; its workers are known to be gone within 2 s.
    """
    nodes = [node for node in nodes if node["Alive"]]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        return [node for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if answers]


def _answers(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def install_coordinator() -> float:
    """Make Ray Train size worker groups by the nodes as they are at that moment; call it before `fit`.

    The answer is how old Ray Train's view of the nodes may be, in seconds.

    Ray's own coordinator looks at the nodes every 20 s, and counts those that were told to go and those that no longer
    answer: after a loss, the worker group is first sized for nodes that are gone, and waits for them. Ray takes an
    actor of its name that is already there
    (ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py), so ours comes first. If Ray's own is
    there, other jobs may depend on it: it stays.
    """
    try:
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        _create_coordinator()
        found = get_or_create_autoscaling_coordinator()  # what Ray Train will do
        if not _is_ours(found):
            _warn_once(
                "restarts after a lost node may take up to 20 s more: Ray's own autoscaling coordinator already counts "
                "this cluster's nodes"
            )
            return RAYS_OWN_LOOKS_EVERY_S
        ray.get(found.get_reserved_resources.remote(TRAIN_REQUESTER), timeout=COORDINATOR_START_TIMEOUT_S)
        if not _someone_trains():
            ray.get(found.forget_runs.remote(), timeout=COORDINATOR_START_TIMEOUT_S)
        return 0.0
    except Exception as error:  # whatever a Ray with other internals raises
        _warn_once(f"restarts after a lost node may take up to 20 s more: no coordinator of our own: {shorten(error)}")
        _remove_coordinator()
        return RAYS_OWN_LOOKS_EVERY_S


def _create_coordinator() -> None:
    """Create ours, with Ray's own options, unless one is there."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor

    class Coordinator(_AutoscalingCoordinatorActor):
        def __init__(self) -> None:
            super().__init__(get_cluster_nodes=_staying_nodes)

        def get_reserved_resources(self, requester_id: str, recompute: bool = False) -> Any:
            if not requester_id.startswith(TRAIN_REQUESTER):  # Ray Data asks all the time: a rough figure will do
                return super().get_reserved_resources(requester_id, recompute)
            reserved = super().get_reserved_resources(requester_id, recompute=True)
            return {
                node: {name: amount + ROUNDING for name, amount in there.items()} for node, there in reserved.items()
            }

        def forget_runs(self) -> None:
            """Give back what Ray Train's controllers reserved."""
            for requester in [name for name in self._ongoing_reqs if name.startswith(TRAIN_REQUESTER)]:
                self.cancel_request(requester)

    here = ray.get_runtime_context().get_node_id()
    ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Coordinator).options(
        name=COORDINATOR,
        namespace=COORDINATOR,
        get_if_exists=True,
        lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    ).remote()


def _staying_nodes() -> list[dict[str, Any]]:
    draining = draining_nodes()
    return answering([node for node in ray.nodes() if node["NodeID"] not in draining])


def _someone_trains() -> bool:
    """Whether a Ray Train controller lives. What a killed one had reserved, the coordinator would keep for 180 s."""
    import ray._private.state

    alive = ray._private.state.actors(actor_state_name="ALIVE").values()
    return any(actor["ActorClassName"] == "TrainController" for actor in alive)


def _remove_coordinator() -> None:
    """Make room for Ray's own."""
    try:
        found = ray.get_actor(COORDINATOR, COORDINATOR)
    except ValueError:  # there is none
        return
    if _is_ours(found):
        ray.kill(found)


def _is_ours(coordinator: Any) -> bool:
    return hasattr(coordinator, "forget_runs")


@functools.cache
def _warn_once(text: str) -> None:
    print(f"warning: {text}", flush=True)
