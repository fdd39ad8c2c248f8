"""Which run of a tracking service shows this run, and how much of it has been delivered there.

tracking/mlflow.json              the run there: created once, by a conditional write, and never changed
tracking/mlflow-delivered.json    how far the delivery is
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from app.errors import NotFoundError
from app.layout import Run, to_json


@dataclass(frozen=True)
class Delivered:
    """How much of a run a tracking service has."""

    step: int = -1
    "Every record of the metric history that counts, up to this step, has been delivered or refused."
    attempt: int = 0
    "The attempt of the last of them: a later one may add its evaluation to the same step."
    records: int = 0
    "How many the service has."
    refused: int = 0
    "How many it will never have, as it refused them."
    report: str = ""
    "SHA-256 of the report that it has."
    model: str = ""
    "The checkpoint whose model it has."
    ended: str = ""
    "The end that it was told of: its state, and when."


def read_tracking_run(run: Run, service: str) -> str | None:
    """The id of the tracking run; None when there is none yet. Raises `StorageError`."""
    return _read(run, f"{service}.json").get("id")


def claim_tracking_run(run: Run, service: str, identity: str) -> str:
    """Make `identity` the id of the tracking run, unless there is one; returns the one that stands."""
    run.storage.create(run.key("tracking", f"{service}.json"), to_json({"id": identity}))
    return str(_read(run, f"{service}.json")["id"])


def read_delivered(run: Run, service: str) -> Delivered:
    """How far the delivery is; raises `StorageError`."""
    record = _read(run, f"{service}-delivered.json")
    return Delivered(**{name: value for name, value in record.items() if name in Delivered.__dataclass_fields__})


def write_delivered(run: Run, service: str, delivered: Delivered) -> None:
    """Note how far the delivery is; raises `StorageError`, after which what came since is delivered once more."""
    run.storage.write(run.key("tracking", f"{service}-delivered.json"), to_json(asdict(delivered)))


def _read(run: Run, file: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = run.read_json("tracking", file)
    except NotFoundError:
        return {}
    return found
