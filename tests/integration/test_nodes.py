"""Tests that each event of a node is found exactly once, and that Ray Train counts only the nodes that stay."""

from __future__ import annotations

import gc
import json
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as rays
from ray.exceptions import ActorDiedError
from ray.experimental.internal_kv import _internal_kv_get
from ray.train import TrainingFailedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.controller.state import RestartingState, RunningState, SchedulingState
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from sunspot.background import start_thread
from sunspot.elastic import nodes as elastic_nodes
from sunspot.elastic.control import COMMAND_EVERY_S, CommandPoller, ControlChannel, open_control
from sunspot.elastic.groups import GroupChoice
from sunspot.elastic.messages import Command, Incident
from sunspot.elastic.nodes import BACKOFF_FACTOR, SETTLED_S, NodeEvent, NodeMonitor, choose_placement, find_room
from sunspot.elastic.supervisor import supervised
from sunspot.ray_internals.controller import (
    end_groups_at_once,
    live_controllers,
    remove_placement_groups,
    replace_lost_alone,
    reserved_groups,
)
from sunspot.ray_internals.coordinator import COORDINATOR, ask_of_groups, install_coordinator, offer_whole_replicas
from sunspot.ray_internals.nodes import drain_nodes, draining_nodes, reachable_nodes
from sunspot.run.incidents import Cause
from sunspot.run.requests import StopRequest
from sunspot.settings import NodeGroup, WorkerRange
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl
from tests.harness.control import worker_group as group
from tests.harness.nodes import start_node
from tests.harness.waiting import wait_until

PER_WORKER = {"CPU": 1.0, "spot": 1.0}


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources or {"CPU": 1.0, "spot": 1.0}}


HEAD = node("head", **{"node:__internal_head__": 1.0, "memory": 1e9})
A, B = node("a"), node("b")
C = node("c")
DEAD_A, DEAD_B = node("a", alive=False), node("b", alive=False)


@pytest.mark.parametrize(
    ("nodes", "draining", "found"),
    [
        ([HEAD, A, B], {}, None),
        ([HEAD, A, B], {"b": 50.0}, NodeEvent(Cause.PREEMPTED, "node b (rank 1)", 50.0)),
        ([HEAD, A, B], {"b": None}, NodeEvent(Cause.PREEMPTED, "node b (rank 1)", None)),
        (
            [HEAD, A, B],
            {"b": 50.0, "a": 40.0},
            NodeEvent(Cause.PREEMPTED, "node a (ranks 0, 2), node b (rank 1)", 40.0),
        ),
        (
            [HEAD, A, B],
            {"b": 50.0, "a": None},
            NodeEvent(Cause.PREEMPTED, "node a (ranks 0, 2), node b (rank 1)", 50.0),
        ),
        ([HEAD, A, B, C], {"c": 50.0, "head": 40.0}, None),
        ([HEAD, A, B, node("c", alive=False)], {}, None),
        ([HEAD, DEAD_A, B], {}, NodeEvent(Cause.NODE_LOST, "node a (ranks 0, 2)")),
        ([HEAD, A], {}, NodeEvent(Cause.NODE_LOST, "node b (rank 1)")),
        # The group ends by itself, so that a restart would gain nothing.
        ([HEAD, A, DEAD_B], {"a": 50.0}, NodeEvent(Cause.NODE_LOST, "node b (rank 1)")),
    ],
)
def test_each_event_on_the_nodes_of_a_group_is_reported_once(
    nodes: list[dict[str, Any]], draining: dict[str, float | None], found: NodeEvent | None
) -> None:
    monitor = NodeMonitor(PER_WORKER, WorkerRange(3, 3), list)
    assert monitor.check(group(1, "a", "b", "a"), nodes, draining, 0.0) == found
    assert monitor.check(group(1, "a", "b", "a"), nodes, draining, 1.0) is None, "the event is found only once"
    assert monitor.check({}, nodes, draining, 2.0) is None
    assert monitor.check(group(2, "a", "b", "a"), nodes, draining, 3.0) == found, (
        "the event is found again for the next group"
    )


