"""Tests of a process that outlives its group: the state that it keeps, and the next group that it forms."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
import torch.distributed as dist

from sunspot.checkpoint import SavedObjects
from sunspot.elastic.claim import StartPoint
from sunspot.elastic.copies import LiveState, SurvivingState
from sunspot.elastic.membership import Generation, Member
from sunspot.elastic.membership_channel import MembershipAddress, RegroupError
from sunspot.elastic.restore import TrainingState
from sunspot.errors import DamageError, DataError, SunspotError, SupersededError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.run import open_run
from sunspot.run.attempts import IN_PLACE, Attempt, Metadata, checkpoint_name, claim
from sunspot.run.failures import read_failures
from sunspot.settings import Settings
from sunspot.train import joining, loop, replacement
from sunspot.train import survivor as survivors
from sunspot.train.survivor import NoGroupError, StateMetadata, Survivor, hand_over
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl, worker_group
from tests.harness.loop import make_worker, plan_without_evaluation
from tests.harness.process_group import in_processes

BEHIND, FURTHEST = (LiveState(f"step-{step:012d}-1-00000000", evaluated=True) for step in (4, 5))


def on_device(device: str, address: MembershipAddress, limit_s: float) -> Survivor:
    with patch("ray.get_runtime_context"), patch("ray.train.torch.get_device", lambda: torch.device(device)):
        return Survivor(address, limit_s)


def continue_in_place(survivor: Survivor, attempt: Attempt, place: WorkerPlace | None = None) -> None:
    """Let a process continue from the live state that `attempt` starts from."""
    start = StartPoint(attempt, live=SurvivingState(FURTHEST.checkpoint, True, (0,)))
    place = place or WorkerPlace()
    build = partial(MagicMock, place=place)
    survivor.continue_from(place, start, build, Mock(paused=nullcontext), LocalControl())


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> TrainingState:
    """Let each process receive a state without another process, and return this state."""
    state = TrainingState(model={}, metrics={"loss": 1.0}, taken=7.0, ledger=("window",), tier=IN_PLACE)
    monkeypatch.setattr(survivors, "hand_over", lambda *_: state)
    for name in ("shard_model_state", "load_rest", "load_weights", "same_parameters"):
        monkeypatch.setattr(survivors, name, MagicMock())
    return state


def test_a_process_keeps_its_own_state_until_it_loads_a_newer_state(
    received: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, the group can return to the older state. While the process loads, it has no usable state."""
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    own = survivor.kept = BEHIND, StateMetadata({}, 0.0, ())
    found: list[Any] = []

    def receive(*_: object) -> TrainingState:
        found.append(survivor.kept)
        return received

    monkeypatch.setattr(survivors, "hand_over", receive)
    monkeypatch.setattr(survivors, "load_weights", lambda *_: found.append(survivor.kept))
    continue_in_place(survivor, Attempt(3, "job", FURTHEST.checkpoint, 5))
    assert found == [own, None]
    assert survivor.kept
    assert survivor.kept[0].checkpoint == checkpoint_name(5, 3)


def test_no_worker_gives_up_its_shard_before_all_workers_have_received_a_newer_shard(tmp_path: Path) -> None:
    """Rank 1 is lost before it sends the second shard, so rank 2 must not load the first shard."""

    def act(group: Any) -> None:
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 2)
        saved = SavedObjects(model, torch.optim.SGD(model.parameters()))
        holders = SurvivingState(FURTHEST.checkpoint, True, (0, 1), shards=2)
        lost = patch("torch.distributed.isend", side_effect=RuntimeError("lost")) if rank == 1 else nullcontext()
        with lost, pytest.raises(RuntimeError):
            hand_over(WorkerPlace(group, rank, 4), holders, saved, StateMetadata({}, 0.0, ()), 10)

    in_processes(tmp_path, 4, act)


def test_the_loss_of_the_sender_ends_the_transfer_of_a_large_tensor_at_once(tmp_path: Path) -> None:
    """Gloo alone would wait until the timeout for the rest of a tensor that has arrived in part."""
    took_s = tmp_path / "took_s"

    def act(group: Any) -> None:
        rank = dist.get_rank()
        model = torch.nn.Linear(5000, 5000)
        saved = SavedObjects(model, torch.optim.SGD(model.parameters()))
        holders = SurvivingState(FURTHEST.checkpoint, True, (1,))
        dist.barrier()
        if rank == 1:
            threading.Timer(0.02, os._exit, (0,)).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            hand_over(WorkerPlace(group, rank, 2), holders, saved, StateMetadata({}, 0.0, ()), 10)
        took_s.write_text(str(time.monotonic() - began))

    with pytest.raises(pytest.fail.Exception, match="rank 1"):
        in_processes(tmp_path, 2, act)
    assert float(took_s.read_text()) < 10


