"""Why a run that has begun is slow, stuck, climbing in memory or failed: from what it left in storage. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.formatting import in_words, plural
from app.run.attempts import Attempt
from app.run.failures import Failure
from app.run.incidents import HUNG, suspects
from app.run.overview import SILENCE_S, RunView
from app.run.status import RunState
from app.settings import PREFIX, Settings
from submitter.cluster.views import PodView
from submitter.doctor.throughput import LEAST_WINDOWS, RankThroughput, climb, measure_pace, rank_windows
from submitter.findings import Diagnosis, Finding, Severity

DATA_SHARE = 0.3
"""Part of the step time that all ranks wait for rows: below this, faster reading would not be felt."""

LAG_RATIO, LAG_SHARE, LEAST_LAG_S = 1.3, 0.1, 0.002
"""A straggler takes so much longer than the others for its own part, costs such a part of the step, and more seconds
than what two processes on one machine take from each other by chance."""

STEADY = 0.75
"""Part of the windows in which the same rank is the slowest: one that had a bad minute is no straggler."""

THROTTLED_SHARE = 0.25
"""Part of the quota's periods: what Kubernetes' usual alert (CPUThrottlingHigh) calls too much."""

NO_STEP_S, FIRST_STEP_S, SLOW_STEPS = 60.0, 300.0, 10
"""Seconds without a step, or rows evaluated, that are told, as soon as they are as long as SLOW_STEPS steps too;
and until the first step, which waits for compilation and for Ray Data's first rows."""

OLD_CHECKPOINTS = 3
"""Intervals without a checkpoint after which it is too old: one save may wait for the one before."""

OLD_CHECKPOINT_S = 60.0
"""Besides: a save takes its time, and its news travel."""

LOW_GOODPUT = 0.8
"""Below it, incidents cost more than what a start takes."""

LONGEST_REASON = 600


@dataclass(frozen=True)
class Case:
    """What is known of a run that has begun."""

    view: RunView
    state: RunState
    reason: str
    "By cluster and storage together."
    failures: Sequence[Failure] = ()
    pods: Sequence[PodView] = ()
    now: float = 0.0
    "Seconds since the epoch."

    @property
    def newest(self) -> Attempt | None:
        return self.view.attempts[-1] if self.view.attempts else None

    def setting(self, name: str) -> str:
        """A setting of the newest attempt."""
        recorded = self.newest.metadata.get("settings", {}) if self.newest else {}
        return str(recorded.get(PREFIX + name.upper(), Settings.model_fields[name].default))

    def host(self, attempt: int, rank: int) -> str:
        """The machine, or the pod, of a rank; empty when unknown."""
        metadata = next((a.metadata for a in self.view.attempts if a.number == attempt), {})
        return str(metadata.get("nodes", {}).get(str(rank), ""))

    def place(self, attempt: int, rank: int) -> dict[str, Any]:
        """Where a rank is, for programs."""
        host = self.host(attempt, rank)
        return {"rank": rank, "host": host or None, "node": self._node(host)}

    def name(self, attempt: int, rank: int) -> str:
        """`rank 1 (run-1-x-worker-1 on node-3)`."""
        host = self.host(attempt, rank)
        node = self._node(host)
        return f"rank {rank}" + (f" ({host}{f' on {node}' if node else ''})" if host else "")

    def _node(self, host: str) -> str | None:
        return next((pod.node for pod in self.pods if pod.name == host), None)


def diagnose(case: Case) -> list[Finding]:
    """What explains the state of a run that has begun, in no order; empty when nothing seems to be the matter."""
    looks: tuple[Callable[[Case], Iterator[Finding]], ...] = (
        find_end,
        find_hung,
        find_stillness,
        find_slow,
        find_climb,
        find_storage,
        find_losses,
    )
    return [finding for look in looks for finding in look(case)]


# --------------------------------------------------------------------------------------------------------------- ended


def find_end(case: Case) -> Iterator[Finding]:
    """What ended the run, or an attempt of it: the first error, told once for all ranks that met it."""
    began = case.view.status.began if case.view.status else 0.0
    recent = [failure for failure in case.failures if failure.time >= began]
    ended = case.state in (RunState.FAILED, RunState.LOST, RunState.RETRYING)
    if recent:
        yield _first_failure(case, recent, Severity.ERROR if ended else Severity.WARNING)
    elif case.state is RunState.FAILED:
        advice = f"`sunspot logs {case.view.run.name}` and, of a worker, `--rank 0` have all that they printed"
        yield Finding(Diagnosis.FAILED, Severity.ERROR, _cut(case.reason), advice, cost=1.0)
    if case.state is RunState.LOST:
        advice = "submit it again, or repeat the same command: it goes on from the last checkpoint"
        yield Finding(Diagnosis.LOST, Severity.ERROR, _cut(case.reason), advice, cost=0.9)
    elif case.state is RunState.DELETING:
        advice = f"`sunspot delete {case.view.run.name}` goes on with that"
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, _cut(case.reason), advice)
    elif case.state is RunState.STOPPED:
        advice = f"`sunspot resume {case.view.run.name}` lets it go on"
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, _cut(case.reason), advice)


