"""Tests that schedule, weight decay and clipping work in the same way on any number of workers."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sunspot.checkpoint.tensors import map_tensors
from sunspot.elastic.restore import TrainingState
from sunspot.errors import SettingsError
from sunspot.parallel.gradients import clip_gradients
from sunspot.parallel.sharding import shard_model
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.tasks.defaults import PlainTask, build_optimizer, learning_rate_factor
from sunspot.train import build
from sunspot.train.learner import load_rest
from tests.harness.constants import SetConstants
from tests.harness.loop import train_ranks

TINY = {"task": "tests.tasks.tiny", "global_batch_size": 25, "learning_rate": 0.1, "max_steps": 4}
"""Settings of a run with SGD, whose steps are as long as its gradients."""


@given(st.sampled_from(["linear", "cosine", "constant"]), st.integers(0, 30), st.integers(1, 40))
def test_the_learning_rate_rises_to_its_peak_and_then_falls(schedule: str, warmup: int, total: int) -> None:
    settings = Settings(schedule=schedule, warmup_steps=warmup)
    factors = [learning_rate_factor(settings, step, total) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    if total > warmup:
        assert factors[warmup] == 1, "the peak comes right after the warm-up"
        assert learning_rate_factor(settings, total, total) == pytest.approx(float(schedule == "constant"), abs=1e-9)


@given(st.floats(0, 1, exclude_min=True, exclude_max=True), st.integers(1, 1000))
def test_the_warm_up_takes_a_fraction_of_the_steps(share: float, total: int) -> None:
    steps = Settings(warmup_steps=math.ceil(share * total))
    for step in range(total):
        found = learning_rate_factor(Settings(warmup_steps=share), step, total)
        assert found == learning_rate_factor(steps, step, total)


def test_a_minimal_task_gets_the_default_optimizer_and_schedule() -> None:
    module = ModuleType("mine")
    module.build_model, module.loss = (lambda *_: nn.Linear(2, 2)), None
    settings = Settings(schedule="cosine", warmup_steps=1, weight_decay=0.1, learning_rate=0.5)
    task = PlainTask(module, settings)
    assert [task.schedule(step, 3) for step in range(3)] == pytest.approx([0.5, 1.0, 0.5])
    decays = {len(g["params"][0].shape): (g["weight_decay"], g["lr"]) for g in _groups(task, settings)}
    assert decays == {2: (0.1, 0.5), 1: (0.0, 0.5)}
    module.schedule = lambda step, total_steps: 7.0
    with pytest.raises(SettingsError, match=r"SUNSPOT_SCHEDULE=cosine: .* brings its own schedule"):
        PlainTask(module, settings)
    assert PlainTask(module, Settings(weight_decay=0.1)).schedule(0, 1) == 7.0


def test_a_task_that_builds_its_own_scheduler_does_not_get_the_default_schedule() -> None:
    module, settings = ModuleType("mine"), Settings(task="mine")
    module.build_scheduler = lambda optimizer, *_: None
    assert PlainTask(module, settings).schedule is None
    with pytest.raises(SettingsError, match=r"SUNSPOT_WARMUP_STEPS=3: .* brings its own schedule"):
        PlainTask(module, Settings(warmup_steps=3))
    module.schedule = lambda step, total_steps: 1.0
    with pytest.raises(SettingsError, match="both schedule and build_scheduler"):
        PlainTask(module, settings)


def _groups(task: Any, settings: Settings) -> Any:
    return task.build_optimizer(task.build_model(settings, None), settings).param_groups


@pytest.mark.parametrize("task", ["sunspot.tasks.mnist", "sunspot.tasks.gpt", "sunspot.tasks.lightning_mnist"])
@pytest.mark.parametrize(("name", "value"), [("schedule", "cosine"), ("warmup_steps", 3), ("weight_decay", 0.1)])
def test_a_setting_that_the_task_ignores_is_rejected(task: str, name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"SUNSPOT_{name.upper()}={value}: {task} brings its own"):
        load_task(Settings(task=task, **{name: value}))
    load_task(Settings(task=task, clip_norm=1))


def test_a_resumed_run_uses_the_current_learning_rate_and_weight_decay() -> None:
    model = nn.Linear(2, 2)
    before = Settings(weight_decay=0.1)
    today = Settings(weight_decay=0.3, learning_rate=0.5)
    saved = build_optimizer(model, before).state_dict()
    optimizer, _ = build.build_optimizer(today, PlainTask(ModuleType("mine"), today), model)
    load_rest(TrainingState(optimizer=saved), model, optimizer)
    found = [(group["weight_decay"], group["lr"], group["initial_lr"]) for group in optimizer.param_groups]
    assert found == [(0.3, 0.5, 0.5), (0.0, 0.5, 0.5)]


@pytest.mark.parametrize("fused", [None, True])
def test_a_restored_state_has_the_memory_layout_of_the_parameters(
    fused: bool | None, set_constants: SetConstants
) -> None:
    """Checkpoints have contiguous tensors, and a fused optimizer accepts only one layout."""
    set_constants("sunspot.parallel.sharding", CHANNELS_LAST=("cpu",))
    module = ModuleType("mine")
    settings = Settings()
    state = TrainingState()
    module.build_optimizer = lambda m, _: torch.optim.AdamW(m.parameters(), 0.1, fused=fused)
    images, losses = torch.rand(5, 3, 8, 8), []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = shard_model(nn.Conv2d(3, 4, 3), settings, torch.device("cpu"))
        for _ in range(2):
            optimizer, _ = build.build_optimizer(settings, PlainTask(module, settings), model)
            load_rest(state, model, optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(images).square().mean()
                loss.backward()
                optimizer.step()
            saved = optimizer.state_dict()
            if resumes:
                saved = map_tensors(saved, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
            state = TrainingState(optimizer=saved)
        state = TrainingState()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()
        assert optimizer.param_groups[0]["fused"] is fused
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_a_gradient_is_clipped_to_the_maximum_norm() -> None:
    model = nn.Linear(3, 1, bias=False)
    for longest, left in [(0.0, 5.0), (10.0, 5.0), (2.5, 2.5)]:
        model.weight.grad = torch.tensor([[3.0, 4.0, 0.0]])
        clip_gradients(model, longest)
        assert float(model.weight.grad.norm()) == pytest.approx(left)


def test_clipping_uses_the_gradient_norm_over_all_workers_passes_and_shards(tmp_path: Path) -> None:
    """The weights do not depend on the number of workers, passes or shards."""
    free = train_ranks(tmp_path / "free", 1, **TINY)
    alone = train_ranks(tmp_path / "alone", 1, **TINY, clip_norm=0.05)
    several = train_ranks(tmp_path / "several", 3, **TINY, clip_norm=0.05, micro_batch_size=4)
    parts = train_ranks(tmp_path / "parts", 3, **TINY, clip_norm=0.05, micro_batch_size=4, parallel="fsdp")
    for name, weights in alone.items():
        np.testing.assert_allclose(several[name], weights, rtol=0, atol=1e-6)
        np.testing.assert_allclose(parts[name], several[name], rtol=0, atol=1e-6)
    assert not np.allclose(free["4.weight"], alone["4.weight"], atol=1e-3)


@pytest.mark.parametrize(("parallel", "degree"), [("ddp", 0), ("fsdp", 0), ("hsdp", 1)])
def test_gradients_sent_in_bf16_are_rounded(parallel: str, degree: int, tmp_path: Path) -> None:
    """Rounding changes the gradients little. A single worker sends no gradients."""
    exact = train_ranks(tmp_path / "exact", 2, **TINY)
    sent = {"parallel": parallel, "shard_degree": degree, "gradient_precision": "bf16"}
    rounded = train_ranks(tmp_path / "rounded", 2, **TINY, **sent)
    apart = np.abs(rounded["4.weight"] - exact["4.weight"]).max()
    assert 1e-7 < apart < 1e-3
