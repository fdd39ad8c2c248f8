"""What a run spends too much of: time, on a CPU quota, one rank, its rows or its incidents, and memory."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sunspot.formatting import in_words, plural
from sunspot.run.failures import BRING_ROWS
from sunspot.run.incidents import Cause
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.findings import Diagnosis, Finding, Severity

RECENT_S = 300.0
"""Seconds of history that tell whether a run is slow now."""

DATA_SHARE = 0.3
"""Share of the step time all ranks wait for rows, below which faster reading would not be noticed."""

LAG_RATIO, LAG_SHARE, MIN_LAG_S = 1.3, 0.1, 0.002
"""A straggler's own part takes this many times as long as the others', costs this share of the step, and more seconds
than two processes on one machine take from each other by chance."""

STEADY = 0.75
"""Share of the windows in which the same rank is the slowest: a bad minute does not make a straggler."""

THROTTLED_SHARE = 0.25
"""Share of the quota's periods that are throttled, as in Kubernetes' usual alert (CPUThrottlingHigh)."""

FIGURES = ("steps_s", "forward_s", "data_wait_s", "throttled_s", "throttled_share")

MEMORY = {"resident_mib", "memory_left_mib", "gpu_memory_mib"}
"""Figures of a rank; those of its memory may be null."""

LOW_GOODPUT = 0.8
"""Below this, incidents cost more than a start does."""

PREVENTION = {
    Cause.HUNG: (
        "look at the call in which the ranks hung (--stacks); a lower SUNSPOT_HANG_TIMEOUT_S ends a hang sooner"
    ),
    Cause.NO_ROWS: BRING_ROWS,
    Cause.OUT_OF_MEMORY: "give the workers enough memory (worker.memory in the profile)",
    Cause.WORKER_FAILED: "fix the error that ends the workers",
}
"""Advice on incidents whose cause is in the run itself, not in its nodes."""

MIN_WINDOWS = 8
"""Fewest windows of the metric history to tell a climb from a warm-up: each half of them must climb."""

MIN_GROWTH_MIB, MIN_GROWTH_SHARE = 64.0, 0.1
"""Least growth that is a climb, in MiB and as a share of the process's memory: allocators, caches and evaluations vary
by less."""

MAX_POINTS = 60
"""Windows of a long run that are compared: the slope takes all pairs."""


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
    """Measure the newest attempt over the last RECENT_S, without its first window, which includes the warm-up."""
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
    """Select the records with steps and figures of each rank, of the newest attempt and group that has any."""
    windows = [dict(r) for r in records if r.get("steps") and _has_figures(r)]
    groups = [(window["attempt"], len(window["ranks"]["resident_mib"])) for window in windows]
    return [window for window, group in zip(windows, groups, strict=True) if group == groups[-1]]


def _has_figures(record: Mapping[str, Any]) -> bool:
    """Whether all figures are known: of a process without a container's limits, say, some are not."""
    ranks = record["ranks"]
    return (
        all(isinstance(record.get(name), int | float) for name in ("time", "seconds"))
        and ranks.keys() >= MEMORY
        and all(isinstance(value, int | float) for name in FIGURES for value in ranks.get(name, [None]))
    )


def in_ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def find_slow(case: Case) -> Iterator[Finding]:
    """Find what takes the time of the newest steps: the CPU quota, one rank, or reading rows."""
    speed = measure_throughput(case.windows)
    if not speed.windows:
        return
    yield from _throttled(case, speed)
    yield from _straggler(case, speed)
    if speed.data_share >= DATA_SHARE:
        wait_s = statistics.median(speed.waits)
        streamed = case.setting("loader") == "ray"
        rows = "SUNSPOT_LOADER=torch, where the rows fit into memory" if streamed else "SUNSPOT_LOADER=ray"
        of_step = f"{in_ms(wait_s)} of {in_ms(speed.step_s)}"
        evidence = f"{speed.data_share:.0%} of the step time all ranks wait for rows: {of_step}"
        cpus = "" if case.local else "more CPUs that read (data_workers, or worker.cpu in the profile), "
        advice = f"{cpus}images stored as pixels and not as PNG or JPEG, or {rows}"
        details = {"data_share": speed.data_share, "data_wait_s": wait_s, "step_s": speed.step_s}
        yield Finding(Diagnosis.DATA_BOUND, Severity.WARNING, evidence, advice, details, cost=speed.data_share)


