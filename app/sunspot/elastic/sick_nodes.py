"""Finds a sick node before the node fails, so that the run can stop using it. This module does no I/O.

All workers wait for the slowest worker in each step, so a single slow node slows down the whole run. A hot GPU or a
busy neighbor slows down the forward passes. Workers do not wait for each other in these passes, so the time of the
passes shows which node is slow. The time spent waiting for rows does not count, because late rows are often not the
node's fault, for example if a replacement has joined with an empty cache.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sunspot.elastic.messages import StepTimes, WorkerGroup
from sunspot.formatting import in_words
from sunspot.run.stragglers import LAG_RATIO, STEADY_FRACTION, lags

SICK_AFTER_S = 180.0
"""Seconds for which a group must train before one of its nodes can count as sick. A short slowdown ends sooner."""

MIN_WINDOWS = 5
"""Minimum number of metric windows in which the nodes are compared."""

AGAIN_AFTER_S = 1800.0
"""Seconds until the run can exclude another node. The wait doubles each time, so that a run does not shrink node by
node."""


def step_times(attempt: int, record: Mapping[str, Any], ranks: Mapping[str, np.ndarray]) -> StepTimes:
    """Return the step times from a record of the metric history.

    `ranks` maps each metric's name to its values on all ranks, float64 [ranks].
    """
    steps = record["steps"]
    usual = np.median(ranks["rows"])
    rows = np.maximum(ranks["rows"], 1)
    forward_s = np.array(ranks["forward_s"]) / steps * np.minimum(1.0, usual / rows)
    return StepTimes(
        attempt, record["time"], record["seconds"], float(max(ranks["steps_s"])) / steps, tuple(forward_s.tolist())
    )


class SickNode(NamedTuple):
    """A node that the run should stop using."""

    node: str
    "Ray's id of the node."
    why: str
    "The reason, as readable text."


class SlowestNode(NamedTuple):
    """The slowest node of a metric window."""

    node: str
    own_s: float
    "Seconds per step in forward passes."
    others_s: float
    "The second slowest node's seconds per step in forward passes, or infinity if no other node had rows."


def find_sick_node(
    windows: Sequence[StepTimes], group: WorkerGroup, size_without: Callable[[str], int], least: int
) -> SickNode | None:
    """Return the node that slows the group down so much that the group should continue without this node.

    Returns None if there is no such node.

    `windows` are the newest metric windows, oldest first. The group's first window is ignored, because it includes the
    warm-up. `size_without` returns how many workers would remain without a node. At least `least` workers must remain,
    and together they must not be slower than the whole group is now. If two nodes are equally slow, neither is
    returned.
    """
    recent = [window for window in windows if window.attempt == group.attempt][1:]
    if len(recent) < MIN_WINDOWS:
        return None
    covered_s = recent[-1].time - recent[0].time + recent[0].seconds
    slowest = [find_slowest_node(window, group.nodes) for window in recent]
    newest = slowest[-1]
    remaining = size_without(newest.node)
    if covered_s < SICK_AFTER_S or remaining < max(1, least):
        return None
    ratio = max(LAG_RATIO, group.world_size / remaining)
    lagging = [
        each.node == newest.node and lags(each.own_s, each.others_s, window.step_s, ratio)
        for each, window in zip(slowest, recent, strict=True)
    ]
    if not lagging[-1] or statistics.mean(lagging) < STEADY_FRACTION:
        return None
    times = f"{newest.own_s:.3g} s a step, and those of the other nodes took at most {newest.others_s:.3g} s"
    steady = f"in {sum(lagging)} of {len(lagging)} windows of {in_words(covered_s)}"
    return SickNode(newest.node, f"its forward passes took {times}, {steady}")


def find_slowest_node(window: StepTimes, nodes: Mapping[int, str]) -> SlowestNode:
    """Return the slowest node in a window. A node is as slow as its slowest rank. `nodes` maps ranks to nodes."""
    own_s: dict[str, float] = {}
    for rank, seconds in enumerate(window.forward_s):
        own_s[nodes[rank]] = max(seconds, own_s.get(nodes[rank], 0.0))
    slowest = max(own_s, key=lambda node: own_s[node])
    others = [seconds for node, seconds in own_s.items() if node != slowest]
    return SlowestNode(slowest, own_s[slowest], max(others, default=0.0) or math.inf)


class SickNodes:
    """Finds one sick node at a time, and pauses after each. All trainers of a driver share one `SickNodes`."""

    def __init__(self) -> None:
        self._not_before = -math.inf
        self._pause_s = AGAIN_AFTER_S

    def find(
        self,
        windows: Sequence[StepTimes],
        group: WorkerGroup,
        size_without: Callable[[str], int],
        least: int,
        now: float,
    ) -> SickNode | None:
        """Return the node that the group should stop using, as chosen by `find_sick_node`.

        Returns None if there is no such node, or during the pause after a node was found. `now` is a value of
        `time.monotonic()`.
        """
        sick = find_sick_node(windows, group, size_without, least) if now >= self._not_before else None
        if sick:
            self._not_before, self._pause_s = now + self._pause_s, 2 * self._pause_s
        return sick
