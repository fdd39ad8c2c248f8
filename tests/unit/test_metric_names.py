"""Tests of reserved metric names, wherever a task can choose a metric's name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sunspot.errors import SettingsError
from sunspot.metric_names import MAX_LENGTH, RECORD_NAMES, find_fault, refuse_names
from sunspot.observe.metrics import MetricWindow, RecentMeans
from sunspot.run.history import model_metrics
from sunspot.settings import Settings
from sunspot.train.learner import Learner, refuse_means
from sunspot.train.loop import train
from tests.harness.loop import make_worker, plan_without_evaluation


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(
            (name, f"its own {name}")
            for name in ("step", "steps", "attempt", "epoch", "rows", "learning_rate", "time", "ranks")
        ),
        ("loss", "the loss itself"),
        ("test_accuracy", "the prefix test_ is reserved"),
        ("", "empty"),
        (" ", "empty"),
        ("two\nlines", "line breaks"),
        ("lone \ud800 surrogate", "unprintable characters"),
        ("long" * MAX_LENGTH, "800 characters"),
        (3, "type int"),
        (float("nan"), "type float"),
        (None, "type NoneType"),
    ],
)
def test_reserved_and_unprintable_names_are_rejected(name: object, fault: str) -> None:
    with pytest.raises(SettingsError) as refused:
        refuse_names(["accuracy", name], "its loss returns")
    assert fault in str(refused.value)
    assert "reserved names are attempt, " in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["accuracy", "Step", "lr", "f1/cat", "rewards/chosen", "naïve", "last_step", "testing"]
)
def test_unreserved_metric_names_are_accepted(name: str) -> None:
    assert not find_fault(name)


def test_every_name_in_a_record_is_reserved(group: dist.ProcessGroup) -> None:
    window = MetricWindow(group, torch.device("cpu"), RecentMeans(100, {}))
    window.add_step([{"loss": torch.ones(2)}], step_time=0.1, data_wait=0.0)
    record = {"attempt": 1, **window.close(1, 1, 0.1), **window.recent.newest}
    assert record.keys() - {"loss"} <= RECORD_NAMES
    assert model_metrics(record) == {"loss": 1.0}


def test_a_loss_function_cannot_return_a_reserved_name(group: dist.ProcessGroup) -> None:
    learner: Learner = SimpleNamespace(plan=SimpleNamespace(settings=Settings(task="mine")))  # type: ignore[assignment]
    losses = torch.ones(2)
    for name in ("step", "loss", "test_hits"):
        with pytest.raises(SettingsError, match=f"SUNSPOT_TASK=mine: its loss returns a metric with the name '{name}'"):
            refuse_means(learner, (losses, {name: losses}), 2)
    assert refuse_means(learner, (losses, {"hits": losses}), 2)[1] == {"hits": losses}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{'loss': bias, 'steps': bias}", "it logs a metric with the name 'steps': every record"),
        ("{'loss': bias, 'hits': 0.5}", "logged hits of type float; log a tensor"),
    ],
)
def test_a_custom_loop_cannot_log_a_reserved_name(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    """Check that the run ends before it has counted the first step."""
    name = f"logs_{abs(hash(value))}"
    (tmp_path / f"{name}.py").write_text(
        "from tests.tasks.tiny import build_model, build_optimizer, schedule\n\n"
        "def train(run):\n    for batch in run.batches():\n        bias = run.model[0].bias.sum()\n"
        f"        run.log({value})\n        run.step()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worker = make_worker(plan_without_evaluation(Settings(task=name, max_steps=2)), group)
    with pytest.raises(SettingsError, match=message):
        train(worker)
    assert worker.step == 0


def test_metrics_of_the_trainer_itself_are_omitted_and_other_metrics_are_kept() -> None:
    pytest.importorskip("transformers")
    from sunspot.adapters.transformers import measured as measured_by_trainer

    logs = {"loss": 1.0, "epoch": 0.1, "learning_rate": 1e-3, "grad_norm": 2.0, "eval_rewards/chosen": 3.0, "step": 4}
    assert measured_by_trainer(logs) == {"grad_norm": 2.0, "rewards_chosen": 3.0, "step": 4.0}, (
        "refused as it is logged"
    )
