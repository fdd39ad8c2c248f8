"""Tests that either all surviving workers change their shards in a step, or none does (PARALLEL=hsdp)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sunspot.background import start_thread
from sunspot.elastic.membership import FIRST_WAIT_S, Close, Generation, Member, Membership, PassBarriers
from sunspot.elastic.membership_channel import MembershipClient, RegroupError
from sunspot.parallel import step_barrier
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.step_barrier import StepBarrier
from sunspot.parallel.sum_guard import SumGuard
from sunspot.train.step_guard import StepGuard
from tests.harness.constants import SetConstants
from tests.harness.waiting import wait_until
from tests.unit.test_membership_channel import open_server

WORKERS = 4


def fail() -> None:
    raise RuntimeError("Connection closed by peer")


def barrier(meet: Any = fail) -> StepBarrier:
    """Return a member's side of group 1's barrier."""
    opened = StepBarrier(meet)
    opened.open(1)
    return opened


def test_a_worker_passes_the_barrier_once_all_workers_have_reached_it() -> None:
    assert barrier(lambda: None).wait()


def test_a_worker_passes_an_interrupted_barrier_that_another_worker_has_passed() -> None:
    interrupted = barrier()
    waiting = start_thread(interrupted.wait, "step")
    assert interrupted.close(1) == 0
    interrupted.answer(1, 1)
    assert waiting.result()


def test_a_worker_does_not_pass_an_interrupted_barrier_that_no_worker_has_passed() -> None:
    interrupted = barrier()
    interrupted.close(1)
    interrupted.answer(1, 0)
    assert not interrupted.wait()


def test_a_worker_that_is_disconnected_passes_only_a_complete_barrier() -> None:
    for meet, passes in ((lambda: None, True), (fail, False)):
        disconnected = barrier(meet)
        disconnected.disconnect(1)
        assert disconnected.wait() == passes


def test_the_end_of_the_connection_does_not_replace_the_answer_of_the_driver() -> None:
    interrupted = barrier()
    interrupted.close(1)
    interrupted.answer(1, 1)
    interrupted.disconnect(1)
    assert interrupted.wait()


def test_a_worker_does_not_pass_a_barrier_that_completes_after_the_worker_reported_an_interruption() -> None:
    completed = barrier(lambda: None)
    assert completed.close(1) == 0
    completed.answer(1, 0)
    assert not completed.wait()


def test_an_answer_about_a_previous_group_is_ignored() -> None:
    opened = barrier(lambda: None)
    opened.open(2)
    opened.answer(1, 0)
    assert opened.close(1) == 0
    assert opened.wait()


def test_an_error_in_the_barrier_is_raised_if_the_group_has_not_ended(set_constants: SetConstants) -> None:
    set_constants(step_barrier, CLOSED_WITHIN_S=0.01)
    with pytest.raises(RuntimeError, match="closed by peer"):
        barrier().wait()


def test_a_worker_that_gets_no_answer_does_not_pass_the_barrier(set_constants: SetConstants) -> None:
    set_constants(step_barrier, ANSWER_WITHIN_S=0.01)
    interrupted = barrier()
    interrupted.close(1)
    assert not interrupted.wait()


def form_group() -> Membership:
    """Return the driver's membership after it has formed a group."""
    membership = Membership(WORKERS, degree=2)
    for number in range(WORKERS):
        membership.enter(Member(f"{number}", f"node-{number // 2}"))
        membership.request_to_join(f"{number}", 0.0, None)
    messages = membership.decide(FIRST_WAIT_S)
    assert len(messages) == WORKERS
    assert all(isinstance(message, Generation) for _, message in messages)
    return membership


def test_the_driver_answers_once_all_live_members_have_reported() -> None:
    membership = form_group()
    membership.lose("0", 0.0)
    assert {uid for uid, message in membership.decide(0.0) if message == Close(1)} == {"1", "2", "3"}
    membership.report_barriers("1", 1, 7)
    membership.report_barriers("2", 1, 8)
    assert not membership.decide(0.0)
    membership.lose("3", 0.0)
    assert sorted(membership.decide(0.0)) == [("1", PassBarriers(1, 8)), ("2", PassBarriers(1, 8))]
    assert not membership.decide(0.0)


