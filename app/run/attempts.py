"""Who trains a run, and which steps count.

Each start of a worker group claims the next number in `attempts/` by a conditional write. The newest number owns the
run: there are no leases and no waiting, and an older attempt finds the newer one before its next commit or deletion.
"""

import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from app.errors import ConflictError, NotFoundError, SupersededError, by_name
from app.formatting import as_time
from app.run import Run, to_json
from app.run.status import refuse_if_deleted
from app.storage.base import map_parallel

CLAIM_TRIES = 20
"""Claims lost in a row before a process gives up: each time, another one has won."""


@dataclass(frozen=True)
class Attempt:
    """One start of a worker group, as recorded in `attempts/NNNN.json`."""

    number: int
    owner: str
    "The job (or process) that trains; the same for all attempts of one job."
    starts_from: str | None
    "Name of the checkpoint it continues from; None: from the beginning."
    step: int
    "Optimizer steps taken in that checkpoint."
    skipped: tuple[str, ...] = ()
    "Newer checkpoints that could not be used, each with the reason."
    time: float = field(default_factory=time.time)
    "Seconds since the epoch."
    metadata: dict[str, Any] = field(default_factory=dict)
    "Settings, versions, host, world size."


def recorded_setting(attempts: Sequence[Attempt], name: str) -> str:
    """A setting of the newest attempt, by its field in `Settings`, or else its default."""
    from app.settings import PREFIX, Settings  # pydantic: slow to import, and most verbs do without

    recorded = attempts[-1].metadata.get("settings", {}) if attempts else {}
    return str(recorded.get(PREFIX + name.upper(), Settings.model_fields[name].default))


class Span(NamedTuple):
    """The steps of one attempt that count: after `after`, up to and including `upto` (None: all that come)."""

    attempt: int
    after: int
    upto: int | None

    def holds(self, attempt: int, step: int) -> bool:
        """Whether `attempt` took `step`, and it counts."""
        return self.after < step and self.reaches(attempt, step)

    def reaches(self, attempt: int, step: int) -> bool:
        """Like `holds`, or it starts at `step`: then it may write the evaluation that the attempt before did not."""
        return attempt == self.attempt and self.after <= step and (self.upto is None or step <= self.upto)


def read_attempts(run: Run) -> list[Attempt]:
    """All attempts, oldest first."""
    files = [entry.key.rpartition("/")[2] for entry in run.storage.list(run.key("attempts"))]
    numbered = [file for file in files if file.removesuffix(".json").isdigit()]
    records = map_parallel(lambda file: run.read_json("attempts", file), numbered)
    return [_attempt(record) for record in records]


def _attempt(record: dict[str, Any]) -> Attempt:
    metadata = record.pop("about", {})  # its name on disk
    return Attempt(**{**record, "skipped": tuple(record["skipped"]), "metadata": metadata})


def lineage(attempts: list[Attempt]) -> list[Span]:
    """The spans of steps that lead to the newest attempt, newest first.

    Attempt n starts from a checkpoint of attempt m: the steps of m up to that checkpoint count, and nothing m wrote
    later, even if it was committed after n began.
    """
    by_number = {attempt.number: attempt for attempt in attempts}
    spans = []
    current, upto = attempts[-1] if attempts else None, None
    while current:
        spans.append(Span(current.number, current.step, upto))
        upto = current.step
        current = by_number.get(attempt_of(current.starts_from)) if current.starts_from else None
    return spans


def checkpoint_name(step: int, attempt: int) -> str:
    """The name of a checkpoint: unique, since an attempt takes each step once."""
    return f"step-{step:08d}-attempt-{attempt:04d}"


def attempt_of(checkpoint: str) -> int:
    """The attempt that wrote a checkpoint, from its name."""
    return int(checkpoint.rpartition("-")[2])


def step_of(checkpoint: str) -> int:
    """The optimizer steps taken in a checkpoint, from its name."""
    return int(checkpoint.split("-")[1])


