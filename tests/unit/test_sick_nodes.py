"""Tests that a run stops using a slow node, never excludes too many nodes, and ignores short hiccups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.elastic import supervisor
from sunspot.elastic.membership import Member, Membership
from sunspot.elastic.messages import StepTimes, WorkerGroup
from sunspot.elastic.sick_nodes import (
    AGAIN_AFTER_S,
    MIN_WINDOWS,
    SICK_AFTER_S,
    SickNode,
    SickNodes,
    find_sick_node,
    step_times,
)
from sunspot.run.requests import StopRequest
from sunspot.run.stragglers import RECENT_S
from sunspot.settings import WorkerRange
from tests.harness.control import LocalControl, worker_group

EVERY_S = 10.0
FAST = 0.2
"""Seconds of a step that healthy workers of these tests spend in forward passes."""

THREE = worker_group(7, "a", "b", "c")


def window(number: int, *forward_s: float, attempt: int = 7, step_s: float = 0.0) -> StepTimes:
    """Return a window of steps. By default, they take three times as long as the slowest rank's forward passes."""
    return StepTimes(attempt, number * EVERY_S, EVERY_S, step_s or 3 * max(forward_s), forward_s)


def windows(count: int, *forward_s: float, **more: Any) -> list[StepTimes]:
    return [window(number, *forward_s, **more) for number in range(count)]


def find(windows: Sequence[StepTimes], group: WorkerGroup = THREE, least: int = 1) -> str | None:
    """Return the sick node that a group should stop using, or None. Each node has one worker by default."""
    sick = find_sick_node(windows, group, lambda node: group.world_size - 1, least)
    return sick.node if sick else None


ENOUGH = int(SICK_AFTER_S / EVERY_S) + 1
"""Number of windows, including the first one, after which a node can be sick."""


def test_a_node_that_was_slow_for_minutes_counts_as_sick_and_the_reason_is_given() -> None:
    sick = find_sick_node(windows(ENOUGH, FAST, FAST, 0.4), THREE, lambda node: 2, 2)
    times = "its forward passes took 0.4 s a step, and those of the other nodes took at most 0.2 s"
    assert sick == SickNode("c", f"{times}, in 18 of 18 windows of 3 min")


CASES: dict[str, list[StepTimes]] = {
    "all nodes are equally slow": windows(30, 0.4, 0.4, 0.4),
    "another node is as slow": windows(30, FAST, 0.4, 0.4),
    "it is slower by less than the loss of a worker costs": windows(30, FAST, FAST, 0.29),
    "its forward passes are a small part of the step": windows(30, FAST, FAST, 0.4, step_s=3.0),
    "the group began a moment ago": windows(ENOUGH - 1, FAST, FAST, 0.4),
    "the windows are from another group": windows(30, FAST, FAST, 0.4, attempt=6),
    "there are too few windows": [
        StepTimes(7, 200.0 * number, 200.0, 1.2, (FAST, FAST, 0.4)) for number in range(MIN_WINDOWS)
    ],
    "a hiccup lasts a minute": [*windows(24, FAST, FAST, FAST), *[window(n, FAST, FAST, 2.0) for n in range(24, 30)]],
    "it has recovered": [*windows(29, FAST, FAST, 0.4), window(29, FAST, FAST, 1.05 * FAST)],
    "another node is slow each time": [
        window(n, *[2 * FAST if n % 3 == k else FAST for k in range(3)]) for n in range(30)
    ],
    "the task measures no forward passes": windows(30, 0.0, 0.0, 0.0, step_s=1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_no_node_counts_as_sick_without_sufficient_evidence(name: str) -> None:
    assert find(CASES[name]) is None


def test_a_slow_node_counts_as_sick_even_if_it_is_sometimes_fast() -> None:
    assert find([window(n, FAST, FAST, 0.4 if n % 6 else FAST) for n in range(29)]) == "c"


def test_the_slowest_worker_of_a_node_determines_whether_the_node_is_slow() -> None:
    """The slowest worker of the node differs between windows."""
    group = WorkerGroup(7, 6, dict(enumerate("aabbcc")))
    slow = [window(n, *[FAST] * 4, *((0.5, FAST) if n % 2 else (FAST, 0.5))) for n in range(30)]
    assert find_sick_node(slow, group, lambda node: 4, 4)
    assert not find_sick_node(slow, group, lambda node: 4, 5), "too few workers would remain"


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ([2, 1, 1], [2.0, 1.0, 1.0]),
        ([2, 2, 1], [2.0, 2.0, 1.0]),
        ([2, 1, 1], [2.0, 1.5, 1.5]),
        ([1, 0, 0], [1.0, 0.0, 0.0]),
    ],
)
def test_a_worker_with_more_rows_is_not_a_straggler(rows: list[int], seconds: list[float]) -> None:
    """Half a second of each forward pass does not depend on the number of rows in the third case."""
    ranks = {"rows": [10 * each for each in rows], "forward_s": [10 * each for each in seconds], "steps_s": [30.0] * 3}
    records = [{"time": EVERY_S * number, "seconds": EVERY_S, "steps": 10} for number in range(30)]
    assert find([step_times(7, record, ranks) for record in records]) is None
    ranks |= {"rows": [10, 10, 10], "forward_s": [20.0, 10.0, 10.0]}
    assert find([step_times(7, record, ranks) for record in records]) == "a"


