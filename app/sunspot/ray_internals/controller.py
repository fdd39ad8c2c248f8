"""Changes how Ray Train's controller stops groups and replaces lost workers, and kills leftover controllers.

ray.train.v2._internal.execution   shows the controller's state and its worker group, to stop a group that cannot
                                   restart yet because nodes are missing. The public `UserCallback` shows neither.
WorkerHealthCheck...Error          wrap or replace the error of a lost worker in the public `UserCallback`, and have no
                                   public names
RayActorError(preempted=True)      makes Ray Train start another group without counting a failure, if a worker raises
                                   the error. No public API restarts a group.
ray._raylet.PlacementGroupID       removes the reservations of a failed controller. The public API removes only
                                   placement groups that the caller has created.
ray._private.state.actors          finds controllers. The public ray.util.state asks the dashboard, which local
                                   sessions do not have.
an actor handle's _actor_id        finds a worker's entry in the membership
core_worker.kill_actor             kills a controller that waits for a node. The public `ray.kill` needs an actor
                                   handle, which the trainer does not expose.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from sunspot.errors import shorten
from sunspot.log import warn_once

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Seconds between two checks of workers that have not answered."""

ANSWER_S = 10.0
"""Seconds to wait for an answer from a worker that is not known to be alive. The membership server waits equally long
for a heartbeat."""

LIVING_S = 600.0
"""Seconds to wait for an answer from a worker that is known to be alive. It might be busy, or its network slow."""


LOST = (RayActorError, OutOfMemoryError)
"""Errors that Ray raises for a process that is gone. Its memory monitor's error is not a `RayActorError` (2.60)."""


class GroupRestartError(RayActorError):
    """Raised in a worker to make Ray Train start another group, as after a preemption.

    The restart does not count toward MAX_FAILURES. Ray passes the error to its controller unchanged.
    """

    def __init__(self) -> None:
        super().__init__(error_msg="the worker group is ending for a restart", preempted=True)


def end_groups_at_once() -> list[Any]:
    """Return callbacks for Ray Train's controller that stop a restarting group at once, even if nodes are missing.

    Without these callbacks, Ray keeps an elastic group's processes until there are enough nodes for the next group. A
    preempted node then stays until the end of its notice, and Kubernetes creates the replacement pod only afterwards.
    """
    try:
        from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
        from ray.train.v2._internal.execution.controller.state import RestartingState
    except ImportError as error:
        warn_once(log, f"if too few nodes are left, preempted nodes might be replaced only after their notice: {error}")
        return []

    class EndAtOnce(ControllerCallback, WorkerGroupCallback):
        _group: Any = None

        def after_worker_group_start(self, worker_group: Any) -> None:
            self._group = worker_group.get_worker_group_state()

        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            # The state is unchanged until Ray has decided on a new group. Then Ray itself ends the old group, including
            # what this method has left of it.
            if self._group and current_state is previous_state and isinstance(current_state, RestartingState):
                group, self._group = self._group, None
                try:
                    group.shutdown()
                except Exception as error:  # other versions of Ray can raise anything, and an error would end the run
                    warn_once(
                        log, f"a restarting worker group keeps its nodes until the next group begins: {shorten(error)}"
                    )

    return [EndAtOnce()]