def _first_failure(case: Case, failures: list[Failure], severity: Severity) -> Finding:
    first = min(failures, key=lambda failure: (failure.consequence, failure.time))
    alike = [f for f in failures if (f.type, f.file, f.line) == (first.type, first.file, first.line)]
    others = Counter(f.type for f in failures if f not in alike)
    ranks = sorted({f.rank for f in alike if f.rank is not None})
    attempts = sorted({f.attempt for f in alike})
    who = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}" if ranks else "the driver"
    place = f" in {first.function} at {first.file}:{first.line}" if first.file else ""
    again = f", in {plural(len(attempts), 'attempt')}" if len(attempts) > 1 else ""
    more = f"; then {', '.join(f'{times} {kind}' for kind, times in others.items())}" if others else ""
    evidence = f"{first.type}: {_first_line(first.message)}{place}; {who}{again}, after step {first.step}{more}"
    advice = "mend what it names, and start the run again: it goes on from the last checkpoint"
    if "OutOfMemory" in first.type or "out of memory" in first.message:
        advice = "lower MICRO_BATCH_SIZE, which leaves the result as it is, or give the workers more memory"
    elif severity is not Severity.ERROR:
        advice = "its workers were started again; mend what it names, as MAX_FAILURES is counted down"
    about = {
        "type": first.type,
        "message": first.message,
        "file": first.file or None,
        "line": first.line or None,
        "function": first.function or None,
        "ranks": ranks,
        "attempts": attempts,
        "step": first.step,
    }
    return Finding(Diagnosis.FAILED, severity, evidence, advice, about, cost=1.0, traces=(first.traceback,))


# --------------------------------------------------------------------------------------------------------------- stuck


def find_hung(case: Case) -> Iterator[Finding]:
    """Ranks that took no step until their watchdogs ended them, in the newest attempt that had any."""
    hung = [event for event in case.view.events if event["event"] == HUNG]
    if not hung:
        return
    number = max(event["attempt"] for event in hung)
    its = sorted((event for event in hung if event["attempt"] == number), key=lambda event: event["rank"])
    world = next((a.metadata.get("world_size", 0) for a in case.view.attempts if a.number == number), 0)
    blamed = suspects(its, world)
    words = {event["rank"]: event["detail"].partition(": ")[2] for event in its}
    said = [
        f"{case.name(number, rank)}: {words.get(rank, 'left no word: stopped, or lost with its node')}"
        for rank in blamed or words
    ]
    waiting = [rank for rank in words if rank not in blamed]
    others = f"; rank{'s' * (len(waiting) != 1)} {', '.join(map(str, waiting))} waited for it" * bool(
        waiting and blamed
    )
    again = any(receipt.attempt > number for receipt in case.view.receipts)
    advice = "look at that call: a read without a time limit, a lock, or a collective that not all ranks enter"
    advice += "; its workers were started again" if again else ""
    about = {
        "attempt": number,
        "step": its[0]["step"],
        "ranks": blamed or list(words),
        "places": [case.place(number, rank) for rank in blamed or words],
        "calls": {str(rank): text for rank, text in words.items()},
    }
    traces = tuple(f"rank {event['rank']}: {event['detail']}\n{event['stacks']}" for event in its)
    severity = Severity.WARNING if again or case.state is RunState.SUCCEEDED else Severity.ERROR
    evidence = f"after step {its[0]['step']}, {'; '.join(said)}{others}"
    yield Finding(Diagnosis.HUNG, severity, evidence, advice, about, cost=0.9, traces=traces)