def _throttled(case: Case, speed: RankThroughput) -> Iterator[Finding]:
    seconds = sum(window["seconds"] for window in speed.windows)
    for rank in range(len(speed.own)):
        held_s = sum(window["ranks"]["throttled_s"][rank] for window in speed.windows)
        share = sum(w["ranks"]["throttled_share"][rank] * w["seconds"] for w in speed.windows) / (seconds or 1)
        if share < THROTTLED_SHARE:
            continue
        used_up = f"its processor quota was used up in {share:.0%} of the periods"
        held = f"held it back for {held_s:.1f} s in {seconds:.0f} s"
        evidence = f"{case.name(speed.attempt, rank)}: {used_up}, and {held}"
        limit = "the CPU limit (Sunspot's manifests set none: a LimitRange of the namespace may)"
        advice = f"take away {limit}, or raise worker.cpu in the profile"
        if case.local:
            advice = "raise the CPU limit of the container or service that this runs in"
        details = {**case.place(speed.attempt, rank), "throttled_share": share, "throttled_s": held_s}
        yield Finding(Diagnosis.THROTTLED, Severity.WARNING, evidence, advice, details, cost=share)


def _straggler(case: Case, speed: RankThroughput) -> Iterator[Finding]:
    if len(speed.own) < 2:
        return
    rank = max(range(len(speed.own)), key=lambda rank: speed.own[rank])
    lag = speed.lag(rank)
    others = speed.own[rank] - lag
    slowest = [_slowest(window) == rank for window in speed.windows]
    if (
        lag < MIN_LAG_S
        or lag < LAG_SHARE * speed.step_s
        or speed.own[rank] < LAG_RATIO * others
        or statistics.mean(slowest) < STEADY
    ):
        return
    others_wait = statistics.median(wait for other, wait in enumerate(speed.waits) if other != rank)
    reads = speed.waits[rank] - others_wait > lag / 2
    part, mine, theirs = "forward pass", speed.forwards[rank], others - others_wait
    replace = "see what else runs on that node, its clock and temperature, or replace it"
    advice = f"{replace}; equal pods on unequal nodes do this too"
    if case.local:
        advice = "see what else runs on this machine, whose cores the workers share"
    if reads:
        part, mine, theirs = "rows", speed.waits[rank], others_wait
        advice = "its rows come late: see what reads on its node, and the network to storage"
    takes = f"{in_ms(mine)} for its {part} in a step of {in_ms(speed.step_s)}, the others {in_ms(theirs)}"
    steady = f"the slowest in {sum(slowest)} of {len(slowest)} windows"
    evidence = f"{case.name(speed.attempt, rank)}: {takes}; {steady}"
    details = {**case.place(speed.attempt, rank), "own_s": speed.own[rank], "others_s": others, "step_s": speed.step_s}
    details["part"] = "data" if reads else "forward"
    yield Finding(Diagnosis.STRAGGLER, Severity.WARNING, evidence, advice, details, cost=lag / speed.step_s)


def _slowest(window: Mapping[str, Any]) -> int:
    ranks = window["ranks"]
    own = [wait + forward for wait, forward in zip(ranks["data_wait_s"], ranks["forward_s"], strict=True)]
    return own.index(max(own))


def find_memory_growth(case: Case) -> Iterator[Finding]:
    """Find ranks whose memory, or whose GPU's memory, keeps growing."""
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
            limit = f"; at this rate the limit is met in {in_words(until_s)}" if until_s is not None else ""
            grew = f"went from {first:.0f} to {last:.0f} MiB in {in_words(span_s)}"
            pace = f"{rate * 60:.3g} MiB a minute, {rate * span_s / max(1, steps):.2g} MiB a step"
            evidence = f"{case.name(attempt, rank)}{whose} {grew}, {pace}{limit}"
            details = {**case.place(attempt, rank), "memory": memory, "from_mib": first, "to_mib": last}
            details |= {"mib_per_s": rate, "limit_in_s": until_s}
            left_s = case.view.seconds_left
            ends = until_s is not None and left_s is not None and until_s < left_s
            yield Finding(Diagnosis.MEMORY, Severity.WARNING, evidence, advice, details, cost=1.0 if ends else 0.0)


