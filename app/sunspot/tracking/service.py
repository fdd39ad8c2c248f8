"""What a delivery needs of a tracking service, and the choice of one."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from sunspot.errors import TrackingError, shorten
from sunspot.run.status import RunState

SERVICES = {"mlflow": "MlflowService", "wandb": "WandbService", "tensorboard": "TensorBoardFiles"}
"""By name, the class of the module of that name beside this one."""


class RefusedError(TrackingError):
    """The service rejects what was sent, and would again: no retry helps."""


class RunIdentity(NamedTuple):
    """The run that is delivered."""

    id: str
    "Unique: a run that replaces a deleted one has another."
    name: str
    location: str


class Point(NamedTuple):
    """The numbers of one record of the metric history."""

    step: int
    time: float
    "Seconds since the epoch."
    values: Mapping[str, float]


class Service(Protocol):
    """One run in a tracking service. Methods raise `TrackingError`, after which they may be retried, or `RefusedError`.

    They return within seconds, whatever the server does, except `attach` and `close`, which wait for uploads.
    """

    acknowledges: bool
    "Whether data has arrived when `send` returns, or only when `close` does."

    def find_or_create(self) -> str:
        """Return the id of this run's tracking run, created if there is none."""

    def discard(self, tracking_run: str) -> None:
        """Remove a tracking run that was just created: another process was first."""

    def open(self, tracking_run: str) -> str:
        """Continue a tracking run; returns where people find it."""

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set the run's parameters and tags; later values replace earlier ones."""

    def send(self, points: Sequence[Point]) -> None:
        """Deliver metrics; sent twice, they count once wherever the service can tell."""

    def attach(self, file: Path, folder: str) -> None:
        """Deliver a file into a folder ('': none), replacing one of that name. The file must stay until `close`."""

    def close(self, state: RunState | None) -> None:
        """Record how the run ended; None: only this delivery ends."""


def open_service(name: str, project: str, identity: RunIdentity) -> Service:
    """Return the service `name`; imports its library only now. `project` is MLflow's experiment, say."""
    return getattr(importlib.import_module(f"sunspot.tracking.{name}"), SERVICES[name])(project, identity)


@contextlib.contextmanager
def service_errors(service: str, *own: type[Exception]) -> Iterator[None]:
    """Turn the errors of a service's library into `TrackingError`; those of its `own` classes need not be named."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, own) else f"{type(error).__name__}: "
        raise TrackingError(f"{service}: {kind}{shorten(error)}") from error
