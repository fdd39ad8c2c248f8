"""How fast the ranks of a run go, and how their memory grows: numbers from its metric history. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RECENT_S = 300.0
"""How far back a run is looked at to say that it is slow: what was an hour ago does not matter."""

LEAST_WINDOWS = 8
"""Of the metric history, to tell a climb from a beginning: each half of them must climb."""

CLIMB_MIB, CLIMB_SHARE = 64.0, 0.1
"""What allocators, caches and evaluations give and take; and the part of its memory by which a process has grown that
climbs."""

MOST_POINTS = 60
"""Windows of a long run that its climb is measured by: the slope compares each with each."""


@dataclass(frozen=True)
class RankThroughput:
    """How the ranks of one attempt went, over its newest windows."""

    windows: list[dict[str, Any]]
    attempt: int = 0
    waits: list[float] = field(default_factory=list)
    "Of each rank, seconds of a step that it waits for rows."
    forwards: list[float] = field(default_factory=list)
    "In forward passes: with the waits, the part of a step in which no rank waits for another."
    step_s: float = 0.0
    "Of a whole step, which takes all ranks as long."

    @property
    def own(self) -> list[float]:
        return [wait + forward for wait, forward in zip(self.waits, self.forwards, strict=True)]

    @property
    def data_share(self) -> float:
        """Part of the step time that the ranks wait for rows."""
        return statistics.median(self.waits) / self.step_s if self.step_s else 0.0

    def lag(self, rank: int) -> float:
        """Seconds of a step by which a rank is behind the others."""
        return self.own[rank] - statistics.median(own for other, own in enumerate(self.own) if other != rank)


def measure_pace(records: Sequence[Mapping[str, Any]]) -> RankThroughput:
    """The pace of the newest attempt over the last RECENT_S, without its first window, in which everything is new."""
    windows = rank_windows(records)[1:]
    windows = [window for window in windows if window["time"] > windows[-1]["time"] - RECENT_S]
    steps = sum(window["steps"] for window in windows)
    if not steps:
        return RankThroughput([])

    def per_step(name: str) -> list[float]:
        ranks = range(len(windows[0]["ranks"]))
        return [sum(window["ranks"][rank][name] for window in windows) / steps for rank in ranks]

    return RankThroughput(
        windows, windows[0]["attempt"], per_step("data_wait_s"), per_step("forward_s"), max(per_step("steps_s"))
    )


def rank_windows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records with steps, and with numbers of each rank, of the newest attempt that has any."""
    told = [dict(r) for r in records if r.get("steps") and r.get("ranks") and "steps_s" in r["ranks"][0]]
    return [record for record in told if record["attempt"] == told[-1]["attempt"]]


def climb(times: list[float], sizes: list[float | None]) -> float:
    """MiB per second by which a size climbs in both halves of its history; 0 where that is not much, or unknown."""
    points = [(time, size) for time, size in zip(times, sizes, strict=True) if size is not None]
    points = points[:: max(1, len(points) // MOST_POINTS)]
    if len(points) < LEAST_WINDOWS:
        return 0.0
    middle = len(points) // 2
    rate = min(slope(points[:middle]), slope(points[middle:]))
    grown = rate * (points[-1][0] - points[0][0])
    return rate if grown >= max(CLIMB_MIB, CLIMB_SHARE * points[0][1]) else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen): no single point sways it."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(points)
        for later in points[place + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0
