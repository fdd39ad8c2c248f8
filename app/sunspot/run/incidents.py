"""Incidents and their cost: a receipt for every start of a worker group.

A receipt is an event of the new attempt, written after its first step. Its times are recorded where things happen.
Receipts form a chain, because `since` names the attempt of the receipt before. So an attempt that was lost before its
first step is covered by a later receipt.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from sunspot.formatting import money, plural
from sunspot.run.attempts import IN_PLACE, Attempt
from sunspot.run.objects import Count, FiniteFloat, SmallCount, Timestamp, as_event

RECOVERED, STARTED = "recovered", "started"
"""Name of the event of a receipt in the journal, and the name shown if the start did not follow an incident."""


class Cause(enum.StrEnum):
    """The cause of a worker group's start."""

    BEGIN = "begin"
    "The run's first start."
    PREEMPTED = "preempted"
    "A node was reclaimed, with notice."
    SCALE_UP = "scale_up"
    "More nodes became available."
    JOINED = "joined"
    "A replacement joined the workers that had kept training."
    MOVED = "moved"
    "Nodes of a preferred group became available."
    NODE_LOST = "node lost"
    WORKER_LOST = "worker lost"
    "A worker's process ended, but its node did not."
    WORKER_FAILED = "worker failed"
    "A worker ended with an error of its own."
    OUT_OF_MEMORY = "out of memory"
    "A worker was killed because its node, its container or its GPU had too little memory."
    HUNG = "hung rank"
    NO_ROWS = "no rows"
    "Ranks waited for rows of Ray Data until they were ended like hung ranks."
    DRIVER_LOST = "driver lost"
    "The driver before ended without writing a status, because its head or its node was lost."
    TAKEN_OVER = "taken over"
    "Another start trained the run, and this start took the run over."
    RESUMED = "resumed"
    "The driver before had ended for good."

    @property
    def incident(self) -> bool:
        """Return True if the cause is an incident, unlike a start, a resume or a take-over, which are deliberate."""
        return self not in (Cause.BEGIN, Cause.RESUMED, Cause.TAKEN_OVER)


NOTICED = (Cause.PREEMPTED, Cause.SCALE_UP, Cause.JOINED, Cause.MOVED)
"""Causes that are known before the worker group ends."""


@dataclass(frozen=True)
class Receipt:
    """The cost of one start of a worker group. Times are in seconds since the epoch, and None if not observed."""

    attempt: Count
    "Number of the new attempt."
    since: Count
    "Attempt of the receipt before, or 0 if this is the first. Attempts in between took no step."
    cause: Cause
    detail: str
    "Details as readable text."
    noticed: Timestamp | None
    "Time at which the notice arrived or the loss was detected."
    save_began: Timestamp | None
    committed: Timestamp | None
    restarted: Timestamp
    "Time at which the attempt was claimed."
    first_step: Timestamp
    "Time at which its first optimizer step was done."
    left: Timestamp
    "Time at which `step` had been taken. No work between this time and `first_step` counts."
    step: Count
    "Step from which the attempt continues."
    last_step: Count
    "Last step that the group before is known to have taken."
    tier: str
    "Source of the state: in place, memory, storage, or beginning."
    world_before: SmallCount
    world_after: SmallCount
    launched: Timestamp | None = None
    "Time at which Ray launched the process of rank 0, after the old group had gone."
    up: Timestamp | None = None
    "Time at which all processes had answered."
    formed: Timestamp | None = None
    "Time at which the processes had formed their process group."
    loaded: Timestamp | None = None
    "Time at which rank 0 had the state and everything else that a step needs."
    paused_s: FiniteFloat = 0.0
    "Seconds during which the run had ended and used no nodes."
    worker_seconds_lost: FiniteFloat = 0.0
    cost: FiniteFloat | None = None
    "Cost of the nodes from the loss to the first step, or None if no price is known."

    @property
    def replayed(self) -> int:
        """Number of optimizer steps that were taken again."""
        return max(0, self.last_step - self.step)

    @property
    def beginning(self) -> tuple[float, str]:
        """The time at which the recovery begins, and the name of that point: the notice or the loss.

        It is the last step that counts if neither was observed, or if the other workers kept training from that step.
        """
        if self.noticed is None or self.tier == IN_PLACE:
            return self.left, "the last step that counts"
        return self.noticed, "the notice" if self.cause in NOTICED else "the loss"

    @property
    def recovery_s(self) -> float:
        """Seconds from `beginning` to the first step after the recovery."""
        return self.first_step - self.beginning[0]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds from `beginning` to the end of each observed phase, in order.

        A driver may begin while the group of a lost driver still trains. A phase that ended before that group took its
        last step that counts is not part of the recovery.
        """
        ends = {
            "old group gone": self.launched,
            "processes up": self.up,
            "group formed": self.formed,
            "state there": self.loaded,
            "first step": self.first_step,
        }
        began, _ = self.beginning
        return {name: end - began for name, end in ends.items() if end is not None and end >= began}

    def record(self) -> dict[str, Any]:
        """Return the receipt as an event of the run."""
        return {**asdict(self), "event": RECOVERED, "time": self.first_step}


def read_receipts(events: Iterable[dict[str, Any]]) -> list[Receipt]:
    """Return the receipts among a run's events, sorted by attempt. Malformed receipts are skipped."""
    named = [event for event in events if event.get("event") in (RECOVERED, STARTED)]
    found = [receipt for event in named if (receipt := as_event(Receipt, event))]
    return sorted(found, key=lambda receipt: receipt.attempt)