def test_the_driver_answers_even_if_a_member_ends_the_whole_group() -> None:
    membership = form_group()
    membership.lose("0", 0.0)
    membership.decide(0.0)
    for uid in ("1", "2", "3"):
        membership.report_barriers(uid, 1, 8)
    membership.end("1")
    assert ("2", PassBarriers(1, 8)) in membership.decide(0.0)


@given(st.data())
def test_all_survivors_take_a_step_or_none_does(data: st.DataObject) -> None:
    """Workers pass the barrier, die, and report in any order. The driver closes the group at some point."""
    membership = form_group()
    barriers = {f"{number}": barrier(lambda: None) for number in range(WORKERS)}
    passed = set[str]()
    told = list[tuple[str, Any]]()
    for _ in range(data.draw(st.integers(1, 20))):
        uid = data.draw(st.sampled_from(sorted(barriers)))
        match data.draw(st.sampled_from(["pass", "die", "listen"])):
            case "pass" if uid not in passed and not barriers[uid]._has_ended():
                assert barriers[uid].wait()
                passed.add(uid)
            case "die" if len(barriers) > 1:
                del barriers[uid]
                membership.lose(uid, 0.0)
            case "listen":
                told += membership.decide(0.0)
                tell(told, barriers, membership, data.draw(st.integers(0, len(told))))
    membership.request_to_join(next(iter(barriers)), 0.0, 0)  # the group ends, even if no worker has died
    for _ in range(3):
        told += membership.decide(0.0)
        tell(told, barriers, membership, len(told))
    takes = {uid: uid in passed or each.wait() for uid, each in barriers.items()}
    assert len(set(takes.values())) == 1, takes


def tell(told: list[tuple[str, Any]], barriers: dict[str, StepBarrier], membership: Membership, number: int) -> None:
    """Deliver the oldest messages, and report to the driver as `MembershipClient` does."""
    for uid, message in told[:number]:
        if uid not in barriers:
            continue
        if isinstance(message, Close):
            membership.report_barriers(uid, message.number, barriers[uid].close(message.number))
        elif isinstance(message, PassBarriers):
            barriers[uid].answer(message.number, message.barriers)
    del told[:number]


def test_the_driver_tells_a_waiting_member_which_barrier_another_member_has_passed() -> None:
    """Three members are connected. One has passed the barrier, one still waits, and one is lost."""
    with open_server(3) as server:
        barriers = [StepBarrier(lambda: None), StepBarrier(fail), StepBarrier(fail)]
        clients = [
            MembershipClient(server.address, Member(f"{number}", "node"), lambda: None, each)
            for number, each in enumerate(barriers)
        ]
        joined = [start_thread(lambda client=client: client.join_next(None), "join") for client in clients]
        assert all(thread.result() for thread in joined)
        assert barriers[0].wait()
        waiting = start_thread(barriers[1].wait, "step")
        clients[2].close()
        assert waiting.result()
        for client in clients:
            client.close()


def test_a_member_that_loses_its_connection_does_not_wait_for_an_answer() -> None:
    with open_server(1) as server:
        interrupted = StepBarrier(fail)
        client = MembershipClient(server.address, Member("one", "node"), lambda: None, interrupted)
        assert client.join_next(None)
        waiting = start_thread(interrupted.wait, "step")
        wait_until(lambda: client._link is not None)
        assert client._link
        client._link.connection.end()
        assert not waiting.result()
        client.close()


@pytest.mark.parametrize("passes", [True, False])
def test_parameters_change_only_after_the_barrier(passes: bool) -> None:
    place = WorkerPlace(sums=SumGuard(), replicas=Mock(step_barrier=Mock(wait=lambda: passes)))
    undo = Mock()
    optimizer = torch.optim.SGD([torch.zeros(1)])
    guard = StepGuard(undo, place, optimizer)
    with nullcontext() if passes else pytest.raises(RegroupError):
        guard.before_change(optimizer)
    assert undo.before_change.called == passes
