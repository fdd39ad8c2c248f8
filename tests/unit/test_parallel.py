"""Tests for collectives. Two threads are the ranks of a group with a short timeout."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import sunspot.checkpoint.commit
import sunspot.parallel.collectives
import sunspot.parallel.decisions
from sunspot.background import start_thread
from sunspot.checkpoint import CheckpointManager, SavedObjects
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.parallel.collectives import WorkerPlace, any_rank, flatten, run_on_all_ranks, same_parameters, unflatten
from sunspot.parallel.decisions import MAX_STEPS_BETWEEN, StepActions, StepDecisionBroadcast
from sunspot.parallel.sharding import build_without_values
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.checkpoints import list_checkpoints
from sunspot.settings import Settings
from tests.harness import process_group
from tests.harness.constants import SetConstants
from tests.harness.process_group import in_processes
from tests.harness.runs import start

LIMIT_S = 1.5


def run_ranks(*ranks: Callable[[dist.ProcessGroup], Any]) -> list[Future[Any]]:
    store = dist.HashStore()

    def run(number: int) -> Any:
        group = dist.ProcessGroupGloo(store, number, len(ranks), timedelta(seconds=LIMIT_S))
        return ranks[number](group)

    return [start_thread(lambda number=number: run(number), "rank") for number in range(len(ranks))]


def slowly() -> str:
    time.sleep(2 * LIMIT_S)
    return "slow"


def test_a_rank_can_take_longer_than_the_timeout_of_a_collective(set_constants: SetConstants) -> None:
    set_constants(sunspot.parallel.collectives, ROUND_S=LIMIT_S / 10)
    ranks = run_ranks(
        lambda group: run_on_all_ranks(group, slowly), lambda group: run_on_all_ranks(group, lambda: "quick")
    )
    assert [rank.result(30) for rank in ranks] == ["slow", "quick"]
    late, waiting = run_ranks(
        lambda group: (slowly(), any_rank(group, True)), lambda group: any_rank(group, True)
    )  # without `run_on_all_ranks`, both ranks would time out
    for rank in (late, waiting):
        with pytest.raises(RuntimeError):
            rank.result(30)


def test_the_last_commit_can_take_longer_than_the_timeout_of_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    """Rank 0 can write the model as one file, for example, while the other ranks wait."""
    set_constants(sunspot.parallel.collectives, ROUND_S=LIMIT_S / 10)
    run, plan = open_run(str(tmp_path), "run"), Plan(Settings(), EmptySource((2,), 2), None, Steps(20, 2), 10)
    attempt, write_manifest = start(run, "me"), sunspot.checkpoint.commit.write_manifest
    monkeypatch.setattr(sunspot.checkpoint.commit, "write_manifest", lambda *about: (slowly(), write_manifest(*about)))

    def train(rank: int, group: dist.ProcessGroup) -> None:
        model = torch.nn.Linear(2, 2)
        saved = SavedObjects(model, torch.optim.SGD(model.parameters()))
        checkpoints = CheckpointManager(run, attempt, plan, saved, place=WorkerPlace(group, rank, 2))
        if rank == 0:
            checkpoints.save(10, {})
        checkpoints.close(finished=True)

    for rank in run_ranks(functools.partial(train, 0), functools.partial(train, 1)):
        rank.result(30)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [10]


def test_an_error_on_one_rank_is_raised_at_once(set_constants: SetConstants) -> None:
    set_constants(sunspot.parallel.collectives, ROUND_S=LIMIT_S / 10)

    def fail() -> None:
        raise ValueError("mine")

    failing, other = run_ranks(
        lambda group: run_on_all_ranks(group, fail), lambda group: run_on_all_ranks(group, slowly)
    )
    with pytest.raises(ValueError, match="mine"):
        failing.result(30)
    with pytest.raises(RuntimeError):  # the other rank does not wait forever
        other.result(30)


def test_a_function_for_all_ranks_is_called_directly_if_there_is_one_worker() -> None:
    assert run_on_all_ranks(None, lambda: 3) == 3


def agree_for(lengths: list[float], wishes: dict[int, StepActions]) -> tuple[list[int], list[StepActions]]:
    """Return the steps at which rank 0 was asked, and the agreed actions after each step.

    The steps take `lengths` seconds. Each of the `wishes` is pending from its step until rank 0 is asked.
    """
    asked: list[int] = []

    def run(group: dist.ProcessGroup, rank: int) -> list[StepActions]:
        consensus, agreed = StepDecisionBroadcast(group), list[StepActions]()

        def decide(step: int) -> StepActions:
            if rank:
                return StepActions(stop=True)  # only rank 0 decides
            asked.append(step)
            due = [at for at in wishes if at <= step]
            return wishes.pop(due[0]) if due else StepActions()

        for step, seconds in enumerate(lengths, start=1):
            time.sleep(seconds)
            agreed.append(consensus.agree(functools.partial(decide, step)))
        return agreed

    one, other = (rank.result(30) for rank in run_ranks(lambda group: run(group, 0), lambda group: run(group, 1)))
    assert one == other
    return asked, one


def test_rank_0_does_not_decide_on_actions_after_every_step_if_steps_are_fast(set_constants: SetConstants) -> None:
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=60.0)  # even on a busy machine
    asked, agreed = agree_for([0.0] * 70, {20: StepActions(save=True), 40: StepActions(copy=True, next_in=3)})
    assert asked[:7] == [1, 3, 7, 15, 31, 47, 50]
    assert asked[7] == 56, "the interval grows again, as after a pause"
    assert [step for step, actions in enumerate(agreed, start=1) if actions.save] == [32]
    assert [step for step, actions in enumerate(agreed, start=1) if actions.copy] == [48]
    assert not any(actions.stop for actions in agreed)
    assert max(later - before for before, later in itertools.pairwise(asked)) == MAX_STEPS_BETWEEN


def test_rank_0_decides_on_actions_after_every_step_if_steps_are_slow(set_constants: SetConstants) -> None:
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.01)
    asked, agreed = agree_for([0.02] * 12, {5: StepActions(busy=True), 8: StepActions(restart=True)})
    assert asked == list(range(1, 13))
    assert [actions.restart for actions in agreed].index(True) == 8
    assert [step for step, actions in enumerate(agreed, start=1) if actions.busy] == [6]


def test_workers_wait_for_the_decision_of_rank_0_after_a_long_step(set_constants: SetConstants) -> None:
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.01, LONG_STEP_S=0.01)
    asked, agreed = agree_for([0.02] * 12, {5: StepActions(busy=True), 8: StepActions(restart=True)})
    assert asked == [1, *range(3, 13)]
    assert [step for step, actions in enumerate(agreed, start=1) if actions.busy] == [5]
    assert [step for step, actions in enumerate(agreed, start=1) if actions.restart] == [8]


def test_no_decision_of_rank_0_is_lost_or_repeated_when_the_step_duration_changes(set_constants: SetConstants) -> None:
    """The workers change between waiting for a decision and not waiting."""
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=0.01, LONG_STEP_S=0.01)
    wishes = {step: StepActions(save=True) for step in range(1, 9)}
    _, agreed = agree_for([*[0.0] * 5, *[0.02] * 5, *[0.0] * 60], wishes)
    assert not wishes
    assert sum(actions.save for actions in agreed) == 8


def test_a_commit_counts_as_running_until_the_next_decision_of_rank_0(set_constants: SetConstants) -> None:
    set_constants(sunspot.parallel.decisions, ASK_EVERY_S=60.0)
    _, agreed = agree_for([0.0] * 16, {7: StepActions(busy=True)})
    assert [step for step, actions in enumerate(agreed, start=1) if actions.busy] == list(range(8, 16))


class Odd(torch.nn.Module):
    """A model with a weight that two modules share, and with tensors outside the state_dict."""

    def __init__(self, *, table: str = "") -> None:
        super().__init__()
        weight = torch.nn.Parameter(torch.empty(4, 4))
        self.one = torch.nn.Linear(4, 4)
        self.other = torch.nn.Linear(4, 4, bias=False)
        self.off = torch.nn.ReLU()
        self.one.weight = self.other.weight = weight
        self.register_buffer("seen", torch.arange(3))
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        if table == "fixed":
            self.register_buffer("table", torch.arange(4), persistent=False)
        if table == "drawn":
            self.first = torch.nn.Parameter(torch.randn(4))
            self.tables = [torch.randn(4)]
        if table == "derived":
            self.table = self.one.weight.detach() * 2
        if table == "looked at":
            assert float(self.one.weight.detach().sum()) < 1e9


def test_a_model_built_on_the_meta_device_has_real_buffers_and_tied_weights() -> None:
    model = build_without_values(lambda: Odd(table="fixed"))
    assert model
    assert {name for name, parameter in model.named_parameters() if parameter.is_meta} == {
        *("one.weight", "one.bias", "frozen")
    }
    assert model.one.weight is model.other.weight
    assert not model.frozen.requires_grad
    assert torch.equal(model.seen, torch.arange(3))
    assert torch.equal(model.table, torch.arange(4))
    assert not any(parameter.is_meta for parameter in Odd().parameters()), "later models have their values"


@pytest.mark.parametrize("table", ["drawn", "derived", "looked at"])
def test_a_model_whose_constructor_reads_its_parameters_is_not_built_on_the_meta_device(table: str) -> None:
    assert build_without_values(lambda: Odd(table=table)) is None


def test_a_hung_test_rank_is_killed_and_its_stack_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(process_group, LIMIT_S=1.0)
    monkeypatch.setattr(dist, "init_process_group", Mock())  # it can take longer than the limit on a busy machine

    def wait_for_ever(_: object) -> None:
        threading.Event().wait()

    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0 of 1 has returned nothing: Timeout.*wait_for_ever"):
        in_processes(tmp_path, 1, wait_for_ever)


def test_an_error_in_one_test_rank_stops_the_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(
        pytest.fail.Exception, match="rank 0 of 2 has returned nothing: it raised an error, which is on stderr"
    ):
        in_processes(tmp_path, 2, lambda group: 1 / dist.get_rank(group))


@pytest.mark.parametrize("differ", [False, True])
def test_parameters_that_differ_by_one_bit_are_detected(differ: bool) -> None:
    models = [torch.nn.Linear(2, 2).bfloat16().requires_grad_(False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].bias[1:].view(torch.int16).bitwise_xor_(int(differ))
    ranks = run_ranks(*(lambda group, model=model: same_parameters(model, WorkerPlace(group)) for model in models))
    assert [rank.result() for rank in ranks] == [not differ] * 2


def test_flattened_tensors_of_several_types_are_restored() -> None:
    norm = torch.nn.BatchNorm2d(3)
    model = torch.nn.Sequential(norm, torch.nn.BatchNorm1d(2))
    kept = [(buffers, flat.clone()) for buffers, flat in flatten(model.buffers())]
    before = [buffer.clone() for buffer in model.buffers()]
    norm(torch.randn(4, 3, 2, 2))
    assert not all(map(torch.equal, model.buffers(), before))
    for buffers, flat in kept:
        unflatten(buffers, flat)
    assert all(map(torch.equal, model.buffers(), before))
    assert len(kept) == 2
