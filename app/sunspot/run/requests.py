"""Requests by users to stop a run, to change its size or to delete it, and records of submitted RayJobs.

A request is a small object that exists as long as the request is in force. The record of a submission
tells users what was submitted and where. A record is never applied to a cluster, because anyone who can write to
storage could have written it.
"""

import functools
import getpass
import os
import re
import signal
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sunspot.background import map_parallel
from sunspot.errors import SunspotError, SupersededError, TerminatedError
from sunspot.run import Run, to_json
from sunspot.run.objects import Timestamp, read, read_if_exists, read_if_usable, read_or_default

if TYPE_CHECKING:
    from sunspot.settings import WorkerRange

STOP, DELETION = "stop.json", "delete.json"
"""Names of the requests to stop and to delete a run."""

SCALE = "scale.json"
"""Name of the request to train with a different number of workers."""


SPENT_BUDGET = "its spent budget"
"""Beginning of `Request.by` if the run's own driver makes the request because of BUDGET."""


@dataclass(frozen=True)
class Request:
    """A request to stop or delete a run."""

    by: str = ""
    "The user and host that made the request (`describe_requester`), SPENT_BUDGET, or an empty string if unknown."
    time: Timestamp = 0.0


class StopRequest:
    """The stop requests that a process has received for its run."""

    def __init__(self) -> None:
        self.marked = False
        """True if the marker of `sunspot stop` was found, or if the run moves. Later drivers of this owner then do not
        train, either."""
        self.moves_to = ""
        "The owner that takes the run over, or an empty string unless the run moves."
        self.signal: signal.Signals | None = None
        """The signal (SIGINT, SIGTERM or SIGHUP) that the process received. A later driver then resumes the run."""

    @property
    def asked(self) -> bool:
        """True if the run has to stop for any reason."""
        return self.marked or self.signal is not None

    def read_marker(self, run: Run) -> None:
        """Check storage for the marker of `sunspot stop`, unless this process has already found the marker."""
        self.marked = self.marked or stop_requested(run)

    def note_signal(self, number: int) -> None:
        """Record a received signal. SIGINT replaces an earlier signal. This method is safe in a signal handler."""
        if self.signal is None or number == signal.SIGINT:
            self.signal = signal.Signals(number)

    def note_marker(self) -> None:
        """Record that another process has found the run's stop marker."""
        self.marked = True

    def note_move(self, to: str) -> None:
        """Record that the owner `to` is waiting for this process to save and exit."""
        self.marked, self.moves_to = True, to

    def cancel_move(self, run: Run) -> None:
        """Withdraw the request recorded by `note_move`. Other requests to stop the run remain in force."""
        self.marked, self.moves_to = stop_requested(run), ""

    def raise_signal(self, kept: str, job: str) -> None:
        """Stop this process with an error if it received a signal. Call this after everything has been saved.

        `kept` describes what was saved. `job` is the setting JOB_ID. If `job` is set, the error counts as a failure, so
        that the operator starts the job again on another node.
        """
        if self.signal is None:
            return
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt(f"interrupted: {kept}")
        message = f"told to end by {self.signal.name}: {kept}"
        raise SunspotError(message) if job else TerminatedError(message, self.signal)


def describe_requester() -> str:
    """Return this process's user and host as readable text. In a container, the user can be a number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def request_stop(run: Run, by: str) -> None:
    """Ask the run to save and stop, whether it is training now or starts later."""
    run.storage.write(run.key(STOP), to_json(asdict(Request(by, time.time()))))


def read_stop(run: Run) -> Request | None:
    """Return the request to stop, or None if there is no request. A damaged request is still in force."""
    return read_if_exists(lambda: read_or_default(lambda: read(run, Request, STOP), Request()))


def describe_stop(run: Run) -> str:
    """Return what stopped the run: `sunspot stop`, or SPENT_BUDGET with the budget and the cost."""
    request = read_stop(run)
    return request.by if request and request.by.startswith(SPENT_BUDGET) else "`sunspot stop`"


def stop_requested(run: Run) -> bool:
    """Return True if the run has been asked to stop."""
    return run.storage.exists(run.key(STOP))


def clear_stop(run: Run) -> None:
    """Delete the request to stop, so that the run can train again."""
    run.storage.delete(run.key(STOP))


@dataclass(frozen=True)
class ScaleRequest:
    """A request to change the number of workers within the range of NUM_WORKERS."""

    workers: str
    "The number or range of workers, such as `2..4`."
    num_workers: str
    "The run's NUM_WORKERS when the request was made. With any other NUM_WORKERS, the request has no effect."
    by: str = ""
    "The user and host that made the request (`describe_requester`)."
    time: Timestamp = 0.0


def request_scale(run: Run, request: ScaleRequest) -> None:
    """Ask the run to train with a different number of workers, now and after each restart."""
    run.storage.write(run.key(SCALE), to_json(asdict(request)))


def read_scale(run: Run) -> ScaleRequest | None:
    """Return the request to change the run's size, or None. A damaged request has no effect."""
    return read_if_usable(lambda: read(run, ScaleRequest, SCALE))


def clear_scale(run: Run) -> None:
    """Delete the request to change the run's size, so that only NUM_WORKERS determines the size again."""
    run.storage.delete(run.key(SCALE))


