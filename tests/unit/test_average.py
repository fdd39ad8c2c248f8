"""Tests for the exponential moving average (EMA) of the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sunspot.checkpoint.average import WeightAverage
from sunspot.settings import Settings
from sunspot.train.loop import take_step
from sunspot.train.run import TrainingRun
from tests.harness.loop import gather, make_worker, plan_without_evaluation
from tests.harness.process_group import in_processes

DECAY = 0.5


class Trainee:
    """A model that is trained, either new or restored from a saved state."""

    def __init__(self, decay: float = DECAY, saved: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.model[0].bias.requires_grad_(False)
        if saved:
            self.model.load_state_dict(saved["model"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.average = WeightAverage(self.optimizer, decay)
        if saved:
            self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    def train(self, steps: int, since: int = 0) -> Trainee:
        for step in range(since, since + steps):
            self.model(torch.arange(12.0).view(4, 3).sin() * (step + 1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update(step + 1)
        return self

    def save(self) -> Any:
        live = {"model": self.model.state_dict(keep_vars=True), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(self.average.exchange(live))


def test_the_average_is_an_exponential_moving_average_of_the_weights() -> None:
    trainee, expected = Trainee(decay=0.4), torch.zeros(0)
    for step in range(1, 7):
        trainee.train(1, since=step - 1)
        decay, weights = min(0.4, (1 + step) / (10 + step)), trainee.model[2].weight.detach()
        expected = weights.clone() if step == 1 else decay * expected + (1 - decay) * weights
        torch.testing.assert_close(trainee.save()["model"]["2.weight"], expected)
    before = trainee.model[2].weight.detach().clone()
    with trainee.average.in_place(trainee.model):
        torch.testing.assert_close(trainee.model[2].weight, nn.Parameter(expected))
    assert torch.equal(trainee.model[2].weight, before)
    state = trainee.save()
    assert torch.equal(state["optimizer"]["state"][4]["trained"], before)
    assert torch.equal(state["model"]["1.running_mean"], trainee.model[1].running_mean), "buffers are not averaged"


def test_a_run_resumes_from_its_trained_weights_instead_of_their_average() -> None:
    def assert_same(one: Any, other: Any) -> None:
        torch.testing.assert_close(one, other, rtol=0, atol=0)

    whole, begun = Trainee().train(6), Trainee().train(3).save()
    assert_same(Trainee(saved=begun).train(3, since=3).save(), whole.save())
    without = Trainee(decay=0, saved=begun).train(3, since=3)
    assert_same(without.model.state_dict(), whole.model.state_dict())
    assert not any("trained" in values for values in without.save()["optimizer"]["state"].values())
    later = Trainee(saved=Trainee(decay=0).train(3).save()).train(1, since=3)
    assert_same(dict(later.save()["model"]), dict(later.model.state_dict()))


def follow(dtype: torch.dtype) -> tuple[WeightAverage, nn.Linear, torch.optim.Optimizer]:
    """Average weights that are 1.0 for 20 steps, and then 1.5 for 200 steps."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = WeightAverage(optimizer, 0.99)
    for step in range(1, 221):
        with torch.no_grad():
            model.weight.fill_(1.0 if step <= 20 else 1.5)
        average.update(step)
    return average, model, optimizer


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_averages_of_16_bit_weights_have_32_bit_precision(dtype: torch.dtype) -> None:
    average, model, optimizer = follow(dtype)
    expected, reference, its_optimizer = follow(torch.float32)
    exact = expected.exchange(live_state(reference, its_optimizer))["model"]["weight"]
    state = copy.deepcopy(average.exchange(live_state(model, optimizer)))
    torch.testing.assert_close(
        state["model"]["weight"], exact.to(dtype), rtol=1e-6 if dtype.itemsize > 2 else 0, atol=0
    )
    with average.in_place(model):
        assert torch.equal(model.weight, state["model"]["weight"])
    assert torch.equal(model.weight, torch.full((1, 1), 1.5, dtype=dtype)), "the weights from before the evaluation"
    assert torch.equal(average.exchange(live_state(model, optimizer))["model"]["weight"], state["model"]["weight"])


@pytest.mark.parametrize("is_old", [False, True])
def test_a_32_bit_average_is_restored_from_a_checkpoint(is_old: bool) -> None:
    """An older checkpoint contains only the rounded average, in `model.pt`."""
    average, model, optimizer = follow(torch.bfloat16)
    state = copy.deepcopy(average.exchange(live_state(model, optimizer)))
    if is_old:
        del state["optimizer"]["state"][0]["average"]
    restored = nn.Linear(1, 1, bias=False).bfloat16()
    restored.load_state_dict(state["model"])
    its_optimizer = torch.optim.SGD(restored.parameters(), 0.1)
    its_average = WeightAverage(its_optimizer, 0.99)
    its_optimizer.load_state_dict(state["optimizer"])
    assert torch.equal(restored.weight, model.weight), "training continues from these weights"
    [before], [after] = average._averages, its_average._averages
    assert torch.equal(after, before.bfloat16().float() if is_old else before)
    assert not any(its_optimizer.state.values()), "the optimizer gets no state of the average"


def averages(settings: Settings, looks: bool, group: dist.ProcessGroup) -> list[np.ndarray]:
    """Train the small task, and return its averages. If `looks` is set, evaluate the average after each step."""
    worker = make_worker(plan_without_evaluation(settings), group)
    run, learner = TrainingRun(worker), worker.learner
    for batch in run.batches():
        take_step(run, batch)
        if looks:
            with learner.average.in_place(learner.model), torch.no_grad():
                learner.task.loss(learner.model, learner.padding_batch)
    return [gather(average) for average in learner.average._averages]


@pytest.mark.parametrize(("workers", "parallel"), [(2, "ddp"), (3, "fsdp")])
def test_the_average_is_the_same_on_any_number_of_workers(workers: int, parallel: Any, tmp_path: Path) -> None:
    """Evaluating the average must not change the run either."""
    settings = Settings(task="tests.tasks.tiny", global_batch_size=25, learning_rate=0.1, max_steps=4, ema=DECAY)
    (tmp_path / "1").mkdir()
    [alone] = in_processes(tmp_path / "1", 1, lambda group: averages(settings, False, group))
    parted = settings.model_copy(update={"parallel": parallel})
    together, *_ = in_processes(tmp_path, workers, lambda group: averages(parted, True, group))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
