"""Finds growing memory use, and causes of lost time: a CPU quota, a slow rank, slow reads, and incidents."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sunspot.formatting import in_words
from sunspot.run.failures import BRING_ROWS
from sunspot.run.incidents import Cause, describe_replayed
from sunspot.run.stragglers import RECENT_S, STEADY_FRACTION, lags
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.findings import Diagnosis, Finding, Severity

MAX_DATA_WAIT = 0.3
"""Largest fraction of the step time that ranks can wait for rows without a finding. Below this fraction, faster reading
would hardly help."""

THROTTLED_FRACTION = 0.25
"""Minimum fraction of throttled quota periods to report, as in the common Kubernetes alert CPUThrottlingHigh."""

FIGURES = ("steps_s", "forward_s", "data_wait_s", "throttled_s", "throttled_share")

MEMORY = {"resident_mib", "memory_left_mib", "gpu_memory_mib"}
"""Figures about a rank's memory. They can be null."""

LOW_GOODPUT = 0.8
"""Goodput below which incidents are reported, because they cost more than an ordinary start."""

PREVENTION = {
    Cause.HUNG: (
        "look at the call in which the ranks hung (--stacks); a lower SUNSPOT_HANG_TIMEOUT_S ends a hang sooner"
    ),
    Cause.NO_ROWS: BRING_ROWS,
    Cause.OUT_OF_MEMORY: "give the workers enough memory (worker.memory in the profile)",
    Cause.WORKER_FAILED: "fix the error that ends the workers",
}
"""Advice on incidents that are caused by the run itself, not by its nodes."""

MIN_WINDOWS = 8
"""Minimum number of metric windows to distinguish growth from a warm-up. Memory must grow in both halves of the
windows."""

MIN_GROWTH_MIB, MIN_GROWTH_FRACTION = 64.0, 0.1
"""Minimum growth to report, in MiB and as a fraction of the process's memory. Allocators, caches and evaluations cause
smaller changes."""

MAX_POINTS = 60
"""Maximum number of windows to compare, because the slope is computed from all pairs of windows."""


@dataclass(frozen=True)
class RankThroughput:
    """Each rank's throughput over an attempt's newest windows."""

    windows: list[dict[str, Any]]
    attempt: int = 0
    waits: list[float] = field(default_factory=list)
    "Seconds of a step that each rank spends waiting for rows."
    forwards: list[float] = field(default_factory=list)
    "Seconds of a step that each rank spends in forward passes."
    step_s: float = 0.0
    "Seconds of a complete step, which is the same for all ranks."

    @property
    def own(self) -> list[float]:
        """Seconds per step that each rank spends on rows and forward passes, without waiting for other ranks."""
        return [wait + forward for wait, forward in zip(self.waits, self.forwards, strict=True)]

    @property
    def data_share(self) -> float:
        """Median fraction of the step time that ranks spend waiting for rows."""
        return statistics.median(self.waits) / self.step_s if self.step_s else 0.0

    def lag(self, rank: int) -> float:
        """Return how many seconds per step a rank is slower than the median of the other ranks."""
        return self.own[rank] - statistics.median(own for other, own in enumerate(self.own) if other != rank)


def measure_throughput(records: Sequence[Mapping[str, Any]]) -> RankThroughput:
    """Measure the newest attempt's throughput over the last RECENT_S seconds.

    The attempt's first window is excluded, because it includes the warm-up.
    """
    windows = rank_windows(records)[1:]
    windows = [window for window in windows if window["time"] > windows[-1]["time"] - RECENT_S]
    steps = sum(window["steps"] for window in windows)
    if not steps:
        return RankThroughput([])

    def per_step(name: str) -> list[float]:
        return [sum(values) / steps for values in zip(*(window["ranks"][name] for window in windows), strict=True)]

    return RankThroughput(
        windows, windows[0]["attempt"], per_step("data_wait_s"), per_step("forward_s"), max(per_step("steps_s"))
    )


