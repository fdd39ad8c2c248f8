"""Trains a plan with one or more Ray trainers, and determines the outcome of the training."""

import logging
import time
from collections.abc import Callable

from sunspot.elastic.failures import WorkersFailedError
from sunspot.elastic.sick_nodes import SickNodes
from sunspot.errors import SunspotError
from sunspot.plan import Plan
from sunspot.ray_internals.controller import (
    end_controllers,
    live_controllers,
    remove_placement_groups,
    reserved_groups,
)
from sunspot.ray_session import ray_session
from sunspot.run import Claimant
from sunspot.run.attempts import fatal_error, read_attempts
from sunspot.run.checkpoints import Checkpoint, SkippedCheckpoint, find_newest_good
from sunspot.run.requests import StopRequest
from sunspot.storage.limits import retry_storage
from sunspot.train.group import TrainingContext, open_context, train_group
from sunspot.train.group_outcome import DRIVER_TRIES, EndReason, GroupOutcome, TrainerStart, next_start

log = logging.getLogger(__name__)

DRIVER_BACKOFF_S = 5
"""Seconds before the second start. Each further start waits for this much longer."""


def fit(
    plan: Plan, claimant: Claimant, stop_request: StopRequest, note_end: Callable[[str], None] = lambda why: None
) -> Checkpoint | None:
    """Train until the plan is complete or a stop is requested, and return the newest checkpoint.

    Returns None if the run is stopped or moved before its first checkpoint.

    `note_end` is called repeatedly with the reason why the newest worker group ended, or with an empty string while a
    group is training. If an error ended the run, raises the worker's `SunspotError`, or a `SunspotError` with Ray's
    reason.
    """
    start: TrainerStart | None = TrainerStart()
    failure: Exception | None = None
    sick_nodes = SickNodes()
    with ray_session():
        while start:
            reserved = reserved_groups()
            others = live_controllers()
            with open_context(plan, claimant, stop_request, note_end, sick_nodes) as context:
                plan = context.plan  # its SHARD_DEGREE has been chosen; later trainers keep it on any nodes
                outcome = train_group(context, start)
                start = choose_next_start(context, outcome, start)
            if outcome.fatal_error:
                raise outcome.fatal_error
            failure = None if start else outcome.failure
            if failure:
                break
            # A trainer that waits for a node, or whose controller failed, keeps its workers' resources reserved, so no
            # new group could start. A waiting controller would also start a group of its own once a node has come.
            end_controllers(others)
            remove_placement_groups(reserved_groups() - reserved)
            if start and outcome.reason is EndReason.CONTROLLER_FAILED:
                again = f"starting it again (start {start.failed_controllers + 1} of {DRIVER_TRIES})"
                log.warning(f"Ray's controller failed: {outcome.describe_error()}; {again}")
                time.sleep(DRIVER_BACKOFF_S * start.failed_controllers)
    return outcome_of_training(plan, claimant, stop_request, failure)


def choose_next_start(context: TrainingContext, outcome: GroupOutcome, start: TrainerStart) -> TrainerStart | None:
    """Return how to start the next trainer, or None if no other trainer follows."""
    plan, claimant = context.plan, context.claimant
    following = next_start(outcome, start, plan.settings.max_failures, survivor_mode=context.membership is not None)
    if following is None:
        return None
    over = False
    if outcome.error is None:
        over = context.stop_request.asked or has_ended(plan, claimant)
    elif outcome.reason is EndReason.CONTROLLER_FAILED:
        over = context.stop_request.asked or fatal_error(claimant) is not None
    return None if over else following


def outcome_of_training(
    plan: Plan, claimant: Claimant, stop_request: StopRequest, failure: Exception | None
) -> Checkpoint | None:
    """Return the newest checkpoint of a run that finished or was stopped, or raise the error that ended the run."""
    run = claimant.run
    fatal, checkpoint, skipped = read_end(plan, claimant)
    if fatal:
        raise fatal
    if checkpoint and not failure and (is_last(checkpoint, plan) or stop_request.marked):
        return checkpoint
    if stop_request.marked and not (checkpoint or failure or skipped):
        return None
    if checkpoint:
        step = f"step {checkpoint.step} of {plan.total_steps}"
        kept = f"{step} is kept in {run.location}, and the same command continues from there"
    else:
        kept = f"no checkpoint {'is intact' if skipped else 'was made'} in {run.location}"
    if not failure:
        stop_request.raise_signal(kept, plan.settings.job.job_id)
    reason = failure or "the workers ended before the last step"
    more = f"`sunspot doctor {run.name}` explains more"
    if checkpoint:  # otherwise the summary of the run says that it has no checkpoint
        more = f"{kept}; {more}"
    error = SunspotError(f"training failed: {reason}\n{more}")
    error.final = isinstance(failure, WorkersFailedError) and failure.final
    raise error from failure


def read_end(
    plan: Plan, claimant: Claimant
) -> tuple[Exception | None, Checkpoint | None, tuple[SkippedCheckpoint, ...]]:
    """Return the error that permanently ended the run (or None), the newest checkpoint, and the skipped checkpoints."""

    def read() -> tuple[Exception | None, Checkpoint | None, tuple[SkippedCheckpoint, ...]]:
        fatal = fatal_error(claimant)
        if fatal:
            return fatal, None, ()
        run = claimant.run
        return None, *find_newest_good(run, read_attempts(run), trust_listing=True)

    return retry_storage(plan.settings.storage_timeout_s, "reading the end", read)


def has_ended(plan: Plan, claimant: Claimant) -> bool:
    """Return True if the run is complete, or if an error has ended it permanently."""
    fatal, checkpoint, _ = read_end(plan, claimant)
    return bool(fatal or (checkpoint and is_last(checkpoint, plan)))


def is_last(checkpoint: Checkpoint, plan: Plan) -> bool:
    """Return True if a checkpoint completes the run."""
    return checkpoint.completes(plan.total_steps, plan.settings.early_stop_evaluations)