def _seconds_until_full(case: Case, window: Mapping[str, Any], rates: Sequence[float], rank: int) -> float | None:
    """Tell when the machine of a rank, which all ranks there share, has no memory left; None: unknown."""
    attempt = window["attempt"]
    host = case.host(attempt, rank)
    together = sum(rate for other, rate in enumerate(rates) if case.host(attempt, other) == host)
    left = window["ranks"]["memory_left_mib"][rank]
    return None if left is None else left / together


def growth_rate(times: Sequence[float], sizes: Sequence[float | None]) -> float:
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


def find_losses(case: Case) -> Iterator[Finding]:
    """Incidents that cost the run a lot, by cause."""
    share = case.view.goodput
    if share is None or share >= LOW_GOODPUT or not case.view.incidents:
        return
    lost: Counter[Cause] = Counter()
    for receipt in case.view.incidents:
        lost[receipt.cause] += round(receipt.worker_seconds_lost)
    times = case.view.incidents_by_cause
    causes = ", ".join(f"{times[cause]} {cause} ({seconds} worker-seconds)" for cause, seconds in lost.most_common())
    evidence = f"{share:.0%} of the worker-seconds were of use; lost by {causes}"
    replayed = case.view.steps_replayed
    [(costliest, _)] = lost.most_common(1)
    prevent = _prevent(costliest, replayed, case.local)
    advice = f"`sunspot events {case.view.run.name}` has the receipt of each; {prevent}"
    details = {"goodput": share, "worker_seconds_lost": dict(lost), "steps_replayed": replayed}
    yield Finding(Diagnosis.LOW_GOODPUT, Severity.WARNING, evidence, advice, details, cost=1 - share)


def _prevent(cause: Cause, replayed: int, local: bool) -> str:
    """Return what makes incidents with this cause fewer or cheaper; `replayed` steps were taken again."""
    if local and cause is Cause.OUT_OF_MEMORY:
        return "start fewer workers (SUNSPOT_NUM_WORKERS)"
    if cause in PREVENTION:
        return PREVENTION[cause]
    if replayed:
        again = f"{plural(replayed, 'step')} taken again"
        return f"{again}: more frequent checkpoints or a higher SUNSPOT_SNAPSHOT_COST reduce that"
    return "see what ended them" if local else "more stable nodes, or fewer that are reclaimed at once, help"


def figures(case: Case) -> tuple[str, dict[str, Any]]:
    """Return the figures that were examined, as a sentence and for programs."""
    view = case.view
    speed = measure_throughput(case.windows)
    words = [f"step {view.step}" + (f" of {view.total_steps}" if view.total_steps else "")]
    details: dict[str, Any] = {"step": view.step, "total_steps": view.total_steps or None}
    if speed.windows:
        words.append(f"{in_ms(speed.step_s)} a step, {speed.data_share:.0%} of it waiting for rows")
        details |= {"step_s": speed.step_s, "data_share": speed.data_share}
        if len(speed.own) > 1:
            rank = speed.own.index(max(speed.own))
            words.append(f"the slowest rank {rank}, {in_ms(speed.lag(rank))} behind the others")
            details |= {"slowest_rank": rank, "lag_s": speed.lag(rank)}
        resident = speed.windows[-1]["ranks"]["resident_mib"]
        if None not in resident:
            words.append(f"{max(resident):.0f} MiB of memory at most")
            details["resident_mib"] = max(resident)
    else:
        words.append("no window of the metric history after the first, so nothing of its speed and memory")
    if view.checkpoint:
        words.append(f"a checkpoint of step {view.checkpoint.step}")
        details["checkpoint"] = view.checkpoint.name
    if view.goodput is not None:
        words.append(f"goodput {view.goodput:.0%}")
        details["goodput"] = view.goodput
    return ", ".join(words), details
