"""Tests that workers save once and keep training if the head is preempted."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sunspot.elastic import supervisor
from sunspot.elastic.messages import Command
from sunspot.elastic.nodes import NodeEvent, NodeMonitor
from sunspot.parallel.decisions import StepActions
from sunspot.run.incidents import Cause
from sunspot.run.requests import StopRequest
from sunspot.settings import WorkerRange
from sunspot.train.worker import Worker
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl
from tests.harness.waiting import wait_until


def test_the_driver_requests_one_save_if_the_head_is_preempted(
    monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "head")
    answers = {"get_runtime_context": lambda: context, "nodes": lambda: []}
    monkeypatch.setattr(supervisor, "ray", SimpleNamespace(**answers))
    set_constants(supervisor, NODE_CHECK_EVERY_S=0.01)
    draining: dict[str, float | None] = {}
    looks = []

    def look() -> dict[str, float | None]:
        looks.append(1)
        return dict(draining)

    monkeypatch.setattr(supervisor, "draining_nodes", look)
    control = LocalControl()

    def wait_for_looks() -> None:
        seen = len(looks)
        wait_until(lambda: len(looks) >= seen + 3, seconds=60)

    with supervisor.supervised(control, StopRequest(), NodeMonitor({"CPU": 1.0}, WorkerRange(1, 1), list)):
        draining["another"] = None
        wait_for_looks()
        assert not control.told
        draining["head"] = time.time() + 27
        wait_for_looks()
    assert [method for method, _ in control.told] == ["request_save", "log"]


def test_a_preemption_notice_reaches_the_workers_even_if_no_nodes_can_be_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise TimeoutError("the coordinator does not answer")

    context = SimpleNamespace(get_node_id=lambda: "head")
    monkeypatch.setattr(supervisor, "ray", SimpleNamespace(get_runtime_context=lambda: context, nodes=list))
    monkeypatch.setattr(supervisor, "draining_nodes", dict)
    monkeypatch.setattr(supervisor, "ask_of_groups", refuse)
    events = [NodeEvent(Cause.PREEMPTED, "node a (rank 0)", 50.0)]
    monitor: Any = SimpleNamespace(per_worker={}, asked={"spot": 1}, check=lambda *_: events.pop() if events else None)
    control = LocalControl()
    watching = supervisor.Supervisor(control, StopRequest(), monitor)
    watching.tick()
    watching.tick()
    assert control.channel.command().restart
    assert control.channel.command().deadline == 50.0


def test_the_workers_save_once_for_a_preempted_head_and_keep_training() -> None:
    due = [StepActions(), StepActions(busy=True), StepActions(), StepActions(copy=True), StepActions(save=True)]
    commands = iter([Command(), *[Command(save=True)] * 4])
    worker: Any = SimpleNamespace(
        commands=SimpleNamespace(poll=lambda: next(commands)),
        checkpoints=SimpleNamespace(due=lambda step, step_s: due[step]),
        reporter=SimpleNamespace(due=lambda: False),
        profiler=SimpleNamespace(is_due=lambda step: False),
        _saved_for_head=False,
    )
    steps: Any = [SimpleNamespace(number=step, seconds=0.1) for step in range(len(due))]
    actions = [Worker.choose_actions(worker, step) for step in steps]
    assert [action.save for action in actions] == [False, False, True, False, True], "not while one is committed"
    assert not any(action.stop or action.restart for action in actions)
