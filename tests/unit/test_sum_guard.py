"""Tests that an aborted sum of gradients changes no state, although no step waits for its sums."""

from __future__ import annotations

import copy
import functools
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from sunspot.elastic.membership_channel import RegroupError
from sunspot.elastic.messages import Command
from sunspot.parallel.decisions import StepActions
from sunspot.parallel.process_group import ProcessGroups
from sunspot.parallel.sum_guard import SumGuard
from sunspot.settings import Settings
from sunspot.train.learner import Learner
from sunspot.train.loop import take_step
from sunspot.train.run import TrainingRun
from sunspot.train.survivor import abandon_step
from sunspot.train.worker import GroupStart, Worker
from tests.harness.fake_stream import FakeEvent, FakeStream
from tests.harness.loop import QuietWorker, make_worker, plan_without_evaluation

CPU = torch.device("cpu")

WARM_UP = 4
"""Steps that a group takes before the group that is aborted."""

STEPS = 8


def build_learner(group: dist.ProcessGroup, **task_args: Any) -> Learner:
    settings = Settings(
        task="tests.tasks.guarded",
        task_args={"way": "teacher", "optimizer": "AdamW", **task_args},
        num_workers="1",
        global_batch_size=4,
        max_steps=100,
        ema=0.9,
    )
    return make_worker(plan_without_evaluation(settings), group).learner


def join(learner: Learner, sums: SumGuard, step: int, is_closed: Callable[[], bool] | None = None) -> Worker:
    """Return a worker that continues from `step` in a new group."""
    undo = learner.undo
    nothing = dict.fromkeys(
        ("heartbeat", "report", "took_step", "save", "begin_step", "count_step"), lambda *_, **__: None
    )
    checkpoints: Any = SimpleNamespace(
        **nothing | {"took_step": lambda *_: undo.stepped.after_step(), "wait_for_copy": undo.stepped.before_step},
        leave_group=lambda step: [],
        name_at=str,
    )
    idle: Any = SimpleNamespace(**nothing)
    learner.place = replace(learner.place, sums=sums)
    start = GroupStart(step, True, {}, in_place=step > 0, is_closed=is_closed)
    return QuietWorker(learner, start, checkpoints, idle, idle, idle, None, ExitStack())


def take_steps(worker: Worker, last: int) -> Iterator[None]:
    """Take the steps up to `last` with the default loop."""
    run = TrainingRun(worker)
    with closing(run):
        for batch in run.batches():
            take_step(run, batch)
            yield
            if run.position == last:
                return


def state_of(learner: Learner) -> Any:
    """Return a copy of everything that a step changes."""
    average = learner.average.exchange({"model": learner.model.state_dict(keep_vars=True), "optimizer": {"state": {}}})
    return copy.deepcopy([learner.model.state_dict(), learner.optimizer.state_dict()["state"], average["model"]])


