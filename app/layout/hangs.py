"""Ranks that hung, as their watchdogs (app/hang.py) left it in the run's events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HUNG = "hung"
"""The `event` of a rank that took no step any more: `rank`, `detail`, `waiting` (for the other ranks), `stacks`."""


def suspects(events: Iterable[dict[str, Any]], world_size: int) -> list[int]:
    """The ranks of one attempt that probably held up the others; empty when its events point at none.

    One that hangs makes all others wait for it in a collective. So it is whoever was not waiting, and who left no word:
    a process that is stopped, or is lost with its node.
    """
    waiting = {event["rank"]: event["waiting"] for event in events if event["event"] == HUNG}
    return [rank for rank in range(world_size) if not waiting.get(rank)] if waiting else []
