"""Tests of how Ray replaces lost workers, and of the end of a trainer without workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sunspot.elastic.membership import Member, Membership, MembershipSnapshot
from sunspot.ray_internals import controller
from sunspot.ray_internals.controller import end_lost
from sunspot.train import group
from sunspot.train.group import only_driver_remains
from tests.harness.constants import SetConstants


class Worker:
    """A Ray worker that answers, is dead, or never answers."""

    def __init__(self, name: str, answer: object) -> None:
        self.name = name
        self.answer = answer
        self.ended = False
        asked = SimpleNamespace(remote=lambda: self)
        self.actor = SimpleNamespace(clear_result_queue=asked, _actor_id=SimpleNamespace(hex=lambda: name))

    def get_workers(self) -> list[Worker]:
        return [self]

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace Ray and the clock. Half a second passes in each wait."""
    now = [0.0]

    def wait(asked: list[Worker], num_returns: int, timeout: float) -> tuple[list[Worker], list[Worker]]:
        answered = [worker for worker in asked if worker.answer is not None]
        now[0] += 0 if len(answered) == num_returns else timeout
        return answered, []

    def get(worker: Worker) -> None:
        if isinstance(worker.answer, Exception):
            raise worker.answer

    monkeypatch.setattr(controller.ray, "wait", wait)
    monkeypatch.setattr(controller.ray, "get", get)
    monkeypatch.setattr(controller.time, "monotonic", lambda: now[0])
    return now


def test_only_workers_that_do_not_answer_are_replaced(time: list[float]) -> None:
    dead, whole = Worker("a", ConnectionError()), Worker("b", "done")
    end_lost([dead, whole], Mock(side_effect=AssertionError))
    assert (dead.ended, whole.ended, time[0]) == (True, False, 0.0)


def test_a_silent_but_busy_worker_is_not_replaced(time: list[float]) -> None:
    """The worker holds the GIL for half a minute, while another one is being replaced."""
    busy, frozen = Worker("busy", None), Worker("frozen", None)

    def find_living() -> list[str]:
        if time[0] > 30:
            busy.answer = "done"
        return ["busy-process-1"]

    end_lost([busy, frozen], find_living)
    assert (busy.ended, frozen.ended) == (False, True)
    assert 30 < time[0] < 60


@pytest.mark.parametrize("known", [True, False])
def test_the_wait_for_a_worker_that_never_answers_is_limited(known: bool, time: list[float]) -> None:
    silent = Worker("silent", None)
    end_lost([silent], (lambda: ["silent-1"]) if known else Mock(side_effect=OSError("the driver is gone")))
    assert silent.ended
    assert time[0] <= (controller.LIVING_S if known else controller.ANSWER_S) + 1


def test_a_trainer_stops_if_its_only_replacement_hangs(
    set_constants: SetConstants,
) -> None:
    set_constants(group, MEMBERS_CHECK_EVERY_S=0.01)
    membership = Membership(1)
    membership.enter(Member("first", "node"))
    membership.request_to_join("first", 0.0)
    membership.decide(1.0)
    assert membership.trains
    membership.enter(Member("hangs", "node"))
    membership.lose("first", 2.0)
    assert not membership.snapshot().has_no_members
    assert only_driver_remains(Future(), membership.snapshot, limit_s=0.1)


@pytest.mark.parametrize("read_membership", [None, Membership(2).snapshot], ids=["restart mode", "survivor mode"])
def test_a_stop_request_before_any_worker_trains_ends_the_trainer_at_once(
    read_membership: Callable[[], MembershipSnapshot] | None, set_constants: SetConstants
) -> None:
    set_constants(group, MEMBERS_CHECK_EVERY_S=0.01)
    looks = iter([False, False, True])
    assert only_driver_remains(Future(), read_membership, lambda: next(looks))
    assert list(looks) == []
