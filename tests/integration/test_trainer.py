"""Tests of what the driver observes when one of Ray's trainers ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import TrainingFailedError

from sunspot.elastic.control import ControlChannel
from sunspot.elastic.messages import Incident
from sunspot.errors import SettingsError
from sunspot.observe.progress import Progress
from sunspot.plan import make_plan
from sunspot.run import Claimant, open_run
from sunspot.run.incidents import Cause
from sunspot.run.requests import StopRequest
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.train import group
from sunspot.train.group import TrainingContext
from sunspot.train.group_outcome import EndReason, GroupOutcome, TrainerStart, next_start
from tests.harness.control import LocalControl, worker_group


@pytest.mark.parametrize("gone", [False, True])
def test_a_lost_control_channel_does_not_hide_the_training_error(
    gone: bool, ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(task="tests.tasks.tiny", storage_path=str(tmp_path), resources_per_worker={"CPU": 1})

    def make_trainer(context: TrainingContext) -> Any:
        def fit() -> None:
            if gone:
                ray.kill(context.control._actor)
            else:
                context.control.call(ControlChannel.set_fatal_error, SettingsError("what a worker found"))
            raise TrainingFailedError("what Ray knows")

        return SimpleNamespace(fit=fit)

    monkeypatch.setattr(group, "make_trainer", make_trainer)
    plan = make_plan(settings, load_task(settings))
    claimant = Claimant(open_run(str(tmp_path), "run"), "me", "driver")
    with group.open_context(plan, claimant, StopRequest()) as context:
        outcome = group.train_group(context, TrainerStart())
    assert isinstance(outcome.failure, TrainingFailedError if gone else SettingsError)
    assert next_start(outcome, TrainerStart(), 3, survivor_mode=True) is None


def test_the_next_trainer_knows_the_progress_of_the_previous_trainer() -> None:
    """Otherwise, the steps since the previous trainer's checkpoint would not count as taken."""
    before, after = LocalControl(), LocalControl()
    before.send(ControlChannel.begin_group, worker_group(1, "a"))
    before.send(ControlChannel.set_progress, Progress(step=7))
    before.send(ControlChannel.add_loss, "a", Incident(Cause.WORKER_LOST, "rank 0 on a", 100.0), others_train=True)
    before.send(ControlChannel.explain_loss, "out of memory: 2.90 of 3.00 GiB in use on a")
    end, incident = before.call(ControlChannel.group_end), before.call(ControlChannel.incident)
    outcome = GroupOutcome(EndReason.WORKERS_FAILED, TrainingFailedError("all workers are gone"), end, incident)
    start = next_start(outcome, TrainerStart(), 3, survivor_mode=True)
    assert start
    after.send(ControlChannel.add_incident_facts, start.incident)
    for attempt, noted in ((2, 1), (3, 0)):  # the third group knows it too, if the second took no step
        incident = after.call(ControlChannel.begin_group, worker_group(attempt, "b"))
        assert (incident.last_step, incident.cause, len(incident.notes)) == (7, Cause.OUT_OF_MEMORY, noted)
