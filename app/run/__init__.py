"""A run as it lies in storage: everything it has written, and where it stands.

    <STORAGE_PATH>/<RUN_NAME>/
        run.json                          what the run may never change: its identity settings and its data
        status.json                       where the run stands, in one small object
        stop.json                         there while the run must stand still
        delete.json                       there while the run is being deleted
        submissions/0001-mnist-1a2b3c4d.yaml
                                          each manifest as applied to a cluster
        attempts/0001.json                one per start of a worker group: who, when, from which checkpoint
        attempts/0001-error.json          the error that ended this attempt for good
        checkpoints/step-00000460-attempt-0001/
            model.pt optimizer.pt extra_state.pt
                                          under PARALLEL=fsdp parts instead of the first two (app/checkpoint/sharded.py)
            manifest.json                 written last: without it there is no checkpoint
        metrics/attempt-0001-00000.jsonl  the metric history, a line per report
        events/attempt-0001-00000.jsonl   what happened to the run besides training
        failures/attempt-0001-rank-0000.json
                                          the error that ended a process, with its traceback
        logs/driver-20261121T141013679Z/000000.log
        logs/attempt-0001-rank-0000/000000.log
                                          what each process printed, in segments
        audit/attempt-0001/00000001-00000460.parquet
                                          the ids of the rows these optimizer steps consumed
        predictions.json                  the last checkpoint's predictions of held-out rows, for the report
        tracking/mlflow.json              the run of a tracking service that shows this one
        tracking/mlflow-delivered.json    how much has been delivered there
        report.html                       all of this as a page, made by the last driver

A step is the number of optimizer steps taken; with the data, the seed and the global batch size it is the whole
position. Attempts form a chain: each names the checkpoint it starts from. What an attempt wrote counts up to the step
a later attempt continued from, and not beyond (`attempts.lineage`).
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.storage import open_storage
from app.storage.base import Storage

__all__ = ["Run", "open_run"]


@dataclass(frozen=True)
class Run:
    """One run's place in storage."""

    storage: Storage
    name: str

    def key(self, *parts: str) -> str:
        """The storage key of something in this run."""
        return "/".join((self.name, *parts))

    @property
    def location(self) -> str:
        """The run's path or URL, for people."""
        return self.storage.locate(self.name)

    def read_json(self, *parts: str) -> Any:
        """Parse one JSON object of the run; raises `NotFoundError` or `ValueError`."""
        return json.loads(self.storage.read(self.key(*parts)))


def open_run(storage_path: str, name: str) -> Run:
    """The run `name` below `storage_path`, whether or not it exists."""
    return Run(open_storage(storage_path), name)


def to_json(value: Any) -> bytes:
    """How every JSON object of a run is written."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


SHARED_MEMORY = Path("/dev/shm")
"""Where a node keeps copies of the training state between checkpoints."""


def copies_of(location: str, shared_memory: Path = SHARED_MEMORY) -> Path:
    """The directory of this node's copies of the run at `location` (`Run.location`); it may not exist."""
    name = hashlib.sha256(location.encode()).hexdigest()[:16]
    return shared_memory / f"sunspot-{os.getuid()}" / name