def replace_lost_alone(find_living: Callable[[], Collection[str]]) -> list[Any]:
    """Return callbacks that let Ray Train's controller replace several lost workers in survivor mode.

    To replace a worker, Ray asks all other workers to discard their reports, and fails if one of these workers is dead
    (`_replace_replica_group_impl`, 2.60). These callbacks therefore tell Ray about all dead workers first. If another
    worker dies during the replacement, the callbacks ignore the error, because Ray notices the loss at its next poll.

    `find_living` returns the names of the workers that are known to be alive. Each name begins with an actor ID.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

    class ForgetLost(ControllerCallback, WorkerGroupCallback):
        _group: Any = None

        def after_worker_group_start(self, worker_group: Any) -> None:
            self._group, replace = worker_group, worker_group.replace_replica_group

            def try_to_replace(number: int) -> None:
                try:
                    replace(number)
                except (*LOST, WorkerGroupStartupFailedError) as error:
                    log.debug(
                        "worker %d has not been replaced yet: %s", number, error
                    )  # the worker counts as lost again

            worker_group.replace_replica_group = try_to_replace

        def before_controller_execute_resize_decision(self, decision: Any) -> None:
            replicas = self._group.get_replica_groups() if self._group is not None else None
            end_lost([replica for replica in replicas or () if replica.is_active()], find_living)

    return [ForgetLost()]


def end_lost(replicas: list[Any], find_living: Callable[[], Collection[str]]) -> None:
    """Shut down each replica group that has lost a worker.

    A worker counts as lost if it is dead, or if it does not answer within ANSWER_S and `find_living` does not return
    its name. After LIVING_S without an answer, the worker counts as lost in any case.
    """
    asked = {
        worker.actor.clear_result_queue.remote(): (worker.actor._actor_id.hex(), replica)
        for replica in replicas
        for worker in replica.get_workers()
    }
    began = time.monotonic()
    while asked:
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_EVERY_S)
        for answer in answered:
            _, replica = asked.pop(answer)
            try:
                ray.get(answer)
            except Exception:  # the worker is dead
                replica.shutdown()
        waited_s = time.monotonic() - began
        if not asked or waited_s < ANSWER_S:
            continue
        living = _ask_who_lives(find_living)
        for answer, (actor, replica) in list(asked.items()):
            if waited_s > LIVING_S or not any(name.startswith(actor) for name in living):
                del asked[answer]
                replica.shutdown()


def _ask_who_lives(find_living: Callable[[], Collection[str]]) -> Collection[str]:
    try:
        return find_living()
    except Exception as error:  # without an answer, no worker is known to be alive
        log.debug("could not find out which workers are alive: %s", error)
        return ()


def unwrap_health_check(error: Exception) -> Exception:
    """Return the error that Ray's health check found in a worker, or any other error unchanged.

    If the health check timed out, the worker counts as lost, so a `RayActorError` is returned.
    """
    if type(error).__name__ == "WorkerHealthCheckTimeoutError":
        return RayActorError(error_msg=str(error))
    found: Exception = getattr(error, "health_check_failure", error)
    return found


def reserved_groups() -> set[str]:
    """Return the IDs of this job's placement groups.

    Returns an empty set in an actor, because the actor's job may also run other trainers.
    """
    context = ray.get_runtime_context()
    if context.get_actor_id():
        return set()
    placed = ray.util.placement_group_table().values()
    ids = [group["placement_group_id"] for group in placed if group["state"] != "REMOVED"]
    return {id for id in ids if id.endswith(context.get_job_id())}  # an ID ends with its job's ID


def live_controllers() -> dict[str, str]:
    """Return the job ID of each Ray Train controller in the cluster, keyed by the controller's actor ID."""
    import ray._private.state

    alive = ray._private.state.actors(actor_state_name="ALIVE")
    return {id: actor["JobID"] for id, actor in alive.items() if actor["ActorClassName"] == "TrainController"}


def end_controllers(spared: Collection[str]) -> None:
    """Kill this job's controllers, except the `spared` ones.

    Does nothing in an actor, because the actor's job may also run other trainers.
    """
    from ray._private.worker import global_worker

    context = ray.get_runtime_context()
    for controller, job in live_controllers().items():
        if job == context.get_job_id() and controller not in spared and not context.get_actor_id():
            global_worker.core_worker.kill_actor(ray.ActorID.from_hex(controller), True)


def remove_placement_groups(groups: set[str]) -> None:
    """Remove the placement groups with these IDs, and kill everything that still runs in them."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for group in groups:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))
