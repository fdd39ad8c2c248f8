"""What surrounds an optimizer step: its random numbers, and the evaluation at the end of an epoch."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sunspot.parallel.decisions
from sunspot.checkpoint.average import WeightAverage
from sunspot.data.order import Steps
from sunspot.data.source import Batch, EmptySource
from sunspot.elastic.messages import Command
from sunspot.elastic.restore import State
from sunspot.observe.metrics import MetricWindow, RecentMeans
from sunspot.parallel.decisions import StepActions, StepDecisionBroadcast
from sunspot.plan import Plan
from sunspot.settings import Settings
from sunspot.train.loop import take_step
from sunspot.train.run import TrainingRun
from sunspot.train.setup import build_optimizer
from sunspot.train.step import after_step, evaluate, make_up_evaluation, seed_generators
from tests.harness.loop import make_worker, plan_without_evaluation
from tests.harness.process_group import in_processes

HELD_OUT = 50


def evaluating(
    group: dist.ProcessGroup, world_size: int, batches: Iterator[Batch] | None = None, **settings: Any
) -> Any:
    """A worker of `world_size` with what an evaluation needs, and its `passes`: the rows of each."""
    passes: list[int] = []

    def test(batch_size: int) -> Iterator[Batch]:
        return batches or ({"row": rows} for rows in torch.arange(HELD_OUT).split(batch_size))

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        assert not torch.is_grad_enabled()
        passes.append(len(batch["row"]))
        return batch["row"].float(), {}

    return SimpleNamespace(
        plan=Plan(Settings(**settings), EmptySource((1,), 1), EmptySource((1,), 1), Steps(1000, 40), 25),
        world_size=world_size,
        device=torch.device("cpu"),
        model=torch.nn.Linear(1, 1),
        loader=SimpleNamespace(test=test),
        padding_batch={"row": torch.zeros(2, dtype=torch.int64)},
        task=SimpleNamespace(loss=loss),
        average=WeightAverage(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1), 0),
        commands=SimpleNamespace(poll=Command),
        control_group=group,
        passes=passes,
        heartbeat=lambda: None,
        waits=lambda: None,
    )


@pytest.mark.parametrize(
    ("world_size", "batch", "micro", "largest"), [(1, 40, 8, 8), (2, 40, 16, 10), (2, 41, 0, 21), (30, 40, 0, 2)]
)
def test_an_evaluation_takes_no_more_rows_at_once_than_training(
    group: dist.ProcessGroup, world_size: int, batch: int, micro: int, largest: int
) -> None:
    worker = evaluating(group, world_size, global_batch_size=batch, micro_batch_size=micro)
    assert evaluate(worker).results == {"test_loss": pytest.approx((HELD_OUT - 1) / 2)}
    assert max(worker.passes) == largest
    assert sum(worker.passes) == HELD_OUT


class Cached(torch.nn.Module):
    """Makes a table in the first pass, as those of rotary angles are; one part stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = torch.nn.Linear(1, 1), torch.nn.Dropout().eval()
        self.table: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(1, 1)
        return self.layer(rows.float()[:, None]) * self.table


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_training_goes_on_with_what_an_evaluation_left(parallel: str, group: dist.ProcessGroup) -> None:
    worker = evaluating(group, 1, parallel=parallel)
    model = worker.model = Cached()
    worker.task.loss = lambda model, batch: (model(batch["row"])[:, 0], {})
    assert evaluate(worker).results
    model(torch.arange(4)).sum().backward()
    assert (model.training, model.layer.training, model.frozen.training) == (True, True, False)


