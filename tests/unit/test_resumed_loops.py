"""Tests of runs with their own loops and averaged weights that are killed and resume on other numbers of workers.

The ranks are forked processes that write real checkpoints, without Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sunspot.data.source import rows_in
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.settings import Settings
from tests.harness.loop import plan_without_evaluation, train_group
from tests.harness.training import consumed, newest, weights

STEPS = 24
KILLED_AT = 17
SAVED_EVERY = 5


def plan_of(storage: Path, settings: dict[str, Any]) -> Plan:
    """Return a plan of one epoch of STEPS steps."""
    common = {"storage_path": str(storage), "run_name": "run", "epochs": 1, "audit": True, "checkpoint_every_s": 0}
    rows = rows_in(plan_without_evaluation(Settings(**settings)).source)
    batch = {"global_batch_size": -(-rows // STEPS), "checkpoint_every_steps": SAVED_EVERY}
    plan = plan_without_evaluation(Settings(**common, **batch, **settings))
    assert plan.total_steps == STEPS
    return plan


@pytest.mark.parametrize(
    ("settings", "then"),
    [
        ({"task": "sunspot.tasks.gan", "task_args": {"width": 16}}, {}),
        ({"task": "tests.tasks.nano"}, {}),
        ({"task": "tests.tasks.tiny", "ema": 0.9, "learning_rate": 0.05, "parallel": "fsdp"}, {"parallel": "ddp"}),
        ({"task": "tests.tasks.tiny", "ema": 0.9, "learning_rate": 0.05}, {"parallel": "fsdp"}),
    ],
    ids=["gan", "nano", "ema from parts", "ema to parts"],
)
def test_a_killed_run_resumes_with_a_different_number_of_workers(
    settings: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    broken, whole = (plan_of(tmp_path / name, settings) for name in ("broken", "whole"))
    resumed = plan_of(tmp_path / "broken", {**settings, **then})
    train_group(broken, 2, killed_at=KILLED_AT)
    train_group(resumed, 3)
    train_group(whole, 1)
    run = open_run(str(tmp_path / "broken"), "run")
    assert [attempt.step for attempt in read_attempts(run)] == [0, KILLED_AT // SAVED_EVERY * SAVED_EVERY]
    assert newest(run).step == STEPS
    rows = [row for step in consumed(run).values() for row in step]
    assert sorted(rows) == list(range(rows_in(whole.source))), "the audit contains each row once"
    expected = weights(open_run(str(tmp_path / "whole"), "run"))
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
