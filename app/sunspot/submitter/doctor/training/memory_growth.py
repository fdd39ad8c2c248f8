"""Ranks whose memory climbs."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sunspot.formatting import in_words
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.doctor.training.slow import count_ranks, rank_windows
from sunspot.submitter.findings import Diagnosis, Finding, Severity

MIN_WINDOWS = 8
"""Fewest windows of the metric history to tell a climb from a warm-up: each half of them must climb."""

MIN_GROWTH_MIB, MIN_GROWTH_SHARE = 64.0, 0.1
"""Least growth that is a climb, in MiB and as a share of the process's memory: allocators, caches and evaluations vary
by less."""

MAX_POINTS = 60
"""Windows of a long run that are compared: the slope takes all pairs."""


@dataclass(frozen=True)
class Growth:
    """The growth of one rank's memory."""

    rank: int
    name: str
    "Of the memory: resident_mib or gpu_memory_mib."
    rate: float
    "In MiB per second."
    until_s: float | None = None
    "Seconds until its machine has none left, if that is known."


def find_memory_growth(case: Case) -> Iterator[Finding]:
    """Find ranks whose memory, or whose GPU's memory, keeps growing."""
    windows = rank_windows(case.windows)[1:]
    if len(windows) < MIN_WINDOWS:
        return
    attempt = windows[0]["attempt"]
    times = [window["time"] for window in windows]
    ranks = range(count_ranks(windows[0]))
    rates = {rank: growth_rate(times, [window["ranks"]["resident_mib"][rank] for window in windows]) for rank in ranks}
    for rank, rate in rates.items():
        if not rate:
            continue
        # All ranks of a machine share what it has left.
        host = case.host(attempt, rank)
        together = sum(other for at, other in rates.items() if other and case.host(attempt, at) == host)
        left = windows[-1]["ranks"]["memory_left_mib"][rank]
        until_s = left / together if left is not None and together > 0 else None
        ends = until_s is not None and case.view.seconds_left is not None and until_s < case.view.seconds_left
        growth = Growth(rank, "resident_mib", rate, until_s)
        yield _growth_finding(case, windows, growth, cost=1.0 if ends else 0.0)
    for rank in ranks:
        rate = growth_rate(times, [window["ranks"]["gpu_memory_mib"][rank] for window in windows])
        if rate:
            yield _growth_finding(case, windows, Growth(rank, "gpu_memory_mib", rate))


def _growth_finding(case: Case, windows: list[dict[str, Any]], growth: Growth, cost: float = 0.0) -> Finding:
    rank = growth.rank
    name = growth.name
    rate = growth.rate
    until_s = growth.until_s
    attempt = windows[0]["attempt"]
    steps = sum(window["steps"] for window in windows[1:])
    span_s = windows[-1]["time"] - windows[0]["time"]
    first, last = (windows[place]["ranks"][name][rank] for place in (0, -1))
    gpu = "'s GPU memory" if name == "gpu_memory_mib" else ""
    limit = f"; at this rate the limit is met in {in_words(until_s)}" if until_s is not None and not gpu else ""
    evidence = (
        f"{case.name(attempt, rank)}{gpu} went from {first:.0f} to {last:.0f} MiB in {in_words(span_s)}, "
        f"{rate * 60:.3g} MiB a minute, {rate * span_s / max(1, steps):.2g} MiB a step{limit}"
    )
    advice = (
        "look for what the task keeps from step to step: losses with their graph (use .detach() or .item()), lists, "
        "caches without a bound"
    )
    details = {
        **case.place(attempt, rank),
        "memory": name,
        "from_mib": first,
        "to_mib": last,
        "mib_per_s": rate,
        "limit_in_s": until_s,
    }
    return Finding(Diagnosis.MEMORY, Severity.WARNING, evidence, advice, details, cost=cost)


def growth_rate(times: list[float], sizes: list[float | None]) -> float:
    """MiB per second by which a size climbs in both halves of its history; 0 when little or unknown."""
    points = [(time, size) for time, size in zip(times, sizes, strict=True) if size is not None]
    points = points[:: max(1, len(points) // MAX_POINTS)]
    if len(points) < MIN_WINDOWS:
        return 0.0
    middle = len(points) // 2
    rate = min(slope(points[:middle]), slope(points[middle:]))
    grown = rate * (points[-1][0] - points[0][0])
    return rate if grown >= max(MIN_GROWTH_MIB, MIN_GROWTH_SHARE * points[0][1]) else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Compute the median slope between all pairs of points (Theil-Sen), robust against single points."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(points)
        for later in points[place + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0