@pytest.mark.parametrize(("hang_timeout_s", "limits_s"), [(300.0, [900.0]), (0.0, [])])
def test_a_process_without_a_group_is_stopped_if_it_hangs_while_it_builds_its_model(
    hang_timeout_s: float, limits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    active = list[float]()

    @contextmanager
    def ended_after(limit_s: float, until: str) -> Iterator[None]:
        active.append(limit_s)
        yield
        active.remove(limit_s)

    def build() -> Mock:
        assert active == limits_s
        return Mock()

    monkeypatch.setattr(survivors, "ended_after", ended_after)
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    survivor.prepare_alone(build, hang_timeout_s)
    assert survivor.learner
    assert not active


def test_a_process_that_received_a_state_can_offer_it_before_its_group_trains(received: TrainingState) -> None:
    """Otherwise, all processes would return to a copy if the only other process with the state died then."""
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    attempt = Attempt(3, "job", FURTHEST.checkpoint, 5, nonce="11111111")
    continue_in_place(survivor, attempt)
    assert survivor.kept == (
        LiveState(checkpoint_name(5, 3, "11111111"), evaluated=True),
        StateMetadata({"loss": 1.0}, 7.0, ("window",)),
    )
    stood = list[int | None]()
    survivor._client = Mock(join_next=lambda step, left_out: stood.append(step))
    survivor.form()
    assert stood == [5], "the decider learns the step"


def test_all_members_continue_with_the_metrics_and_rows_of_one_member(tmp_path: Path) -> None:
    """A loss can end an evaluation on only some members, and one of them might then stop the run early."""

    def act(group: Any) -> Any:
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 2)
        saved = SavedObjects(model, torch.optim.SGD(model.parameters()))
        own = StateMetadata({"no_better": rank}, float(rank), [("1", 1, rank, torch.zeros(0, 3))])
        holders = SurvivingState(FURTHEST.checkpoint, False, (1, 0))
        state = hand_over(WorkerPlace(group, rank, 2), holders, saved, own, 10)
        return state.metrics, state.taken, state.ledger[0][2], state.evaluated, state.model

    assert in_processes(tmp_path, 2, act) == [({"no_better": 1}, 1.0, 1, False, None)] * 2


def test_members_with_the_state_share_the_work_of_sending_it(tmp_path: Path) -> None:
    def act(group: Any) -> Any:
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, rank)
        saved = SavedObjects(model, torch.optim.SGD(model.parameters())) if rank in (1, 3) else None
        holders = SurvivingState(FURTHEST.checkpoint, True, (3, 1))
        state = hand_over(WorkerPlace(group, rank, 4), holders, saved, StateMetadata({}, 0.0, ()), 10)
        return state.model and float(state.model["weight"].mean())

    assert in_processes(tmp_path, 4, act) == [3.0, None, 1.0, None]


def test_a_process_that_received_a_shard_does_not_offer_the_whole_state(received: TrainingState) -> None:
    """Otherwise, a group that has lost all other shards would train with this shard in their place."""
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    place = WorkerPlace(rank=3, world_size=4, replicas=Mock(degree=2))
    survivor.prepare(lambda: MagicMock(place=place))
    continue_in_place(survivor, Attempt(3, "job", FURTHEST.checkpoint, 5), place)
    assert survivor.kept
    assert survivor.kept[0][2:] == (1, 2)


def test_a_member_without_a_model_builds_a_model_when_its_group_continues_in_place(received: TrainingState) -> None:
    """Otherwise, a prepared process and a process that started when no group trained would wait for each other."""
    prepared, other = (on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0) for _ in range(2))
    prepared.prepare(lambda: MagicMock(place=WorkerPlace()))
    before = prepared.learner
    for each in (prepared, other):
        continue_in_place(each, Attempt(3, "job", FURTHEST.checkpoint, 5))
    assert other.learner
    assert prepared.learner is before