def rank_windows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest worker group's records that contain steps and the measurements of all ranks."""
    windows = [dict(r) for r in records if r.get("steps") and _has_figures(r)]
    groups = [(window["attempt"], len(window["ranks"]["resident_mib"])) for window in windows]
    return [window for window, group in zip(windows, groups, strict=True) if group == groups[-1]]


def _has_figures(record: Mapping[str, Any]) -> bool:
    """Return True if a record has all measurements. Measurements of memory can be null."""
    ranks = record["ranks"]
    return (
        all(isinstance(record.get(name), int | float) for name in ("time", "seconds"))
        and ranks.keys() >= MEMORY
        and all(isinstance(value, int | float) for name in FIGURES for value in ranks.get(name, [None]))
    )


def in_ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def find_slow(case: Case) -> Iterator[Finding]:
    """Find what slows down the newest steps: the CPU quota, one rank, or reading rows."""
    speed = measure_throughput(case.windows)
    if not speed.windows:
        return
    yield from _throttled(case, speed)
    yield from _straggler(case, speed)
    if speed.data_share >= MAX_DATA_WAIT:
        wait_s = statistics.median(speed.waits)
        streamed = case.setting("loader") == "ray"
        rows = "SUNSPOT_LOADER=torch, if the rows fit into memory" if streamed else "SUNSPOT_LOADER=ray"
        of_step = f"{in_ms(wait_s)} of {in_ms(speed.step_s)}"
        evidence = f"all ranks wait for rows for {speed.data_share:.0%} of the step time: {of_step}"
        cpus = "" if case.local else "more CPUs for reading (data_workers, or worker.cpu in the profile), "
        advice = f"use {cpus}images stored as pixels and not as PNG or JPEG, or {rows}"
        details = {"data_share": speed.data_share, "data_wait_s": wait_s, "step_s": speed.step_s}
        yield Finding(Diagnosis.DATA_BOUND, Severity.WARNING, evidence, advice, details, cost=speed.data_share)


def _throttled(case: Case, speed: RankThroughput) -> Iterator[Finding]:
    seconds = sum(window["seconds"] for window in speed.windows)
    for rank in range(len(speed.own)):
        held_s = sum(window["ranks"]["throttled_s"][rank] for window in speed.windows)
        share = sum(w["ranks"]["throttled_share"][rank] * w["seconds"] for w in speed.windows) / (seconds or 1)
        if share < THROTTLED_FRACTION:
            continue
        used_up = f"its CPU quota was exhausted in {share:.0%} of the periods"
        held = f"delayed it by {held_s:.1f} s in {seconds:.0f} s"
        evidence = f"{case.describe_rank(speed.attempt, rank)}: {used_up}, and {held}"
        limit = "the CPU limit (Sunspot's manifests set none, but a LimitRange in the namespace can)"
        advice = f"remove {limit}, or raise worker.cpu in the profile"
        if case.local:
            advice = "raise the CPU limit of the container or service that this runs in"
        details = {**case.locate_rank(speed.attempt, rank), "throttled_share": share, "throttled_s": held_s}
        yield Finding(Diagnosis.THROTTLED, Severity.WARNING, evidence, advice, details, cost=share)


