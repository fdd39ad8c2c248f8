"""Ranks that hung, as their watchdogs recorded them in the run's events, and which of them blocked the others."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sunspot.run.objects import Count, Moment, Workers, as_event

HUNG = "hung"
"""The `event` of a rank that stopped taking steps."""

BRING_ROWS = (
    "Ray Data brought no rows: the pods that read them are gone or busy, or its object store is full (see `kubectl get "
    "pods` and the dashboard); what helps is CPUs that are not reclaimed (data_workers in the profile), or a longer "
    "HANG_TIMEOUT_S"
)
"""Why ranks got no rows, and what helps."""


NO_STACKS = "left no stacks: it was stopped, or lost with its node"
"""What is known of a rank that the others waited for and whose watchdog reported nothing."""


@dataclass(frozen=True)
class Hang:
    """A rank that stopped taking steps, and ended itself."""

    rank: Workers
    detail: str
    "Where it stood, for people."
    waiting: bool
    "It waited for other ranks."
    loading: bool = False
    "It waited for rows of Ray Data."
    starting: bool = False
    "Its group had not claimed an attempt yet: it is recorded with the attempt before."
    world_size: Workers = 0
    attempt: Count = 0
    step: Count = 0
    time: Moment = 0.0
    stacks: str = ""

    def record(self) -> dict[str, Any]:
        """As an event of the run."""
        return {**asdict(self), "event": HUNG}


def read_hangs(events: Iterable[dict[str, Any]]) -> list[Hang]:
    """Return the hung ranks among a run's events; malformed ones are skipped."""
    return [hang for event in events if event["event"] == HUNG and (hang := as_event(Hang, event))]


def suspects(hangs: Iterable[Hang], world_size: int) -> list[int]:
    """Return the ranks of one attempt that probably blocked the others; empty when its hangs point at none.

    A hung rank makes all others wait in a collective: it is one that was not waiting, or that left no stacks, as its
    process is stopped or its node is lost.
    """
    waiting = {hang.rank: hang.waiting for hang in hangs}
    return [rank for rank in range(world_size) if not waiting.get(rank)] if waiting else []


def starved(hangs: Sequence[Hang], world_size: int) -> bool:
    """Return whether the ranks that blocked the others waited for rows of Ray Data, and so did not hang."""
    loading = {hang.rank for hang in hangs if hang.loading}
    blamed = suspects(hangs, world_size)
    return bool(blamed) and loading.issuperset(blamed)


def blame(hangs: Sequence[Hang], world_size: int) -> str:
    """Return which ranks of one attempt blocked the others, and where; all ranks, when none can be singled out."""
    ordered = sorted(hangs, key=lambda hang: hang.rank)
    blamed = suspects(ordered, world_size)
    details = [hang.detail for hang in ordered if hang.rank in blamed or not blamed]
    silent = [f"rank {rank}: {NO_STACKS}" for rank in blamed if rank not in {hang.rank for hang in ordered}]
    return "; ".join([*details, *silent])
