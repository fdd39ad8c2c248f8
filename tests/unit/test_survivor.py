"""A process that outlives its group: what it knows of the state that it holds, and how it forms the next group."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from sunspot.checkpoint import SavedObjects
from sunspot.elastic.copies import Holders, LiveState
from sunspot.elastic.membership import Generation, Member
from sunspot.elastic.membership_channel import MembershipAddress
from sunspot.elastic.restore import Position, hand_over
from sunspot.parallel.collectives import WorkerPlace
from sunspot.train import survivor as survivors
from sunspot.train.survivor import Survivor
from sunspot.train.worker import RegroupError
from tests.harness.process_group import in_processes

BEHIND, FURTHEST = (LiveState(f"step-{step:012d}-1-00000000", evaluated=True) for step in (4, 5))


def on_device(device: str, address: MembershipAddress, limit_s: float) -> Survivor:
    with patch("ray.get_runtime_context"), patch("ray.train.torch.get_device", lambda: torch.device(device)):
        return Survivor(address, limit_s)


def test_who_was_handed_a_newer_state_does_not_call_it_by_the_name_of_its_own(tmp_path: Path) -> None:
    """Its group may end before it trains: alone, it would claim the step before with the parameters of this one."""

    def act(group: Any) -> LiveState | None:
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 2)
        survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
        survivor.prepare(lambda: Mock(saved=lambda: SavedObjects(model, torch.optim.SGD(model.parameters()))))
        survivor.kept = (FURTHEST, BEHIND)[rank], Position({}, 0.0, ())
        survivor.hand_over(WorkerPlace(group, rank, 2), Holders(FURTHEST.checkpoint, True, (0,)), 10)
        return survivor.kept[0] if survivor.kept else None

    assert in_processes(tmp_path, 2, act) == [FURTHEST, None]


def test_all_go_on_with_the_metrics_and_rows_of_one(tmp_path: Path) -> None:
    """A loss may end an evaluation on some of them only: then one alone would stop early, later."""

    def act(group: Any) -> Any:
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 2)
        saved = SavedObjects(model, torch.optim.SGD(model.parameters()))
        own = Position({"no_better": rank}, float(rank), [("1", 1, rank, torch.zeros(0, 3))])
        holders = Holders(FURTHEST.checkpoint, False, (1, 0))
        state = hand_over(WorkerPlace(group, rank, 2), holders, saved, own, 10)
        return state.metrics, state.taken, state.ledger[0][2], state.evaluated, state.model

    assert in_processes(tmp_path, 2, act) == [({"no_better": 1}, 1.0, 1, False, None)] * 2


@pytest.mark.parametrize("live", [False, True])
def test_a_group_builds_together_or_not_at_all(live: bool) -> None:
    """One that has prepared itself, and one that came when none trained, would wait for each other in collectives."""
    prepared, other = (on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0) for _ in range(2))
    prepared.prepare(Mock)
    for each in (prepared, other):
        each.align(live, Mock)
    assert [bool(each.learner) for each in (prepared, other)] == [live, live]


def test_a_group_that_is_closed_before_it_has_a_socket_forms_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member was lost right after the word that it belongs to the group; nothing can be cut yet."""
    monkeypatch.setattr(survivors, "FORM_LIMIT_S", 600)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    survivor = on_device("cpu", MembershipAddress("127.0.0.1", 0, store.port, b""), 600.0)
    ours, lost = Member("ours", "node"), Member("lost", "node")
    stood = [(Generation(7, (ours, lost)), 0), None]
    survivor._client = Mock(stand=lambda: stood.pop(0), closed=lambda wait_s: True)
    assert survivor.form() is None


@pytest.mark.parametrize("broken", [False, True])
def test_a_gpu_takes_no_step_by_sums_of_a_group_that_was_broken_off(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's collectives end without an error when they are aborted, and with sums of anything."""
    survivor = on_device("cuda", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    aborted = list[bool]()
    survivor._client = Mock(closed=lambda wait_s: bool(aborted))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(survivors, "await_device", lambda device: aborted.append(True) if broken else None)
    with pytest.raises(RegroupError) if broken else nullcontext():
        survivor.await_sums()
