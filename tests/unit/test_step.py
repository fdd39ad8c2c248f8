"""What surrounds an optimizer step: its random numbers, and the evaluation at the end of an epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from app.checkpoint.average import WeightAverage
from app.data.order import Steps
from app.data.source import Batch, EmptySource
from app.elastic.control import Command
from app.elastic.restore import State
from app.plan import Plan
from app.settings import Settings
from app.train.loop import take_step
from app.train.run import TrainingRun
from app.train.setup import build_optimizer
from app.train.step import evaluate, seed_generators
from tests.harness.loop import make_worker, plan_without_evaluation

HELD_OUT = 50


def evaluated(group: dist.ProcessGroup, world_size: int, **settings: Any) -> tuple[list[int], dict[str, float]]:
    """The rows of each forward pass of an evaluation by one of `world_size` workers, and its result."""
    passes: list[int] = []

    def test(batch_size: int) -> Iterator[Batch]:
        return ({"row": rows} for rows in torch.arange(HELD_OUT).split(batch_size))

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        assert torch.is_inference_mode_enabled() == (settings.get("parallel") != "fsdp")
        assert not torch.is_grad_enabled()
        passes.append(len(batch["row"]))
        return batch["row"].float(), {}

    worker: Any = SimpleNamespace(
        plan=Plan(Settings(**settings), EmptySource((1,), 1), EmptySource((1,), 1), Steps(1000, 40), 25),
        world_size=world_size,
        device=torch.device("cpu"),
        model=torch.nn.Linear(1, 1),
        loader=SimpleNamespace(test=test),
        task=SimpleNamespace(loss=loss),
        average=WeightAverage(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1), 0),
        commands=SimpleNamespace(poll=Command),
        control_group=group,
        heartbeat=lambda: None,
    )
    results = evaluate(worker)
    assert results is not None
    return passes, results


@pytest.mark.parametrize(
    ("world_size", "batch", "micro", "largest"), [(1, 40, 8, 8), (2, 40, 16, 10), (2, 41, 0, 21), (30, 40, 0, 2)]
)
def test_an_evaluation_takes_no_more_rows_at_once_than_training(
    group: dist.ProcessGroup, world_size: int, batch: int, micro: int, largest: int
) -> None:
    passes, results = evaluated(group, world_size, global_batch_size=batch, micro_batch_size=micro)
    assert max(passes) == largest
    assert sum(passes) == HELD_OUT
    assert results == {"test_loss": pytest.approx((HELD_OUT - 1) / 2)}


def test_an_evaluation_leaves_nothing_of_inference_mode_to_fsdp(group: dist.ProcessGroup) -> None:
    passes, _ = evaluated(group, 1, parallel="fsdp")
    assert sum(passes) == HELD_OUT


def run_on(device: str, group: dist.ProcessGroup) -> TrainingRun:
    """A run of a worker alone, with all of its tensors on a device."""
    settings = Settings(task="tests.tasks.tiny", global_batch_size=8, micro_batch_size=5, clip_norm=1)
    worker = make_worker(plan_without_evaluation(settings), group)
    train, worker.device = worker.loader.train, torch.device("cpu" if device == "meta" else device)

    def on_device(*steps: int) -> Iterator[Batch]:
        return ({name: column.to(device) for name, column in batch.items()} for batch in train(*steps))

    worker.loader.train = on_device  # type: ignore[method-assign]
    worker.model = worker.model.to(device)
    worker.optimizer, worker.average = build_optimizer(settings, worker.task, worker.model, State())
    return TrainingRun(worker)


def test_a_step_reads_nothing_that_the_device_computes(group: dist.ProcessGroup) -> None:
    """Tensors of the meta device have no values: whatever would wait for one raises."""
    run = run_on("meta", group)
    for batch in itertools.islice(run.batches(), 2):
        take_step(run, batch)
    with pytest.raises(RuntimeError, match="meta"):
        run._window.mean_loss  # noqa: B018


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_does_not_wait_for_the_gpu(group: dist.ProcessGroup) -> None:
    run = run_on("cuda", group)
    batches = list(run._worker.loader.train(1, 0, 4))
    run._worker.loader.train = lambda *_: iter(batches)  # type: ignore[assignment, method-assign]
    for batch in itertools.islice(run.batches(), 4):
        torch.cuda.set_sync_debug_mode("error" if run.position else "default")
        try:
            take_step(run, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_random_numbers_of_a_step_are_those_that_torch_manual_seed_gives() -> None:
    seed_generators(3, 7, 1)
    drawn = torch.rand(4), np.random.rand(), random.random()
    word = int(np.random.SeedSequence([3, 7, 1]).generate_state(1)[0])
    torch.manual_seed(word)
    np.random.seed(word)
    random.seed(word)
    assert torch.equal(drawn[0], torch.rand(4))
    assert drawn[1:] == (np.random.rand(), random.random())
