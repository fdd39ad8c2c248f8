"""Replaces Ray Train's coordinator, the actor through which Ray Train sizes worker groups and requests nodes.

ray.data._internal.cluster_autoscaler   contains Ray's coordinator, which no public API can replace. Ray's coordinator
                                        counts preempted and unreachable nodes, and cannot request nodes of a
                                        particular group.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sunspot.errors import shorten
from sunspot.log import warn_once
from sunspot.ray_internals.controller import live_controllers
from sunspot.ray_internals.nodes import staying_nodes

log = logging.getLogger(__name__)

COORDINATOR = "AutoscalingCoordinator"
"""Name and namespace of the actor that tells Ray Train which nodes it may use."""

COORDINATOR_START_TIMEOUT_S = 60.0
"""Maximum number of seconds for starting the actor's process. It takes a few seconds, or tens of seconds on a busy
machine."""

RAY_TICK_S = 20.0
"""Seconds between two updates of Ray's coordinator: AutoscalingCoordinator.TICK_INTERVAL_S
(ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py)."""

ROUNDING = 1e-6
"""Amount added before a division, because 3 * 0.33 // 0.33 is 2. Ray Train does not add it. Ray counts in units of
1e-4."""

TRAIN_REQUESTER = "train-"
"""Prefix of the names under which the coordinator knows Ray Train's controllers."""


def install_coordinator() -> float:
    """Make Ray Train size worker groups without counting draining or unreachable nodes.

    Returns the maximum delay, in seconds, before Ray Train notices that nodes have changed. Call this before `fit`.

    Ray's own coordinator updates only every 20 s, and counts draining and unreachable nodes. With that coordinator,
    Ray would size the first worker group after a lost node for nodes that are gone, and wait for them. Ray uses an
    existing actor with the coordinator's name
    (ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py), so ours is created first. If Ray's own
    coordinator already exists, it stays, because other jobs can depend on it.
    """
    try:
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        _create_coordinator()
        found = get_or_create_autoscaling_coordinator()  # as Ray Train does
        if _is_ours(found):
            ray.get(found.get_reserved_resources.remote(TRAIN_REQUESTER), timeout=COORDINATOR_START_TIMEOUT_S)
            if not live_controllers():  # the coordinator keeps the reservations of a killed controller for 180 s
                ray.get(found.forget_runs.remote(), timeout=COORDINATOR_START_TIMEOUT_S)
            return 0.0
        why = "Ray's own autoscaling coordinator already counts this cluster's nodes"
    except Exception as error:  # other versions of Ray can raise anything
        why = f"could not start Sunspot's coordinator: {shorten(error)}"
        _remove_coordinator()
    warn_once(log, f"restarts after a lost node can take up to 20 s longer: {why}")
    return RAY_TICK_S


def ask_of_groups(per_worker: dict[str, float], workers: dict[str, int]) -> None:
    """Request nodes from Ray's autoscaler for a number of workers in each node group.

    Each node group is identified by a custom Ray resource that all of its nodes provide. Only our coordinator supports
    such requests.
    """
    coordinator = ray.get_actor(COORDINATOR, COORDINATOR)
    ray.get(coordinator.ask_of_groups.remote(per_worker, workers), timeout=COORDINATOR_START_TIMEOUT_S)


def offer_whole_replicas(per_worker: dict[str, float], multiple: int) -> None:
    """Make Ray Train start only groups whose size is divisible by `multiple`. Only our coordinator supports this."""
    coordinator = ray.get_actor(COORDINATOR, COORDINATOR)
    ray.get(coordinator.offer_whole_replicas.remote(per_worker, multiple), timeout=COORDINATOR_START_TIMEOUT_S)


def workers_in(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """Return how many workers fit on a node with these resources."""
    fits = [(resources.get(name, 0.0) + ROUNDING) // amount for name, amount in per_worker.items() if amount]
    return int(min(fits, default=0))


def without_surplus(
    reserved: dict[str, dict[str, float]], per_worker: Mapping[str, float], multiple: int
) -> dict[str, dict[str, float]]:
    """Return the resources reserved on each node, without those for surplus workers.

    If the total number of workers is not divisible by `multiple`, the remainder is surplus. Surplus workers are taken
    from the last nodes.
    """
    offered = dict(reserved)
    surplus = sum(workers_in(there, per_worker) for there in reserved.values()) % multiple
    for node, there in reversed(reserved.items()):
        here = workers_in(there, per_worker)
        left_out = min(surplus, here)
        if left_out:
            offered[node] = {name: amount * (here - left_out) for name, amount in per_worker.items()}
            surplus -= left_out
    return offered


def _create_coordinator() -> None:
    """Create our coordinator with Ray's own options, unless a coordinator exists."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        _AutoscalingCoordinatorActor,
        _default_send_resources_request,
    )

    class Coordinator(_AutoscalingCoordinatorActor):
        def __init__(self) -> None:
            self._per_worker: dict[str, float] = {}
            self._of_groups: dict[str, int] = {}
            self._multiple = 1
            super().__init__(get_cluster_nodes=staying_nodes, send_resources_request=self._send)

        def ask_of_groups(self, per_worker: dict[str, float], workers: dict[str, int]) -> None:
            """Request nodes for this number of workers in each group, instead of nodes in any group."""
            with self._lock:
                self._per_worker, self._of_groups = per_worker, workers
                self._merge_and_send_requests()

        def offer_whole_replicas(self, per_worker: dict[str, float], multiple: int) -> None:
            """Offer resources only for numbers of workers that are divisible by `multiple`."""
            self._per_worker, self._multiple = per_worker, multiple

        def _send(self, bundles: list[Any], label_selectors: list[Any] | None = None) -> None:
            if self._of_groups:
                others = [index for index, bundle in enumerate(bundles) if bundle != self._per_worker]
                bundles = [bundles[index] for index in others]
                label_selectors = label_selectors and [label_selectors[index] for index in others]
                for group, workers in self._of_groups.items():
                    bundles += [{**self._per_worker, group: 1.0}] * workers
                    if label_selectors:
                        label_selectors += [{}] * workers
            _default_send_resources_request(bundles, label_selectors)

        def get_reserved_resources(self, requester_id: str, recompute: bool = False) -> Any:
            if not requester_id.startswith(TRAIN_REQUESTER):  # Ray Data asks all the time, so it gets the last answer
                return super().get_reserved_resources(requester_id, recompute)
            reserved = super().get_reserved_resources(requester_id, recompute=True)
            offered = without_surplus(reserved, self._per_worker, self._multiple)
            return {
                node: {name: amount + ROUNDING for name, amount in there.items()} for node, there in offered.items()
            }

        def forget_runs(self) -> None:
            """Cancel the reservations of Ray Train's controllers, and allow any number of workers again."""
            self._multiple = 1
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


def _remove_coordinator() -> None:
    """Remove our coordinator, if there is one, so that Ray creates its own."""
    with contextlib.suppress(ValueError):  # the actor does not exist
        found = ray.get_actor(COORDINATOR, COORDINATOR)
        if _is_ours(found):
            ray.kill(found)


def _is_ours(coordinator: Any) -> bool:
    return hasattr(coordinator, "forget_runs")
