"""Tests of the code around an optimizer step: its random numbers, and the evaluation at the end of an epoch."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sunspot.log
import sunspot.parallel.decisions
import sunspot.train.worker
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.ledger import Ledger
from sunspot.data.order import Steps
from sunspot.data.source import Batch, EmptySource
from sunspot.elastic.membership_channel import RegroupError
from sunspot.elastic.messages import Command
from sunspot.observe.metrics import MetricWindow
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.decisions import StepActions
from sunspot.parallel.sum_guard import SumGuard
from sunspot.plan import Plan
from sunspot.settings import Settings
from sunspot.tasks import Task
from sunspot.train.build import build_optimizer
from sunspot.train.evaluate import evaluate
from sunspot.train.learner import Learner
from sunspot.train.loop import take_step, train
from sunspot.train.randomness import draw_uniform, seed_generators, seed_of
from sunspot.train.run import TrainingRun
from sunspot.train.survivor import abandon_step
from sunspot.train.worker import GroupStart, Step, Worker
from tests.harness.constants import SetConstants
from tests.harness.loop import make_worker, plan_without_evaluation
from tests.harness.process_group import in_processes

HELD_OUT = 50


def evaluating(
    group: dist.ProcessGroup, world_size: int, batches: Iterator[Batch] | None = None, **settings: Any
) -> Any:
    """Return a fake learner on one of `world_size` workers. Its `passes` lists the row count of each pass."""
    passes: list[int] = []

    def test(batch_size: int) -> Iterator[Batch]:
        return batches or ({"row": rows} for rows in torch.arange(HELD_OUT).split(batch_size))

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        assert not torch.is_grad_enabled()
        passes.append(len(batch["row"]))
        return batch["row"].float(), {}

    chosen = Settings(**{"global_batch_size": 40, **settings})
    steps = Steps(1000, chosen.global_batch_size)
    task: Any = Task(SimpleNamespace(loss=loss), chosen)
    return SimpleNamespace(
        plan=Plan(chosen, EmptySource((1,), 1), EmptySource((1,), 1), steps, 25),
        place=WorkerPlace(group, dist.get_rank(group), world_size),
        model=torch.nn.Linear(1, 1),
        loader=SimpleNamespace(test=test),
        padding_batch={"row": torch.zeros(2, dtype=torch.int64)},
        task=task,
        compute_loss=lambda model, batch: task.loss(model, batch),
        average=WeightAverage(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1), 0),
        optimizer=None,
        undo=Mock(warnings=list, put_back=lambda cancelled: True),
        passes=passes,
    )


def results_of(learner: Any) -> dict[str, float] | None:
    """Return the results of an evaluation that no command interrupts."""
    return evaluate(learner, Command, lambda _: None).results


@pytest.mark.parametrize(
    ("world_size", "batch", "micro", "largest"), [(1, 40, 8, 8), (2, 40, 16, 10), (2, 41, 0, 21), (30, 40, 0, 2)]
)
def test_an_evaluation_pass_has_no_more_rows_than_a_training_pass(
    group: dist.ProcessGroup, world_size: int, batch: int, micro: int, largest: int
) -> None:
    learner = evaluating(group, world_size, global_batch_size=batch, micro_batch_size=micro)
    assert results_of(learner) == {"test_loss": pytest.approx((HELD_OUT - 1) / 2)}
    assert max(learner.passes) == largest
    assert sum(learner.passes) == HELD_OUT


class Cached(torch.nn.Module):
    """A model that makes a table in its first pass, like rotary embeddings. One part stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = torch.nn.Linear(1, 1), torch.nn.Dropout().eval()
        self.table: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(1, 1)
        return self.layer(rows.float()[:, None]) * self.table


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_training_can_use_tensors_that_the_model_made_during_an_evaluation(
    parallel: str, group: dist.ProcessGroup
) -> None:
    learner = evaluating(group, 1, parallel=parallel)
    model = learner.model = Cached()
    learner.task.loss = lambda model, batch: (model(batch["row"])[:, 0], {})
    assert results_of(learner)
    model(torch.arange(4)).sum().backward()
    assert (model.training, model.layer.training, model.frozen.training) == (True, True, False)


