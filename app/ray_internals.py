"""Private APIs of Ray, checked against Ray 2.60.0; where a Ray has changed one, runs do without it, with a warning.

ray._private.state.state.get_draining_nodes   which nodes are preempted, and until when: no public API tells
sys.argv of a worker                          when Ray launched it: the public API tells only of actors and tasks
RAY_RAYLET_PID in a worker's environment      Ray's process on the node, without which there are no workers
ray._private.state.actors                     whether a Ray Train controller lives: the public ray.util.state asks the
                                              dashboard, which local sessions do not have
ray._raylet.PlacementGroupID                  to give back what a failed controller had reserved: the public API removes
                                              only groups that one has made oneself
ray._raylet.GcsClient.drain_node              to give back nodes of a group that better ones have come for: of the
                                              public API, only `ray start` drains, and its own node
ray.data._internal.cluster_autoscaler         the actor by which Ray Train sizes worker groups and asks for nodes; ours
                                              counts neither preempted nor unreachable nodes, and asks for
                                              those of each group
ray.train.v2._internal.execution              the states of Ray Train's controller, and its worker group: to end a group
                                              that restarts while there are too few nodes for the next
ray._private.worker.print_to_stdstream        prints a page for each lost worker, which we tell on a line
ray.train.v2...failure_handling               decides whether another worker group follows a failed one: the public
                                              FailureConfig counts all failures of a job's life, and knows no bugs
"""

import functools
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.errors import shorten

COORDINATOR = "AutoscalingCoordinator"
"""Name and namespace of the actor that tells Ray Train which nodes it may use."""

COORDINATOR_START_TIMEOUT_S = 60.0
"""Starting an actor's process takes some seconds, and on a busy machine tens of them."""

RAY_TICK_S = 20.0
"""AutoscalingCoordinator.TICK_INTERVAL_S (ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py)."""

CONNECT_TIMEOUT_S = 1.0
"""The kernel of a live machine accepts a connection at once, however busy the machine is."""

CONNECTIONS = 32
"""Nodes that are tried at the same time, as the timeouts of unreachable ones would add up."""

ROUNDING = 1e-6
"""Added to amounts before a division, as Ray Train does not: 3 * 0.33 // 0.33 is 2. Ray counts in units of 1e-4."""

LAUNCHED_AT = "--worker-launch-time-ms="

NO_DEADLINE = 0

TRAIN_REQUESTER = "train-"
"""Prefix of the names by which Ray Train's controllers are known to the coordinator."""


def draining_nodes() -> dict[str, float | None]:
    """The deadlines of draining nodes, by Ray's id of the node, in seconds since the epoch; None: not known.

    As Ray Train's own preemption watcher asks (ray/train/v2/_internal/execution/preemption.py).
    """
    import ray._private.state

    try:
        ask = ray._private.state.state.get_draining_nodes
    except AttributeError as error:
        _warn_once(f"losing a node that was told to go costs steps: this Ray does not tell which those are ({error})")
        return {}
    return {node: deadline_ms / 1000 or None for node, deadline_ms in ask().items()}


def launch_time() -> float | None:
    """When Ray launched this worker, in seconds since the epoch; None: it does not tell."""
    given = [argument.removeprefix(LAUNCHED_AT) for argument in sys.argv if argument.startswith(LAUNCHED_AT)]
    return int(given[-1]) / 1000 if given and given[-1].isdigit() else None


def raylet_process() -> int:
    """The process without which this node has no workers."""
    return int(os.environ.get("RAY_RAYLET_PID", os.getppid()))


def drain_nodes(nodes: Iterable[str], why: str = "better nodes have come") -> None:
    """Have nodes, by Ray's id, end as soon as nothing runs on them any more; nothing new begins there."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    for node in nodes:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, refusal = client.drain_node(node, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, why, NO_DEADLINE)
        if not accepted:
            print(f"warning: node {node[:12]} is not given back: {refusal}", flush=True)


def reserved_groups() -> set[str]:
    """The ids of this job's placement groups; none in an actor, as its job may have other trainings."""
    context = ray.get_runtime_context()
    if context.get_actor_id():
        return set()
    # An id ends with that of its job.
    ids = (
        group["placement_group_id"]
        for group in ray.util.placement_group_table().values()
        if group["state"] != "REMOVED"
    )
    return {id for id in ids if id.endswith(context.get_job_id())}