@pytest.mark.parametrize("handed_over", [True, False])
def test_all_workers_return_to_an_earlier_copy_if_their_parameters_differ(
    handed_over: bool, received: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bits of the parameters can differ between different kinds of processors, which is not a failure."""
    loaded = Mock()
    monkeypatch.setattr(survivors, "load_weights", loaded)
    monkeypatch.setattr(survivors, "same_parameters", lambda *_: False)
    monkeypatch.setattr(survivors, "hand_over", lambda *_: replace(received, model={} if handed_over else None))
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    survivor.kept = FURTHEST, StateMetadata({}, 0.0, ())
    with pytest.raises(RegroupError):
        continue_in_place(survivor, Attempt(2, "me", FURTHEST.checkpoint, 5))
    assert loaded.called is handed_over
    assert survivor.kept is None
    assert survivor.learner is None


def test_a_group_stops_forming_if_it_is_closed_before_it_has_a_socket(set_constants: SetConstants) -> None:
    """A member was lost right after it was admitted to the group, when there is no socket to cut yet."""
    set_constants(survivors, FORM_LIMIT_S=600)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    survivor = on_device("cpu", MembershipAddress("127.0.0.1", 0, store.port, b""), 600.0)
    ours, lost = Member("ours", "node"), Member("lost", "node")
    stood = [(Generation(7, (ours, lost)), 0), None]
    survivor._client = Mock(join_next=lambda step, left_out: stood.pop(0), closed=lambda wait_s: True)
    assert survivor.form() is None


def test_a_worker_alone_in_its_group_stops_when_the_group_is_closed(tmp_path: Path) -> None:
    """No collective fails in a group of one, because no process waits for another."""

    def act(group: Any) -> int:
        worker = make_worker(plan_without_evaluation(Settings(max_steps=8)), group)
        worker.group_start = replace(worker.group_start, is_closed=lambda: worker.step == 3)
        with pytest.raises(RegroupError):
            loop.train(worker)
        return worker.step

    assert in_processes(tmp_path, 1, act) == [3]


def test_an_evaluation_stops_when_the_group_is_closed() -> None:
    worker = SimpleNamespace(group_start=SimpleNamespace(is_closed=lambda: True))
    worker._leave_closed_group = lambda: survivors.Worker._leave_closed_group(worker)  # type: ignore[arg-type]
    with pytest.raises(RegroupError):
        survivors.Worker._heartbeat(worker, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("closed", [True, False])
def test_a_process_outlives_a_group_that_the_same_driver_has_superseded(closed: bool) -> None:
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    survivor._client = Mock(closed=lambda wait_s: closed)
    assert survivor.outlives(SupersededError("attempt 2 owns the run")) is closed
    assert not survivor.outlives(DataError("no rows"))


@pytest.mark.parametrize(("driver", "fatal"), [("this", False), ("another", True)])
def test_a_superseded_worker_ends_the_run_only_if_another_driver_owns_the_run(
    driver: str, fatal: bool, tmp_path: Path
) -> None:
    run, control = open_run(str(tmp_path), "run"), LocalControl()
    ours = Attempt(1, "job", None, 0, metadata=Metadata(driver="this"))
    claim(run, [], ours)
    claim(run, [ours], Attempt(2, "job", None, 0, metadata=Metadata(driver=driver)))
    start = SimpleNamespace(attempt=ours)
    setup: Any = SimpleNamespace(run=run, control=control, place=WorkerPlace(), start=start, survivor=None)
    joining.record_end(SupersededError("attempt 2 owns the run"), setup)
    assert bool(control.channel.group_end().fatal) is fatal


@pytest.mark.parametrize(("rank", "told"), [(0, True), (1, False)])
def test_a_replacement_reports_a_fatal_error_if_no_trained_worker_remains(
    rank: int, told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the run would end because of MAX_FAILURES lost workers, instead of with the error's exit code."""
    control = LocalControl()
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    monkeypatch.setattr(survivor, "form", lambda: WorkerPlace(None, rank, 2, nodes=["node", "node"]))
    monkeypatch.setattr(survivor, "prepare", lambda build: None)
    for name in ("print_logs", "find_code", "enter_folder", "quiet_ray_train", "Watchdog", "listening_to_rounds"):
        monkeypatch.setattr(joining, name, MagicMock())
    for name in ("open_memory", "set_tf32"):
        monkeypatch.setattr(joining, name, Mock(return_value=None))
    monkeypatch.setattr(joining.ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(joining.dist, "barrier", lambda group: None)
    monkeypatch.setattr(joining.torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(joining, "agree_on_start", Mock(side_effect=DamageError("no checkpoint is whole")))
    config: Any = Mock(control=control, plan=plan_without_evaluation(Settings()))
    config.claimant = lambda: Mock(run=open_run(str(tmp_path), "run"))
    with pytest.raises(DamageError):
        loop.train_in_group(config, survivor)
    assert bool(control.channel.group_end().fatal) is told


@pytest.mark.parametrize("others_train", [True, False])
@pytest.mark.parametrize("others_first", [True, False])
def test_members_that_cannot_connect_fail_promptly(
    others_first: bool, others_train: bool, set_constants: SetConstants
) -> None:
    """One member hangs but sends heartbeats. A collective can take far longer than forming a group.

    The first member that fails closes the group for the others.
    """
    set_constants(survivors, FORM_LIMIT_S=0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    survivor = on_device("cpu", MembershipAddress("127.0.0.1", 0, store.port, b""), 600.0)
    survivor.others_train = others_train
    members = Member("ours", "node-1"), Member("silent", "node-2")
    stand = Mock(return_value=(Generation(7, members), 0))
    survivor._client = Mock(join_next=stand, closed=lambda wait_s: others_first and wait_s > 0)
    began = time.monotonic()
    with pytest.raises(NoGroupError, match="node-1, node-2 can connect to each other"):
        survivor.form()
    assert time.monotonic() - began < 30
    assert stand.call_count == (1 if others_train else survivors.GROUP_TRIES), (
        "the others wait for a replacement in each try"
    )


def test_a_process_stops_retrying_if_it_is_repeatedly_presumed_lost() -> None:
    """The process held the GIL for too long while it built its model, and would do so again."""
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    survivor._client = Mock(connections=1)
    for connections in range(1, survivors.GROUP_TRIES + 1):
        survivor._connections, survivor._client.connections = connections, connections + 1
        survivor.abandon_group(RegroupError())
    with pytest.raises(NoGroupError, match=r"3 groups in a row took no step: .*considered this process lost"):
        survivor.form()
    survivor._worker = Mock(step=5, group_start=Mock(step=4))
    survivor.abandon_group(RegroupError())
    assert not survivor._failed_groups, "a step was taken"


class Ended(BaseException):
    """An exception raised instead of ending the process."""


@pytest.mark.parametrize(("others_train", "trained"), [(True, False), (True, True), (False, False)])
def test_a_replacement_that_cannot_train_does_not_stop_workers_that_are_training(
    others_train: bool, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = on_device("cpu", MembershipAddress("nowhere", 0, 0, b""), 30.0)
    survivor._client, survivor._trained = Mock(connect=lambda: others_train, closed=lambda wait_s: False), trained

    def end(error: Exception, config: Any) -> NoReturn:
        raise Ended

    def fail(*given: Any) -> NoReturn:
        raise DataError("the rows take 40 GB, and 12 GB are left there")

    monkeypatch.setattr(loop, "Survivor", lambda *given: survivor)
    monkeypatch.setattr(loop, "end_replacement", end)
    monkeypatch.setattr(loop, "train_in_group", fail)
    alone = others_train and not trained
    with pytest.raises(Ended if alone else SunspotError):
        loop.train_loop(Mock())
    assert survivor._client.end.called is not alone, "the others are not told that the group ends"


@pytest.mark.parametrize(("head", "left_out"), [("another", True), ("bad", False)])
def test_a_node_on_which_replacements_fail_is_excluded_unless_it_is_the_head_node(
    head: str, left_out: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    control = LocalControl()
    drained, pauses = list[str](), list[float]()
    control.channel._group = worker_group(1, "others")
    config: Any = SimpleNamespace(control=control, run=open_run(str(tmp_path), "run"))
    monkeypatch.setattr(replacement.os, "_exit", Mock(side_effect=Ended))
    monkeypatch.setattr(replacement.time, "sleep", pauses.append)
    monkeypatch.setattr(replacement, "drain_nodes", lambda nodes, why: drained.extend(nodes))
    monkeypatch.setattr(replacement, "head_nodes", lambda: {head})
    context = Mock(get_world_rank=lambda: 2, get_node_id=lambda: "bad")
    for way in ("ray.get_runtime_context", "ray.train.get_context"):
        monkeypatch.setattr(way, lambda: context)
    for _ in range(3):
        with pytest.raises(Ended):
            replacement.end_replacement(DataError("no such mount"), config)
    assert drained == (["bad", "bad"] if left_out else [])
    assert pauses == ([] if left_out else [10.0, 20.0]), "on a node that cannot be left out, tries become rare"
    assert "no such mount; the other workers keep training" in control.heard("log")[0]
    [failure] = read_failures(config.run)
    assert (failure.rank, failure.type, failure.message) == (2, "DataError", "no such mount")
