"""Ray Train's controller: when a worker group ends, whether another follows, and what a failed controller leaves.

ray.train.v2._internal.execution   the controller's states, and its worker group: to end a group that restarts while
                                   there are too few nodes for the next. The public `UserCallback` learns of neither
ray.train.v2...failure_handling    decides whether another worker group follows a failed one: the public FailureConfig
                                   counts all failures of a job's life, and knows no bugs
RayActorError(preempted=True)      raised by a worker, asks for another group at no charge: no public API restarts one
ray._raylet.PlacementGroupID       to give back what a failed controller had reserved: the public API removes only
                                   groups that one has made oneself
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError

from sunspot.errors import shorten
from sunspot.log import warn_once

log = logging.getLogger(__name__)


class GroupRestartError(RayActorError):
    """Ends a worker so that Ray Train starts another group, as after a preemption, whatever MAX_FAILURES is.

    The controller gets it as it was raised.
    """

    def __init__(self) -> None:
        super().__init__(error_msg="the worker group ends, for a restart", preempted=True)


def end_groups_at_once() -> list[Any]:
    """Callbacks for Ray Train's controller: a group that restarts ends at once, waiting for nodes or not.

    Ray would keep an elastic group's processes and places until there are enough nodes for the next group. A node that
    was told to go then stays to the end of its notice, and Kubernetes makes the pod that replaces it only after that.
    """
    try:
        from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
        from ray.train.v2._internal.execution.controller.state import RestartingState
    except ImportError as error:
        warn_once(
            log, f"with too few nodes left, those told to go may be replaced only when their notice is over: {error}"
        )
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
                    warn_once(
                        log, f"a worker group that restarts keeps its nodes until the next begins: {shorten(error)}"
                    )

    return [EndAtOnce()]


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
        warn_once(log, f"MAX_FAILURES counts all failures of a start, whatever came of it in between: {shorten(error)}")
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