def test_a_lost_node_is_reported_with_its_host_name_if_known() -> None:
    """The host is the pod in Kubernetes, which `kubectl` also knows. No other list contains Ray's node ids."""
    monitor = NodeMonitor(PER_WORKER, WorkerRange(2, 2), list)
    named = replace(group(1, "a", "b"), hosts={0: "run-1-x-worker-1", 1: "run-1-x-worker-2"})
    found = monitor.check(named, [HEAD, A, DEAD_B], {}, 0.0)
    assert found == NodeEvent(Cause.NODE_LOST, "run-1-x-worker-2 (rank 1)")


def test_a_preempted_node_is_not_also_reported_as_lost() -> None:
    monitor = NodeMonitor(PER_WORKER, WorkerRange(1, 3), list)
    found = monitor.check(group(1, "a", "b"), [HEAD, A, B], {"b": 50.0}, 0.0)
    assert found.cause is Cause.PREEMPTED
    assert monitor.check(group(1, "a", "b"), [HEAD, A, DEAD_B], {}, 1.0) is None


@pytest.mark.parametrize(
    ("per_worker", "resources", "room"),
    [
        ({"CPU": 1.0}, {"CPU": 4.0}, 4),
        ({"CPU": 1.0, "spot": 1.0}, {"CPU": 4.0, "spot": 2.0}, 2),
        ({"CPU": 1.0, "spot": 1.0}, {"CPU": 4.0}, 0),
        ({"CPU": 3.0}, {"CPU": 8.0}, 2),
        ({"CPU": 0.1}, {"CPU": 1.0}, 10),
        ({"CPU": 0.33}, {"CPU": 0.99}, 3),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 8.0, "CPU": 16.0}, 4),
        ({"GPU": 1.0, "CPU": 0.0}, {"GPU": 1.0}, 1),
        ({"CPU": 1.0}, {"CPU": 2.0, "node:__internal_head__": 1.0}, 2),
        ({"GPU": 1.0}, {"GPU": 1.0, "node:__internal_head__": 1.0}, 1),
        ({"memory": 1.0}, {"memory": 9.0, "node:__internal_head__": 1.0}, 0),
        ({}, {"CPU": 2.0}, 0),
    ],
)
def test_the_scarcest_resource_of_a_node_limits_how_many_workers_fit_on_it(
    per_worker: dict[str, float], resources: dict[str, float], room: int
) -> None:
    assert find_room([node("x", **resources)], per_worker) == ({"x": room} if room else {})
    assert find_room([node("x", alive=False, **resources)], per_worker) == {}


@pytest.mark.parametrize(
    ("workers", "begin"),
    [(WorkerRange(2, 2), 2), (WorkerRange(2, 8), 4), (WorkerRange(3, 9, multiple=3), 3)],
    ids=str,
)
def test_a_run_on_one_machine_does_not_wait_for_other_nodes(
    workers: WorkerRange, begin: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_nodes, "staying_nodes", lambda: [node("x", CPU=4.0)])
    with elastic_nodes.asked_nodes({"CPU": 1.0}, workers, one_machine=True) as chosen:
        assert chosen == WorkerRange(begin, begin)
    assert capsys.readouterr().out == f"  this machine has room for {begin} workers\n"