def find_stillness(case: Case) -> Iterator[Finding]:
    """A run that should train, and of which nothing is heard, or no step for long."""
    status, newest = case.view.status, case.newest
    if not status or case.state not in (RunState.RUNNING, RunState.STARTING):
        return
    silent_s = case.now - status.time
    if silent_s > SILENCE_S:
        evidence = f"no news for {in_words(silent_s)}, though it is {case.state}: {_cut(case.reason)}"
        advice = "its head may be lost, or storage out of its reach: kubectl get pods, and `sunspot logs`"
        yield Finding(Diagnosis.SILENT, Severity.ERROR, evidence, advice, {"silent_s": round(silent_s)}, cost=0.8)
        return
    if case.state is RunState.STARTING:
        waited_s = case.now - (status.began or status.time)
        advice = "wait: Ray places the workers, and these import and read"
        severity = Severity.NOTE
        if waited_s > FIRST_STEP_S:
            severity, advice = Severity.WARNING, "Ray finds no room for the workers: compare NUM_WORKERS with the pods"
        evidence = f"{case.reason}, for {in_words(waited_s)}"
        yield Finding(Diagnosis.STARTING, severity, evidence, advice, {"waited_s": round(waited_s)})
        return
    if newest is None or status.attempt != newest.number:
        return
    told = case.view.last["time"] if case.view.last.get("attempt") == newest.number else None  # by older versions
    heartbeat = status.heartbeat or told
    still_s = case.now - (heartbeat or newest.time)
    limit_s = max(NO_STEP_S, SLOW_STEPS * (status.step_time_s or 0.0)) if heartbeat else FIRST_STEP_S
    if still_s > limit_s:
        timeout_s = float(case.setting("hang_timeout_s"))
        usual = f"; a step took {status.step_time_s:.3g} s" if status.step_time_s else ""
        evidence = f"no step for {in_words(still_s)}, after step {status.step} or a little later{usual}"
        advice = "it may wait for storage; otherwise a rank hangs: "
        advice += (
            f"when none goes on for {timeout_s:.0f} s, all leave their stacks and are started again (HANG_TIMEOUT_S)"
            if timeout_s
            else "HANG_TIMEOUT_S is 0, so nothing ends that; stop the run, and set it"
        )
        about = {"still_s": round(still_s), "step": status.step, "hang_timeout_s": timeout_s}
        yield Finding(Diagnosis.NO_STEP, Severity.ERROR, evidence, advice, about, cost=0.8)


# ---------------------------------------------------------------------------------------------------------------- slow


def find_slow(case: Case) -> Iterator[Finding]:
    """What takes the time of the newest steps: a quota, one rank, or the rows."""
    pace = measure_pace(case.view.records)
    if not pace.windows:
        return
    yield from _throttled(case, pace)
    yield from _straggler(case, pace)
    if pace.data_share >= DATA_SHARE:
        rows = "LOADER=torch, where the rows fit into memory" if case.setting("loader") == "ray" else "LOADER=ray"
        evidence = (
            f"{pace.data_share:.0%} of the step time all ranks wait for rows: {_ms(statistics.median(pace.waits))} of "
            f"{_ms(pace.step_s)}"
        )
        advice = (
            "more CPUs that read (data_workers, or worker.cpu in the profile), images stored as pixels and not as PNG "
            f"or JPEG, or {rows}"
        )
        about = {"data_share": pace.data_share, "data_wait_s": statistics.median(pace.waits), "step_s": pace.step_s}
        yield Finding(Diagnosis.DATA_BOUND, Severity.WARNING, evidence, advice, about, cost=pace.data_share)


def _throttled(case: Case, pace: RankThroughput) -> Iterator[Finding]:
    for rank in range(len(pace.own)):
        seconds = sum(window["seconds"] for window in pace.windows)
        held_s = sum(window["ranks"][rank]["throttled_s"] for window in pace.windows)
        share = sum(w["ranks"][rank]["throttled_share"] * w["seconds"] for w in pace.windows) / (seconds or 1)
        if share < THROTTLED_SHARE:
            continue
        evidence = (
            f"{case.name(pace.attempt, rank)}: its processor quota was used up in {share:.0%} of the periods, and held "
            f"it back for {held_s:.1f} s in {seconds:.0f} s"
        )
        advice = (
            "take away the CPU limit (Sunspot's manifests set none: a LimitRange of the namespace may), or raise "
            "worker.cpu in the profile"
        )
        about = {**case.place(pace.attempt, rank), "throttled_share": share, "throttled_s": held_s}
        yield Finding(Diagnosis.THROTTLED, Severity.WARNING, evidence, advice, about, cost=share)


