"""Tests of COMPILE: all passes share one graph, and the model's names and gradients stay the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sunspot.data.order import Steps, micro_batches
from sunspot.data.source import EmptySource
from sunspot.errors import SettingsError
from sunspot.parallel.sharding import find_blocks
from sunspot.plan import Plan
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.tasks.gpt import GPT
from sunspot.train.build import compile_model
from sunspot.train.evaluate import evaluation_mode
from sunspot.train.learner import row_losses
from sunspot.train.loop import train
from tests.harness.loop import make_worker, plan_without_evaluation, train_rank

CPU = torch.device("cpu")

GRAPHS = 3
"""Graphs of a training pass: the model or each of its blocks, and the task's loss before and after the model."""


def plan_of(rows: int, **settings: Any) -> Plan:
    steps = Steps(rows, settings.get("global_batch_size", 128))
    return Plan(Settings(**settings), EmptySource((1,), 2), None, steps, steps.per_epoch)


@given(st.integers(2, 500), st.integers(2, 90), st.integers(1, 9), st.integers(0, 20))
def test_losing_workers_does_not_enlarge_forward_passes(rows: int, batch: int, workers: int, micro: int) -> None:
    """This holds for any number of remaining workers, out of nine."""
    plan = plan_of(rows, num_workers=9, global_batch_size=batch, micro_batch_size=micro, compile="default")

    def passes_of(workers: int, limit: int) -> list[list[slice]]:
        places = itertools.product(range(plan.steps.per_epoch), range(workers))
        shares = [plan.steps.share(step, workers, rank) for step, rank in places]
        return [list(micro_batches(end - begin, limit)) for begin, end in shares if end > begin]

    all_train, left = passes_of(9, micro), passes_of(workers, plan.pass_limit)
    largest = max(part.stop - part.start for parts in all_train for part in parts)
    assert plan.pass_rows == max(largest, min(3, micro or 3))
    assert max(part.stop - part.start for parts in left for part in parts) <= plan.pass_rows
    assert plan.passes(workers) == max(map(len, left))
    assert plan_of(rows, global_batch_size=batch).pass_rows == 0


def test_padding_rows_do_not_affect_the_step(group: dist.ProcessGroup) -> None:
    settings = Settings(task="tests.tasks.tiny", global_batch_size=8, num_workers=1)
    found = []
    for chosen in (settings, settings.model_copy(update={"compile": "default"})):
        torch.manual_seed(0)
        learner = make_worker(plan_without_evaluation(settings), group).learner
        learner.plan = dataclasses.replace(learner.plan, settings=chosen)
        batch, seen = next(learner.loader.train(1, 0, 1)), []
        learner.model.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(len(given[0])))
        losses, metrics = row_losses(learner, learner.model, {name: column[:5] for name, column in batch.items()})
        losses.sum().backward()
        found.append((seen, losses.detach(), metrics["accuracy"], learner.model[0].weight.grad))
    (free, *before), (filled, *after) = found
    assert (free, filled) == ([5], [8])
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other)
        torch.testing.assert_close(one, other)


