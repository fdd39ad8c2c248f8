"""Watches the cluster's nodes for preemptions, losses, better nodes, and room to scale up."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.autoscaler.sdk import request_resources  # noqa: TID251  # in Ray's public reference, unlike the rest of its module

from sunspot.elastic.groups import GroupChoice, capacity_by_group, nodes_to_release
from sunspot.elastic.messages import WorkerGroup
from sunspot.errors import SunspotError
from sunspot.formatting import in_words, plural
from sunspot.ray_internals.coordinator import ask_of_groups, workers_in
from sunspot.ray_internals.nodes import staying_nodes
from sunspot.run.incidents import Cause
from sunspot.settings import WorkerRange

NODE_CHECK_EVERY_S = 0.5
"""Seconds between two checks of the nodes. A preemption notice may be as short as 15 s."""

SETTLED_S = 5.0
"""Seconds that room for more workers must last before a restart, which stops all workers for several seconds. Nodes
that were requested together join within seconds of each other. The delay of Ray's own view of the nodes is added."""

FIRST_WAIT_S = 30.0
"""Maximum number of seconds that a start in survivor mode waits for more nodes."""

FIRST_SETTLED_S = 15.0
"""Seconds without a new node after which a start in survivor mode begins, because Ray adds no workers later. With 5 s,
three of three starts began with one worker (three nodes, two busy cores), and scaling up cost 41, 50 and 76 s."""

BACKOFF_FACTOR = 4
"""Factor by which the required seconds (SETTLED_S) grow after each restart in which Ray did not start a larger group,
for example because another job uses the new nodes. With a single attempt, the nodes might never be used. With attempts
at a constant pace, the run would never train."""

HEAD = "node:__internal_head__"
"""Resource that only the head's node has."""


@dataclass(frozen=True)
class NodeEvent:
    """A change in the cluster's nodes that affects a worker group."""

    cause: Cause
    detail: str
    "Human-readable description."
    deadline: float | None = None
    "Time at which the first node will be gone, in seconds since the epoch."
    spare: tuple[str, ...] = ()
    "Nodes to release, by Ray's id."


def ask_for_nodes(resources_per_worker: dict[str, float], workers: int) -> None:
    """Request nodes for a number of workers from Ray's autoscaler. The newest request replaces earlier ones."""
    request_resources(bundles=[resources_per_worker] * workers)


