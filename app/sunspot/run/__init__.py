"""A run in storage: its objects, and the purpose of each.

    <STORAGE_PATH>/<RUN_NAME>/
        run.json                          the run's identity: the settings, rows and row order that it began with
        status/attempt-0001-3f2a9c1e.json the run's state, written by its driver; one file per driver and attempt
        status/attempt-0001-3f2a9c1e-workers.json
                                          the run's state, written by rank 0 during training
        status/attempt-0001-3f2a9c1e-ended.json
                                          the run's state when that driver ended
        stop.json                         exists as long as the run must not train
        profile.json                      exists while `sunspot profile` waits for a profile
        profiles/20261129T141013Z3f2a9c1e/rank-0000.json.gz
                                          the trace of a rank; rank-0000.json has the cost of tracing (profiles.py)
        scale.json                        the number of workers that a user has asked for, within NUM_WORKERS
        handover.json                     exists while workers in a new place wait for the old driver to save and stop
        delete.json                       exists while the run is being deleted
        submissions/0001-mnist-1a2b3c4d.json
                                          a RayJob as it was applied, and the cluster to which it was applied
        attempts/0001.json                one per start of a worker group; the newest names the run's owner
        attempts/0001-start-9f3c21ab.json the checkpoint that the attempt starts from
        attempts/0001-error.json          the fatal error that ended the attempt, if any
        checkpoints/step-00000460-attempt-0001-9f3c21ab/
            model.pt optimizer.pt extra_state.pt
                                          the state; with PARALLEL=fsdp, shards replace the first two (parts.py)
            manifest.json                 written last, so a directory without a manifest is not a checkpoint
        metrics/attempt-0001-66c1f0a9b3e52d07-0000000000-0000000311.jsonl
                                          the metric history, one line per record; this file contains lines 0 to 311 of
                                          a stream, which is written by a single process (streams.py)
        ranks/attempt-0001-...            the metrics of each rank, with old records combined
        events/attempt-0001-...           everything that happened to the run besides training
        failures/driver-20261121T141013679Z.json
        failures/attempt-0001-rank-0000.json
                                          the error that ended a process, with its traceback
        logs/driver-20261121T141013679Z/000000000000000.log
        logs/attempt-0001-rank-0000/000000000000000.log
                                          a process's output, in segments named by their position in the output
        audit/attempt-0001-9f3c21ab/00000001-00000460-84d1c07e2b5f9a36.parquet
                                          the ids of the rows that steps 1 to 460 consumed (audit.py)
        predictions.json                  the last checkpoint's predictions for held-out rows, for the report
        shown.json                        what the task's `show` returned for the last checkpoint, for the report
        tracking/mlflow.json              the ID of this run in the tracking service
        tracking/mlflow-delivered.json    how much of this run the service has received
        code/5f3a...c1.tar                user code packed by `submit --code`, named after its SHA-256
        report.html                       the report, written by the last driver

        search.json                       the trials of a search; each trial is a run, which is stored next to this run
        tensorboard/                      the files that TRACKING=tensorboard writes
        probe-6f1c...                     exists while nodes check that they can reach the storage

A run's `step` is the number of optimizer steps taken. Together with the data, the seed and the global batch size, it
fully determines the run's position. Each attempt records the checkpoint that it starts from, so the attempts form a
chain. Only the steps that led to the newest attempt are part of the run's lineage (`attempts.lineage`).

The life of a run, with the module for each part:

    requests.py      a user submits a RayJob, asks the run to stop or to change its size, or deletes it
    profiles.py      a user asks some ranks to trace a few steps
    outcome.py       a driver begins, and writes the status (status.py) while no worker writes it
    identity.py      the driver records the run's identity, or raises an error if it has changed
    handover.py      workers in a new place wait until the old driver has saved and stopped
    attempts.py      a worker group claims an attempt, and records the checkpoint that it starts from
    history.py       the workers add metrics and events, including a receipt for each start (incidents.py)
    checkpoints.py   the workers record the rows that their steps consumed (audit.py), then commit a checkpoint
    logs.py          every process ships its output and, if it fails, its error (failures.py)
    overview.py      readers list the runs, and derive the state of a run from its status and a listing
    sightings.py     readers learn from all runs how many nodes each place provided
    seen.py          readers look at a run (`RunSeen`), or read everything about it (`RunDetails`)
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from sunspot.machine.private_folder import private_path
from sunspot.storage import open_storage
from sunspot.storage.base import Entry, Storage

__all__ = ["Claimant", "Run", "open_run"]


RECORDS = ("run.json", "status", "submissions")
"""Names of the files and folders that identify a run. A deletion removes them last."""

FILES = (
    *("stop.json", "handover.json", "scale.json", "delete.json", "profile.json", "search.json", "predictions.json"),
    *("shown.json", "report.html"),
)
"""Names of the files at the top of a run's folder that do not identify the run."""