def refuse_if_superseded(attempts: list[Attempt], owner: str) -> None:
    """Raise `SupersededError` when `owner` has lost the run to another owner: it never gets it back."""
    if attempts and attempts[-1].owner != owner and any(attempt.owner == owner for attempt in attempts):
        raise _superseded(attempts[-1])


def claim(run: Run, attempts: list[Attempt], attempt: Attempt) -> bool:
    """Take the run over as `attempt`; False when another process took this number first.

    Raises `SupersededError` when the owner was superseded, or the run is being deleted.
    """
    refuse_if_superseded(attempts, attempt.owner)
    refuse_if_deleted(run)
    record = asdict(attempt)
    record["about"] = record.pop("metadata")  # its name on disk
    return run.storage.create(_key(run, attempt.number), to_json(record))


def ensure_owner(run: Run, attempt: Attempt) -> None:
    """Called before commits and deletions: raise `SupersededError` if a newer attempt has begun or the run is gone."""
    listed = {entry.key for entry in run.storage.list(run.key("attempts"))}
    if _key(run, attempt.number + 1) in listed:
        raise _superseded(read_attempts(run)[-1])
    if _key(run, attempt.number) not in listed and not run.storage.exists(_key(run, attempt.number)):
        raise SupersededError(
            f"{run.location} was deleted while attempt {attempt.number} trained; this process has ended"
        )


def record_error(run: Run, attempt: int, error: Exception) -> None:
    """Record the error that ended an attempt for good: later starts of the same job refuse to train."""
    record = {"type": type(error).__name__, "message": str(error), "time": time.time()}
    run.storage.write(run.key("attempts", f"{attempt:04d}-error.json"), to_json(record))


def read_error(run: Run, attempt: int) -> Exception | None:
    """The error recorded for an attempt, as an exception of its class."""
    try:
        record = run.read_json("attempts", f"{attempt:04d}-error.json")
    except NotFoundError:
        return None
    return by_name(record["type"])(record["message"])


def _superseded(newest: Attempt) -> SupersededError:
    return SupersededError(
        f"attempt {newest.number} of {newest.owner} owns the run since {as_time(newest.time)}; this process has ended, "
        "and its retries will not claim the run again. To take it over, start a new job"
    )


def _key(run: Run, number: int) -> str:
    return run.key("attempts", f"{number:04d}.json")


def new_owner(run: Run, job_id: str) -> str:
    """The owner that a driver claims for: the cluster's job, or else this process."""
    return owner_of(run, job_id) if job_id else f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def fatal_error(run: Run, owner: str) -> Exception | None:
    """What ended this owner's part in the run for good, if anything did."""
    attempts = read_attempts(run)
    try:
        refuse_if_superseded(attempts, owner)
        refuse_if_deleted(run)
    except ConflictError as error:
        return error
    return read_error(run, attempts[-1].number) if attempts and attempts[-1].owner == owner else None


def record_submission(run: Run, job: str, manifest: str) -> str:
    """Keep the manifest (YAML) to be applied as `job`; returns the storage key. Raises `StorageError`."""
    number = len(_submissions(run)) + 1
    while not run.storage.create(key := run.key("submissions", f"{number:04d}-{job}.yaml"), manifest.encode()):
        number += 1
    return key


def newest_submission(run: Run) -> tuple[str, str] | None:
    """Job name and manifest (YAML) of the last submission, if any."""
    keys = _submissions(run)
    return (_job(keys[-1]), run.storage.read(keys[-1]).decode()) if keys else None


def owner_of(run: Run, job: str) -> str:
    """The owner of a process of `job` that starts now: the job, and how often it has been submitted."""
    times = sum(_job(key) == job for key in _submissions(run))
    return f"{job}#{times}" if times else job


def _submissions(run: Run) -> list[str]:
    return [entry.key for entry in run.storage.list(run.key("submissions")) if entry.key.endswith(".yaml")]


def _job(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[2].removesuffix(".yaml")
