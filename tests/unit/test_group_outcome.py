"""Tests of the decision whether another trainer follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from sunspot.elastic.failures import WorkersFailedError
from sunspot.elastic.messages import FailureCounts, GroupEnd, Incident
from sunspot.errors import SettingsError
from sunspot.observe.progress import Progress
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run.incidents import Cause
from sunspot.train.group_outcome import DRIVER_TRIES, EndReason, GroupOutcome, TrainerStart, find_reason, next_start

MAX_FAILURES = 2

WORKERS = WorkerGroupError("lost", {0: RayActorError()})
RESTART = WorkerGroupError("restart", {0: GroupRestartError()})
CONTROLLER = ControllerError(ValueError("broken"))

LOST = Incident(Cause.WORKER_LOST, "rank 0 on node a", 100.0)

TWICE = FailureCounts(charged=2)
"""Failure counts after two groups have failed without a new checkpoint."""

ONCE = FailureCounts(charged=1)


def counted(charged: int, kept: int = 0) -> FailureCounts:
    return FailureCounts(charged=charged, kept=kept)


@pytest.mark.parametrize("survivor_mode", [False, True])
@pytest.mark.parametrize(
    ("error", "restart", "end", "before", "expected"),
    [
        (None, False, GroupEnd(), ONCE, counted(1)),
        (None, False, GroupEnd(counts=TWICE), TWICE, counted(1)),
        (None, False, GroupEnd(counts=TWICE), replace(TWICE, kept=0), None),
        (None, False, GroupEnd(progress=Progress(committed=9)), replace(TWICE, kept=0), counted(1, kept=9)),
        (None, True, GroupEnd(counts=TWICE), TWICE, TWICE),
        (RESTART, False, GroupEnd(counts=TWICE), TWICE, TWICE),
        (WORKERS, False, GroupEnd(counts=TWICE), ONCE, TWICE),
        (WORKERS, False, GroupEnd(counts=ONCE), ONCE, counted(1)),
        (WORKERS, False, GroupEnd(gave_up="no new checkpoint"), ONCE, None),
        (WORKERS, False, GroupEnd(fatal=SettingsError("wrong")), ONCE, None),
        (RESTART, False, GroupEnd(fatal=SettingsError("wrong")), ONCE, None),
        (WORKERS, False, None, ONCE, None),
        (None, True, None, ONCE, None),
    ],
    ids=[
        "all lost",
        "all lost after a first checkpoint",
        "all lost too often",
        "all lost after a new checkpoint",
        "restart without an error",
        "restart",
        "judged",
        "not judged",
        "gave up",
        "fatal error",
        "fatal error in a restart",
        "no control channel",
        "no control channel in a restart",
    ],
)
def test_in_survivor_mode_a_new_trainer_starts_unless_the_run_has_failed(
    error: Any,
    restart: bool,
    end: GroupEnd | None,
    before: FailureCounts,
    expected: FailureCounts | None,
    survivor_mode: bool,
) -> None:
    outcome = GroupOutcome(find_reason(error, restart, one_machine=False), error, end, LOST)
    following = next_start(outcome, TrainerStart(counts=before), MAX_FAILURES, survivor_mode)
    if not survivor_mode:
        assert following is None, "Ray starts the next group itself"
    elif expected is None:
        assert following is None
    else:
        assert following
        assert following.counts == expected
        assert (following.incident.detail, following.incident.noticed) == (
            (LOST.detail, 100.0) if error else ("no worker was left, and Ray waited for a node", 100.0)
        )


@pytest.mark.parametrize("survivor_mode", [False, True])
def test_restarts_of_a_failed_controller_are_limited_but_do_not_count_toward_max_failures(survivor_mode: bool) -> None:
    outcome = GroupOutcome(find_reason(CONTROLLER, restart=False, one_machine=True), CONTROLLER, None)
    start: TrainerStart | None = TrainerStart(counts=TWICE)
    starts = 0
    while start:
        assert start.counts == TWICE
        starts += 1
        start = next_start(outcome, start, MAX_FAILURES, survivor_mode)
    assert starts == DRIVER_TRIES
    assert str(outcome.failure) == "Ray's controller failed: Training failed due to controller error: broken"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (GroupEnd(fatal=SettingsError("wrong"), gave_up="no new checkpoint"), SettingsError),
        (GroupEnd(gave_up="no new checkpoint"), WorkersFailedError),
        (GroupEnd(), TrainingFailedError),
        (None, TrainingFailedError),
    ],
)
def test_an_error_from_a_worker_takes_precedence_over_the_error_from_ray(
    end: GroupEnd | None, expected: type[Exception]
) -> None:
    assert isinstance(GroupOutcome(EndReason.WORKERS_FAILED, WORKERS, end).failure, expected)