def _straggler(case: Case, speed: RankThroughput) -> Iterator[Finding]:
    if len(speed.own) < 2:
        return
    rank = max(range(len(speed.own)), key=lambda rank: speed.own[rank])
    lag = speed.lag(rank)
    others = speed.own[rank] - lag
    slowest = [_slowest(window) == rank for window in speed.windows]
    if not lags(speed.own[rank], others, speed.step_s) or statistics.mean(slowest) < STEADY_FRACTION:
        return
    others_wait = statistics.median(wait for other, wait in enumerate(speed.waits) if other != rank)
    reads = speed.waits[rank] - others_wait > lag / 2
    part = "forward pass"
    seconds = speed.forwards[rank]
    others_seconds = others - others_wait
    replace = "check what else runs on that node, its clock rate and its temperature, or replace it"
    advice = f"{replace}; a slower type of node has the same effect"
    if case.local:
        advice = "check what else runs on this machine, whose cores the workers share"
    if reads:
        part = "rows"
        seconds = speed.waits[rank]
        others_seconds = others_wait
        advice = "its rows come late; check what else reads on its node, and the network to storage"
    takes = f"takes {in_ms(seconds)} of a {in_ms(speed.step_s)} step for its {part}"
    steady = f"others take {in_ms(others_seconds)}; it was the slowest in {sum(slowest)} of {len(slowest)} windows"
    evidence = f"{case.describe_rank(speed.attempt, rank)}: {takes}, and {steady}"
    details = {
        **case.locate_rank(speed.attempt, rank),
        "own_s": speed.own[rank],
        "others_s": others,
        "step_s": speed.step_s,
    }
    details["part"] = "data" if reads else "forward"
    yield Finding(Diagnosis.STRAGGLER, Severity.WARNING, evidence, advice, details, cost=lag / speed.step_s)


def _slowest(window: Mapping[str, Any]) -> int:
    ranks = window["ranks"]
    own = [wait + forward for wait, forward in zip(ranks["data_wait_s"], ranks["forward_s"], strict=True)]
    return own.index(max(own))


def find_memory_growth(case: Case) -> Iterator[Finding]:
    """Find ranks whose use of memory or GPU memory keeps growing."""
    windows = rank_windows(case.windows)[1:]
    if len(windows) < MIN_WINDOWS:
        return
    attempt = windows[0]["attempt"]
    times = [window["time"] for window in windows]
    steps = sum(window["steps"] for window in windows[1:])
    span_s = times[-1] - times[0]
    kept = "losses with their graph (use .detach() or .item()), lists, caches without a bound"
    advice = f"look for what the task keeps from step to step: {kept}"
    for memory, whose in (("resident_mib", ""), ("gpu_memory_mib", "'s GPU memory")):
        sizes = list(zip(*(window["ranks"][memory] for window in windows), strict=True))
        rates = [growth_rate(times, of_rank) for of_rank in sizes]
        for rank, rate in enumerate(rates):
            if not rate:
                continue
            first, last = sizes[rank][0], sizes[rank][-1]
            until_s = None if whose else _seconds_until_full(case, windows[-1], rates, rank)
            limit = f"; at this rate it reaches the limit in {in_words(until_s)}" if until_s is not None else ""
            grew = f"grew from {first:.0f} to {last:.0f} MiB in {in_words(span_s)}"
            pace = f"{rate * 60:.3g} MiB a minute, {rate * span_s / max(1, steps):.2g} MiB a step"
            evidence = f"{case.describe_rank(attempt, rank)}{whose} {grew}, {pace}{limit}"
            details = {**case.locate_rank(attempt, rank), "memory": memory, "from_mib": first, "to_mib": last}
            details |= {"mib_per_s": rate, "limit_in_s": until_s}
            left_s = case.seen.seconds_left
            ends = until_s is not None and left_s is not None and until_s < left_s
            yield Finding(Diagnosis.MEMORY, Severity.WARNING, evidence, advice, details, cost=1.0 if ends else 0.0)


def _seconds_until_full(case: Case, window: Mapping[str, Any], rates: Sequence[float], rank: int) -> float | None:
    """Return the seconds until a rank's machine has no memory left, or None if this is unknown.

    All ranks on the machine share its memory.
    """
    attempt = window["attempt"]
    host = case.host(attempt, rank)
    together = sum(rate for other, rate in enumerate(rates) if case.host(attempt, other) == host)
    left = window["ranks"]["memory_left_mib"][rank]
    return None if left is None else left / together


