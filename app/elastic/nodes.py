"""What happens to the cluster's nodes and matters to the workers: one is told to go, is lost, or more have come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from app.background import Background
from app.errors import shorten
from app.ray_internals import ROUNDING, answering, draining_nodes
from app.run.incidents import Cause
from app.settings import Workers

NODE_CHECK_EVERY_S = 0.5
"""Seconds between two looks at the nodes: a notice may be as short as 15 s."""

SETTLED_S = 5.0
"""How long room for more workers must stay as it is before they make way: nodes that were asked for together join
within seconds of each other, and a restart stops all workers for several seconds. Ray has to know of them, too: what
its view of the nodes may be behind comes on top."""

IN_VAIN_FACTOR = 4
"""How much longer the room must stay after each time that Ray made no larger group of it: when another job holds
those nodes, say. With one try alone they would never be used, and with tries all the time nothing would be trained."""

GROUP_QUERY_TIMEOUT_S = 5.0
"""How long a look waits for the control channel, which answers at once unless it is gone."""

BLIND_AFTER_S = 30.0
"""How long looks may fail before the user is told. One that fails now and then does no harm."""

HEAD = "node:__internal_head__"
"""A resource that only the head has."""


@dataclass(frozen=True)
class NodeEvent:
    """What a look at the nodes found out about a worker group."""

    cause: Cause
    detail: str
    "For people."
    deadline: float | None = None
    "When the first node will be gone, in seconds since the epoch."


class NodeMonitor:
    """Turns looks at the nodes into at most one finding for each worker group.

    One is enough: from then on the group is about to end.
    """

    def __init__(
        self,
        resources_per_worker: dict[str, float],
        workers: Workers,
        answering: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        behind_s: float = 0.0,
    ) -> None:
        self._per_worker, self._most, self._answering = resources_per_worker, workers.most, answering
        self._settled_s = SETTLED_S + behind_s
        self._done_with = 0  # attempts count from 1
        self._room: dict[str, int] = {}
        self._since = 0.0
        self._tries = 0

    def look(
        self, group: dict[str, Any], nodes: list[dict[str, Any]], draining: dict[str, float | None], now: float
    ) -> NodeEvent | None:
        """What the worker group must hear of, if anything.

        `group` is `Board.group()`, `nodes` is `ray.nodes()`, `draining` is `draining_nodes()`; `now` is in seconds of
        any clock that goes evenly.
        """
        room = find_room([node for node in nodes if node["NodeID"] not in draining], self._per_worker)
        if room != self._room:
            self._room, self._since, self._tries = room, now, 0
        if not group or group["attempt"] == self._done_with:
            return None
        found = find_lost(group, nodes) or find_preempted(group, draining) or self._find_growth(group, nodes, now)
        if found:
            self._done_with = group["attempt"]
        return found

    def _find_growth(self, group: dict[str, Any], nodes: list[dict[str, Any]], now: float) -> NodeEvent | None:
        size = group["world_size"]
        if size >= self._possible(nodes):
            self._tries = 0
            return None
        if now - self._since < self._settled_s * IN_VAIN_FACTOR**self._tries:
            return None
        possible = self._possible(self._answering(nodes))  # a lost node may not be known to be one yet
        if size >= possible:
            return None
        self._since, self._tries = now, self._tries + 1
        return NodeEvent(Cause.SCALE_UP, f"{size} -> {possible} workers")

    def _possible(self, nodes: list[dict[str, Any]]) -> int:
        return min(self._most, sum(self._room.get(node["NodeID"], 0) for node in nodes))


def find_lost(group: dict[str, Any], nodes: list[dict[str, Any]]) -> NodeEvent | None:
    """The group's nodes that are gone."""
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    lost = set(group["nodes"].values()) - alive
    return NodeEvent(Cause.NODE_LOST, _name(lost, group)) if lost else None


def find_preempted(group: dict[str, Any], draining: dict[str, float | None]) -> NodeEvent | None:
    """The group's nodes that were told to go, and the earliest of their deadlines."""
    leaving = set(group["nodes"].values()) & set(draining)
    deadlines = [deadline for node in leaving if (deadline := draining[node]) is not None]
    return NodeEvent(Cause.PREEMPTED, _name(leaving, group), min(deadlines, default=None)) if leaving else None


def find_room(nodes: list[dict[str, Any]], resources_per_worker: dict[str, float]) -> dict[str, int]:
    """How many workers each node could hold, by its id, of those that could hold any.

    Counted as Ray Train does it (ElasticScalingPolicy): by a node's total resources, as the group's own workers are
    on these nodes, and without a head that has no CPU and no GPU.
    """
    room = {}
    for node in nodes:
        there = node["Resources"]
        if node["Alive"] and not (HEAD in there and not there.get("CPU") and not there.get("GPU")):
            fits = [
                (there.get(name, 0.0) + ROUNDING) // amount for name, amount in resources_per_worker.items() if amount
            ]
            room[node["NodeID"]] = int(min(fits, default=0))
    return {node: workers for node, workers in room.items() if workers}


def _name(nodes: set[str], group: dict[str, Any]) -> str:
    ranks = {node: [rank for rank, its in sorted(group["nodes"].items()) if its == node] for node in nodes}
    return ", ".join(
        f"node {node[:12]} ({'rank' if len(its) == 1 else 'ranks'} {', '.join(map(str, its))})"
        for node, its in sorted(ranks.items(), key=lambda item: item[1])
    )


@contextmanager
def watch_nodes(
    control: Any, resources_per_worker: dict[str, float], workers: Workers, behind_s: float
) -> Iterator[None]:
    """Tell the control channel (`app.elastic.control`) what happens to the nodes, while the context lasts.

    `behind_s` is how old the view of the nodes may be, in seconds, by which Ray Train sizes a group.
    The worker group is to leave nodes that go, and for nodes that have come; a lost one is only noted, as Ray Train
    restarts the group by itself.
    """
    watch = NodeMonitor(resources_per_worker, workers, answering, behind_s)
    seen = time.monotonic()
    blind = False

    def look() -> None:
        nonlocal seen, blind
        try:
            group = ray.get(control.group.remote(), timeout=GROUP_QUERY_TIMEOUT_S)
            found = watch.look(group, ray.nodes(), draining_nodes(), time.monotonic())
            if found and found.cause is Cause.NODE_LOST:
                control.note.remote(cause=found.cause, detail=found.detail, noticed=time.time())
            elif found:
                control.restart_group.remote(found.cause, found.detail, time.time(), found.deadline)
            seen = time.monotonic()
        except Exception as error:  # the next look may do better
            if not blind and time.monotonic() - seen > BLIND_AFTER_S:
                blind = True
                print(f"warning: notices of nodes may be missed: {shorten(error)}", flush=True)

    with Background(NODE_CHECK_EVERY_S, look):
        yield
