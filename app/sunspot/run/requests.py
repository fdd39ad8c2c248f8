"""Requests of people: to stop a run, to delete it, or to train it (the records of submitted RayJobs).

The requests to stop and to delete are small objects that exist as long as the request holds. The record of a submission
says what was submitted and where, for people to read. Nothing is ever applied to a cluster from a record, because
anybody who can write to storage could have written it.
"""

import getpass
import os
import re
import signal
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sunspot.errors import SunspotError, SupersededError, TerminatedError
from sunspot.run import Run, to_json
from sunspot.run.objects import Moment, read, read_if_there, read_or_default

STOP, DELETION = "stop.json", "delete.json"
"""There while the run must stand still, or is being deleted."""


@dataclass(frozen=True)
class Request:
    """Who asked for a stop or a deletion, and when."""

    by: str = ""
    "Empty: not known."
    time: Moment = 0.0


class StopRequest:
    """What this process knows of a request that its run stops."""

    def __init__(self) -> None:
        self.marked = False
        "`sunspot stop` left its marker: later starts may not train either."
        self.signal: signal.Signals | None = None
        "The SIGINT (Ctrl-C), SIGTERM or SIGHUP that this process got: a later start resumes the run."

    @property
    def asked(self) -> bool:
        """Whether the run is to stop, for whatever reason."""
        return self.marked or self.signal is not None

    def read_marker(self, run: Run) -> None:
        """Look in storage for the marker of `sunspot stop`; one that was there counts for the rest of this start."""
        self.marked = self.marked or stop_requested(run)

    def note_signal(self, number: int) -> None:
        """Note that this process got a signal. SIGINT replaces an earlier signal. Safe to call in a signal handler."""
        if self.signal is None or number == signal.SIGINT:
            self.signal = signal.Signals(number)

    def note_marker(self) -> None:
        """Note that the run has its stop marker, as another process has seen."""
        self.marked = True

    def raise_signal(self, kept: str, job: str) -> None:
        """Raise, once all is saved, what a signal asked for: the run is stopped; `kept` says what is there.

        A cluster's `job` has failed instead: its operator starts it again, elsewhere.
        """
        if self.signal is None:
            return
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt(f"interrupted: {kept}")
        told = f"told to end by {self.signal.name}: {kept}"
        raise SunspotError(told) if job else TerminatedError(told, self.signal)


def who_asks() -> str:
    """Return user and host of this process as text for people; a container's user may have only a number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def request_stop(run: Run, by: str) -> None:
    """Ask the run, whichever job trains it now or later, to save and stop."""
    run.storage.write(run.key(STOP), to_json(asdict(Request(by, time.time()))))


def read_stop(run: Run) -> Request | None:
    """Return the request to stop, if there is one. It holds even when it is damaged."""
    return read_if_there(lambda: read_or_default(lambda: read(run, Request, STOP), Request()))


def stop_requested(run: Run) -> bool:
    """Return whether the run has to stop, and stay stopped."""
    return run.storage.exists(run.key(STOP))


def clear_stop(run: Run) -> None:
    """Let the run train again."""
    run.storage.delete(run.key(STOP))


def how_to_resume(arguments: str, on_cluster: bool) -> str:
    """Say how a stopped run goes on: `resume` itself starts a cluster's job again, but no training on a machine.

    `arguments` are those of `sunspot resume`.
    """
    return f"to go on, give `sunspot resume {arguments}`" + ("" if on_cluster else ", then the same command")


def mark_deletion(run: Run, by: str) -> None:
    """Record that the run is being deleted; raises `StorageError`."""
    run.storage.write(run.key(DELETION), to_json(asdict(Request(by, time.time()))))


def deletion_begun(run: Run) -> bool:
    """Return whether the run is being deleted, or its deletion was interrupted."""
    return run.storage.exists(run.key(DELETION))


def refuse_if_deleted(run: Run) -> None:
    """Raise `SupersededError` when the run is being deleted."""
    if deletion_begun(run):
        raise SupersededError(
            f"{run.location} is being deleted, so nothing may train it; `sunspot delete {run.name}` completes that"
        )


def clear_deletion(run: Run) -> None:
    """Delete the record, last of all; a request that is carried out late spares that of another deletion."""
    for entry in run.storage.list(run.key(DELETION)):
        run.storage.delete(entry.key, entry.version)


# ---------------------------------------------------------------------------------------------------------- submissions

SUBMISSION = re.compile(r"[0-9]{4,9}-[a-z0-9]([-a-z0-9]*[a-z0-9])?\.(json|yaml)")
"""Names of the files that Sunspot writes to `submissions/`. Earlier versions wrote the manifest alone, as YAML."""


@dataclass(frozen=True)
class SubmissionRecord:
    """A RayJob that was submitted, and the cluster to which. Fields that are not known are empty."""

    job: str
    namespace: str = ""
    cluster: str = ""
    "The identity of the Kubernetes cluster (`owner.cluster_identity`)."
    server: str = ""
    "The address of its API server."
    arguments: tuple[str, ...] = ()
    "Arguments of `sunspot submit` with which the same job can be submitted again."
    manifest: dict[str, Any] = field(default_factory=dict)
    "The RayJob as it was applied."
    time: Moment = 0.0
    "Time of the submission, in seconds since the epoch."


def record_submission(run: Run, submission: SubmissionRecord) -> str:
    """Write the record of a submission, and return its storage key. Raises `StorageError`."""
    content = to_json(asdict(submission))
    number = len(list_submissions(run)) + 1
    while not run.storage.create(key := run.key("submissions", f"{number:04d}-{submission.job}.json"), content):
        number += 1
    return key


def newest_submission(run: Run) -> SubmissionRecord | None:
    """Return the record of the newest submission, if any. If it cannot be read, only the job is known."""
    keys = list_submissions(run)
    if not keys:
        return None
    file = keys[-1].rpartition("/")[2]
    known = SubmissionRecord(submitted_job(keys[-1]))
    if file.endswith(".yaml"):
        return known
    return read_if_there(lambda: read_or_default(lambda: read(run, SubmissionRecord, "submissions", file), known))


def submitted_job(key: str) -> str:
    """Return the name of the RayJob whose submission has this storage key."""
    file = key.rpartition("/")[2]
    return file.partition("-")[2].rpartition(".")[0]


def list_submissions(run: Run) -> list[str]:
    """Return the storage keys of the records, oldest first."""
    ours = [file for file, _ in run.entries("submissions") if SUBMISSION.fullmatch(file)]
    return [run.key("submissions", file) for file in sorted(ours, key=lambda file: int(file.partition("-")[0]))]