def test_a_group_on_a_single_node_has_no_sick_node() -> None:
    assert find(windows(30, FAST, 0.9), WorkerGroup(7, 2, {0: "a", 1: "a"})) is None


def test_an_hsdp_group_loses_whole_replicas_when_it_excludes_a_node() -> None:
    membership = Membership(6, degree=2)
    for number, node in enumerate("aabbcd"):
        membership.enter(Member(f"{number}", node, f"{number}"))
        membership.request_to_join(f"{number}", 0.0)
    assert membership.decide(1.0)
    assert membership.size_without("a") == 4
    assert membership.size_without("c") == 4, "the worker on node d waits for another replica"
    membership.limit(4)
    assert membership.size_without("a") == 2, "two workers leave anyway"


times = st.floats(0.1, 1.0)


@given(st.lists(times, min_size=2, max_size=8), st.lists(st.floats(0.95, 1.05), min_size=30, max_size=30))
def test_no_node_counts_as_sick_if_all_workers_become_slow(noise: list[float], slowness: list[float]) -> None:
    """The workers differ by up to 10 %, and all of them change together."""
    group = worker_group(7, *map(str, range(len(noise))))
    found = find(
        [window(n, *[FAST * (1 + each / 10) * factor for each in noise]) for n, factor in enumerate(slowness)], group
    )
    assert found is None


@given(st.lists(st.sampled_from([1.0, 1.1, 2.0, 4.0]), min_size=2, max_size=8), st.integers(1, 8), st.booleans())
def test_a_run_keeps_its_minimum_number_of_workers_and_rarely_excludes_a_node(
    slowness: list[float], least: int, again: bool
) -> None:
    """Each change of the group begins a new attempt. An excluded node can come back as slow as before."""
    nodes = {str(number): FAST * factor for number, factor in enumerate(slowness)}
    sick_nodes = SickNodes()
    left_at: list[float] = []
    attempt = 0
    history: list[StepTimes] = []
    for number in range(int(6 * 3600 / 60)):
        now = 60.0 * number
        group = worker_group(attempt, *nodes)
        forward_s = tuple(nodes.values())
        history += [StepTimes(attempt, now + n * EVERY_S, EVERY_S, 3 * max(forward_s), forward_s) for n in range(6)]
        history = [each for each in history if each.time > now - RECENT_S]
        sick = sick_nodes.find(history, group, lambda node: len(nodes) - 1, least, now)
        if not sick:
            continue
        before = dict(nodes)
        slow = nodes.pop(sick.node)
        assert slow == max(before.values()), "the slowest node is excluded"
        assert len(nodes) >= least
        assert max(nodes.values()) / len(nodes) <= slow / len(before), "the others are not slower without it"
        left_at.append(now)
        if again:
            nodes[f"{sick.node} again"] = slow
        attempt += 1
    pauses = [later - earlier for earlier, later in pairwise(left_at)]
    assert all(pause >= AGAIN_AFTER_S * 2**number for number, pause in enumerate(pauses))