def _straggler(case: Case, pace: RankThroughput) -> Iterator[Finding]:
    if len(pace.own) < 2:
        return
    rank = max(range(len(pace.own)), key=lambda rank: pace.own[rank])
    lag, others = pace.lag(rank), pace.own[rank] - pace.lag(rank)
    slowest = [_slowest(window) == rank for window in pace.windows]
    if (
        lag < LEAST_LAG_S
        or lag < LAG_SHARE * pace.step_s
        or pace.own[rank] < LAG_RATIO * others
        or statistics.mean(slowest) < STEADY
    ):
        return
    others_wait = statistics.median(wait for other, wait in enumerate(pace.waits) if other != rank)
    reads = pace.waits[rank] - others_wait > lag / 2
    part, mine, theirs = "forward pass", pace.forwards[rank], others - others_wait
    if reads:
        part, mine, theirs = "rows", pace.waits[rank], others_wait
    evidence = (
        f"{case.name(pace.attempt, rank)}: {_ms(mine)} for its {part} in a step of {_ms(pace.step_s)}, the others "
        f"{_ms(theirs)}; the slowest in {sum(slowest)} of {len(slowest)} windows"
    )
    advice = (
        "its rows come late: see what reads on its node, and the network to storage"
        if reads
        else "see what else runs on that node, its clock and temperature, or replace it; equal pods on unequal nodes "
        "do this too"
    )
    about = {
        **case.place(pace.attempt, rank),
        "own_s": pace.own[rank],
        "others_s": others,
        "step_s": pace.step_s,
        "part": "data" if reads else "forward",
    }
    yield Finding(Diagnosis.STRAGGLER, Severity.WARNING, evidence, advice, about, cost=lag / pace.step_s)


def _slowest(window: Mapping[str, Any]) -> int:
    own = [rank["data_wait_s"] + rank["forward_s"] for rank in window["ranks"]]
    return own.index(max(own))


# -------------------------------------------------------------------------------------------------------------- memory


def find_climb(case: Case) -> Iterator[Finding]:
    """Ranks whose memory, or whose GPU's, grows on and on."""
    windows = rank_windows(case.view.records)[1:]
    if len(windows) < LEAST_WINDOWS:
        return
    attempt, times = windows[0]["attempt"], [window["time"] for window in windows]
    ranks = range(len(windows[0]["ranks"]))
    rates = {rank: climb(times, [window["ranks"][rank]["resident_mib"] for window in windows]) for rank in ranks}
    for rank, rate in rates.items():
        if not rate:
            continue
        # All ranks of a machine share what it has left.
        host = case.host(attempt, rank)
        together = sum(other for at, other in rates.items() if other and case.host(attempt, at) == host)
        left = windows[-1]["ranks"][rank]["memory_left_mib"]
        until_s = left / together if left is not None and together > 0 else None
        ends = until_s is not None and case.view.seconds_left is not None and until_s < case.view.seconds_left
        yield _climbing(case, windows, rank, "resident_mib", rate, until_s, 1.0 if ends else 0.0)
    for rank in ranks:
        if rate := climb(times, [window["ranks"][rank]["gpu_memory_mib"] for window in windows]):
            yield _climbing(case, windows, rank, "gpu_memory_mib", rate, None, 0.0)


def _climbing(
    case: Case, windows: list[dict[str, Any]], rank: int, name: str, rate: float, until_s: float | None, cost: float
) -> Finding:
    attempt, steps = windows[0]["attempt"], sum(window["steps"] for window in windows[1:])
    span_s = windows[-1]["time"] - windows[0]["time"]
    first, last = (windows[place]["ranks"][rank][name] for place in (0, -1))
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
    about = {
        **case.place(attempt, rank),
        "memory": name,
        "from_mib": first,
        "to_mib": last,
        "mib_per_s": rate,
        "limit_in_s": until_s,
    }
    return Finding(Diagnosis.MEMORY, Severity.WARNING, evidence, advice, about, cost=cost)


# ----------------------------------------------------------------------------------------------- storage and incidents


