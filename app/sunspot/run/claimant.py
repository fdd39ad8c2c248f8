"""Who trains a run: the owner that claims it, by one start of its driver."""

from dataclasses import dataclass, field
from threading import Event

from sunspot.run import Run


@dataclass(frozen=True)
class Claimant:
    """A start of a driver that trains a run, or wants to."""

    run: Run
    owner: str
    "The job or process that trains; the same for all of its starts."
    driver: str = ""
    "Identifies this start (`status.new_driver`); empty: a process that is none's driver."
    given_up: Event = field(default_factory=Event)
    "Set once the worker group that claims for it is no more: a thread of it that waited for storage claims nothing."