@pytest.fixture
def only_graphs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Compile models only to graphs, because generating code requires a compiler and takes a minute.

    Return the compiler's counters.
    """
    import torch._dynamo  # takes seconds
    from torch._dynamo.utils import counters

    really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda code, mode="", **options: really(code, backend="aot_eager", **options))
    monkeypatch.setenv("CXX", "true")
    torch._dynamo.reset()
    counters.clear()
    return counters["stats"]


def test_short_and_full_steps_use_the_same_compiled_graph(group: dist.ProcessGroup, only_graphs: Counter[str]) -> None:
    """The last step of the epoch is a short one."""
    settings = {"task": "tests.tasks.tiny", "global_batch_size": 7000, "epochs": 1, "learning_rate": 0.1}
    plain = train_rank(plan_without_evaluation(Settings(**settings)), group)
    worker = make_worker(plan_without_evaluation(Settings(**settings, compile="default")), group)
    train(worker)
    assert only_graphs["unique_graphs"] == GRAPHS
    compiled = worker.learner.model.state_dict()
    assert list(compiled) == list(plain)
    for name, weights in plain.items():
        np.testing.assert_allclose(compiled[name].numpy(), weights, rtol=0, atol=1e-5)


def test_the_compiled_graph_is_the_same_for_any_number_of_workers(
    group: dist.ProcessGroup, only_graphs: Counter[str]
) -> None:
    """The evaluation has graphs of its own."""
    settings = Settings(task="tests.tasks.tiny", num_workers="2..8", global_batch_size=64, compile="default")
    learner = make_worker(plan_without_evaluation(settings), group).learner
    batch = next(learner.loader.train(1, 0, 1))
    for workers in range(8, 0, -1):
        learner.place = dataclasses.replace(learner.place, world_size=workers)
        for rows in micro_batches(-(-64 // workers), learner.plan.pass_limit):
            part = {name: column[rows] for name, column in batch.items()}
            row_losses(learner, learner.model, part)[0].sum().backward()
        with evaluation_mode(learner.model), torch.no_grad():
            row_losses(learner, learner.model, {name: column[:workers] for name, column in batch.items()})
    assert only_graphs["unique_graphs"] == 2 * GRAPHS


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_repeated_blocks_share_a_compiled_graph(
    parallel: str, group: dist.ProcessGroup, only_graphs: Counter[str]
) -> None:
    gpt = {
        "task": "sunspot.tasks.gpt",
        "task_args": {"layers": 4, "width": 50, "heads": 2, "context": 16},
        "global_batch_size": 25,
        "micro_batch_size": 9,
        "max_steps": 2,
    }
    plain = train_rank(plan_without_evaluation(Settings(**gpt)), group)
    compiled = train_rank(plan_without_evaluation(Settings(**gpt, parallel=parallel, compile="default")), group)
    assert only_graphs["unique_graphs"] == GRAPHS
    assert list(compiled) == list(plain)
    for name, weights in plain.items():
        np.testing.assert_allclose(compiled[name], weights, rtol=0, atol=1e-5)


def build_resnet() -> nn.Module:
    from torchvision.models import resnet50  # takes seconds

    return resnet50()


@pytest.mark.parametrize(
    ("mode", "build", "alone"),
    [
        ("default", lambda: GPT(256, 4, 32, 2, 16, tied=True), True),
        ("max-autotune", lambda: GPT(256, 4, 32, 2, 16, tied=True), False),
        ("default", lambda: GPT(256, 3, 32, 2, 16, tied=True), False),
        ("default", build_resnet, False),
        ("default", lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(9))), False),
    ],
)
def test_only_models_with_repeated_blocks_are_compiled_block_by_block(
    mode: str, build: Callable[[], nn.Module], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode, dynamic: compiled.append(self))
    monkeypatch.setenv("CXX", "true")
    model = build()
    compile_model(model, plan_of(10, compile=mode), 1, CPU)
    assert compiled == (list(find_blocks(model)) if alone else [model])


def test_a_missing_compiler_is_reported_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SettingsError, match=r"SUNSPOT_COMPILE=default: torch.compile needs g\+\+ or clang\+\+, which"):
        compile_model(nn.Linear(1, 1), plan_of(10, compile="default"), 1, CPU)
    compile_model(nn.Linear(1, 1), plan_of(10), 1, CPU)


def test_a_lightning_module_is_compiled() -> None:
    with pytest.raises(SettingsError, match=r"SUNSPOT_COMPILE=default: .*is never compiled"):
        load_task(Settings(task="sunspot.tasks.lightning_mnist", compile="default"))


@pytest.mark.parametrize(
    ("micro", "survivors", "mode"),
    [
        (0, "off", "max-autotune"),
        (40, "off", "max-autotune-no-cudagraphs"),
        (0, "auto", "max-autotune-no-cudagraphs"),
    ],
)
def test_accumulated_gradients_are_not_kept_in_the_memory_of_a_cuda_graph(
    micro: int, survivors: str, mode: str
) -> None:
    """The remaining worker accumulates the gradients of two passes."""
    model, modes = nn.Linear(1, 1), []
    model.compile = lambda mode, dynamic: modes.append(mode)
    plan = plan_of(1000, micro_batch_size=micro, compile="max-autotune", survivors=survivors)
    compile_model(model, plan, 2, CPU)
    assert modes == [mode]