def growth_rate(times: Sequence[float], sizes: Sequence[float | None]) -> float:
    """Return a size's growth in MiB per second, which is the smaller of the rates in the two halves of its history.

    Returns 0 if the growth is small or unknown.
    """
    points = [(time, size) for time, size in zip(times, sizes, strict=True) if size is not None]
    points = points[:: max(1, len(points) // MAX_POINTS)]
    if len(points) < MIN_WINDOWS:
        return 0.0
    middle = len(points) // 2
    rate = min(slope(points[:middle]), slope(points[middle:]))
    grown = rate * (points[-1][0] - points[0][0])
    return rate if grown >= max(MIN_GROWTH_MIB, MIN_GROWTH_FRACTION * points[0][1]) else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between all pairs of points (Theil-Sen), which is robust against outliers."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for position, earlier in enumerate(points)
        for later in points[position + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def find_losses(case: Case) -> Iterator[Finding]:
    """Yield a finding if incidents cost the run much of its time."""
    share = case.seen.goodput
    if share is None or share >= LOW_GOODPUT or not case.seen.incidents:
        return
    lost: Counter[Cause] = Counter()
    for receipt in case.seen.incidents:
        lost[receipt.cause] += round(receipt.worker_seconds_lost)
    times = case.seen.incidents_by_cause
    causes = ", ".join(f"{times[cause]} {cause} ({seconds} worker-seconds)" for cause, seconds in lost.most_common())
    evidence = f"{share:.0%} of the worker-seconds were useful; the rest was lost to {causes}"
    steps, more = case.seen.steps_replayed, case.seen.replayed_at_least
    [(costliest, _)] = lost.most_common(1)
    prevent = _prevent(costliest, describe_replayed(steps, more) if steps or more else "", case.local)
    advice = f"`sunspot events {case.seen.run.name}` shows the receipt of each incident; {prevent}"
    details = {"goodput": share, "worker_seconds_lost": dict(lost), "steps_replayed": steps, "replayed_at_least": more}
    yield Finding(Diagnosis.LOW_GOODPUT, Severity.WARNING, evidence, advice, details, cost=1 - share)


def _prevent(cause: Cause, replayed: str, local: bool) -> str:
    """Return advice on how to make incidents with this cause rarer or cheaper.

    `replayed` is the number of repeated steps as text, or empty if no step was repeated.
    """
    if local and cause is Cause.OUT_OF_MEMORY:
        return "start fewer workers (SUNSPOT_NUM_WORKERS)"
    if cause in PREVENTION:
        return PREVENTION[cause]
    if replayed:
        better = "more frequent checkpoints or a higher SUNSPOT_SNAPSHOT_COST would reduce this number"
        return f"{replayed} had to be repeated; {better}"
    return "find out what ended them" if local else "use nodes that are reclaimed less often, or not all at once"


def summarize_figures(case: Case) -> tuple[str, dict[str, Any]]:
    """Return the examined measurements as text and as details for the JSON document."""
    seen = case.seen
    speed = measure_throughput(case.windows)
    words = [f"step {seen.step}" + (f" of {seen.total_steps}" if seen.total_steps else "")]
    details: dict[str, Any] = {"step": seen.step, "total_steps": seen.total_steps or None}
    if speed.windows:
        words.append(f"{in_ms(speed.step_s)} a step, {speed.data_share:.0%} of it waiting for rows")
        details |= {"step_s": speed.step_s, "data_share": speed.data_share}
        if len(speed.own) > 1:
            rank = speed.own.index(max(speed.own))
            words.append(f"rank {rank} is the slowest ({in_ms(speed.lag(rank))} behind the others)")
            details |= {"slowest_rank": rank, "lag_s": speed.lag(rank)}
        resident = speed.windows[-1]["ranks"]["resident_mib"]
        if None not in resident:
            words.append(f"{max(resident):.0f} MiB of memory at most")
            details["resident_mib"] = max(resident)
    else:
        words.append("no metric window after the first, so its speed and memory are unknown")
    if seen.checkpoint:
        words.append(f"a checkpoint of step {seen.checkpoint.step}")
        details["checkpoint"] = seen.checkpoint.name
    if seen.goodput is not None:
        words.append(f"goodput {seen.goodput:.0%}")
        details["goodput"] = seen.goodput
    return ", ".join(words), details