def are_equal(one: Any, other: Any) -> bool:
    """Return True if all numbers in two states are the same, to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


class GroupOnDevice:
    """A group that trains on a device which lags behind, until the group is aborted before one of the operations."""

    def __init__(self, learner: Learner, lag: float, abort_at: float = math.inf, told: bool = True) -> None:
        """Abort the group before operation `abort_at`. A process that is not `told` learns this only from the guard."""
        self._hooks = ExitStack()
        self._abort_at = abort_at
        self._ran = 0
        self.stream = FakeStream(lag, self._before_operation)
        self.guard = SumGuard(CPU, functools.partial(FakeEvent, self.stream))
        self.taken = WARM_UP
        "Number of steps that the device had taken before the abort."
        for each in filter(lambda each: each.requires_grad, learner.model.parameters()):
            summed = each.register_post_accumulate_grad_hook(lambda each: self._collective(each.grad))
            self._hooks.callback(summed.remove)
        broadcast = learner.model.register_forward_pre_hook(lambda *_: self._collective(*learner.model.buffers()))
        self._hooks.callback(broadcast.remove)
        self._worker = join(learner, self.guard, WARM_UP, lambda: told and self.guard.aborted)

    def _before_operation(self, name: str) -> None:
        if self._ran == self._abort_at:
            self.guard.trip()
        self._ran += 1
        self.taken += "_fused_" in name and not self.guard.aborted

    def _collective(self, *tensors: torch.Tensor) -> None:
        """Queue a collective of all workers, which leaves wrong values if it is aborted."""

        def run() -> None:
            for each in tensors if self.guard.aborted else ():
                each.data.fill_(math.nan if each.is_floating_point() else -1)

        self.stream.queue("collective", run)

    def train(self, last: int) -> list[int]:
        """Take the steps up to `last`, and return the number of operations after each step.

        Raises `RegroupError` after an abort.
        """
        with self.stream:
            return [self.stream.queued for _ in take_steps(self._worker, last)]

    def report(self) -> tuple[list[int], list[int]]:
        """Make the worker report its steps. Return the steps that are recorded as taken, and those that are shown."""
        worker = self._worker
        recorded, shown = list[int](), list[int]()
        worker.checkpoints.count_step = recorded.append  # type: ignore[method-assign]
        worker.checkpoints.due = lambda *_: StepActions()  # type: ignore[method-assign]
        worker.commands = Mock(poll=Command)
        worker.reporter = Mock(due=lambda: False, took_step=lambda step, *_: shown.append(step))
        return recorded, shown

    def leave(self) -> int | None:
        """Leave the group, and return the step of the remaining state, or None if no state remains."""
        with self.stream, self._hooks:
            kept = abandon_step(self._worker)
        self.stream.synchronize()
        assert self._worker.window.steps == self._worker.step - WARM_UP
        return self._worker.step if kept else None


@pytest.mark.parametrize(
    ("optimizer", "lag", "told"),
    [("AdamW", math.inf, False), ("Adam", 5, True), ("SGD", 40, False)],
)
def test_after_an_abort_at_any_point_the_state_is_that_of_the_last_complete_step(
    optimizer: str, lag: float, told: bool, group: dist.ProcessGroup
) -> None:
    calm = build_learner(group, optimizer=optimizer)
    states = {step: state_of(calm) for step, _ in enumerate(take_steps(join(calm, SumGuard(), 0), STEPS), 1)}
    learner = warmed_up(group, optimizer=optimizer)
    undisturbed = GroupOnDevice(learner, lag)
    ends = undisturbed.train(STEPS)
    assert undisturbed.leave() == STEPS
    assert are_equal(state_of(learner), states[STEPS]), "a device that lags computes the same"
    for abort_at in range(ends[1], ends[2]):
        learner = warmed_up(group, optimizer=optimizer)
        trained = GroupOnDevice(learner, lag, abort_at, told)
        with pytest.raises(RegroupError):
            trained.train(STEPS + 2)
        step = trained.leave()
        assert step in (trained.taken, trained.taken + 1), abort_at
        assert are_equal(state_of(learner), states[step]), abort_at
        for parameter in learner.model.parameters():
            parameter.grad = None
        list(take_steps(join(learner, SumGuard(), step), STEPS))
        assert are_equal(state_of(learner), states[STEPS]), abort_at


def test_a_cancelled_step_is_neither_shown_nor_recorded_as_taken(group: dist.ProcessGroup) -> None:
    """Otherwise, the receipt of a loss would count the step as replayed."""
    calm = GroupOnDevice(warmed_up(group), math.inf)
    counted, _ = calm.report()
    ends = calm.train(STEPS)
    assert counted[-1] == STEPS - 1, "the last step is still in doubt"
    assert calm.leave() == counted[-1] == STEPS, "heartbeats follow once it counts"
    for abort_at in range(ends[1], ends[2], 4):
        trained = GroupOnDevice(warmed_up(group), math.inf, abort_at, told=False)
        recorded, shown = trained.report()
        with pytest.raises(RegroupError):
            trained.train(STEPS + 2)
        step = trained.leave()
        assert step
        assert max(recorded) == step, abort_at
        assert max(shown) <= step, abort_at


def warmed_up(group: dist.ProcessGroup, **task_args: str) -> Learner:
    """Return a learner that has taken WARM_UP steps in an earlier group."""
    learner = build_learner(group, **task_args)
    list(take_steps(join(learner, SumGuard(), 0), WARM_UP))
    return learner


@pytest.mark.parametrize("way", ["weights", "weights by .data"])
def test_a_step_that_changes_weights_early_is_never_cancelled(way: str, group: dist.ProcessGroup) -> None:
    """Cancelling would not undo the early change. If the step's gradient sums are aborted, no state remains."""
    calm = build_learner(group, way=way)
    states = {step: state_of(calm) for step, _ in enumerate(take_steps(join(calm, SumGuard(), 0), STEPS), 1)}
    ends = GroupOnDevice(warmed_up(group, way=way), math.inf).train(STEPS)
    left = list[int | None]()
    for abort_at in range(ends[1], ends[2], 4):
        learner = warmed_up(group, way=way)
        trained = GroupOnDevice(learner, math.inf, abort_at, told=False)
        with pytest.raises(RegroupError):
            trained.train(STEPS)
        left.append(trained.leave())
        assert left[-1] is None or are_equal(state_of(learner), states[left[-1]])
    assert None in left


