"""Tests that a model's passes give the same gradients with CUDA graphs, which are imitated on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from sunspot.settings import Settings
from sunspot.train.cuda_graphs import PASSES_BEFORE_CAPTURE, GraphedForward, use_graphs

STEPS = PASSES_BEFORE_CAPTURE + 4


class FakeGraphs:
    """An imitation of `torch.cuda.make_graphed_callables`, whose graphs overwrite their values in each replay."""

    def __init__(self, fault: float = 1.0) -> None:
        self.fault = fault
        "Factor of the gradients, which is 1 for a graph without a fault."
        self.replays = 0

    def __call__(self, module: nn.Module, sample: tuple[torch.Tensor, ...], allow_unused_input: bool) -> None:
        assert allow_unused_input
        graphs, eager = self, module.forward
        parameters = list(module.parameters())
        gradients = [torch.zeros_like(each) for each in parameters]
        result = torch.empty_like(eager(*sample))
        live: list[torch.Tensor] = []

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
                for static, value in zip(sample, inputs, strict=False):
                    static.copy_(value)
                with torch.enable_grad():
                    live[:] = [eager(*sample)]
                graphs.replays += 1
                return result.copy_(live[0].detach()).detach()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                newest = torch.autograd.grad(live[0], parameters, gradient, retain_graph=True)
                for static, value in zip(gradients, newest, strict=True):
                    static.copy_(value * graphs.fault)
                return (*[None] * len(sample), *(each.detach() for each in gradients))

        module.forward = lambda *inputs: Replay.apply(*inputs, *parameters)


class Mlp(nn.Sequential):
    """A model with batch norm, whose buffers change in each pass, and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.ReLU(), nn.Linear(8, 2))


def step_once(model: nn.Module, rows: list[torch.Tensor]) -> None:
    mse_loss(model(rows[0]), torch.ones(6, 2)).backward()


def call_twice(model: nn.Module, rows: list[torch.Tensor]) -> None:
    first, second = model(rows[0]), model(rows[1])
    mse_loss(first, second + 1).backward()


def accumulate(model: nn.Module, rows: list[torch.Tensor]) -> None:
    for each in rows:
        step_once(model, [each])


def discard_pass(model: nn.Module, rows: list[torch.Tensor]) -> None:
    model(rows[1])
    step_once(model, rows)


def evaluate_between(model: nn.Module, rows: list[torch.Tensor]) -> None:
    output = model(rows[0])
    with torch.no_grad():
        model(rows[1])
    mse_loss(output, torch.ones(6, 2)).backward()


def train(model: nn.Module, take_step: Callable[[nn.Module, list[torch.Tensor]], None]) -> dict[str, torch.Tensor]:
    """Train a model, and return its state. The rows and the dropout differ between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        torch.manual_seed(step)
        take_step(model, [torch.rand(6, 4), torch.rand(6, 4)])
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("take_step", [step_once, call_twice, accumulate, discard_pass, evaluate_between])
def test_training_with_cuda_graphs_gives_the_same_weights_and_buffers(
    take_step: Callable[[nn.Module, list[torch.Tensor]], None],
) -> None:
    model = Mlp()
    expected = train(copy.deepcopy(model), take_step)
    graphs = FakeGraphs()
    model.forward = GraphedForward(model, graphs)  # type: ignore[method-assign]
    state = train(model, take_step)
    assert graphs.replays > 2  # one replay compares the graph with a normal pass
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("fault", [1.5, float("nan")])
def test_a_cuda_graph_with_wrong_gradients_is_not_used(fault: float, capsys: pytest.CaptureFixture[str]) -> None:
    model = Mlp()
    expected = train(copy.deepcopy(model), step_once)
    graphs = FakeGraphs(fault)
    model.forward = GraphedForward(model, graphs)  # type: ignore[method-assign]
    state = train(model, step_once)
    assert graphs.replays == 1
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert "graph of the model for inputs of shape 6x4: not used, because its results differ" in capsys.readouterr().out


def test_a_model_that_cannot_be_captured_trains_without_a_cuda_graph(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = Mlp()
    model.forward = GraphedForward(model, fail)  # type: ignore[method-assign]
    train(model, step_once)
    assert capsys.readouterr().out == (
        "CUDA graph of the model for inputs of shape 6x4: not used, because its capture failed: operation not "
        "permitted when stream is capturing\n"
    )


def test_a_model_with_hooks_gets_no_cuda_graph(capsys: pytest.CaptureFixture[str]) -> None:
    model = Mlp()
    model[0].register_forward_hook(lambda *_: None)
    graphs = FakeGraphs()
    model.forward = GraphedForward(model, graphs)  # type: ignore[method-assign]
    train(model, step_once)
    assert not graphs.replays
    assert "the model has hooks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        (Settings(graph="auto"), "cpu", "the workers train on cpu"),
        (Settings(graph="auto", parallel="fsdp"), "cuda", "SUNSPOT_PARALLEL=fsdp exchanges parameters"),
        (Settings(graph="auto", compile="default"), "cuda", "SUNSPOT_COMPILE=default compiles the model"),
        (Settings(graph="auto", recompute="blocks"), "cuda", "SUNSPOT_RECOMPUTE=blocks runs blocks again"),
    ],
)
def test_the_reason_why_no_cuda_graphs_are_used_is_printed(
    settings: Settings, device: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Mlp()
    use_graphs(model, settings, torch.device(device))
    assert not isinstance(model.forward, GraphedForward)
    assert f"SUNSPOT_GRAPH=auto: CUDA graphs are not used, because {reason}" in capsys.readouterr().out


def test_a_model_on_a_gpu_gets_cuda_graphs() -> None:
    model = Mlp()
    use_graphs(model, Settings(graph="auto"), torch.device("cuda"))
    assert isinstance(model.forward, GraphedForward)
