"""Passes workers' errors to the failure judge, and ends the trainer if the judge says so.

This module uses only Ray's public API. A `ray.train.UserCallback` in Ray Train's controller receives the errors before
Ray acts on them, and an error that the callback raises ends the trainer.
"""

import time
from collections.abc import Callable
from typing import Any

import ray.train
from ray.train import ControllerError, FailureConfig, TrainingFailedError, WorkerGroupError

from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.failures import reason
from sunspot.elastic.messages import Incident
from sunspot.elastic.out_of_memory import find_killed_for_memory
from sunspot.ray_internals.controller import GroupRestartError, unwrap_health_check
from sunspot.run.incidents import Cause

MAX_DETAIL = 500
"""Maximum number of characters kept from the errors of all workers together."""

ALWAYS_CONTINUE = FailureConfig(max_failures=-1)
"""A Ray failure configuration that continues after every failure, unless a `FailureCallback` ends the trainer."""


class FailureCallback(ray.train.UserCallback):
    """A callback that ends a trainer whose workers have failed, unless the failure judge lets Ray continue.

    It runs in Ray Train's controller. Ray waits for it before starting another group or replacing a worker, which gives
    the judge time to exclude a broken node.
    """

    def __init__(
        self, control: ControlClient, judge: Callable[[dict[int, Exception]], bool], survivor_mode: bool = False
    ) -> None:
        """Create a callback. `judge` is a `failures.FailureJudge`."""
        self._control = control
        self._judge = judge
        self._survivor_mode = survivor_mode

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Record the errors. Raise a `ControllerError`, which ends the trainer, unless the judge lets Ray continue."""
        errors = {rank: unwrap_health_check(error) for rank, error in worker_exceptions.items()}
        failed = {rank: error for rank, error in errors.items() if not isinstance(error, GroupRestartError)}
        lines = "; ".join(f"rank {rank}: {reason(error)}" for rank, error in sorted(failed.items()))[:MAX_DETAIL]
        if failed and not self._survivor_mode:  # otherwise the membership server has reported the loss
            short = any(find_killed_for_memory(error)[0] for error in failed.values())
            cause = Cause.OUT_OF_MEMORY if short else Cause.WORKER_LOST
            self._control.send(ControlChannel.add_incident_facts, Incident(cause, lines, time.time(), lines))
        if not self._judge(errors):
            raise ControllerError(WorkerGroupError(lines, errors))


def find_worker_error(error: TrainingFailedError) -> TrainingFailedError:
    """Return the workers' error for which a `FailureCallback` ended the trainer, or `error` if Ray ended it."""
    failure = error.controller_failure if isinstance(error, ControllerError) else None
    return failure if isinstance(failure, WorkerGroupError) else error