def test_a_custom_training_loop_waits_for_the_gradient_sums_of_each_step(group: dist.ProcessGroup) -> None:
    """The loop may change parameters after a step, which the device would not cancel."""

    class Waiting(SumGuard):
        waits = 0

        def await_sums(self) -> bool:
            self.waits += 1
            return super().await_sums()

    learner = warmed_up(group)
    learner.task.train = lambda run: [take_step(run, batch) for batch in run.batches()]
    guard = Waiting(CPU, lambda: FakeEvent(FakeStream(0, lambda name: None)))
    assert len(list(take_steps(join(learner, guard, WARM_UP), STEPS))) == guard.waits == STEPS - WARM_UP


def make_guard(device: torch.device | None = CPU) -> SumGuard:
    return SumGuard(device, lambda: FakeEvent(FakeStream(0, lambda name: None)))


def with_gradients(*parameters: torch.nn.Parameter) -> tuple[torch.nn.Parameter, ...]:
    for each in parameters:
        each.grad = torch.ones_like(each)
    return parameters


def test_the_first_optimizer_step_of_a_parameter_is_never_cancelled() -> None:
    """A cancelled first step of fused SGD would keep a momentum that it has not written."""
    guard = make_guard()
    first, later = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first], 0.1, momentum=0.9, fused=True)
    with_gradients(first)
    assert [guard.can_cancel(optimizer) for _ in range(3)] == [False, True, True]
    optimizer.add_param_group({"params": [later]})
    assert guard.can_cancel(optimizer), "it has no gradient yet"
    with_gradients(later)
    assert [guard.can_cancel(optimizer) for _ in range(2)] == [False, True]


class OwnAdam(torch.optim.Adam):
    """An optimizer of a task, which could change parameters after a step that the device has cancelled."""


@pytest.mark.parametrize("reason", ["not fused", "own class", "own hook", "gloo", ""])
def test_an_optimizer_step_that_could_have_side_effects_is_not_cancelled(reason: str) -> None:
    guard = make_guard(None if reason == "gloo" else CPU)
    kind = OwnAdam if reason == "own class" else torch.optim.Adam
    optimizer = kind(with_gradients(torch.nn.Parameter(torch.ones(2))), fused=reason != "not fused")
    if reason == "own hook":
        optimizer.register_step_post_hook(lambda *_: None)
    assert [guard.can_cancel(optimizer) for _ in range(2)] == [False, not reason]


def test_after_an_error_within_a_step_the_optimizer_can_take_the_next_step() -> None:
    guard = make_guard()
    [parameter] = with_gradients(torch.nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.SGD([parameter], 0.5, fused=True)
    guard.trip()
    guard.begin_step(optimizer)
    guard.settle()
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((2,), 0.5))


@pytest.mark.parametrize("aborted", [False, True])
def test_an_aborted_broadcast_keeps_the_previous_values(aborted: bool) -> None:
    guard = make_guard()
    if aborted:
        guard.trip()
    assert guard.keep_complete(torch.tensor([1]), torch.tensor([2])).tolist() == [1 if aborted else 2]
    assert guard.await_sums() is not aborted


def test_the_guard_learns_of_an_abort_before_a_connection_is_closed() -> None:
    class Watching(SumGuard):
        connected = False

        def trip(self) -> None:
            self.connected = bool(ours.send(b"x"))

    groups = ProcessGroups(CPU, 1.0)
    with groups.forming(lambda: False):
        listening = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listening.getsockname())
    groups.sums = guard = Watching()
    groups.abort_collectives()
    assert guard.connected
    with ours, listening, pytest.raises(OSError, match="Broken pipe"):
        ours.send(b"x")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_the_abort_flag_only_after_all_previously_queued_work() -> None:
    device = torch.device("cuda")
    guard = SumGuard(device)
    [parameter] = with_gradients(torch.nn.Parameter(torch.ones(2, device=device)))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    before = parameter.detach().clone()
    factor = torch.ones(8192, 8192, device=device)
    for _ in range(50):  # far longer than the calls below
        factor = factor @ factor
    guard.begin_step(optimizer)
    optimizer.step()
    guard.end_step()
    guard.trip()
    assert not guard.confirm()
    assert torch.equal(parameter.detach(), before)
