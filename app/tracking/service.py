"""What a delivery needs of a tracking service."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from app.errors import TrackingError
from app.run.status import RunState


class RefusedError(TrackingError):
    """The service has looked at what was sent, and does not take it: it would not the next time either."""


class About(NamedTuple):
    """The run that is shown."""

    identity: str
    "Another one for every run, also for one that takes the place of a deleted one."
    name: str
    location: str


class Point(NamedTuple):
    """The numbers of one record of the metric history."""

    step: int
    time: float
    "Seconds since the epoch."
    values: Mapping[str, float]


class Service(Protocol):
    """One run in a tracking service. What fails raises `TrackingError` and may be done again, or `RefusedError`.

    Calls end within seconds, whatever the server does; but `attach` and `close` take as long as bytes travel.
    """

    acknowledges: bool
    "Whether what was sent has arrived when `send` returns; or else, when `close` does."

    def find_or_create(self) -> str:
        """The id of this run's tracking run, which is made if there is none."""

    def discard(self, tracking_run: str) -> None:
        """Remove a tracking run that was just created: another process was first."""

    def open(self, tracking_run: str) -> str:
        """Go on with a tracking run; returns where people find it."""

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Say what the run is trained with, and what else is to know of it; what was said before is replaced."""

    def send(self, points: Sequence[Point]) -> None:
        """Deliver numbers; sent twice, they count once wherever the service can tell."""

    def attach(self, file: Path, folder: str) -> None:
        """Deliver a file into a folder ('': none), in place of the one that is there. It stays until `close`."""

    def close(self, state: RunState | None) -> None:
        """Say how the run ended; None: this delivery ends, and the run has not."""


def open_service(name: str, project: str, about: About) -> Service:
    """The service `name`, a module beside this one; only now is its library imported."""
    service: Any = importlib.import_module(f"app.tracking.{name}")
    opened: Service = service.open_service(project, about)
    return opened