FOLDERS = (
    *("attempts", "checkpoints", "metrics", "ranks", "events", "failures", "logs", "audit"),
    *("tracking", "tensorboard", "code", "profiles"),
)
"""Names of the folders in a run's folder that do not identify the run."""

PROBE = re.compile(r"probe-[0-9a-f]{32}")
"""Pattern for the names of the files that nodes write to check whether they can reach storage."""


def is_name_of_run(path: str) -> bool:
    """Return True if an object at `path`, relative to the run's folder, belongs to the run."""
    top = path.partition("/")[0]
    return top in (*RECORDS, *FILES, *FOLDERS) or bool(PROBE.fullmatch(top))


@dataclass(frozen=True)
class Run:
    """A run, given by its storage and name. It need not exist."""

    storage: Storage
    name: str

    def key(self, *parts: str) -> str:
        """Return the storage key of one of this run's objects or folders."""
        return "/".join((self.name, *parts))

    def entries(self, folder: str) -> list[tuple[str, Entry]]:
        """Return all objects in one of this run's folders, each with its path relative to the folder."""
        begin = len(self.key(folder, ""))
        return [(entry.key[begin:], entry) for entry in self.storage.list(self.key(folder))]

    @property
    def location(self) -> str:
        """The run's path or URL as readable text."""
        return self.storage.locate(self.name)


@dataclass(frozen=True)
class Claimant:
    """A process that claims a run in order to train it."""

    run: Run
    owner: str
    "The job or process that trains. All drivers of a job have the same owner."
    driver: str = ""
    "The ID of the driver (`status.new_driver`), or an empty string if there is no driver."
    cancelled: Event = field(default_factory=Event)
    "Set once the worker group has ended. Any of its threads that still wait for storage then claim nothing."


def open_run(storage_path: str, name: str) -> Run:
    """Return the run `name` in the storage at `storage_path`. The run need not exist."""
    return Run(open_storage(storage_path), name)


def to_json(value: Any) -> bytes:
    """Return a value as JSON, formatted like all of a run's objects."""
    return (dump_json(value, indent=1, sort_keys=True) + "\n").encode()


def dump_json(value: Any, **options: Any) -> str:
    """Return a value as JSON. Lone surrogates are replaced, because many JSON readers reject them."""
    text = json.dumps(value, **options)
    if "\\ud" in text:
        plain = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", json.dumps(value, ensure_ascii=False))
        return json.dumps(json.loads(plain), **options)
    return text


SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which Python produces from undecodable file names."""


SHARED_MEMORY = Path("/dev/shm")
"""The directory in which a node keeps copies of the training state between checkpoints."""


def node_memory_directory(location: str, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the directory in this node's memory for copies of a run's checkpoints. The directory need not exist.

    `location` is the run's `Run.location`.
    """
    name = hashlib.sha256(location.encode()).hexdigest()[:16]
    return private_path(shared_memory) / name
