"""Incidents and their cost, recorded in a receipt for each start of a worker group.

A receipt is an event that the new attempt writes after its first step. Each receipt's `since` field is the
attempt of the previous receipt, so the receipts form a chain. An attempt that is lost before its first step is covered
by a later receipt.
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
"""The name of a receipt's event in the journal, and the name displayed if no incident preceded the start."""


class Cause(enum.StrEnum):
    """The reason why a worker group started."""

    BEGIN = "begin"
    "The run's first start."
    PREEMPTED = "preempted"
    "A node was reclaimed with notice."
    SCALE_UP = "scale_up"
    "More nodes became available."
    SCALE_DOWN = "scale_down"
    "Workers were given back, as a user asked."
    SICK_NODE = "sick node"
    "A node was excluded because it slowed down the other nodes."
    JOINED = "joined"
    "A replacement joined the workers that had kept training."
    MOVED = "moved"
    "Nodes of a preferred group became available."
    NODE_LOST = "node lost"
    WORKER_LOST = "worker lost"
    "A worker's process ended, but its node is still there."
    WORKER_FAILED = "worker failed"
    "A worker ended with an error that was not caused by the loss of another worker."
    OUT_OF_MEMORY = "out of memory"
    "A worker was killed because its node, its container or its GPU had too little memory."
    HUNG = "hung rank"
    NO_ROWS = "no rows"
    "Ranks waited for rows from Ray Data until they were ended as hung ranks."
    DRIVER_LOST = "driver lost"
    "The previous driver ended without writing a status, because its head or node was lost."
    TAKEN_OVER = "taken over"
    "The previous driver was still alive and belonged to a different job."
    RESUMED = "resumed"
    "The previous driver had ended for good."

    @property
    def incident(self) -> bool:
        """True for an incident, and False for a deliberate start (the first start, a resume or a take-over)."""
        return self not in (Cause.BEGIN, Cause.RESUMED, Cause.TAKEN_OVER)


NOTICED = (Cause.PREEMPTED, Cause.SCALE_UP, Cause.SCALE_DOWN, Cause.SICK_NODE, Cause.JOINED, Cause.MOVED)
"""Causes that are known before the previous worker group ends."""


@dataclass(frozen=True)
class Receipt:
    """The cost of a worker group's start. Times are in seconds since the epoch, or None if they are unknown."""

    attempt: Count
    "The number of the new attempt."
    since: Count
    "The attempt of the previous receipt, or 0 for the first receipt. Any attempts in between took no steps."
    cause: Cause
    detail: str
    "More about the cause, as readable text."
    noticed: Timestamp | None
    "The time at which the notice arrived or the loss was detected."
    save_began: Timestamp | None
    committed: Timestamp | None
    restarted: Timestamp
    "The time at which the attempt was claimed."
    first_step: Timestamp
    "The time at which the attempt completed its first optimizer step."
    left: Timestamp
    "The time at which `step` was completed. Work between this time and `first_step` is lost."
    step: Count
    "The step from which the attempt continues."
    last_step: Count
    "The last step that the previous group is known to have taken."
    tier: str
    "The source of the state: in place, memory, storage or beginning."
    world_before: SmallCount
    world_after: SmallCount
    launched: Timestamp | None = None
    "The time at which Ray launched rank 0's process, after the old group was gone."
    up: Timestamp | None = None
    "The time by which all processes had answered."
    formed: Timestamp | None = None
    "The time by which the process group was formed."
    loaded: Timestamp | None = None
    "The time by which rank 0 had loaded the state and was ready for a step."
    paused_s: FiniteFloat = 0.0
    "Seconds during which the run had ended and used no nodes."
    worker_seconds_lost: FiniteFloat = 0.0
    at_least: bool = False
    "True if the previous group may have taken more steps than `last_step`, because it left no exact record."
    cost: FiniteFloat | None = None
    "The cost of the nodes from the loss to the first step, or None if no price is known."

    @property
    def replayed(self) -> int:
        """The number of optimizer steps that were repeated. The number is a lower bound if `at_least` is True."""
        return max(0, self.last_step - self.step)

    @property
    def beginning(self) -> tuple[float, str]:
        """The time at which the recovery began, and the name of the event that marks it.

        The event is the notice of a loss, or the loss itself. If neither was observed, or if the
        surviving workers kept training, the event is the completion of the step from which the attempt continues.
        """
        if self.noticed is None or self.tier == IN_PLACE:
            return self.left, "the last step that counts"
        return self.noticed, "the notice" if self.cause in NOTICED else "the loss"

    @property
    def recovery_s(self) -> float:
        """Seconds from `beginning` to the end of the first step."""
        return self.first_step - self.beginning[0]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds from `beginning` to the end of each observed phase, in order.

        Phases that ended before `beginning` are omitted. This can happen if a new driver started while the workers of
        a lost driver were still training.
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
        """Return the receipt as one of the run's events."""
        return {**asdict(self), "event": RECOVERED, "time": self.first_step}


def read_receipts(events: Iterable[dict[str, Any]]) -> list[Receipt]:
    """Return the receipts among a run's events, sorted by attempt. Malformed receipts are skipped."""
    named = [event for event in events if event.get("event") in (RECOVERED, STARTED)]
    found = [receipt for event in named if (receipt := as_event(Receipt, event))]
    return sorted(found, key=lambda receipt: receipt.attempt)


def display_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event for display. A recovery event that no incident caused is displayed as a plain start."""
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
    replayed = describe_replayed(receipt.replayed, receipt.at_least)
    return (
        f"{receipt.cause}{detail}: first step {passed:.1f} s after {since}{passed_by}, "
        f"{replayed} replayed, {workers}, {receipt.worker_seconds_lost:.0f} worker-seconds lost{cost}, {origin}"
    )


def describe_replayed(steps: int, at_least: bool) -> str:
    """Return the number of repeated steps as text. If `at_least` is True, more steps may have been repeated."""
    if not at_least:
        return plural(steps, "step")
    return f"at least {plural(steps, 'step')}" if steps else "an unknown number of steps"


def worker_seconds(attempts: list[Attempt], begin: float, end: float) -> float:
    """Return the worker-seconds between two times, counting each attempt's workers from its claim to the next claim."""
    total = 0.0
    claims = list(accumulate((attempt.time for attempt in attempts), max))  # clocks can disagree
    for attempt, claimed, until in zip(attempts, claims, [*claims, end][1:], strict=True):
        total += max(0.0, min(end, until) - max(begin, claimed)) * attempt.metadata.world_size
    return total


def goodput(attempts: list[Attempt], receipts: list[Receipt], end: float) -> float | None:
    """Return the useful fraction of all worker-seconds until `end`, or None if there are no receipts.

    Lost time that several receipts cover is counted once. The time of a group that has not taken a step is lost, too.
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
    """Yield the spans in order, with overlaps removed."""
    reached = float("-inf")
    for first, last in sorted(spans):
        if last > reached:
            yield max(first, reached), last
            reached = last


def find_gaps(receipts: list[Receipt], stepped: Iterable[int]) -> list[str]:
    """Return a line for each missing receipt. `stepped` contains the attempts known to have taken a step."""
    wanted = {*stepped, *(receipt.since for receipt in receipts)} - {0}
    missing = wanted - {receipt.attempt for receipt in receipts}
    return [f"attempt {number} took steps, but has no receipt" for number in sorted(missing)]
