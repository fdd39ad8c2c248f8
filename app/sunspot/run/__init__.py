"""A run in storage: the objects that it consists of, and what each of them is for.

    <STORAGE_PATH>/<RUN_NAME>/
        run.json                          what the run may never change: its identity settings, its rows and their order
        status/attempt-0001-3f2a9c1e.json the state of the run, in one small object for each start of a driver and each
                                          of its attempts (only the newest attempt's is used)
        stop.json                         exists as long as the run must not train
        delete.json                       exists while the run is being deleted
        submissions/0001-mnist-1a2b3c4d.json
                                          each RayJob as it was applied, and the cluster to which it was applied
        attempts/0001.json                one per start of a worker group: who owns the run from here on, and since when
        attempts/0001-start-9f3c21ab.json the checkpoint from which this attempt has chosen to start
        attempts/0001-error.json          the error that ended this attempt for good
        checkpoints/step-00000460-attempt-0001-9f3c21ab/
            model.pt optimizer.pt extra_state.pt
                                          under PARALLEL=fsdp parts instead of the first two (checkpoint/parts.py)
            manifest.json                 written last: without a manifest there is no checkpoint
        metrics/attempt-0001-66c1f0a9b3e52d07-0000000000-0000000311.jsonl
                                          the metric history, a line per report: lines 0 to 311 of a stream that only
                                          one process writes (streams.py)
        ranks/attempt-0001-...            the numbers of each rank, with fewer records the older they are
        events/attempt-0001-...           what happened to the run besides training
        failures/driver-20261121T141013679Z.json
        failures/attempt-0001-rank-0000.json
                                          the error that ended a process, with its traceback
        logs/driver-20261121T141013679Z/000000000000000.log
        logs/attempt-0001-rank-0000/000000000000000.log
                                          what each process printed, in segments named by their position in the output
        audit/attempt-0001-9f3c21ab/00000001-00000460-84d1c07e2b5f9a36.parquet
                                          the ids of the rows that these optimizer steps consumed (audit.py)
        predictions.json                  the last checkpoint's predictions of held-out rows, for the report
        shown.json                        what the task shows of the last checkpoint's model, for the report
        tracking/mlflow.json              the run of a tracking service that shows this run
        tracking/mlflow-delivered.json    how much has been delivered to the service
        code/5f3a...c1.tar                own code that `submit --code` packed, named by its SHA-256
        report.html                       all of this as a page, written by the last driver

        search.json                       the trials of a search (their runs are beside this one in storage)
        tensorboard/                      what TRACKING=tensorboard shows
        probe-6f1c...                     exists while nodes check that they can reach the storage

A step is the number of optimizer steps taken. Together with the data, the seed and the global batch size it is the
whole position of a run. Attempts form a chain, because each names the checkpoint from which it starts. What an attempt
wrote counts up to the step from which a later attempt continued, and not beyond (`attempts.lineage`).

The life of a run, with the module that writes or reads each part:

    requests.py      a user submits a RayJob, asks the run to stop, or deletes it
    outcome.py       a driver begins, and writes the status (status.py) as long as no worker does
    identity.py      the driver records the identity of the run, or refuses to continue with another one
    attempts.py      a worker group claims an attempt, and records the checkpoint from which it starts
    history.py       the workers add metrics and events; incidents.py has the receipt of each start
    checkpoints.py   the workers commit checkpoints, and before each the rows that its steps consumed (audit.py)
    logs.py          every process ships its output and, if it fails, its error (failures.py)
    overview.py      readers list the runs, find the state of a run, or read everything about it
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from sunspot.private_folder import private_path
from sunspot.storage import open_storage
from sunspot.storage.base import Entry, Storage

__all__ = ["Claimant", "Run", "open_run"]


RECORDS = ("run.json", "status", "submissions")
"""Names of the objects that identify a run. A deletion removes these last."""

FILES = ("stop.json", "delete.json", "search.json", "predictions.json", "shown.json", "report.html")
"""Names of the other files at the top of a run's folder."""

FOLDERS = (
    *("attempts", "checkpoints", "metrics", "ranks", "events", "failures", "logs", "audit"),
    *("tracking", "tensorboard", "code"),
)
"""Names of the other folders in a run's folder."""

PROBE = re.compile(r"probe-[0-9a-f]{32}")
"""Names of the files that nodes write to check that they can reach the storage."""


def is_name_of_run(path: str) -> bool:
    """Return True if a run writes objects of this name. `path` is a key below the run's folder."""
    top = path.partition("/")[0]
    return top in (*RECORDS, *FILES, *FOLDERS) or bool(PROBE.fullmatch(top))


@dataclass(frozen=True)
class Run:
    """A run of this name in a storage. It may not exist."""

    storage: Storage
    name: str

    def key(self, *parts: str) -> str:
        """Return the storage key of an object or a folder of this run."""
        return "/".join((self.name, *parts))

    def entries(self, folder: str) -> list[tuple[str, Entry]]:
        """Return all objects in a folder of this run, each with its key below the folder."""
        begin = len(self.key(folder, ""))
        return [(entry.key[begin:], entry) for entry in self.storage.list(self.key(folder))]

    @property
    def location(self) -> str:
        """The run's path or URL as readable text."""
        return self.storage.locate(self.name)


@dataclass(frozen=True)
class Claimant:
    """One start of a driver that trains, or is about to train, a run."""

    run: Run
    owner: str
    "The job or the process that trains. It is the same for all starts of a job's driver."
    driver: str = ""
    "Identity of this start (`status.new_driver`). Empty if the process is not a driver."
    cancelled: Event = field(default_factory=Event)
    "Set once the claiming worker group has ended, so that its threads that waited for storage claim nothing."


def open_run(storage_path: str, name: str) -> Run:
    """Return the run `name` below `storage_path`. It may not exist."""
    return Run(open_storage(storage_path), name)


def to_json(value: Any) -> bytes:
    """Return a value as JSON in the format of all objects of a run."""
    return (dump_json(value, indent=1, sort_keys=True) + "\n").encode()


def dump_json(value: Any, **options: Any) -> str:
    """Return JSON that every reader accepts, without lone surrogates."""
    text = json.dumps(value, **options)
    if "\\ud" in text:
        plain = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", json.dumps(value, ensure_ascii=False))
        return json.dumps(json.loads(plain), **options)
    return text


SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates. Python makes them of undecodable file names, and JSON readers refuse them."""


SHARED_MEMORY = Path("/dev/shm")
"""The directory in which a node keeps copies of the training state between checkpoints."""


def node_memory_directory(location: str, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the directory of this node's copies of the run at `location` (`Run.location`). It may not exist."""
    name = hashlib.sha256(location.encode()).hexdigest()[:16]
    return private_path(shared_memory) / name