@pytest.mark.parametrize("command", [Command(restart=True), Command(stop=True)])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_notice_cuts_an_evaluation_short_on_all_ranks(
    parallel: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though only rank 0 hears of it, and the other one has more rows than it will ever see."""
    monkeypatch.setattr(sunspot.parallel.decisions, "ASK_EVERY_S", 0.0)

    def act(group: dist.ProcessGroup) -> tuple[bool, bool, bool]:
        slowly = ({"row": torch.full((4,), time.sleep(0.001) or number)} for number in range(20_000))
        worker = evaluating(group, 2, slowly, parallel=parallel)
        if dist.get_rank() == 0:
            worker.commands.poll = lambda: command if len(worker.passes) >= 3 else Command()
        results, stop, restart = evaluate(worker)
        return results is None and len(worker.passes) < 20_000, stop, restart

    assert in_processes(tmp_path, 2, act) == [(True, command.stop, command.restart)] * 2


def test_a_rank_without_rows_is_alive_while_others_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As held-out rows may be uneven, and an evaluation may take longer than HANG_TIMEOUT_S."""
    monkeypatch.setattr(sunspot.parallel.decisions, "ASK_EVERY_S", 0.0)

    def act(group: dist.ProcessGroup) -> tuple[dict[str, float] | None, int]:
        rows = range(20) if dist.get_rank() == 0 else range(1)
        worker = evaluating(group, 2, ({"row": torch.tensor([time.sleep(0.005) or row])} for row in rows))
        beats = itertools.count()
        worker.waits = worker.heartbeat = lambda: next(beats)
        return evaluate(worker).results, next(beats)

    (results, _), (same, beats) = in_processes(tmp_path, 2, act)
    assert results == same == {"test_loss": pytest.approx(sum(range(20)) / 21)}
    assert beats > 5, "one for each round, and of those many while the other evaluates"


def kept_of(calls: list[Any], worker: Any) -> Any:
    """The worker, with what it does about an evaluation recorded in `calls`."""
    worker.checkpoints = SimpleNamespace(
        save=lambda step, metrics, evaluated=True, to_storage=True: calls.append(("save", step, evaluated, to_storage)),
        due=lambda *_: StepActions(),
    )
    worker.average.update = worker.took_step = lambda *_: None
    worker.report = lambda record, _: worker.records.append(record)
    worker.records = []
    worker.due = lambda *_: StepActions()
    worker.add_evaluation = lambda results: calls.append(("made up", *results))
    worker.restart_group = lambda: calls.append("restart")
    return worker


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (Command(), [("save", 25, True, True)]),
        (Command(restart=True), [("save", 25, False, True), "restart"]),
        (Command(stop=True), [("save", 25, False, True)]),
    ],
)
def test_an_epochs_end_is_kept_before_its_evaluation(
    command: Command, left: list[Any], group: dist.ProcessGroup
) -> None:
    """What is lost, or cut short, from there on costs no step, and is not told to be evaluated."""
    calls: list[Any] = []
    worker = kept_of(calls, evaluating(group, 1))
    worker.commands.poll = lambda: calls.append("evaluates") or command
    window = MetricWindow(group, worker.device, RecentMeans(1000, {}))
    window.add_step([{"loss": torch.ones(2)}], 0.1, 0.1)
    stopped = after_step(worker, StepDecisionBroadcast(group), window, 25, None, 0.1)
    assert stopped == command.stop
    assert [*dict.fromkeys(calls)] == [("save", 25, False, False), "evaluates", *left]
    [record] = worker.records
    assert (record["epoch"], "test_loss" in record) == (1, command == Command())


@pytest.mark.parametrize(
    ("command", "done"),
    [
        (Command(), [("made up", "test_loss")]),
        (Command(restart=True), [("save", 25, False, True), "restart"]),
        (Command(stop=True), [("save", 25, False, True)]),
    ],
)
def test_an_evaluation_is_made_up(command: Command, done: list[Any], group: dist.ProcessGroup) -> None:
    calls: list[Any] = []
    worker = kept_of(calls, evaluating(group, 1))
    worker.start, worker.metrics, worker.commands.poll = 25, {}, lambda: command
    worker.evaluated = True
    assert not make_up_evaluation(worker)
    assert not calls
    worker.evaluated = False
    assert make_up_evaluation(worker) == command.stop
    assert calls == done


def test_an_evaluation_has_the_buffers_that_a_checkpoint_has(tmp_path: Path) -> None:
    """Those of rank 0, such as batch norm's averages: each rank has its own until then."""

    def act(group: dist.ProcessGroup) -> tuple[float, dict[str, float] | None]:
        worker = evaluating(group, 2)
        worker.model = torch.nn.BatchNorm1d(1)
        worker.model.running_mean.fill_(dist.get_rank())
        worker.task.loss = lambda model, batch: (model.running_mean.expand(len(batch["row"])), {})
        results = evaluate(worker).results
        return float(worker.model.running_mean), results

    assert in_processes(tmp_path, 2, act) == [(0.0, {"test_loss": 0.0})] * 2


def test_a_checkpoint_that_can_wait_does_so_while_one_is_committed(group: dist.ProcessGroup) -> None:
    calls: list[Any] = []
    worker = kept_of(calls, evaluating(group, 1, parallel="fsdp", checkpoint_every_steps=2))
    window, consensus = MetricWindow(group, worker.device, RecentMeans(1000, {})), StepDecisionBroadcast(group)
    for busy in (True, False):
        worker.due = lambda *_, busy=busy: StepActions(busy=busy)
        calls.clear()
        for step in range(1, 21):
            window.add_step([{"loss": torch.ones(2)}], 0.1, 0.1)
            after_step(worker, consensus, window, step, None, 0.1)
            time.sleep(0.001)
        assert (("save", 20, True, True) in calls) is not busy


def run_on(device: str, group: dist.ProcessGroup) -> TrainingRun:
    """A run of a worker alone, with all of its tensors on a device."""
    settings = Settings(task="tests.tasks.tiny", global_batch_size=8, micro_batch_size=5, clip_norm=1)
    worker = make_worker(plan_without_evaluation(settings), group)
    train, worker.device = worker.loader.train, torch.device("cpu" if device == "meta" else device)

    def on_device(*steps: int) -> Iterator[Batch]:
        return ({name: column.to(device) for name, column in batch.items()} for batch in train(*steps))

    worker.loader.train = on_device
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
    run._worker.loader.train = lambda *_: iter(batches)
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