class NodeMonitor:
    """Watches the nodes for events that affect a worker group, such as the loss of a node or room for more workers.

    Each group gets at most one event, because most events end the group. `usable` filters the nodes to those on which a
    group may start, and checks whether they answer. Ray Train's view of the nodes can be up to `lag_s` seconds old.
    `choice` chooses among several node groups.
    """

    def __init__(
        self,
        resources_per_worker: dict[str, float],
        workers: WorkerRange,
        usable: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        lag_s: float = 0.0,
        choice: GroupChoice | None = None,
    ) -> None:
        self.per_worker = resources_per_worker
        self._workers = workers
        self._usable = usable
        self._settled_s = SETTLED_S + lag_s
        self._choice = choice
        self._group_of: dict[str, str] = {}
        self.asked: dict[str, int] = {}
        "Number of workers to request from each node group."
        self._ended = 0
        "Attempt number of the last group with an event, or 0. Attempts are numbered from 1."
        self._no_room_since = math.inf
        "Time since which no live node has had room for a worker, or infinity if a node has room."
        self._room: dict[str, int] = {}
        self._since = 0.0
        self._tries = 0

    def limit(self, most: int) -> None:
        """Change the maximum number of workers."""
        self._workers = self._workers._replace(most=most)

    def without_room_s(self, now: float) -> float:
        """Return for how many seconds no live node has had room for a worker, or 0 if a node has. Draining nodes count.

        `now` is the current `time.monotonic()`.
        """
        return max(0.0, now - self._no_room_since)

    def check(
        self,
        group: WorkerGroup | None,
        nodes: list[dict[str, Any]],
        draining: dict[str, float | None],
        now: float,
    ) -> NodeEvent | None:
        """Return an event that affects this worker group, or None.

        `nodes` is `ray.nodes()`, and `draining` is `draining_nodes()`. `now` is the current `time.monotonic()`.
        """
        live = find_room(nodes, self.per_worker)
        self._no_room_since = math.inf if live else min(now, self._no_room_since)
        room = {node: workers for node, workers in live.items() if node not in draining}
        if room != self._room:
            self._room = room
            self._since = now
            self._tries = 0
        if self._choice:
            self._group_of = self._choice.groups_of(nodes)
            self.asked = self._choice.choose(capacity_by_group(room, self._group_of), now)
        if not group or group.attempt == self._ended:
            return None
        found = (
            find_lost(group, nodes)
            or find_preempted(group, draining)
            or self._find_better(group, nodes)
            or self._find_scale_up(group, nodes, now)
        )
        if found:
            self._ended = group.attempt
        return found

    def _find_better(self, group: WorkerGroup, nodes: list[dict[str, Any]]) -> NodeEvent | None:
        """Return an event if the group can move away from nodes that are no longer requested.

        The other nodes must have room for all of the group's workers. Nodes that the group does not use are no reason
        to move, because Ray's autoscaler releases idle nodes by itself.
        """
        if not self._choice:
            return None
        used = set(group.nodes.values())
        spare = nodes_to_release(self._room, self._group_of, self.asked, used)
        others = [node for node in nodes if node["NodeID"] not in spare]
        if used.isdisjoint(spare) or self._possible(self._usable(others)) < group.world_size:
            return None
        return NodeEvent(Cause.MOVED, f"from {_name(used & set(spare), group)}", spare=tuple(spare))

    def _find_scale_up(self, group: WorkerGroup, nodes: list[dict[str, Any]], now: float) -> NodeEvent | None:
        size = group.world_size
        if size >= self._possible(nodes):
            self._tries = 0
            return None
        if now - self._since < self._settled_s * BACKOFF_FACTOR**self._tries:
            return None
        possible = self._possible(self._usable(nodes))  # Ray may not know yet that a node is lost
        if size >= possible:
            return None
        self._since, self._tries = now, self._tries + 1
        return NodeEvent(Cause.SCALE_UP, f"{size} -> {possible} workers")

    def _possible(self, nodes: list[dict[str, Any]]) -> int:
        return self._workers.fit(sum(self._room.get(node["NodeID"], 0) for node in nodes))


def find_lost(group: WorkerGroup, nodes: list[dict[str, Any]]) -> NodeEvent | None:
    """Return an event if nodes of the group are gone, otherwise None."""
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    lost = set(group.nodes.values()) - alive
    return NodeEvent(Cause.NODE_LOST, _name(lost, group)) if lost else None


def find_preempted(group: WorkerGroup, draining: dict[str, float | None]) -> NodeEvent | None:
    """Return an event if nodes of the group are draining, with the earliest of their deadlines."""
    preempted = set(group.nodes.values()) & set(draining)
    if not preempted:
        return None
    deadlines = [deadline for node in preempted if (deadline := draining[node]) is not None]
    return NodeEvent(Cause.PREEMPTED, _name(preempted, group), min(deadlines, default=None))


def find_room(nodes: list[dict[str, Any]], resources_per_worker: dict[str, float]) -> dict[str, int]:
    """Return how many workers fit on each node, keyed by node ID. Nodes without room are omitted.

    Like Ray Train's ElasticScalingPolicy, this function counts a node's total resources, because the group's own
    workers use some of them. A head node without CPUs and GPUs is ignored.
    """
    room = {}
    for node in nodes:
        total = node["Resources"]
        if node["Alive"] and not (HEAD in total and not total.get("CPU") and not total.get("GPU")):
            room[node["NodeID"]] = workers_in(total, resources_per_worker)
    return {node: workers for node, workers in room.items() if workers}


