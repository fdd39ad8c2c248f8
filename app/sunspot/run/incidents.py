"""What interrupted a run and what it cost: a receipt for every start of a worker group.

A receipt is an event of the new attempt, written after its first step; its times are taken where things happen.
Receipts form a chain: `since` is the attempt of the receipt before, so an attempt lost before its first step is covered
by a later receipt.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from sunspot.formatting import money, plural
from sunspot.run.attempts import IN_PLACE, Attempt
from sunspot.run.objects import Count, Measure, Moment, Workers, as_event

RECOVERED, STARTED = "recovered", "started"
"""The `event` of a receipt in the journal, and the one that is shown for a start which followed no disturbance."""


class Cause(enum.StrEnum):
    """Why a worker group started."""

    BEGIN = "begin"
    "The run's first one."
    PREEMPTED = "preempted"
    "A node was taken away, with notice."
    SCALE_UP = "scale_up"
    "More nodes came."
    JOINED = "joined"
    "A worker took its place beside those that had trained on."
    MOVED = "moved"
    "Nodes of a better choice came."
    NODE_LOST = "node lost"
    WORKER_LOST = "worker lost"
    "A worker's process ended, but not its node."
    WORKER_FAILED = "worker failed"
    "A worker ended with an error of its own."
    OUT_OF_MEMORY = "out of memory"
    "A worker was ended because its node, its container or its GPU had too little memory."
    HUNG = "hung rank"
    NO_ROWS = "no rows"
    "Ranks that waited for rows of Ray Data until they were ended like hung ones."
    DRIVER_LOST = "driver lost"
    "The driver before ended without a status: its head or its node was lost."
    TAKEN_OVER = "taken over"
    "Another start of the run trained, and this one took it over."
    RESUMED = "resumed"
    "The driver before had ended for good."

    @property
    def incident(self) -> bool:
        """Whether it is a disturbance; starting, resuming and taking over are deliberate."""
        return self not in (Cause.BEGIN, Cause.RESUMED, Cause.TAKEN_OVER)


NOTICED = (Cause.PREEMPTED, Cause.SCALE_UP, Cause.JOINED, Cause.MOVED)
"""Causes that are known before the group ends."""


@dataclass(frozen=True)
class Receipt:
    """What one start of a worker group cost. Times are in seconds since the epoch; None: not observed."""

    attempt: Count
    "The new attempt."
    since: Count
    "The attempt of the receipt before; 0: none. Attempts in between took no step."
    cause: Cause
    detail: str
    "Details for people."
    noticed: Moment | None
    "When the notice arrived or the loss was detected."
    save_began: Moment | None
    committed: Moment | None
    restarted: Moment
    "When the attempt was claimed."
    first_step: Moment
    "When its first optimizer step was done."
    left: Moment
    "When `step` had been taken: from here to `first_step`, no work counts."
    step: Count
    "The step it continues from."
    last_step: Count
    "The last step the group before is known to have taken."
    tier: str
    "Where the state came from: memory, storage, or beginning."
    world_before: Workers
    world_after: Workers
    launched: Moment | None = None
    "When Ray launched rank 0's process, the old group being gone."
    up: Moment | None = None
    "When all processes answered."
    formed: Moment | None = None
    "When they had formed their process group."
    loaded: Moment | None = None
    "When rank 0 had the state, and all else that a step needs."
    paused_s: Measure = 0.0
    "Seconds in between in which the run had ended and used no nodes."
    worker_seconds_lost: Measure = 0.0
    cost: Measure | None = None
    "What the nodes cost meanwhile; None: no price is known."

    @property
    def replayed(self) -> int:
        """Optimizer steps taken again."""
        return max(0, self.last_step - self.step)

    @property
    def beginning(self) -> tuple[float, str]:
        """When the recovery begins, and what that is: the notice or the loss.

        Or the last step that counts, where neither was observed, and where others train on from that step.
        """
        if self.noticed is None or self.tier == IN_PLACE:
            return self.left, "the last step that counts"
        return self.noticed, "the notice" if self.cause in NOTICED else "the loss"

    @property
    def recovery_s(self) -> float:
        """Seconds from `beginning` to the first step after it."""
        return self.first_step - self.beginning[0]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds from `beginning` to the end of each phase that was observed, in their order.

        A driver may begin while the group of a lost one still trains: what it did before that group's last step that
        counts is no part of the recovery.
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
        """Return it as an event of the run."""
        return {**asdict(self), "event": RECOVERED, "time": self.first_step}


def read_receipts(events: Iterable[dict[str, Any]]) -> list[Receipt]:
    """Return the receipts among a run's events (`history.read_journal`), by attempt; malformed ones are skipped."""
    named = [event for event in events if event.get("event") in (RECOVERED, STARTED)]
    found = [receipt for event in named if (receipt := as_event(Receipt, event))]
    return sorted(found, key=lambda receipt: receipt.attempt)


def display_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as it is shown: a receipt is a recovery only if a disturbance preceded its start."""
    deliberate = event.get("cause") in [cause for cause in Cause if not cause.incident]
    return {**event, "event": STARTED} if event.get("event") == RECOVERED and deliberate else event


def describe_receipt(receipt: Receipt) -> str:
    """Return a line for people."""
    if not receipt.cause.incident:
        passed, since = receipt.first_step - receipt.restarted, "the start"
    else:
        passed, since = receipt.recovery_s, receipt.beginning[1]
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
    """Return worker-seconds between two times; an attempt has its workers from its claim to the next one's."""
    total = 0.0
    claims = list(accumulate((attempt.time for attempt in attempts), max))  # clocks may disagree
    for attempt, claimed, until in zip(attempts, claims, [*claims, end][1:], strict=True):
        total += max(0.0, min(end, until) - max(begin, claimed)) * attempt.metadata.world_size
    return total


def goodput(attempts: list[Attempt], receipts: list[Receipt], end: float) -> float | None:
    """Return useful over all worker-seconds, from the first receipt's start to `end`; None without receipts.

    Time covered by several receipts is lost once. A group without a step so far has done nothing useful; the steps its
    start has cost as well are known after its first one.
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
    """Yield the same spans of time, without overlap."""
    reached = float("-inf")
    for first, last in sorted(spans):
        if last > reached:
            yield max(first, reached), last
            reached = last


def find_gaps(receipts: list[Receipt], stepped: Iterable[int]) -> list[str]:
    """Return a line per missing receipt; `stepped` are attempts known to have taken a step."""
    wanted = {*stepped, *(receipt.since for receipt in receipts)} - {0}
    missing = wanted - {receipt.attempt for receipt in receipts}
    return [f"no receipt of attempt {number}, which took steps" for number in sorted(missing)]
