"""Merges what several observers report about the end of a worker group into one incident.

The workers, the membership server, Ray's controller and the driver's supervisor each see a part of an incident. Their
reports arrive in any order, through control.ControlChannel. The strongest cause wins (`merge`). Among equally strong
causes, the earliest wins, except that a new hang replaces an earlier hang. Any other fact keeps the value that was
reported first. If a stronger cause replaces a PLANNED one, however, the facts reported with the stronger cause take
precedence.
"""

import time
from collections.abc import Iterable
from dataclasses import fields, replace

from sunspot.elastic.messages import Incident, Note
from sunspot.run.incidents import Cause

PLANNED = (Cause.JOINED, Cause.SCALE_UP, Cause.SCALE_DOWN, Cause.SICK_NODE, Cause.MOVED)
"""Causes that end a group on purpose. If a worker is lost first, the loss becomes the cause."""

HANGS = (Cause.HUNG, Cause.NO_ROWS)
"""Causes whose newest description covers all ranks that have hung so far."""

EXPLAINED = 3
"""Strength of a cause that explains a worker group's end, such as PREEMPTED or OUT_OF_MEMORY."""

STRENGTH: dict[Cause | None, int] = {
    None: 0,
    **dict.fromkeys(PLANNED, 1),
    Cause.WORKER_LOST: 2,  # does not say why
    Cause.DRIVER_LOST: 4,
    **dict.fromkeys((Cause.BEGIN, Cause.RESUMED, Cause.TAKEN_OVER), 5),  # outweigh everything else at a driver's start
}
"""Strength of each cause that is not EXPLAINED."""


def strength(cause: Cause | None) -> int:
    """Return a cause's strength. A stronger cause replaces a weaker one."""
    return STRENGTH.get(cause, EXPLAINED)


def merge(known: Incident, new: Incident) -> Incident:
    """Merge two reports of one incident. `known` was reported first."""
    stronger = strength(new.cause) > strength(known.cause)
    newer_hang = known.cause in HANGS and new.cause in HANGS
    first, second = (new, known) if stronger and known.cause in PLANNED else (known, new)
    unknown = [one.name for one in fields(Incident) if not getattr(first, one.name)]
    merged = replace(first, **{name: getattr(second, name) for name in unknown})
    merged = replace(merged, notes=(*known.notes, *new.notes))
    return replace(merged, cause=new.cause, detail=new.detail) if stronger or newer_hang else merged


class Incidents:
    """The incident that ends the current worker group, and the incident that caused the group to start."""

    def __init__(self) -> None:
        self._ending = Incident()
        self._began = Incident()
        "The incident that started the current group, or an empty incident once the group has taken a step."
        self._notes: list[Note] = []
        "Notes for the run's events since the newest group began."

    def observe(self, facts: Incident) -> None:
        """Merge `facts` into what is known about why the current group is ending."""
        self._ending = merge(self._ending, facts)

    def explain_loss(self, detail: str) -> None:
        """Record that a lost worker had run out of memory. Ray reports this some time after the loss.

        If the next group has already taken a step by then, only the run's events contain this explanation.
        """
        self.note(Cause.OUT_OF_MEMORY, [detail])
        explanation = Incident(Cause.OUT_OF_MEMORY, detail)
        self._ending, self._began = (
            merge(loss, explanation) if loss.cause is Cause.WORKER_LOST else loss
            for loss in (self._ending, self._began)
        )

    def note(self, event: str, details: Iterable[str]) -> None:
        """Add a note for each of the `details`, to be recorded in the run's events."""
        self._notes += [Note(event, detail, time.time()) for detail in details]

    def begin_group(self) -> Incident:
        """Return why a new group begins.

        If the previous group took no step, the result is merged with the incident that started that group.
        """
        began = merge(self._began, self._ending)
        began = replace(began, notes=(*began.notes, *self._notes))
        self._began, self._ending = replace(began, notes=()), Incident()
        self._notes = []
        return began

    def take_step(self) -> Incident:
        """Return the incident that started the current group, and clear it.

        Call this after the group's first step.
        """
        began, self._began = self._began, Incident()
        return began

    def current(self) -> Incident:
        """Return what is known so far about why the current group is ending."""
        return replace(self._ending, notes=(*self._ending.notes, *self._notes))
