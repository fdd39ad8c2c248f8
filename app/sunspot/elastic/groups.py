"""Decides how many workers to request from each node group, and which nodes to release. This module does no I/O."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sunspot.places.experience import FORGOTTEN_AFTER_S
from sunspot.settings import NodeGroup

LONGEST_RETURN_S = 1800.0
"""Maximum number of seconds by which repeated losses can delay a return to an earlier group. Until the return, nodes of
both groups cost money."""


class GroupChoice:
    """Decides how many workers to request from each node group.

    The first group is always asked for its maximum number of workers, so that its nodes come as soon as they are
    available. A later group is asked for the workers beyond the earlier groups' maximum. If the earlier groups
    lack nodes for longer than the later group's `after_s`, the later group is also asked for the missing workers. This
    additional request ends once the earlier groups have had enough nodes for just as long. This time doubles, up to
    LONGEST_RETURN_S, if nodes are missing again within FORGOTTEN_AFTER_S, so that a run does not keep returning to
    nodes that go again.
    """

    def __init__(self, groups: Sequence[NodeGroup], workers: int) -> None:
        self._groups, self._workers = groups, workers
        self._asked: dict[str, int] = {}
        self._agreed: dict[str, float] = {}
        "Last time at which exactly as many workers as needed were requested from each group."
        self._return_after_s = {group.name: group.after_s for group in groups}
        "Seconds for which earlier groups must have enough nodes before the additional request to each group ends."
        self._returned: dict[str, float] = {}
        "Time at which the request to each group was last reduced, until it is raised again."

    def choose(self, room: Mapping[str, int], now: float) -> dict[str, int]:
        """Return the number of workers to request from each group, keyed by the group's name.

        `room` maps each group's name to the number of workers that fit on the group's nodes. `now` is the current
        `time.monotonic()`.
        """
        missing = beyond = self._workers
        for group in self._groups:
            name, there = group.name, room.get(group.name, 0)
            needed = min(group.most, missing)
            always = min(group.most, beyond)
            missing -= min(there, needed)
            beyond -= always
            # After a restart, a driver finds nodes that the previous driver requested.
            asked = self._asked.setdefault(name, max(always, min(group.most, there)))
            if asked == needed:
                self._agreed[name] = now
                continue
            more = asked < needed
            if now - self._agreed.setdefault(name, now) >= (group.after_s if more else self._return_after_s[name]):
                if more:
                    self._prolong_wait(group, now)
                else:
                    self._returned[name] = now
                self._asked[name], self._agreed[name] = needed, now
        return dict(self._asked)

    def _prolong_wait(self, group: NodeGroup, now: float) -> None:
        """Double the wait before the next return to the earlier groups if nodes are missing soon after a return."""
        returned = self._returned.pop(group.name, None)
        if returned is None:
            return
        longer_s = min(2 * self._return_after_s[group.name], max(group.after_s, LONGEST_RETURN_S))
        self._return_after_s[group.name] = longer_s if now - returned < FORGOTTEN_AFTER_S else group.after_s

    def groups_of(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the group of each node (as in `ray.nodes()`), or an empty string if its resources name no group."""
        names = [group.name for group in self._groups]
        return {node["NodeID"]: next((name for name in names if name in node["Resources"]), "") for node in nodes}


def capacity_by_group(room: Mapping[str, int], group_of: Mapping[str, str]) -> dict[str, int]:
    """Return how many workers fit on each group's nodes. `room` and `group_of` are keyed by node."""
    totals: dict[str, int] = {}
    for node, workers in room.items():
        totals[group_of[node]] = totals.get(group_of[node], 0) + workers
    return totals


def nodes_to_release(
    room: Mapping[str, int], group_of: Mapping[str, str], asked: Mapping[str, int], used: Collection[str]
) -> list[str]:
    """Return the nodes that their node groups do not need, unused nodes first.

    `asked` is the number of workers requested from each node group. A node group needs enough nodes to fit this number.
    """
    spare = []
    excess = {
        group: workers - asked.get(group, workers) for group, workers in capacity_by_group(room, group_of).items()
    }
    for node in sorted(room, key=lambda node: (node in used, node)):
        if room[node] <= excess[group_of[node]]:
            excess[group_of[node]] -= room[node]
            spare.append(node)
    return spare