def choose_placement(room: dict[str, int]) -> str:
    """Return the strategy by which Ray places workers in survivor mode, given the room on each node.

    While no node has room for a replacement, Ray 2.60 retries without a pause, which uses 91 % of a CPU on the head
    (ray-project/ray#65007). With STRICT_SPREAD, where each worker needs its own node, Ray waits for another node
    instead. This function therefore returns STRICT_SPREAD if no node has room for two workers. Otherwise, it returns
    PACK.
    """
    return "STRICT_SPREAD" if set(room.values()) == {1} else "PACK"


def _name(nodes: set[str], group: WorkerGroup) -> str:
    ranks = {node: [rank for rank, its in sorted(group.nodes.items()) if its == node] for node in nodes}
    return ", ".join(
        f"{group.hosts.get(its[0]) or f'node {node[:12]}'} ({'rank' if len(its) == 1 else 'ranks'} "
        f"{', '.join(map(str, its))})"
        for node, its in sorted(ranks.items(), key=lambda item: item[1])
    )


def wait_for_nodes(
    choice: GroupChoice, resources_per_worker: dict[str, float], workers: WorkerRange, timeout_s: float
) -> None:
    """Request the first nodes from several groups, and wait until there is room for the minimum number of workers.

    Raises `SunspotError` after `timeout_s`.
    """
    began = time.monotonic()
    asked: dict[str, int] = {}
    while True:
        nodes = staying_nodes()
        room = find_room(nodes, resources_per_worker)
        wanted = choice.choose(capacity_by_group(room, choice.groups_of(nodes)), time.monotonic())
        available = f"nodes for {sum(room.values())} of {workers} workers"
        if wanted != asked:
            asked = wanted
            ask_of_groups(resources_per_worker, asked)
            print(f"found {available}; requested {describe_asked(asked)}", flush=True)
        if sum(room.values()) >= workers.least:
            return
        if time.monotonic() - began > timeout_s:
            raise SunspotError(
                f"after {in_words(timeout_s)}, there are only {available} (requested: {describe_asked(asked)}); run "
                "`sunspot doctor` to see what the pods are waiting for, or run the same command to try again"
            )
        time.sleep(NODE_CHECK_EVERY_S)


@contextmanager
def asked_nodes(
    resources_per_worker: dict[str, float], workers: WorkerRange, one_machine: bool = False
) -> Iterator[WorkerRange]:
    """Request nodes for the maximum number of workers, and yield the number of workers to start in survivor mode.

    Ray replaces lost workers, but only a restart adds workers. If the run began as soon as there was room for the
    minimum number of workers, it would soon restart to add more. This function therefore waits for a first node, and
    then until no other node has joined for FIRST_SETTLED_S. With `one_machine`, it does not wait, because no other node
    can join.
    """
    if one_machine:
        room = max(workers.fit(sum(find_room(staying_nodes(), resources_per_worker).values())), workers.least)
        print(f"  this machine has room for {plural(room, 'worker')}", flush=True)
        yield WorkerRange(room, room)
        return
    ask_for_nodes(resources_per_worker, workers.most)
    try:
        room = 0
        began = time.monotonic()
        since = began + FIRST_WAIT_S
        while room < workers.most and (now := time.monotonic()) < min(since + FIRST_SETTLED_S, began + FIRST_WAIT_S):
            found = min(sum(find_room(staying_nodes(), resources_per_worker).values()), workers.most)
            if found != room:
                room, since = found, now
            time.sleep(NODE_CHECK_EVERY_S)
        chosen = max(workers.fit(room), workers.least)
        print(f"found nodes for {room} of {workers} workers; starting with {chosen}", flush=True)
        yield WorkerRange(chosen, chosen)
    finally:
        ask_for_nodes(resources_per_worker, 0)


def describe_asked(asked: dict[str, int]) -> str:
    """Return the number of requested workers by group, such as `2 in group spot, 1 in group on-demand`."""
    return ", ".join(f"{workers} in group {name}" for name, workers in asked.items())