def display_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as it is displayed. A receipt is called a recovery only if an incident preceded the start."""
    deliberate = event.get("cause") in [cause for cause in Cause if not cause.incident]
    return {**event, "event": STARTED} if event.get("event") == RECOVERED and deliberate else event


def describe_receipt(receipt: Receipt) -> str:
    """Return a receipt as one line of readable text."""
    if receipt.cause.incident:
        passed, since = receipt.recovery_s, receipt.beginning[1]
    else:
        passed, since = receipt.first_step - receipt.restarted, "the start"
    detail = f" ({receipt.detail})" if receipt.detail else ""
    workers = plural(receipt.world_after, "worker")
    if receipt.world_before not in (0, receipt.world_after):
        workers = f"{receipt.world_before} -> {workers}"
    phases = [f"{name} {at:.1f} s" for name, at in receipt.phases.items()][:-1] if receipt.cause.incident else []
    passed_by = f" ({', '.join(phases)})" if phases else ""
    origin = {"beginning": "from the beginning", IN_PLACE: "in place"}.get(receipt.tier, f"from {receipt.tier}")
    cost = "" if receipt.cost is None else f" ({money(receipt.cost)})"
    return (
        f"{receipt.cause}{detail}: first step {passed:.1f} s after {since}{passed_by}, "
        f"{plural(receipt.replayed, 'step')} replayed, {workers}, {receipt.worker_seconds_lost:.0f} worker-seconds "
        f"lost{cost}, {origin}"
    )


def worker_seconds(attempts: list[Attempt], begin: float, end: float) -> float:
    """Return the worker-seconds between two times. An attempt has its workers from its claim until the next claim."""
    total = 0.0
    claims = list(accumulate((attempt.time for attempt in attempts), max))  # clocks may disagree
    for attempt, claimed, until in zip(attempts, claims, [*claims, end][1:], strict=True):
        total += max(0.0, min(end, until) - max(begin, claimed)) * attempt.metadata.world_size
    return total


def goodput(attempts: list[Attempt], receipts: list[Receipt], end: float) -> float | None:
    """Return the fraction of useful worker-seconds from the first receipt's start to `end`, or None without receipts.

    Time covered by several receipts is lost only once. A group that has not taken a step yet has done nothing useful.
    The steps that its start cost are known only after its first step.
    """
    if not receipts:
        return None
    losses = [(receipt.left, receipt.first_step) for receipt in receipts]
    waiting = [attempt.time for attempt in attempts if attempt.number > receipts[-1].attempt]
    if waiting:
        losses.append((waiting[0], end))
    begin = min(first for first, _ in losses)
    paused = sum(receipt.paused_s * receipt.world_before for receipt in receipts)
    total = worker_seconds(attempts, begin, end) - paused
    lost = sum(worker_seconds(attempts, first, min(last, end)) for first, last in without_overlap(losses)) - paused
    return max(0.0, 1 - max(0.0, lost) / total) if total > 0 else None


def without_overlap(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the same spans of time without their overlaps, sorted."""
    reached = float("-inf")
    for first, last in sorted(spans):
        if last > reached:
            yield max(first, reached), last
            reached = last


def find_gaps(receipts: list[Receipt], stepped: Iterable[int]) -> list[str]:
    """Return a line for each missing receipt. `stepped` are the attempts that are known to have taken a step."""
    wanted = {*stepped, *(receipt.since for receipt in receipts)} - {0}
    missing = wanted - {receipt.attempt for receipt in receipts}
    return [f"no receipt of attempt {number}, which took steps" for number in sorted(missing)]