def give_back(groups: set[str]) -> None:
    """Remove placement groups, by their ids, with whatever still runs in them."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for group in groups:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def reachable_nodes(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the nodes (as in `ray.nodes()`) that are alive and whose raylet accepts connections.

    To Ray a lost node is alive until its health checks have failed a few times: by default 14 s after it was killed,
    and 64 s after its power failed. The loss of its workers is known within 2 s.
    """
    nodes = [node for node in nodes if node["Alive"]]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return [node for node, reachable in zip(nodes, pool.map(_is_reachable, nodes), strict=True) if reachable]


def _is_reachable(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def end_groups_at_once() -> list[Any]:
    """Callbacks for Ray Train's controller: a group that restarts ends at once, waiting for nodes or not.

    Ray would keep an elastic group's processes and places until there are enough nodes for the next group. A node that
    was told to go then stays to the end of its notice, and Kubernetes makes the pod that replaces it only after that.
    """
    try:
        from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
        from ray.train.v2._internal.execution.controller.state import RestartingState
    except ImportError as error:
        _warn_once(f"with too few nodes left, those told to go may be replaced only when their notice is over: {error}")
        return []

    class EndAtOnce(ControllerCallback, WorkerGroupCallback):
        def __init__(self) -> None:
            self._group: Any = None

        def after_worker_group_start(self, worker_group: Any) -> None:
            self._group = worker_group.get_worker_group_state()

        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            # The same state again: no new group was decided. Otherwise Ray ends the old one by itself, as it does later
            # with what is left of this one.
            if self._group and current_state is previous_state and isinstance(current_state, RestartingState):
                group, self._group = self._group, None
                try:
                    group.shutdown()
                except Exception as error:  # another Ray may raise anything, and an error here would end the run
                    _warn_once(f"a worker group that restarts keeps its nodes until the next begins: {shorten(error)}")

    return [EndAtOnce()]


def install_coordinator() -> float:
    """Make Ray Train size worker groups by the nodes that stay; call it before `fit`.

    Returns how far Ray Train's view of the nodes may be behind, in seconds.

    Ray's own coordinator updates every 20 s and counts draining and unreachable nodes: after a loss, it first sizes a
    worker group for nodes that are gone, and waits for them. Ray uses an existing actor of that name
    (ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py), so ours is created first. Ray's own
    stays if it is there already, as other jobs may depend on it.
    """
    try:
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        _create_coordinator()
        found = get_or_create_autoscaling_coordinator()  # as Ray Train does
        if not _is_ours(found):
            _warn_once(
                "restarts after a lost node may take up to 20 s more: Ray's own autoscaling coordinator already counts "
                "this cluster's nodes"
            )
            return RAY_TICK_S
        ray.get(found.get_reserved_resources.remote(TRAIN_REQUESTER), timeout=COORDINATOR_START_TIMEOUT_S)
        if not _someone_trains():
            ray.get(found.forget_runs.remote(), timeout=COORDINATOR_START_TIMEOUT_S)
        return 0.0
    except Exception as error:  # another Ray may raise anything
        _warn_once(f"restarts after a lost node may take up to 20 s more: no coordinator of our own: {shorten(error)}")
        _remove_coordinator()
        return RAY_TICK_S


LOST_WORKER = "A worker died or was killed while executing a task"
"""How the page begins that Ray prints in the driver for each lost worker."""


@contextmanager
def quiet_losses() -> Iterator[None]:
    """Keep Ray from printing a page for each lost worker: what ended which rank is said on one line."""
    import ray._private.worker as module

    if not (usual := getattr(module, "print_to_stdstream", None)):
        yield
        return

    def print_others(data: dict[str, Any], *options: Any, **named: Any) -> None:
        if not any(line.startswith(LOST_WORKER) for line in data.get("lines", ())):
            usual(data, *options, **named)

    module.print_to_stdstream = print_others
    try:
        yield
    finally:
        module.print_to_stdstream = usual


@contextmanager
def asked_of_failures(judge: Callable[[dict[int, Exception]], bool]) -> Iterator[None]:
    """Have trainers ask `judge`, in their controller, whether another worker group starts after one that failed.

    It is given the errors by rank, a `RayError` for each lost process. Groups that ended for a preemption always are
    followed by another. Ray's own policy, which counts, stays where it cannot be replaced.
    """
    try:
        from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
        from ray.train.v2.api import data_parallel_trainer

        own = data_parallel_trainer.create_failure_policy
    except (ImportError, AttributeError) as error:
        _warn_once(f"MAX_FAILURES counts all failures of a start, whatever came of it in between: {shorten(error)}")
        yield
        return

    class Policy(DefaultFailurePolicy):
        def make_decision(self, training_failed_error: Any) -> Any:
            decision = super().make_decision(training_failed_error)
            failures = getattr(training_failed_error, "worker_failures", {})
            # Ray wraps what its health checks found.
            errors = {rank: getattr(error, "health_check_failure", error) for rank, error in failures.items()}
            if not errors or any(getattr(error, "preempted", False) for error in errors.values()):
                return decision
            return FailureDecision.RETRY if judge(errors) else FailureDecision.RAISE

    data_parallel_trainer.create_failure_policy = Policy
    try:
        yield
    finally:
        data_parallel_trainer.create_failure_policy = own


def ask_of_groups(per_worker: dict[str, float], workers: dict[str, int]) -> None:
    """Ask Ray's autoscaler for nodes for so many workers of each group, which is a resource of its nodes.

    Only our coordinator can.
    """
    coordinator = ray.get_actor(COORDINATOR, COORDINATOR)
    ray.get(coordinator.ask_of_groups.remote(per_worker, workers), timeout=COORDINATOR_START_TIMEOUT_S)


def _create_coordinator() -> None:
    """Create ours, with Ray's own options, unless there is one."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        _AutoscalingCoordinatorActor,
        _default_send_resources_request,
    )

    class Coordinator(_AutoscalingCoordinatorActor):
        def __init__(self) -> None:
            self._per_worker: dict[str, float] = {}
            self._of_groups: dict[str, int] = {}
            super().__init__(get_cluster_nodes=_staying_nodes, send_resources_request=self._send)

        def ask_of_groups(self, per_worker: dict[str, float], workers: dict[str, int]) -> None:
            """Ask for nodes of these groups instead of any that workers fit on."""
            with self._lock:
                self._per_worker, self._of_groups = per_worker, workers
                self._merge_and_send_requests()

        def _send(self, bundles: list[Any], label_selectors: list[Any] | None = None) -> None:
            if self._of_groups:
                others = [place for place, bundle in enumerate(bundles) if bundle != self._per_worker]
                bundles = [bundles[place] for place in others]
                label_selectors = label_selectors and [label_selectors[place] for place in others]
                for group, workers in self._of_groups.items():
                    bundles += [{**self._per_worker, group: 1.0}] * workers
                    if label_selectors:
                        label_selectors += [{}] * workers
            _default_send_resources_request(bundles, label_selectors)

        def get_reserved_resources(self, requester_id: str, recompute: bool = False) -> Any:
            if not requester_id.startswith(TRAIN_REQUESTER):  # Ray Data asks all the time: an old answer will do
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
    return reachable_nodes([node for node in ray.nodes() if node["NodeID"] not in draining])


def _someone_trains() -> bool:
    """Whether a Ray Train controller lives; the coordinator keeps the reservations of a killed one for 180 s."""
    import ray._private.state

    alive = ray._private.state.actors(actor_state_name="ALIVE").values()
    return any(actor["ActorClassName"] == "TrainController" for actor in alive)


def _remove_coordinator() -> None:
    """Remove ours, so that Ray creates its own."""
    try:
        found = ray.get_actor(COORDINATOR, COORDINATOR)
    except ValueError:  # no such actor
        return
    if _is_ours(found):
        ray.kill(found)


def _is_ours(coordinator: Any) -> bool:
    return hasattr(coordinator, "forget_runs")


@functools.cache
def _warn_once(text: str) -> None:
    print(f"warning: {text}", flush=True)