def narrowed(given: "WorkerRange", request: ScaleRequest | None) -> "WorkerRange":
    """Return the range of workers that a request asks for, or `given` (NUM_WORKERS) if no request applies.

    A request does not apply if NUM_WORKERS has changed since the request, or does not include the requested range.
    """
    from sunspot.settings import parse_workers  # pydantic is slow to import, and most verbs do not need it

    if request is None or request.num_workers != str(given):
        return given
    try:
        workers = parse_workers(request.workers).in_multiples_of(given.multiple)
    except ValueError:
        return given
    return workers if given.least <= workers.least and workers.most <= given.most else given


def resume_hint(arguments: str, on_cluster: bool) -> str:
    """Return a hint on how to continue a stopped run with `sunspot resume` and its `arguments`.

    On a cluster, `resume` itself starts the job again. On a single machine, the user has to start training again.
    """
    return f"to continue, run `sunspot resume {arguments}`" + ("" if on_cluster else ", then the same command")


def mark_deletion(run: Run, by: str) -> None:
    """Record that the run is being deleted. Raises `StorageError`."""
    run.storage.write(run.key(DELETION), to_json(asdict(Request(by, time.time()))))


def deletion_begun(run: Run) -> bool:
    """Return True if the run is being deleted, or if its deletion was interrupted."""
    return run.storage.exists(run.key(DELETION))


def refuse_if_deleted(run: Run) -> None:
    """Raise `SupersededError` if the run is being deleted."""
    if deletion_begun(run):
        raise SupersededError(
            f"{run.location} is being deleted and cannot be trained; `sunspot delete {run.name}` completes the deletion"
        )


def clear_deletion(run: Run) -> None:
    """Delete the record of a deletion. This is the last step of deleting a run.

    A call that is delayed does not delete the record of a later deletion.
    """
    for entry in run.storage.list(run.key(DELETION)):
        run.storage.delete(entry.key, entry.version)


# ---------------------------------------------------------------------------------------------------------- submissions

SUBMISSION = re.compile(r"[0-9]{4,9}-[a-z0-9]([-a-z0-9]*[a-z0-9])?\.json")
"""Pattern for the names of files in `submissions/`."""


@dataclass(frozen=True)
class SubmissionRecord:
    """A submitted RayJob and its cluster. Unknown fields are empty."""

    job: str
    namespace: str = ""
    cluster: str = ""
    "The ID of the Kubernetes cluster (`owner.cluster_identity`)."
    server: str = ""
    "The address of the cluster's API server."
    place: str = ""
    "The name of the place in the user's profile, or an empty string if the profile has no places."
    arguments: tuple[str, ...] = ()
    "The arguments of `sunspot submit` to submit the job again."
    manifest: dict[str, Any] = field(default_factory=dict)
    "The RayJob as it was applied."
    time: Timestamp = 0.0
    "The time of the submission, in seconds since the epoch."
    withdrawn: Timestamp = 0.0
    "The time at which the RayJob was deleted because the run stays in its old place, or 0."


def record_submission(run: Run, submission: SubmissionRecord) -> str:
    """Write the record of a submission, and return its storage key. Raises `StorageError`."""
    content = to_json(asdict(submission))
    number = len(list_submissions(run)) + 1
    while not run.storage.create(key := run.key("submissions", f"{number:04d}-{submission.job}.json"), content):
        number += 1
    return key


def withdraw_submission(run: Run, job: str, place: str, undo: bool = False) -> None:
    """Record that a RayJob in a place must no longer train the run. Raises `StorageError`.

    If `undo` is True, record that the RayJob can train the run again.
    """
    for key in reversed(list_submissions(run)):
        record = _read_submission(run, key)
        if (record.job, record.place) == (job, place):
            run.storage.write(key, to_json(asdict(replace(record, withdrawn=0.0 if undo else time.time()))))
            return


def newest_submission(run: Run) -> SubmissionRecord | None:
    """Return the newest record of a submission that was not withdrawn. If it is damaged, only `job` is set."""
    for key in reversed(list_submissions(run)):
        record = read_if_exists(functools.partial(_read_submission, run, key))
        if record and not record.withdrawn:
            return record
    return None


def read_submissions(run: Run) -> list[SubmissionRecord]:
    """Return the records of all submissions, oldest first. If a record is damaged, only its `job` is set."""
    found = map_parallel(lambda key: read_if_exists(lambda: _read_submission(run, key)), list_submissions(run))
    return [record for record in found if record]


def _read_submission(run: Run, key: str) -> SubmissionRecord:
    file = key.rpartition("/")[2]
    return read_or_default(
        lambda: read(run, SubmissionRecord, "submissions", file), SubmissionRecord(submitted_job(key))
    )


def submitted_job(key: str) -> str:
    """Return the RayJob's name, given a submission's storage key."""
    file = key.rpartition("/")[2]
    return file.partition("-")[2].rpartition(".")[0]


def list_submissions(run: Run) -> list[str]:
    """Return the storage keys of the run's submissions, oldest first."""
    ours = [file for file, _ in run.entries("submissions") if SUBMISSION.fullmatch(file)]
    return [run.key("submissions", file) for file in sorted(ours, key=lambda file: int(file.partition("-")[0]))]