def supervise(monkeypatch: pytest.MonkeyPatch, sick: SickNode | None) -> tuple[Callable[[float], Any], SimpleNamespace]:
    """Return a function that lets a supervisor check three nodes after some seconds, and its parts."""
    now = [0.0]
    nodes = [{"NodeID": node, "Alive": True} for node in "abc"]
    context = SimpleNamespace(get_node_id=lambda: "head")
    draining: dict[str, None] = {}
    parts = SimpleNamespace(
        control=LocalControl(),
        membership=Mock(snapshot=lambda: SimpleNamespace(size=3), leave_sick_node=Mock(return_value=sick)),
        monitor=Mock(per_worker={"CPU": 1.0}, check=Mock(return_value=None), asked={}),
        draining=draining,
    )
    monkeypatch.setattr(supervisor, "ask_for_nodes", lambda *_: None)
    monkeypatch.setattr(supervisor, "draining_nodes", lambda: dict(draining))
    monkeypatch.setattr(supervisor, "drain_nodes", lambda nodes, why: draining.update(dict.fromkeys(nodes)))
    monkeypatch.setattr(supervisor, "ray", SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    both = WorkerRange(2, 3)
    wanted: Any = SimpleNamespace(range=both, narrowed=False, describe=lambda: "")
    watching = supervisor.Supervisor(parts.control, StopRequest(), parts.monitor, parts.membership, wanted)
    parts.control.channel.begin_group(THREE)

    def after(seconds: float) -> WorkerGroup:
        now[0] += seconds
        watching.tick()
        group: WorkerGroup = parts.monitor.check.call_args.args[0]
        return group

    return after, parts


def test_the_driver_excludes_a_sick_node_and_later_uses_room_on_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    after, parts = supervise(monkeypatch, SickNode("c", "it is slow"))
    parts.control.channel.add_step_times(window(1, FAST, FAST, FAST))
    assert after(1).nodes == THREE.nodes
    assert set(after(supervisor.SICK_CHECK_EVERY_S).nodes.values()) == {"a", "b"}, "its drain is not a preemption"
    assert parts.membership.leave_sick_node.call_args.args == ([window(1, FAST, FAST, FAST)], THREE, "head", 2)
    assert list(parts.draining) == ["c"]
    line = "the run stops using node c, and the other nodes keep training: it is slow"
    assert parts.control.heard("log") == [line]
    assert parts.control.heard("add_left_out") == [[line]]
    parts.membership.leave_sick_node.return_value = None
    parts.control.channel.begin_group(worker_group(8, "a", "b"))
    assert after(1).world_size == 3, "the others may not have joined yet"
    assert after(supervisor.SHORT_S + 1).world_size == 2, "room on other nodes is used by a restart"


def test_a_run_does_not_exclude_a_sick_node_while_another_node_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    after, parts = supervise(monkeypatch, SickNode("c", "it is slow"))
    parts.draining["b"] = None
    after(supervisor.SICK_CHECK_EVERY_S)
    assert not parts.membership.leave_sick_node.called


def test_the_channel_forgets_the_step_times_of_old_windows() -> None:
    control = LocalControl()
    for number in range(100):
        control.channel.add_step_times(window(number, FAST, FAST))
    kept = control.channel.step_times()
    assert [each.time for each in kept] == [number * EVERY_S for number in range(70, 100)]
