"""Chooses the node groups to request workers from, in order of preference, and the nodes to give back. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sunspot.settings import NodeGroup


class GroupChoice:
    """Decides how many workers to ask of each group.

    The first choice is always asked for as many as may run on it, so that its nodes come as soon as there are any. A
    later one is asked for what can never run on those before it, and, once they have lacked nodes for its `after_s`,
    for what is missing there. When they have had enough for as long, it is asked for less again.
    """

    def __init__(self, groups: Sequence[NodeGroup], workers: int) -> None:
        self._groups, self._workers = groups, workers
        self._asked: dict[str, int] = {}
        self._agreed: dict[str, float] = {}
        "When each group was last asked for just what it should be."

    def choose(self, room: Mapping[str, int], now: float) -> dict[str, int]:
        """Return how many workers to ask of each group.

        `room` is how many workers the nodes of each group have room for; `now` is in seconds of a monotonic clock.
        """
        missing = beyond = self._workers
        for group in self._groups:
            name, there = group.name, room.get(group.name, 0)
            needed, always = min(group.most, missing), min(group.most, beyond)
            missing, beyond = missing - min(there, needed), beyond - always
            # A driver that starts again finds nodes that the one before had asked for.
            asked = self._asked.setdefault(name, max(always, min(group.most, there)))
            if asked == needed:
                self._agreed[name] = now
            elif now - self._agreed.setdefault(name, now) >= group.after_s:
                self._asked[name], self._agreed[name] = needed, now
        return dict(self._asked)

    def groups_of(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the group of each node (as in `ray.nodes()`), whose resources name it; empty: it belongs to none."""
        names = [group.name for group in self._groups]
        return {node["NodeID"]: next((name for name in names if name in node["Resources"]), "") for node in nodes}


def capacity_by_group(room: Mapping[str, int], group_of: Mapping[str, str]) -> dict[str, int]:
    """Return how many workers the nodes of each group have room for; `room` and `group_of` are by node."""
    totals: dict[str, int] = {}
    for node, workers in room.items():
        totals[group_of[node]] = totals.get(group_of[node], 0) + workers
    return totals


def nodes_to_release(
    room: Mapping[str, int], group_of: Mapping[str, str], asked: Mapping[str, int], used: Collection[str]
) -> list[str]:
    """Return the nodes beyond what is asked of their group, those that are not `used` first."""
    spare = []
    excess = {
        group: workers - asked.get(group, workers) for group, workers in capacity_by_group(room, group_of).items()
    }
    for node in sorted(room, key=lambda node: (node in used, node)):
        if room[node] <= excess[group_of[node]]:
            excess[group_of[node]] -= room[node]
            spare.append(node)
    return spare
