"""A task's own loop: the steps of ours at any number of workers, and what is said of one that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import app.baseline.train
from app.errors import SettingsError
from app.plan import make_plan
from app.settings import Settings
from app.tasks import load_task
from app.train.loop import train
from tests.harness import REPOSITORY
from tests.harness.loop import losses_of_ranks, make_worker, plan_without_evaluation, train_ranks

BATCH = {"global_batch_size": 25, "max_steps": 12}
"""Whose shares differ on two workers, and on three."""


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of docs/own-loop.md, to be imported."""
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", (REPOSITORY / "docs/own-loop.md").read_text(), re.S | re.M
    )
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("task", ["my_loop", "my_parts", "tests.tasks.nano"])
def test_losses_do_not_depend_on_the_number_of_workers(task: str, examples: None, tmp_path: Path) -> None:
    settings = {**BATCH, "task": task, "micro_batch_size": 4}
    alone = losses_of_ranks(tmp_path / "1", 1, **settings)
    assert len(alone) == 12
    assert alone[-1] < alone[0]
    for workers in (2, 3):
        assert losses_of_ranks(tmp_path / str(workers), workers, **settings) == pytest.approx(alone, rel=1e-5)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a task with the model of the small one; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"own_{abs(hash(text))}"
        parts = "build_model, build_optimizer, schedule"
        (tmp_path / f"{name}.py").write_text(f"from tests.tasks.tiny import {parts}\n{text}\n")
        return name

    return write


PLAIN = """
from app.tasks.images import loss as measure

def train(run):
    for batch in run.batches():
        losses, metrics = measure(run.model, batch)
        (losses.sum() * run.weight).backward()
        run.log({"loss": losses, **metrics})
        run.clip()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step()
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_loop_takes_the_steps_of_ours(parallel: str, tmp_path: Path, own: Callable[..., str]) -> None:
    """In a step that is too small for all workers, too."""
    settings: dict[str, Any] = {"global_batch_size": 5, "max_steps": 4, "parallel": parallel, "clip_norm": 0.5}
    ours = train_ranks(tmp_path / "ours", 3, task="tests.tasks.tiny", **settings)
    theirs = train_ranks(tmp_path / "theirs", 3, task=own(PLAIN), **settings)
    for name, weights in ours.items():
        np.testing.assert_array_equal(theirs[name], weights)


BEGIN = "def train(run):\n    for batch in run.batches():\n        "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BEGIN + "pass", "took a batch and did not call run.step"),
        (BEGIN + "run.step()", "logged nothing of a batch"),
        (BEGIN + "run.log({'loss': run.model.state_dict()['0.bias']})", r"logged loss of shape \[8\]; .* 25 rows"),
        (BEGIN + "run.log({'loss': run.model[0].bias.sum()}); run.step(); run.step()", "called run.step.. twice"),
        (BEGIN + "run.log({'loss': run.model[0].bias.sum()}); run.step(); break", "returned at step 1 of 12"),
    ],
)
def test_a_loop_that_cannot_be_is_told_so(
    text: str, message: str, own: Callable[..., str], group: dist.ProcessGroup
) -> None:
    worker = make_worker(plan_without_evaluation(Settings(task=own(text), **BATCH)), group)
    with pytest.raises(SettingsError, match=message):
        train(worker)


def test_held_out_rows_need_a_loss(examples: None) -> None:
    settings = Settings(task="my_loop")
    plan = make_plan(settings, load_task(settings))
    assert plan.test is None
    assert "; no loss, so no evaluation" in plan.reasons[0]
    with pytest.raises(SettingsError, match="my_loop: brings its own loop"):
        app.baseline.train.train(settings)


def test_the_script_that_became_a_task_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on from what it has saved; with the same rates, and a model of the same loss at first."""
    from tests.tasks import nano, nano_script

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nano_script, "SAVE_EVERY", 2)
    (tmp_path / "text").write_bytes(bytes(range(97, 123)) * 40)
    first = nano_script.train(str(tmp_path / "text"), str(tmp_path), 2)
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 2
    assert nano_script.train(str(tmp_path / "text"), str(tmp_path), 12) < first
    assert [nano.rate(step) for step in range(200)] == [nano_script.rate(step) for step in range(200)]