def test_workers_do_not_join_or_leave_during_an_evaluation(group: dist.ProcessGroup) -> None:
    """An evaluation that restarted for each new worker might never end."""
    assert evaluate(evaluating(group, 1), lambda: Command(regroup=True), lambda _: None).results


@pytest.mark.parametrize(("parallel", "copied"), [("ddp", False), ("fsdp", True), ("hsdp", False)])
def test_a_sharded_state_without_replicas_is_copied_before_the_group_changes(
    parallel: str, copied: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even while the previous copy is running, because all workers return to the newest copy."""
    settings = Settings(task="tests.tasks.tiny", global_batch_size=8, parallel=parallel, shard_degree=1)
    worker = make_worker(plan_without_evaluation(settings), group)
    saved: list[dict[str, Any]] = []
    worker.checkpoints.save = lambda step, metrics, **how: saved.append(how)
    worker.checkpoints.close = lambda finished: None
    monkeypatch.setattr(worker._decisions, "agree", lambda decide: StepActions(regroup=True))
    with pytest.raises(RegroupError):
        train(worker)
    assert [how["needed"] for how in saved] == ([True] if copied else [])


@pytest.mark.parametrize("command", [Command(restart=True), Command(stop=True)])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_preemption_notice_interrupts_an_evaluation_on_all_ranks(
    parallel: str, command: Command, tmp_path: Path, set_constants: SetConstants
) -> None:
    """Only rank 0 hears of the notice, and the other rank has more rows than it could ever evaluate."""
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.0)

    def act(group: dist.ProcessGroup) -> tuple[bool, bool, bool]:
        slowly = ({"row": torch.full((4,), time.sleep(0.001) or number)} for number in range(20_000))
        learner = evaluating(group, 2, slowly, parallel=parallel)

        def poll() -> Command:
            return command if dist.get_rank() == 0 and len(learner.passes) >= 3 else Command()

        results, stop, restart = evaluate(learner, poll, lambda _: None)
        return results is None and len(learner.passes) < 20_000, stop, restart

    assert in_processes(tmp_path, 2, act) == [(True, command.stop, command.restart)] * 2


def test_a_rank_without_rows_sends_heartbeats_while_other_ranks_evaluate(
    tmp_path: Path, set_constants: SetConstants
) -> None:
    """Held-out rows can be divided unevenly, and an evaluation can take longer than HANG_TIMEOUT_S."""
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.0)

    def act(group: dist.ProcessGroup) -> tuple[dict[str, float] | None, int]:
        rows = range(20) if dist.get_rank() == 0 else range(1)
        learner = evaluating(group, 2, ({"row": torch.tensor([time.sleep(0.005) or row])} for row in rows))
        beats = list[bool]()
        return evaluate(learner, Command, beats.append).results, len(beats)

    (results, _), (same, beats) = in_processes(tmp_path, 2, act)
    assert results == same == {"test_loss": pytest.approx(sum(range(20)) / 21)}
    assert beats > 5, "there is a heartbeat for each of the many rounds of the other rank's evaluation"


class Recorded(Worker):
    """A worker that does not train, and records what it does after a step in `calls` and `records`."""

    def __init__(
        self,
        learner: Any,
        command: Command,
        evaluated: bool = True,
        before: dict[str, Any] | None = None,
        **due: Any,
    ) -> None:
        self.calls: list[Any] = []
        self.records: list[dict[str, Any]] = []
        learner.average.update = lambda _: None
        checkpoints: Any = SimpleNamespace(
            save=self._save,
            count_step=lambda _: None,
            took_step=lambda *_: None,
            due=lambda *_: StepActions(**due),
            wait_for_copy=lambda: None,
            leave_group=lambda step: [],
            name_at=lambda step: f"step {step}",
        )
        commands: Any = SimpleNamespace(poll=lambda: command if "evaluates" in self.calls else Command())
        loss = learner.task.loss
        learner.task.loss = lambda *given: self.calls.append("evaluates") or loss(*given)
        reporter: Any = MagicMock(due=lambda: False)
        begun = GroupStart(25, evaluated, before or {})
        learner.place = dataclasses.replace(learner.place, sums=SumGuard())
        ignored = MagicMock()
        super().__init__(learner, begun, checkpoints, commands, ignored, ignored, reporter, ExitStack())

    def take_step(self, step: int) -> bool:
        return self.finish_step(Step(step, {}, 2, 0.0, 0.1, [{"loss": torch.ones(2)}], 0.1, 0.1))

    def report(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def restart_group(self) -> Any:
        self.calls.append("restart")

    def _save(
        self,
        step: int,
        metrics: dict[str, Any],
        *,
        evaluated: bool = True,
        to_storage: bool = True,
        needed: bool = False,
    ) -> None:
        self.calls.append(("save", step, evaluated, to_storage))
        self.records.append(metrics)


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (Command(), [("save", 25, True, True)]),
        (Command(restart=True), [("save", 25, False, True), "restart"]),
        (Command(stop=True), [("save", 25, False, True)]),
    ],
)
def test_the_state_at_the_end_of_an_epoch_is_saved_before_the_evaluation(
    command: Command, left: list[Any], group: dist.ProcessGroup, set_constants: SetConstants
) -> None:
    """A loss or an interrupt during the evaluation costs no step, and the state does not count as evaluated."""
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.0)
    worker = Recorded(evaluating(group, 1), command)
    assert worker.take_step(25) == command.stop
    assert [*dict.fromkeys(worker.calls)] == [("save", 25, False, False), "evaluates", *left]
    record = worker.records[-1]
    assert (record["epoch"], "test_loss" in record) == (1, command == Command())
    outlived = abandon_step(worker)
    assert outlived
    assert outlived[1].metrics.items() >= record.items(), "a repeated evaluation adds to this record"


@pytest.mark.parametrize(
    ("metric", "command", "warned"),
    [
        ("accuracy", Command(), True),
        ("accuracy", Command(restart=True), False),
        ("loss", Command(), False),
        ("test_loss", Command(), False),
    ],
)
def test_the_first_evaluation_warns_of_a_checkpoint_metric_that_the_task_lacks(
    metric: str,
    command: Command,
    warned: bool,
    group: dist.ProcessGroup,
    set_constants: SetConstants,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.0)
    monkeypatch.setattr(sunspot.log, "WARNED", set())
    Recorded(evaluating(group, 1, checkpoint_metric=metric), command).take_step(25)
    said = "SUNSPOT_CHECKPOINT_METRIC=accuracy: the task has no such metric; set it to one of loss, test_loss"
    assert [record.message for record in caplog.records] == [said] * warned


def test_an_epoch_is_evaluated_even_if_a_worker_is_lost_at_its_end(group: dist.ProcessGroup) -> None:
    """The group ends before its members have agreed on what to do after the step."""
    worker = Recorded(evaluating(group, 1), Command())
    worker._decisions = Mock(agree=Mock(side_effect=RuntimeError("Connection closed by peer")))
    with pytest.raises(RuntimeError):
        worker.take_step(25)
    outlived = abandon_step(worker)
    assert outlived
    assert not outlived[0].evaluated


@pytest.mark.parametrize(
    ("command", "done"),
    [
        (Command(), [("save", 25, True, True)]),
        (Command(restart=True), [("save", 25, False, True), "restart"]),
        (Command(stop=True), [("save", 25, False, True)]),
    ],
)
def test_an_interrupted_evaluation_is_repeated_once(
    command: Command, done: list[Any], group: dist.ProcessGroup, set_constants: SetConstants
) -> None:
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.0)
    learner = evaluating(group, 1)
    worker = Recorded(learner, command)
    assert not worker.repeat_evaluation()
    assert not worker.calls
    worker = Recorded(learner, command, evaluated=False)
    assert worker.repeat_evaluation() == command.stop
    assert [*dict.fromkeys(worker.calls)] == ["evaluates", *done]
    assert ("test_loss" in worker.records[-1]) == (command == Command())
    assert not worker.repeat_evaluation()


@pytest.mark.parametrize(("order", "ends"), [("min", [False, False, False, True]), ("max", [False, True])])
def test_a_run_ends_after_several_evaluations_without_an_improvement(
    order: str, ends: list[bool], group: dist.ProcessGroup
) -> None:
    """A restart continues counting from the checkpoint."""
    kept: dict[str, Any] = {}
    for offset, end in zip((0, -1, float("nan"), -1), ends, strict=False):
        settings = {"early_stop_evaluations": 2 if order == "min" else 1, "checkpoint_order": order}
        learner = evaluating(group, 1, **settings)
        loss = learner.task.loss
        learner.task.loss = lambda *given, loss=loss, offset=offset: (loss(*given)[0] + offset, {})
        worker = Recorded(learner, Command(), before=kept)
        assert worker.take_step(25) is end
        kept = worker.records[-1]
    assert kept["evaluations_since_best"] == learner.plan.settings.early_stop_evaluations
    best = worker.records[-1]["best_evaluation"]
    assert best == pytest.approx(sum(range(HELD_OUT)) / HELD_OUT - (order == "min"))


def test_an_evaluation_uses_the_same_buffers_as_a_checkpoint(tmp_path: Path) -> None:
    """These are rank 0's buffers, such as batch norm's averages. Before the evaluation, they differ between ranks."""

    def act(group: dist.ProcessGroup) -> tuple[float, dict[str, float] | None]:
        learner = evaluating(group, 2)
        learner.model = torch.nn.BatchNorm1d(1)
        learner.model.running_mean.fill_(dist.get_rank())
        learner.task.loss = lambda model, batch: (model.running_mean.expand(len(batch["row"])), {})
        results = results_of(learner)
        return float(learner.model.running_mean), results

    assert in_processes(tmp_path, 2, act) == [(0.0, {"test_loss": 0.0})] * 2


def test_a_checkpoint_that_can_wait_is_delayed_while_another_checkpoint_is_committed(group: dist.ProcessGroup) -> None:
    for busy in (True, False):
        worker = Recorded(evaluating(group, 1, parallel="fsdp", checkpoint_every_steps=2), Command(), busy=busy)
        for step in range(1, 21):
            worker.take_step(step)
            time.sleep(0.001)
        assert (("save", 20, True, True) in worker.calls) is not busy


def run_on(device: str, group: dist.ProcessGroup) -> TrainingRun:
    """Return the run of a single worker, with all of its tensors on a device."""
    settings = Settings(task="tests.tasks.tiny", global_batch_size=8, micro_batch_size=5, clip_norm=1)
    worker = make_worker(plan_without_evaluation(settings), group)
    learner = worker.learner
    train, on = learner.loader.train, torch.device("cpu" if device == "meta" else device)
    learner.place = dataclasses.replace(learner.place, device=on)

    def on_device(*steps: int) -> Iterator[Batch]:
        return ({name: column.to(device) for name, column in batch.items()} for batch in train(*steps))

    learner.loader.train = on_device
    learner.model = learner.model.to(device)
    learner.optimizer, learner.average = build_optimizer(settings, learner.task, learner.model)
    worker.window = MetricWindow(group, on, worker.window.recent)
    return TrainingRun(worker)


def test_a_step_never_waits_for_a_value_from_the_device(group: dist.ProcessGroup) -> None:
    """Tensors of the meta device have no values, so waiting for one raises an error."""
    run = run_on("meta", group)
    for batch in itertools.islice(run.batches(), 2):
        take_step(run, batch)
    with pytest.raises(RuntimeError, match="meta"):
        run._worker.window.mean_loss  # noqa: B018


def test_consumed_rows_are_not_read_from_the_device(group: dist.ProcessGroup) -> None:
    run = run_on("meta", group)
    ledger = Ledger(group, "attempt-0001", 0, [], True)
    worker, loader = run._worker, run._learner.loader
    train = loader.train

    def with_ids(*steps: int) -> Iterator[Batch]:
        for batch in train(*steps):
            loader.ids = torch.arange(8)
            yield batch

    worker.outlives_groups, loader.train = True, with_ids
    worker.checkpoints.begin_step = ledger.begin_exchange
    worker.checkpoints.took_step = lambda step, rows: ledger.add_step(step, rows)
    for batch in itertools.islice(run.batches(), 2):
        take_step(run, batch)
    assert ledger.unwritten_windows(2)[0][3][:, 2].tolist() == [*range(8)] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_does_not_wait_for_the_gpu(group: dist.ProcessGroup) -> None:
    run = run_on("cuda", group)
    batches = list(run._learner.loader.train(1, 0, 4))
    run._learner.loader.train = lambda *_: iter(batches)
    for batch in itertools.islice(run.batches(), 4):
        torch.cuda.set_sync_debug_mode("error" if run.position else "default")
        try:
            take_step(run, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_seeding_a_step_gives_the_same_numbers_as_the_seed_function_of_each_library() -> None:
    seed_generators(3, 7, 1)
    drawn = torch.rand(4), np.random.rand(), random.random()
    word = seed_of(3, 7, 1)
    torch.manual_seed(word)
    np.random.seed(word)
    random.seed(word)
    assert torch.equal(drawn[0], torch.rand(4))
    assert drawn[1:] == (np.random.rand(), random.random())


def test_each_rank_draws_its_part_of_the_same_random_stream() -> None:
    everything = draw_uniform(5, 3, 1000)
    assert 0 <= everything.min() < 0.01
    assert 0.99 < everything.max() < 1
    assert abs(everything.mean() - 0.5) < 0.03
    assert torch.equal(
        torch.cat([draw_uniform(5, 3, 1), draw_uniform(5, 4, 998), draw_uniform(5, 1002, 1)]), everything
    )
    assert not torch.equal(draw_uniform(6, 3, 1000), everything)


def test_seeds_differ_for_every_step_and_rank() -> None:
    seeds = {seed_of(seed, step, rank) for seed in range(3) for step in range(200) for rank in range(8)}
    assert len(seeds) == 3 * 200 * 8
    assert seed_of(1, 2) != seed_of(2, 1)


@pytest.mark.parametrize("needs_others", [False, True])
def test_a_warm_up_step_does_not_change_the_model(needs_others: bool) -> None:
    """Only the optimizer's state remains, until the others' state replaces it. This test's loss replaces a buffer."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].register_buffer("center", torch.zeros(2))
    source: Any = SimpleNamespace(row_groups=(60,), read=lambda group, rows: {"x": np.ones((len(rows), 2), np.float32)})
    plan = Plan(Settings(num_workers="2..3", global_batch_size=12), source, None, Steps(60, 12), 25)
    passes: list[int] = []

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        passes.append(len(batch["row"]))
        model[0].center = model[0].center + 1
        if needs_others:
            dist.barrier()
        return model(batch["x"]).sum(1), {}

    optimizer = torch.optim.Adam(model.parameters())
    task = Task(SimpleNamespace(loss=loss), plan.settings)
    learner = Learner(plan, task, WorkerPlace(), model, optimizer, WeightAverage(optimizer, 0), *[MagicMock()] * 2)
    before = [buffer.clone() for buffer in model.buffers()]
    learner.warm_up()
    assert passes == [4], "the pass has the rows of one of three workers"
    assert all(map(torch.equal, model.buffers(), before))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert bool(optimizer.state) is not needs_others