class FakeCluster:
    """Checks the nodes of a changing cluster once per simulated second."""

    def __init__(self, workers: WorkerRange, lag_s: float = 0.0) -> None:
        self.silent: set[str] = set()
        self.monitor, self.now = NodeMonitor(PER_WORKER, workers, self.reachable, lag_s), 0.0

    def reachable(self, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [node for node in nodes if node["NodeID"] not in self.silent]

    def run_for(
        self, seconds: float, group: dict[str, Any], *nodes: dict[str, Any], draining: tuple[str, ...] = ()
    ) -> list[tuple[float, str]]:
        """Return the events found, each with the seconds until it was found."""
        found = []
        for second in range(int(seconds)):
            one = self.monitor.check(group, [HEAD, *nodes], dict.fromkeys(draining), self.now)
            found += [(second, f"{one.cause}: {one.detail}")] if one else []
            self.now += 1
        return found


def test_a_group_restarts_to_scale_up() -> None:
    cluster = FakeCluster(WorkerRange(1, 3))
    assert cluster.run_for(60, group(1, "a"), A) == []
    assert cluster.run_for(60, group(1, "a"), A, B) == [(SETTLED_S, "scale_up: 1 -> 2 workers")]
    assert cluster.run_for(60, {}, A, B) == []
    assert cluster.run_for(60, group(2, "a", "b"), A, B) == []
    assert cluster.run_for(3, group(2, "a", "b"), A, B, C) == []
    # The fourth node is one too many, because the group may have three workers.
    assert cluster.run_for(60, group(2, "a", "b"), A, B, C, node("d")) == [(SETTLED_S, "scale_up: 2 -> 3 workers")]
    assert cluster.run_for(60, group(3, "a", "b", "c"), A, B, C, node("d")) == []
    # Ray Train would form a group of the nodes that it knew 20 s earlier.
    cluster = FakeCluster(WorkerRange(1, 3), lag_s=20)
    assert cluster.run_for(60, group(1, "a"), A, B) == [(SETTLED_S + 20, "scale_up: 1 -> 2 workers")]


def test_a_group_restarts_only_to_add_whole_replicas() -> None:
    nodes = [node(name, CPU=2.0, spot=2.0) for name in "abc"]
    cluster = FakeCluster(WorkerRange(4, 8, multiple=4))
    running = group(1, "a", "a", "b", "b")
    assert cluster.run_for(60, running, *nodes) == [], "six workers would fit, but they form only one replica"
    more = [*nodes, node("d", CPU=2.0, spot=2.0), node("e", CPU=2.0, spot=2.0)]
    assert cluster.run_for(60, running, *more) == [(SETTLED_S, "scale_up: 4 -> 8 workers")]


def test_nodes_that_join_at_about_the_same_time_cause_one_restart() -> None:
    cluster = FakeCluster(WorkerRange(1, 4))
    assert cluster.run_for(4, group(1, "a"), A) + cluster.run_for(4, group(1, "a"), A, B) == []
    assert cluster.run_for(60, group(1, "a"), A, B, C) == [(SETTLED_S, "scale_up: 1 -> 3 workers")]


@pytest.mark.parametrize(
    ("workers", "nodes", "draining"),
    [
        pytest.param(WorkerRange(1, 1), (A, B), (), id="fixed size"),
        pytest.param(WorkerRange(1, 3), (A, node("b", CPU=1.0)), (), id="not a node for workers"),
        pytest.param(WorkerRange(1, 3), (A, B), ("b",), id="preempted"),
        pytest.param(WorkerRange(1, 3), (A, DEAD_B), (), id="dead"),
    ],
)
def test_a_group_does_not_restart_without_room_for_more_workers(
    workers: WorkerRange, nodes: tuple[dict[str, Any], ...], draining: tuple[str]
) -> None:
    assert FakeCluster(workers).run_for(60, group(1, "a"), *nodes, draining=draining) == []


def test_an_unreachable_node_has_no_room_for_workers() -> None:
    cluster = FakeCluster(WorkerRange(1, 4))
    cluster.silent = {"b"}
    assert cluster.run_for(60, group(1, "a"), A, B) == []
    assert cluster.run_for(60, group(1, "a"), A, B, C) == [(SETTLED_S, "scale_up: 1 -> 2 workers")]


def test_the_time_without_room_for_a_worker_begins_when_the_last_node_is_gone() -> None:
    cluster = FakeCluster(WorkerRange(1, 3))

    def seconds_after(*nodes: dict[str, Any], draining: tuple[str, ...] = ()) -> float:
        cluster.run_for(20, {}, *nodes, draining=draining)
        return cluster.monitor.without_room_s(cluster.now)

    assert seconds_after(A) == 0
    assert seconds_after(A, draining=("a",)) == 0, "a draining node still has its memory"
    assert seconds_after() == 20
    assert seconds_after() == 40
    assert seconds_after(B) == 0


def test_a_node_that_comes_and_goes_causes_no_restart() -> None:
    cluster = FakeCluster(WorkerRange(1, 2))
    for _ in range(10):
        assert cluster.run_for(4, group(1, "a"), A, B) + cluster.run_for(2, group(1, "a"), A) == []


def test_failed_attempts_to_scale_up_are_repeated_at_increasing_intervals() -> None:
    cluster = FakeCluster(WorkerRange(1, 3))
    tried = [
        cluster.now + after for attempt in range(1, 601) for after, _ in cluster.run_for(10, group(attempt, "a"), A, B)
    ]
    waits = [after - before for before, after in zip([0.0, *tried], tried, strict=False)]
    assert len(waits) == 5
    for tries, wait in enumerate(waits):
        assert SETTLED_S * BACKOFF_FACTOR**tries <= wait <= SETTLED_S * BACKOFF_FACTOR**tries + 11
    # A new node, or a group that has grown, makes another attempt worthwhile at once.
    assert cluster.run_for(60, group(601, "a"), A, B, C) == [(SETTLED_S, "scale_up: 1 -> 3 workers")]
    assert cluster.run_for(60, group(602, "a", "b", "c"), A, B, C) == []
    assert cluster.run_for(60, group(603, "a"), A, B, C) != []


def test_a_group_moves_to_better_nodes_that_have_been_stable() -> None:
    groups = [NodeGroup(name="spot", most=2, after_s=0), NodeGroup(name="paid", most=2, after_s=60)]
    paid, spot = [[node(f"{name}{n}", CPU=1.0, **{name: 1.0}) for n in "01"] for name in ("paid", "spot")]
    cluster = FakeCluster(WorkerRange(1, 2))
    cluster.monitor = NodeMonitor({"CPU": 1.0}, WorkerRange(1, 2), cluster.reachable, choice=GroupChoice(groups, 2))
    on_paid = group(1, "paid0", "paid1")
    assert cluster.run_for(61, on_paid, *paid) == []
    assert cluster.monitor.asked == {"spot": 2, "paid": 2}
    assert cluster.run_for(59, on_paid, *paid, *spot) == []
    cluster.silent = {"spot1"}
    assert cluster.run_for(60, on_paid, *paid, *spot) == [], "one of the better nodes does not answer"
    cluster.silent = set()
    event = cluster.monitor.check(on_paid, [HEAD, *paid, *spot], {}, cluster.now)
    assert event == NodeEvent(Cause.MOVED, "from node paid0 (rank 0), node paid1 (rank 1)", spare=("paid0", "paid1"))
    assert cluster.run_for(60, group(2, "spot0", "spot1"), *paid, *spot, draining=("paid0", "paid1")) == []
    assert cluster.monitor.asked == {"spot": 2, "paid": 0}


def test_idle_nodes_are_released_without_a_restart() -> None:
    groups = [NodeGroup(name="spot", most=2, after_s=0), NodeGroup(name="paid", most=2, after_s=60)]
    paid, spot = [[node(f"{name}{n}", CPU=1.0, **{name: 1.0}) for n in "01"] for name in ("paid", "spot")]
    cluster = FakeCluster(WorkerRange(1, 2))
    cluster.monitor = NodeMonitor({"CPU": 1.0}, WorkerRange(1, 2), cluster.reachable, choice=GroupChoice(groups, 2))
    assert cluster.run_for(200, group(1, "spot0", "spot1"), *paid, *spot) == []
    assert cluster.monitor.asked == {"spot": 2, "paid": 0}


def next_call(control: LocalControl, within: float) -> tuple[str, Incident, float | None]:
    """Return the next call of the control channel: the method, the incident and the deadline."""
    wait_until(lambda: control.told, seconds=within)
    [(method, given)] = control.told
    control.told.clear()
    return method, given[0], given[1] if len(given) > 1 else None


@pytest.fixture
def no_coordinator(ray_address: str) -> None:
    """Wait until Ray Train has no live controllers, and remove the autoscaling coordinator."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray's keeps the last controller of this process alive

    def nobody_trains() -> bool:
        gc.collect()
        return not live_controllers()

    wait_until(nobody_trains, seconds=30)
    remove_coordinator()


def remove_coordinator() -> None:
    def name_is_free() -> bool:
        try:
            ray.kill(ray.get_actor(COORDINATOR, COORDINATOR))
        except ValueError:
            return True
        return False

    wait_until(name_is_free, seconds=20)


def reserve(requester: str, workers: int, per_worker: dict[str, float]) -> None:
    request = ray.get_actor(COORDINATOR, COORDINATOR).request_resources.remote(
        requester_id=requester,
        resources=[per_worker] * workers,
        expire_after_s=180,
        priority=rays.ResourceRequestPriority.HIGH,
    )
    ray.get(request)


def reserved(requester: str, per_worker: dict[str, float]) -> dict[str, int]:
    """Return the number of workers that Ray Train would start on each node."""
    answer = ray.get(ray.get_actor(COORDINATOR, COORDINATOR).get_reserved_resources.remote(requester))
    return {node: int(min(there[name] // per_worker[name] for name in per_worker)) for node, there in answer.items()}


@pytest.mark.slow
def test_a_group_restarts_if_a_node_joins_or_is_preempted_or_is_lost(
    no_coordinator: None, ray_address: str, set_constants: SetConstants
) -> None:
    set_constants(elastic_nodes, SETTLED_S=1.0)

    @ray.remote(num_cpus=1)
    class Rank:
        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

    install_coordinator()
    control = LocalControl()
    with (
        start_node(ray_address, CPU=1, spot=1) as a,
        supervised(control, StopRequest(), NodeMonitor(PER_WORKER, WorkerRange(1, 3), reachable_nodes)),
    ):
        control.channel.begin_group(group(1, a.node_id))
        reserve("train-test", 3, PER_WORKER)
        assert reserved("train-test", PER_WORKER) == {a.node_id: 1}
        with start_node(ray_address, notice_s=20, CPU=2, spot=2) as b:
            assert reserved("train-test", PER_WORKER) == {a.node_id: 1, b.node_id: 2}
            told, incident, _ = next_call(control, within=10)
            assert (told, incident.cause, incident.detail) == ("restart_group", Cause.SCALE_UP, "1 -> 3 workers")

            rank = Rank.options(resources={"spot": 2}).remote()  # a preempted node without work ends at once
            assert ray.get(rank.node.remote()) == b.node_id
            control.channel.begin_group(group(2, a.node_id, b.node_id, b.node_id))
            b.reclaim()
            told, incident, deadline = next_call(control, within=20)
            assert (told, incident.cause) == ("restart_group", Cause.PREEMPTED)
            assert incident.detail == f"node {b.node_id[:12]} (ranks 1, 2)"
            assert deadline
            assert incident.noticed
            assert 0 < incident.noticed - (deadline - 20) < 2, "seconds since the notice"
            assert reserved("train-test", PER_WORKER) == {a.node_id: 1}, (
                "a draining node is not counted, or Ray Train would wait for it"
            )

            ray.kill(rank)
            b.wait(timeout=15)
            control.channel.begin_group(group(3, a.node_id, b.node_id))
            told, incident, _ = next_call(control, within=15)
            assert (told, incident.cause) == ("add_incident_facts", Cause.NODE_LOST), "Ray restarts the group itself"
            assert incident.detail == f"node {b.node_id[:12]} (rank 1)"
        a.lose()
        assert next(one for one in ray.nodes() if one["NodeID"] == a.node_id)["Alive"], (
            "Ray still considers the node alive, as this test requires"
        )
        assert reserved("train-test", PER_WORKER) == {}, (
            "a node that does not answer is not counted, or Ray Train would wait for it"
        )


def test_a_group_is_stopped_early_only_if_the_next_group_must_wait_for_nodes() -> None:
    """Ray ends the old group itself, at once and in its own order, if there are enough nodes for the next group."""
    ended: list[str] = []
    [callback] = end_groups_at_once()
    running, next_one = RunningState(), SchedulingState(ResizeDecision(2, PER_WORKER))

    def restart(name: str, waits: int, trouble: Exception | None = None) -> None:
        def shutdown() -> None:
            ended.append(name)
            if trouble:
                raise trouble

        state = SimpleNamespace(shutdown=shutdown)
        callback.after_worker_group_start(SimpleNamespace(get_worker_group_state=lambda: state))
        restarting = RestartingState(training_failed_error=TrainingFailedError("the nodes go"))
        for before, after in pairwise([running, running, restarting, *[restarting] * waits, next_one, running]):
            callback.after_controller_state_update(before, after)

    restart("does not wait", 0)
    assert ended == []
    restart("waits", 5)
    assert ended == ["waits"], "the group is shut down once"
    restart("cannot be ended", 2, OSError("no answer"))  # an error in a callback would end the training
    restart("does not wait either", 0)
    assert ended == ["waits", "cannot be ended"]


@pytest.mark.parametrize("error", [ActorDiedError(), WorkerGroupStartupFailedError("it died as it was initialized")])
def test_a_replacement_that_dies_is_replaced_after_the_next_poll(error: Exception) -> None:
    """Ray would try again at once. It would then also replace earlier replacements that may already train."""

    def replace(number: int) -> None:
        raise error

    group = SimpleNamespace(replace_replica_group=replace)
    [callback] = replace_lost_alone(list)
    callback.after_worker_group_start(group)
    group.replace_replica_group(1)


@pytest.mark.slow
def test_a_group_that_waits_for_nodes_releases_its_preempted_nodes(
    no_coordinator: None, ray_address: str, tmp_path: Path
) -> None:
    """The minimum size of this elastic run does not fit on the nodes that stay."""

    told = tmp_path / "told"

    def train() -> None:
        here = ray.get_runtime_context().get_node_id()
        (tmp_path / f"rank {ray.train.get_context().get_world_rank()}").touch()
        while not told.exists():
            if here in draining_nodes():
                told.touch()
                raise RuntimeError("the group ends for a restart")
            time.sleep(0.1)

    install_coordinator()
    trainer: Any = DataParallelTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=(2, 3), resources_per_worker=PER_WORKER),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path),
            failure_config=ray.train.FailureConfig(max_failures=1),
            callbacks=end_groups_at_once(),
        ),
    )
    with start_node(ray_address, CPU=1, spot=1), start_node(ray_address, notice_s=120, CPU=2, spot=2) as going:
        training = start_thread(trainer.fit, "fit")
        wait_until((tmp_path / "rank 2").exists, seconds=60)
        going.reclaim()
        going.wait(timeout=60)
        with start_node(ray_address, CPU=1, spot=1):
            assert training.result(120).error is None


def test_the_resources_of_a_killed_driver_are_freed(no_coordinator: None) -> None:
    cpu = {"CPU": 0.33}  # in floating point, three times 0.33 is less than 0.99
    assert install_coordinator() == 0
    reserve("train-killed", 3, cpu)
    assert list(reserved("train-killed", cpu).values()) == [3]
    install_coordinator()
    assert reserved("train-killed", cpu) == {}


def test_the_autoscaling_coordinator_requests_nodes_of_each_node_group(no_coordinator: None) -> None:
    assert install_coordinator() == 0
    per_worker = {"CPU": 1.0, "training-worker": 1.0}
    reserve("train-asking", 3, per_worker)
    reserve("data-asking", 1, {"CPU": 2.0})
    assert sorted(map(str, asked_of_ray())) == sorted(map(str, [*[per_worker] * 3, {"CPU": 2.0}]))
    ask_of_groups(per_worker, {"spot": 1, "paid": 2})
    of_groups = [{**per_worker, "spot": 1.0}, *[{**per_worker, "paid": 1.0}] * 2]
    assert sorted(map(str, asked_of_ray())) == sorted(map(str, [*of_groups, {"CPU": 2.0}]))
    remove_coordinator()


def test_the_autoscaling_coordinator_offers_only_resources_for_whole_replicas(no_coordinator: None) -> None:
    assert install_coordinator() == 0
    cpu = {"CPU": 0.25}
    offer_whole_replicas(cpu, 3)
    reserve("train-replicas", 4, cpu)
    assert sum(reserved("train-replicas", cpu).values()) == 3
    install_coordinator()
    reserve("train-others", 4, cpu)
    assert sum(reserved("train-others", cpu).values()) == 4, "the next run may need no replicas"
    remove_coordinator()


def asked_of_ray() -> list[dict[str, float]]:
    """Return the bundles that Ray's autoscaler, if there were one, would have to provide."""
    asked: list[dict[str, float]] = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL))
    return asked


