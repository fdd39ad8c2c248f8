"""Tests that nodes with broken GPUs are left out, both at the start of a run and during training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sunspot.elastic.failures import Suspects
from sunspot.errors import SunspotError
from sunspot.train import broken_gpus, probe
from sunspot.train.broken_gpus import BrokenInTraining, RequiredResources, leave_out_at_start, new_nodes_checked
from tests.harness.asked_nodes import FakeRay
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl
from tests.harness.waiting import wait_until

A = "a" * 56
B = "b" * 56
C = "c" * 56


class Cluster:
    """A cluster of node A with 8 GPUs, B with 2 and C without. Nodes in `broken` have no GPU driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken, self.done = "", list[tuple[str, ...]]()
        self.answer = threading.Event()
        self.answer.set()
        self.ray = FakeRay(self._say)
        resources = {A: {"GPU": 8.0}, B: {"GPU": 2.0}, C: {"CPU": 8.0}}
        self.nodes = [{"NodeID": node, "Resources": has, "Alive": True} for node, has in resources.items()]
        monkeypatch.setattr(probe, "ray", self.ray)
        monkeypatch.setattr(broken_gpus, "ray", self.ray)
        monkeypatch.setattr(self.ray, "nodes", lambda: self.nodes, raising=False)
        monkeypatch.setattr(broken_gpus, "reachable_nodes", list)
        monkeypatch.setattr(broken_gpus, "draining_nodes", dict)
        monkeypatch.setattr(broken_gpus, "staying_nodes", lambda: self.nodes)
        monkeypatch.setattr(broken_gpus, "drain_nodes", lambda nodes, why: self.done.append(tuple(nodes)))

    def _say(self, node: str) -> str:
        assert self.answer.wait(10)
        return "no driver" if node[0] in self.broken else ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.mark.parametrize(
    ("broken", "least", "left_out"),
    [("", 10, ""), ("a", 2, A)],
    ids=["none", "one, and the others do"],
)
def test_a_node_with_a_broken_gpu_is_excluded_if_the_other_nodes_suffice(
    broken: str, least: int, left_out: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.broken = broken
    lines = leave_out_at_start(cluster.nodes, RequiredResources({"GPU": 1.0}, least))
    assert cluster.ray.arguments == {A: (8,), B: (2,)}, "the GPUs that each node promises"
    assert cluster.done == ([(left_out,)] if left_out else [])
    assert lines == ([f"node {left_out[:12]} left out: no driver"] if left_out else [])
    warned = "1 of 2 nodes with GPUs cannot compute on them, and is left out" in capsys.readouterr().out
    assert warned == bool(left_out)


@pytest.mark.parametrize(
    ("broken", "head", "least", "why"),
    [
        ("ab", C, 1, "the other nodes can run 0 workers, but the run needs at least 1"),
        ("a", C, 3, "the other nodes can run 2 workers, but the run needs at least 3"),
        ("a", A, 1, "the run cannot continue without its head node"),
    ],
    ids=["all", "too few others", "the head's"],
)
def test_a_run_does_not_start_if_it_needs_a_node_with_a_broken_gpu(
    broken: str, head: str, least: int, why: str, cluster: Cluster
) -> None:
    cluster.broken, cluster.ray.here = broken, head
    with pytest.raises(SunspotError, match=rf"of 2 nodes with GPUs cannot compute on them: .*: no driver; {why}"):
        leave_out_at_start(cluster.nodes, RequiredResources({"GPU": 1.0}, least))
    assert not cluster.done


@pytest.fixture
def training(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> BrokenInTraining:
    class Control(LocalControl):
        def call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
            cluster.done.append((method.__name__,))

    return BrokenInTraining(Control(), RequiredResources({"GPU": 1.0}, 2), group_ends=True)


@pytest.mark.parametrize(
    ("codes", "broken", "told"),
    [
        ({A: 719}, "a", "no driver"),
        ({A: None, B: None}, "a", "no driver"),
        ({A: 214}, "", "its GPU had an uncorrectable error of its memory (ECC)"),
    ],
    ids=["launch failure, and dead since", "lost", "answers after an ECC error"],
)
def test_a_node_with_a_newly_broken_gpu_is_excluded_from_the_next_group(
    codes: Suspects, broken: str, told: str, cluster: Cluster, training: BrokenInTraining
) -> None:
    cluster.broken = broken
    assert training(codes) == [f"node {A[:12]} left out: {told}"]
    assert cluster.done == [("forget_group",), (A,)], "a drain of a group's node would be a notice"


def test_a_group_still_gets_preemption_notices_after_a_node_is_excluded(
    cluster: Cluster, training: BrokenInTraining
) -> None:
    """The supervisor passes notices only to the group that the control channel knows."""
    cluster.broken = "a"
    assert replace(training, group_ends=False)({A: None})
    assert cluster.done == [(A,)]


@pytest.mark.parametrize(
    ("codes", "asked"),
    [({A: 710, B: 700}, {A, B}), ({C: None}, set()), ({"gone": None}, set()), ({}, set())],
    ids=["the program's error", "no GPU", "a lost node", "none"],
)
def test_a_gpu_that_still_works_after_an_error_stays_in_use(
    codes: Suspects, asked: set[str], cluster: Cluster, training: BrokenInTraining
) -> None:
    assert not training(codes)
    assert set(cluster.ray.arguments) == asked
    assert not cluster.done


def test_a_run_ends_if_it_needs_a_gpu_that_has_broken(cluster: Cluster, training: BrokenInTraining) -> None:
    cluster.broken = "ab"
    room = "the other nodes can run 0 workers, but the run needs at least 2"
    told = rf"a GPU broke: {A[:12]}, {B[:12]}: no driver; {room}"
    with pytest.raises(SunspotError, match=told):
        training({A: 719, B: 719})
    assert not cluster.done


def test_a_needed_gpu_stays_in_use_unless_it_has_reported_an_error_and_no_longer_works(
    cluster: Cluster, training: BrokenInTraining
) -> None:
    """MAX_FAILURES limits the number of attempts in that case."""
    assert not training({A: 214, B: 220})
    cluster.broken = "ab"  # the GPUs of a node that is about to end might not answer, either
    assert not training({A: None, B: None})
    assert not cluster.done


def test_a_new_node_is_checked_before_a_group_grows_onto_it(
    cluster: Cluster, set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    set_constants(broken_gpus, NODE_CHECK_EVERY_S=0.01)
    control = LocalControl()
    every = [node["NodeID"] for node in cluster.nodes]

    def usable() -> list[str]:
        return [node["NodeID"] for node in filtered(cluster.nodes)]

    cluster.broken = "b"
    joining, cluster.nodes = cluster.nodes[1:], cluster.nodes[:1]
    with new_nodes_checked(control, cluster.nodes) as filtered:
        cluster.answer.clear()
        cluster.nodes += joining
        wait_until(lambda: cluster.ray.arguments)
        assert usable() == [A]
        assert not control.told
        cluster.answer.set()
        wait_until(lambda: usable() == every)
        time.sleep(0.1)
    assert cluster.ray.arguments == {B: (2,)}, "A was checked already, and C promises no GPU"
    assert control.heard("add_left_out") == [[f"node {B[:12]} left out: no driver"]]
    assert cluster.done == [(B,)], "B is drained once, and no group is ended"
    assert capsys.readouterr().out == f"warning: node {B[:12]} left out: no driver\n"


def test_a_draining_node_is_not_checked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(broken_gpus, NODE_CHECK_EVERY_S=0.01)
    monkeypatch.setattr(broken_gpus, "draining_nodes", lambda: {B: None})
    with new_nodes_checked(LocalControl(), []) as filtered:
        wait_until(lambda: [node["NodeID"] for node in filtered(cluster.nodes)] == [A, C])
    assert set(cluster.ray.arguments) == {A}
