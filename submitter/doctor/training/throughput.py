"""How fast the ranks of a run go: figures from its metric history."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RECENT_S = 300.0
"""Seconds of history that tell whether a run is slow now."""


@dataclass(frozen=True)
class RankThroughput:
    """The throughput of each rank of one attempt over its newest windows."""

    windows: list[dict[str, Any]]
    attempt: int = 0
    waits: list[float] = field(default_factory=list)
    "Seconds of a step that each rank waits for rows."
    forwards: list[float] = field(default_factory=list)
    "Seconds in forward passes: with the waits, the part of a step in which no rank waits for another."
    step_s: float = 0.0
    "Seconds of a whole step, the same for all ranks."

    @property
    def own(self) -> list[float]:
        return [wait + forward for wait, forward in zip(self.waits, self.forwards, strict=True)]

    @property
    def data_share(self) -> float:
        """Share of the step time the ranks wait for rows."""
        return statistics.median(self.waits) / self.step_s if self.step_s else 0.0

    def lag(self, rank: int) -> float:
        """Seconds of a step by which a rank lags the others."""
        return self.own[rank] - statistics.median(own for other, own in enumerate(self.own) if other != rank)


def measure_throughput(records: Sequence[Mapping[str, Any]]) -> RankThroughput:
    """The newest attempt over the last RECENT_S, without its first window, which includes the warm-up."""
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
    """The records with steps and figures of each rank, of the newest attempt that has any."""
    windows = [dict(r) for r in records if r.get("steps") and r.get("ranks") and "steps_s" in r["ranks"][0]]
    return [window for window in windows if window["attempt"] == windows[-1]["attempt"]]


def in_ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