def find_storage(case: Case) -> Iterator[Finding]:
    """Checkpoints that fail, come late, are damaged, or take longer than a notice."""
    view, status, newest = case.view, case.view.status, case.newest
    if view.passed_over:
        evidence = "passed over " + "; ".join(view.passed_over)
        advice = (
            "the run goes on from the one before; look after the storage, and `sunspot checkpoints verify` finds more"
        )
        yield Finding(Diagnosis.DAMAGED, Severity.WARNING, evidence, advice, {"checkpoints": list(view.passed_over)})
    if not newest or not status or case.state is not RunState.RUNNING:
        return
    committed = view.checkpoint.time if view.checkpoint else 0.0
    failed = [
        e
        for e in view.events
        if e["event"] == "commit failed" and e["attempt"] == newest.number and e["time"] > committed
    ]
    if failed:
        since_s = case.now - failed[0]["time"]
        evidence = f"no checkpoint could be committed for {in_words(since_s)}, {plural(len(failed), 'failure')}: "
        evidence += str(failed[-1].get("detail", ""))
        patience_s = float(case.setting("storage_timeout_s"))
        advice = f"mend the storage within {patience_s:.0f} s (STORAGE_TIMEOUT_S), or the run ends"
        yield Finding(Diagnosis.STORAGE, Severity.WARNING, _cut(evidence), advice, {"tries": len(failed)}, cost=0.5)
    every_s = float(case.setting("checkpoint_every_s"))
    age_s = case.now - max(committed, newest.time)
    limit_s = OLD_CHECKPOINTS * max(every_s, status.save_s or 0.0) + OLD_CHECKPOINT_S
    if every_s and age_s > limit_s and not failed:
        evidence = f"no new checkpoint for {in_words(age_s)}, though one is due every {every_s:.0f} s"
        evidence += f" and took {status.save_s:.1f} s to save" if status.save_s else ""
        advice = "storage may be slow or away: `sunspot events`, and what the driver's log warns of"
        yield Finding(Diagnosis.OLD_CHECKPOINT, Severity.WARNING, evidence, advice, {"age_s": round(age_s)})
    if status.warning and status.save_s and status.notice_s:
        about = {"save_s": status.save_s, "notice_s": status.notice_s}
        advice = "faster storage, a smaller model or optimizer, or a longer notice (notice_s in the profile)"
        yield Finding(Diagnosis.LONG_SAVE, Severity.WARNING, status.warning, advice, about)


def find_losses(case: Case) -> Iterator[Finding]:
    """Incidents that cost the run much, by cause."""
    share = case.view.goodput
    if share is None or share >= LOW_GOODPUT or not case.view.incidents:
        return
    lost: Counter[str] = Counter()
    for receipt in case.view.incidents:
        lost[receipt.cause] += round(receipt.worker_seconds_lost)
    times = Counter(str(receipt.cause) for receipt in case.view.incidents)
    causes = ", ".join(f"{times[cause]} {cause} ({seconds} worker-seconds)" for cause, seconds in lost.most_common())
    evidence = f"{share:.0%} of the worker-seconds were of use; lost by {causes}"
    advice = f"`sunspot events {case.view.run.name}` has the receipt of each; "
    replayed = sum(receipt.replayed for receipt in case.view.incidents)
    advice += (
        f"{replayed} steps were taken again: more frequent checkpoints or a higher SNAPSHOT_COST make that fewer"
        if replayed
        else "more stable nodes, or fewer that are reclaimed at once, help"
    )
    about = {"goodput": share, "worker_seconds_lost": dict(lost), "steps_replayed": replayed}
    yield Finding(Diagnosis.LOW_GOODPUT, Severity.WARNING, evidence, advice, about, cost=1 - share)


# ------------------------------------------------------------------------------------------------------------- healthy


def figures(case: Case) -> tuple[str, dict[str, Any]]:
    """The figures that were looked at, as a sentence and for programs."""
    view, pace = case.view, measure_pace(case.view.records)
    words = [f"step {view.step}" + (f" of {view.total_steps}" if view.total_steps else "")]
    about: dict[str, Any] = {"step": view.step, "total_steps": view.total_steps or None}
    if pace.windows:
        words.append(f"{_ms(pace.step_s)} a step, {pace.data_share:.0%} of it waiting for rows")
        about |= {"step_s": pace.step_s, "data_share": pace.data_share}
        if len(pace.own) > 1:
            rank = pace.own.index(max(pace.own))
            words.append(f"the slowest rank {rank}, {_ms(pace.lag(rank))} behind the others")
            about |= {"slowest_rank": rank, "lag_s": pace.lag(rank)}
        resident = [rank.get("resident_mib") for rank in pace.windows[-1]["ranks"]]
        if all(size is not None for size in resident):
            words.append(f"{max(resident):.0f} MiB of memory at most")
            about["resident_mib"] = max(resident)
    else:
        words.append("no window of the metric history after the first, so nothing of its speed and memory")
    if view.checkpoint:
        words.append(f"a checkpoint of step {view.checkpoint.step}")
        about["checkpoint"] = view.checkpoint.name
    if view.goodput is not None:
        words.append(f"goodput {view.goodput:.0%}")
        about["goodput"] = view.goodput
    return ", ".join(words), about


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _first_line(text: str) -> str:
    return _cut(next((line.strip() for line in text.splitlines() if line.strip()), ""))


def _cut(text: str) -> str:
    """A reason may quote a page; its beginning and its end say most."""
    words = " ".join(text.split())
    half = LONGEST_REASON // 2
    return words if len(words) <= LONGEST_REASON else f"{words[:half]} ... {words[-half:]}"