@pytest.mark.slow
def test_a_released_node_stays_until_it_is_idle(ray_address: str) -> None:
    @ray.remote(num_cpus=1, resources={"spot": 1})
    class Rank:
        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

    with start_node(ray_address, CPU=1, spot=1) as a:
        rank = Rank.remote()
        assert ray.get(rank.node.remote()) == a.node_id
        drain_nodes([a.node_id])
        assert draining_nodes() == {a.node_id: None}
        time.sleep(2)
        assert ray.get(rank.node.remote()) == a.node_id, "the node stays while it has work"
        ray.kill(rank)
        # `ray start --block` continues after an orderly end of the raylet, so the autoscaler has to delete the pod.
        wait_until(lambda: not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == a.node_id), seconds=20)


@pytest.mark.slow
def test_an_autoscaling_coordinator_that_ray_has_started_is_not_replaced(
    no_coordinator: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = rays.get_or_create_autoscaling_coordinator()
    assert install_coordinator() == rays._AutoscalingCoordinatorActor.TICK_INTERVAL_S
    assert ray.get(own.get_reserved_resources.remote("someone")) == {}
    assert capsys.readouterr().out.count("Ray's own autoscaling coordinator already counts") == 1
    remove_coordinator()


@pytest.mark.slow
def test_a_run_starts_even_if_the_internals_of_ray_have_changed(
    no_coordinator: None, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    class Other:
        """Coordinator that does not accept `get_cluster_nodes`."""

    import ray._private.state

    monkeypatch.setattr(rays, "_AutoscalingCoordinatorActor", Other)
    monkeypatch.delattr(ray._private.state.GlobalState, "get_draining_nodes")
    install_coordinator()
    assert draining_nodes() == {}
    assert draining_nodes() == {}
    assert len(warned) == 2, "each of the two uses warns once"
    remove_coordinator()


def test_the_resources_of_a_failed_controller_are_freed(ray_address: str) -> None:
    @ray.remote(num_cpus=0)
    class Controller:
        def reserve(self) -> None:
            ray.get(ray.util.placement_group([{"CPU": 1}] * 3).ready())

        def seen(self) -> set[str]:
            return reserved_groups()

    before = reserved_groups()
    controller = Controller.remote()
    ray.get(controller.reserve.remote())
    assert ray.get(controller.seen.remote()) == set(), "in an actor, placement groups may belong to another trial"
    ray.kill(controller)
    time.sleep(1)
    [left] = reserved_groups() - before
    remove_placement_groups({left})
    again = ray.util.placement_group([{"CPU": 1}] * 3)
    ray.get(again.ready(), timeout=20)
    assert reserved_groups() - before == {again.id.hex()}
    remove_placement_groups({again.id.hex()})


def test_workers_receive_a_command_after_the_step_during_which_it_was_sent(ray_address: str) -> None:
    with open_control() as control, CommandPoller(control) as commands:
        assert commands.poll() == Command()
        control.call(ControlChannel.restart_group, Incident(Cause.PREEMPTED, "node 1", time.time()), None)
        time.sleep(3 * COMMAND_EVERY_S)  # a step during which nobody polls
        assert commands.poll().restart


def test_each_worker_has_its_own_node_if_no_node_has_room_for_two_workers() -> None:
    assert choose_placement({"a": 1, "b": 1}) == "STRICT_SPREAD"
    assert choose_placement({"a": 1, "b": 2}) == choose_placement({}) == "PACK"
