"""Tests that a step that a worker cannot complete is undone, or that the worker detects that this is impossible."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sunspot.parallel.sum_guard import SumGuard
from sunspot.settings import Settings
from sunspot.train.learner import Learner
from sunspot.train.loop import train
from sunspot.train.survivor import abandon_step
from sunspot.train.undo import StepUndo
from sunspot.train.worker import GroupStart
from tests.harness.loop import QuietWorker, make_worker, plan_without_evaluation
from tests.tasks import early_changes

BROKEN_AT = 5


def outliving(learner: Learner, step: int) -> QuietWorker:
    """Return a worker that outlives its group and continues from `step`."""
    stepped = learner.undo.stepped

    def nothing(*given: Any, **named: Any) -> None:
        pass

    checkpoints: Any = SimpleNamespace(
        **dict.fromkeys(("save", "begin_step", "count_step"), nothing),
        took_step=lambda *_: stepped.after_step(),
        wait_for_copy=stepped.before_step,
        leave_group=lambda step: [],
        name_at=lambda step: f"step {step}",
    )
    idle: Any = SimpleNamespace(**dict.fromkeys(("heartbeat", "report", "took_step"), nothing))
    group_start = GroupStart(step, True, {}, in_place=step > 0)
    learner.place = replace(learner.place, sums=SumGuard())
    return QuietWorker(learner, group_start, checkpoints, idle, idle, idle, None, ExitStack())


def learner_of(way: str, group: dist.ProcessGroup) -> Learner:
    settings = Settings(
        task="tests.tasks.early_changes", task_args={"way": way}, num_workers="1", global_batch_size=16, max_steps=8
    )
    return make_worker(plan_without_evaluation(settings), group).learner


@pytest.mark.parametrize(
    ("way", "taken_back"),
    [
        ("batch norm alone", True),
        ("teacher", True),
        ("teacher by .data", True),
        ("table", True),
        ("optimizers", True),
        ("weights", False),
        ("weights of one step", False),
        ("weights by .data", False),
        ("state that grows", False),
    ],
)
def test_an_interrupted_step_is_undone_or_reported_as_impossible_to_undo(
    way: str, taken_back: bool, group: dist.ProcessGroup
) -> None:
    """Repeating the step leads to the weights of an undisturbed run."""
    calm, broken = (learner_of(way, group) for _ in range(2))
    train(outliving(calm, 0))
    early_changes.broken_off_at.add(BROKEN_AT)
    worker = outliving(broken, 0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(worker)
    assert worker.step == BROKEN_AT - 1
    assert (abandon_step(worker) is not None) is taken_back
    if taken_back:
        for parameter in broken.model.parameters():
            parameter.grad = None
        train(outliving(broken, worker.step))
        for name, values in calm.model.state_dict().items():
            assert torch.equal(broken.model.state_dict()[name], values), name


def test_parameters_that_change_too_early_are_reported_by_name(group: dist.ProcessGroup) -> None:
    learner = learner_of("weights", group)
    train(outliving(learner, 0))
    assert learner.undo.early == {"student.weight"}
    assert (
        "1 parameter changed outside of the optimizer's step, such as student.weight" in learner.undo.describe_early()
    )


def follow(model: Any) -> None:
    """Move a model's teacher, like a forward pass can."""
    with torch.no_grad():
        model.teacher.weight.lerp_(model.student.weight, 0.1)


def test_changes_that_an_evaluation_or_a_loop_makes_between_two_steps_are_kept() -> None:
    model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("student", "teacher")})
    optimizer = torch.optim.SGD(model["student"].parameters(), 0.1)
    undo = StepUndo(model, optimizer)
    undo.keep()
    for _ in range(2):
        undo.begin_step()
        follow(model)
        undo.accept()
    follow(model)  # in an evaluation
    undo.accept()
    evaluated = model["teacher"].weight.clone()
    undo.begin_step()
    follow(model)
    assert undo.put_back()
    assert torch.equal(model["teacher"].weight, evaluated)
    follow(model)  # by the loop, after `run.step()`
    moved = model["teacher"].weight.clone()
    undo.begin_step()
    follow(model)
    assert undo.put_back()
    assert torch.equal(model["teacher"].weight, moved)


@pytest.mark.parametrize("replaced", [False, True], ids=["in place", "replaced"])
def test_buffers_that_a_loop_changes_between_two_steps_are_kept(replaced: bool) -> None:
    """Such a buffer can be an average of the weights that is updated after `run.step()`."""
    model: Any = torch.nn.Linear(2, 2)
    model.register_buffer("average", torch.zeros(2, 2))
    undo = StepUndo(model, torch.optim.SGD(model.parameters(), 0.1))
    undo.keep()
    undo.begin_step()
    undo.accept()
    if replaced:
        model.average = model.average + 1
    else:
        model.average += 1
    undo.begin_step()
    model.average *= 2
    assert undo.put_back()
    assert torch.equal(model.average, torch.ones(2, 2))


def test_a_teacher_model_updated_in_each_pass_is_reported_if_the_number_of_passes_per_step_varies() -> None:
    """A step has more forward passes if there are fewer workers."""
    model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("student", "teacher")})
    undo = StepUndo(model, torch.optim.SGD(model["student"].parameters(), 0.1))
    undo.keep()
    for passes in (1, 1, 0, 1):
        undo.begin_step()
        for _ in range(passes):
            follow(model)
        undo.accept()
    assert undo.warnings() == []
    undo.begin_step()
    follow(model)
    follow(model)
    undo.accept()
    [text] = undo.warnings()
    assert "1 frozen parameter, such as teacher.weight, changed more often in some steps" in text


@pytest.mark.parametrize("more_than_tensors", [False, True])
def test_undoing_a_step_restores_the_previous_optimizer_state(more_than_tensors: bool) -> None:
    """A parameter gets its first gradient in the step that is undone. A list in the state cannot be restored."""
    model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "ab"})
    first, last = (torch.optim.Adam(part.parameters(), 0.1) for part in model.values())
    undo = StepUndo(model, first)
    undo.keep()

    def step(*optimizers: torch.optim.Optimizer, idle: Any = None) -> None:
        undo.begin_step()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None if parameter is idle else torch.ones_like(parameter)
            undo.before_change(optimizer)
            optimizer.step()

    step(first, last, idle=model["a"].bias)
    if more_than_tensors:
        first.state[model["a"].weight]["directions"] = [torch.ones(2)]
    undo.accept()
    before = copy.deepcopy((model.state_dict(), first.state_dict()))
    step(first)
    assert undo.put_back() is not more_than_tensors
    if not more_than_tensors:
        after = model.state_dict(), first.state_dict()
        assert str(after) == str(before)
        assert all(torch.equal(after[0][name], values) for name, values in before[0].items())
    undo.keep()
    step(first, last)
    assert not undo.put_back(), "the last optimizer has no copy"
