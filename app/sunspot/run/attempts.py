"""Who trains a run, and which steps count.

Each start of a worker group claims the next number in `attempts/` by a conditional write. The newest number owns the
run: there are no leases and no waiting, and an older attempt finds the newer one before its next commit or deletion. (A
process that is rank 0 of both completes the commit that it had begun: `ensure_committer` in checkpoints.py.) Only then
does the new owner choose the checkpoint it starts from, and records it: what the older one deletes after its own newest
checkpoint was listed cannot be that one. Until it has chosen, its attempt leads nowhere.

A claim's nonce tells it from one of the same number in a run that was deleted and begun again under its name. The names
of checkpoints and audit folders carry it, so a process of the deleted run writes beside the new one's, never over them.
"""

import contextlib
import functools
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, NamedTuple

from annotated_types import Predicate

from sunspot.background import map_parallel
from sunspot.errors import ConflictError, DamageError, SupersededError, by_name
from sunspot.formatting import as_time
from sunspot.run import Claimant, Run
from sunspot.run.objects import (
    MAX_NUMBER,
    CheckpointName,
    Count,
    Moment,
    Workers,
    read_if_exists,
    read_verified,
    with_checksum,
)
from sunspot.run.owner import Owner
from sunspot.run.requests import refuse_if_deleted
from sunspot.run.status import list_statuses, newest_status

log = logging.getLogger(__name__)

CLAIM = re.compile(r"(0[0-9]{3}|[1-9][0-9]{3,8})\.json")
"""A file of `attempts/` with which an attempt claimed its number."""

MAX_ATTEMPTS_CACHED = 10_000
"""Attempts that a process remembers, of all runs: a few kB each."""

IN_PLACE = "in place"
"""The tier of an attempt whose workers go on with the state that they have."""

CLAIM_TRIES = 20
"""Claims lost in a row before a process gives up: each time, another one has won."""


@dataclass(frozen=True)
class Metadata:
    """The worker group of an attempt, and what it trains with."""

    settings: dict[str, str] = field(default_factory=dict)
    "By variable."
    versions: dict[str, str] = field(default_factory=dict)
    host: str = ""
    "Of rank 0."
    nodes: dict[str, str] = field(default_factory=dict)
    "The host of each rank."
    processes: tuple[str, ...] = ()
    "What tells the process of each rank apart from all others."
    groups: dict[str, str] = field(default_factory=dict)
    "The group of each host, where the cluster has named it."
    world_size: Workers = 0
    driver: str = ""
    "The start of the driver whose workers claimed it (`status.new_driver`)."
    after: tuple[str, ...] = ()
    "The starts of drivers that had begun before that one."
    tier: str = ""
    "Where the state came from that it continues from: in place, memory, storage, or beginning; empty: not chosen yet."


@dataclass(frozen=True)
class Attempt:
    """One start of a worker group, as recorded in `attempts/NNNN.json`."""

    number: Count
    owner: str
    "The job (or process) that trains; the same for all attempts of one job."
    starts_from: CheckpointName | None
    "Name of the checkpoint it continues from; None: from the beginning."
    step: Count
    "Optimizer steps taken in that checkpoint."
    skipped: tuple[str, ...] = ()
    "Newer checkpoints that could not be used, each with the reason."
    time: Moment = field(default_factory=time.time)
    "Seconds since the epoch."
    metadata: Metadata = Metadata()
    nonce: Annotated[str, Predicate(re.compile("([0-9a-f]{8})?").fullmatch)] = ""
    "Unique to this claim (`new_nonce`)."
    chosen: bool = True
    "False: it owns the run, and has not chosen where it starts."

    @property
    def driver(self) -> str:
        """The start of the driver whose workers claimed it."""
        return self.metadata.driver

    @property
    def label(self) -> str:
        """Its name in those of what it writes: no other attempt has it, of this run or of one deleted before."""
        return attempt_label(self.number, self.nonce)

    def starting_from(self, name: CheckpointName | None, tier: str, skipped: tuple[str, ...] = ()) -> "Attempt":
        """Return it as one that has chosen to start from `name`; None: from the beginning."""
        metadata = replace(self.metadata, tier=tier)
        step = step_of(name) if name else 0
        return replace(self, starts_from=name, step=step, skipped=skipped, metadata=metadata, chosen=True)


def recorded_setting(attempts: Sequence[Attempt], name: str) -> str:
    """Return a setting of the newest attempt, by its field in `Settings`, or else its default."""
    from sunspot.settings import PREFIX, Settings  # pydantic: slow to import, and most verbs do without

    recorded = attempts[-1].metadata.settings if attempts else {}
    return str(recorded.get(PREFIX + name.upper(), Settings.model_fields[name].default))


def recorded_number(attempts: Sequence[Attempt], name: str) -> float:
    """Return a setting of the newest attempt as a number; raises `DamageError` when it is none."""
    text = recorded_setting(attempts, name)
    with contextlib.suppress(ValueError):
        if abs(number := float(text)) <= MAX_NUMBER:
            return number
    raise DamageError(f"attempt {attempts[-1].number} cannot be used: its {name.upper()}={text[:100]} is no number")


class Span(NamedTuple):
    """The steps of one attempt that count: after `after`, up to and including `upto` (None: all that come)."""

    attempt: int
    after: int
    upto: int | None
    nonce: str = ""

    @property
    def label(self) -> str:
        """That of the attempt (`Attempt.label`)."""
        return attempt_label(self.attempt, self.nonce)

    def holds(self, attempt: int, step: int) -> bool:
        """Return whether `attempt` took `step`, and it counts."""
        return self.after < step and self.reaches(attempt, step)

    def reaches(self, attempt: int, step: int) -> bool:
        """Return whether it holds `step`, or starts there: then it may write the evaluation that was left to do."""
        return attempt == self.attempt and self.after <= step and (self.upto is None or step <= self.upto)


def read_attempts(run: Run) -> list[Attempt]:
    """Return all attempts, oldest first. Raises `DamageError` for one that cannot be used, with what gives it up."""
    files = _list_files(run)

    def read_one(file: str) -> Attempt:
        try:
            return _read_chosen(run, file, files)
        except DamageError as error:
            number = _number_of(file)
            raise DamageError(
                f"{error}. It records start {number} of the run: put it back as it was; or, to give up what that start "
                f"trained, start the run once with SUNSPOT_ACCEPT={_loss_of(number)}"
            ) from error

    found = map_parallel(read_one, filter(CLAIM.fullmatch, files))
    return sorted(found, key=lambda attempt: attempt.number)


def give_up_damaged(run: Run, environment: Mapping[str, str]) -> None:
    """Make attempts whose records cannot be read, and whose loss ACCEPT names, claims that lead nowhere.

    Their numbers stay taken: what they wrote is not taken for a later attempt's. `environment` has the settings.
    """
    from sunspot.settings import accepts  # pydantic: slow to import, and most verbs do without

    files = _list_files(run)
    for file in filter(CLAIM.fullmatch, files):
        if accepts(environment, _loss_of(number := _number_of(file))):
            try:
                _read_chosen(run, file, files)
            except DamageError as error:
                log.warning(f"start {number} of the run is given up: {error}")
                nowhere = Attempt(number, "nobody", None, 0, nonce=new_nonce(), chosen=False)
                run.storage.write(run.key("attempts", file), with_checksum(asdict(nowhere)))


def _loss_of(number: int) -> str:
    """Return what ACCEPT names to give up an attempt."""
    return f"loss-of-{attempt_label(number)}"


def _read_chosen(run: Run, file: str, files: Mapping[str, str]) -> Attempt:
    """Return the attempt that a file claims, as it chose to start if it did; `files` has the version of each."""
    claimed = _read_version(run, file, files[file])
    chosen = _start_file(claimed)
    return claimed if claimed.chosen or chosen not in files else _read_version(run, chosen, files[chosen])


@functools.lru_cache(MAX_ATTEMPTS_CACHED)
def _read_version(run: Run, file: str, version: str) -> Attempt:
    """Read the attempt in a `version` of a file once: each commit asks for all, and none ever changes."""
    return _read_attempt(run, file)


def _read_attempt(run: Run, file: str) -> Attempt:
    """Return an attempt, which must be the one that its file is called after, and start from an earlier one."""
    attempt, place = read_verified(run, Attempt, "attempts", file), run.storage.locate(run.key("attempts", file))
    if file not in (f"{attempt.number:04d}.json", _start_file(attempt)):
        raise DamageError(
            f"{place} cannot be used: it is the record of attempt {attempt.number} {attempt.nonce}".rstrip()
        )
    origin = attempt.starts_from
    if (step_of(origin) if origin else 0) != attempt.step or (origin and attempt_of(origin) >= attempt.number):
        raise DamageError(
            f"{place} cannot be used: attempt {attempt.number} would start at step {attempt.step} of {origin}"
        )
    return attempt


def lineage(attempts: list[Attempt]) -> list[Span]:
    """Return the spans of steps that lead to the newest attempt that has chosen where it starts, newest first.

    Attempt n starts from a checkpoint of attempt m: the steps of m up to that checkpoint count, and nothing m wrote
    later, even if it was committed after n began.
    """
    by_label = {attempt.label: attempt for attempt in attempts if attempt.chosen}
    spans = []
    current, upto = next((attempt for attempt in reversed(attempts) if attempt.chosen), None), None
    while current:
        spans.append(Span(current.number, current.step, upto, current.nonce))
        upto = current.step
        current = by_label.get(label_of(current.starts_from)) if current.starts_from else None
    return spans


def new_nonce() -> str:
    """Return eight hexadecimal digits: claims of one number, in runs of one name, are few."""
    return uuid.uuid4().hex[:8]


def attempt_label(number: int, nonce: str = "") -> str:
    """Return how an attempt is called in the names of what it writes (`Attempt.label`)."""
    return f"attempt-{number:04d}" + (f"-{nonce}" if nonce else "")


def checkpoint_name(step: int, attempt: int, nonce: str = "") -> str:
    """Return the name of a checkpoint: unique, since an attempt takes each step once."""
    return f"step-{step:08d}-{attempt_label(attempt, nonce)}"


def attempt_of(checkpoint: str) -> int:
    """Return the attempt that wrote a checkpoint, from its name."""
    return int(checkpoint.split("-")[3])


def step_of(checkpoint: str) -> int:
    """Return the optimizer steps taken in a checkpoint, from its name."""
    return int(checkpoint.split("-")[1])


def nonce_of(checkpoint: str) -> str:
    """Return the nonce of the attempt that wrote a checkpoint, from its name."""
    return "".join(checkpoint.split("-")[4:])


def label_of(checkpoint: str) -> str:
    """Return the label of the attempt that wrote a checkpoint, from its name."""
    return checkpoint.split("-", 2)[2]


def refuse_if_superseded(attempts: list[Attempt], owner: str, driver: str = "") -> None:
    """Raise `SupersededError` when `owner` has lost the run to another owner: it never gets it back.

    So has a start of a `driver` that lost it to a later start of the same job: the operator starts another one when it
    does not hear of the head, which may be frozen, even before its first claim.
    """
    if not attempts:
        return
    newest = attempts[-1]
    lost = newest.owner != owner and any(attempt.owner == owner for attempt in attempts)
    restarted = driver and newest.driver != driver and any(attempt.driver == driver for attempt in attempts)
    overtaken = driver and any(driver in attempt.metadata.after for attempt in attempts)
    if lost or restarted or overtaken:
        raise _superseded(newest)


def claim(run: Run, attempts: list[Attempt], attempt: Attempt) -> bool:
    """Take the run over as `attempt`; False if its number is taken. Raises `SupersededError`, also if it is deleted."""
    refuse_if_superseded(attempts, attempt.owner, attempt.driver)
    refuse_if_deleted(run)
    return run.storage.create(_key(run, attempt.number), with_checksum(asdict(attempt)))


def claim_next(run: Run, make: Callable[[list[Attempt]], Attempt | None]) -> list[Attempt]:
    """Claim the attempt that `make` returns for those so far, again with the newest when its number was taken.

    Returns those before it as they stand after the claim, oldest first, and it as the last; nothing if `make` returns
    None. Raises `ConflictError` when all of CLAIM_TRIES were taken, `SupersededError` when the run is being deleted, or
    was, and like `claim`.
    """
    for _ in range(CLAIM_TRIES):
        attempts = read_attempts(run)
        attempt = make(attempts)
        if not attempt:
            return []
        if claim(run, attempts, attempt):
            before = [earlier for earlier in read_attempts(run) if earlier.number < attempt.number]
            if len(before) < len(attempts):
                raise _deleted(run, attempt)
            refuse_if_deleted(run)  # or what those say may be gone already, though they are there
            return [*before, attempt]
    raise ConflictError(f"{run.location}: {CLAIM_TRIES} claims lost in a row to other processes that train this run")


def next_number(attempts: Sequence[Attempt]) -> int:
    """Return the number to claim after these attempts, oldest first."""
    return attempts[-1].number + 1 if attempts else 1


def record_start(run: Run, attempt: Attempt) -> None:
    """Record where a claimed `attempt` has chosen to start; raises like `ensure_owner`."""
    key = run.key("attempts", _start_file(attempt))
    run.storage.create(key, with_checksum(asdict(attempt)))
    try:
        ensure_owner(run, attempt)
    except SupersededError:
        run.storage.delete(key)  # or it would be left of a run that was deleted meanwhile
        raise


def ensure_owner(run: Run, attempt: Attempt) -> None:
    """Raise `SupersededError`, before a commit or a deletion, if a newer attempt has begun or the run is gone."""
    run.storage.refresh(run.key("attempts"))
    if run.storage.exists(_key(run, attempt.number + 1)) and (attempts := read_attempts(run)):
        raise _superseded(attempts[-1])  # or else it has just been deleted
    claimed = read_if_exists(lambda: _read_attempt(run, f"{attempt.number:04d}.json"))
    if not claimed or claimed.nonce != attempt.nonce:
        raise _deleted(run, attempt)


def is_of_newest_driver(run: Run, attempt: Attempt) -> bool:
    """Return True if the run's newest attempt is of the driver that made `attempt`: another group of its workers."""
    newest = read_attempts(run)[-1:]
    return any((each.owner, each.driver) == (attempt.owner, attempt.driver) for each in newest)


@dataclass(frozen=True)
class FatalError:
    """The error that ended an attempt for good."""

    type: str
    message: str
    time: Moment


def record_error(run: Run, attempt: int, error: Exception) -> None:
    """Record the error that ended an attempt for good: later starts of the same job refuse to train."""
    ended = FatalError(type(error).__name__, str(error), time.time())
    run.storage.write(run.key("attempts", f"{attempt:04d}-error.json"), with_checksum(asdict(ended)))


def read_error(run: Run, attempt: int) -> Exception | None:
    """Return the error recorded for an attempt, as an exception of its class; raises `DamageError`."""
    ended = read_if_exists(lambda: read_verified(run, FatalError, "attempts", f"{attempt:04d}-error.json"))
    return by_name(ended.type)(ended.message) if ended else None


def _superseded(newest: Attempt) -> SupersededError:
    return SupersededError(
        f"attempt {newest.number} of {Owner.parse(newest.owner).describe()} owns the run since {as_time(newest.time)}; "
        "this process has ended, and its retries will not claim the run again. To take the run back, start it again, "
        "or submit it with --take-over"
    )


def _deleted(run: Run, attempt: Attempt) -> SupersededError:
    return SupersededError(f"{run.location} was deleted while attempt {attempt.number} trained; this process has ended")


def _key(run: Run, number: int) -> str:
    return run.key("attempts", f"{number:04d}.json")


def _start_file(attempt: Attempt) -> str:
    """Return the file of `attempts/` that records where a claimed attempt has chosen to start."""
    return f"{attempt.number:04d}-start-{attempt.nonce}.json"


def _list_files(run: Run) -> dict[str, str]:
    """Return the files of `attempts/`, and the version of each."""
    return {file: entry.version for file, entry in run.entries("attempts")}


def newest_number(run: Run) -> int:
    """Return the number of the newest attempt; 0 before the first."""
    return max(map(_number_of, filter(CLAIM.fullmatch, _list_files(run))), default=0)


def _number_of(file: str) -> int:
    """Return the attempt that claimed its number with this file."""
    return int(file.removesuffix(".json"))


def fatal_error(claimant: Claimant, attempts: list[Attempt] | None = None) -> Exception | None:
    """Return what ended for good what this owner, or this start of its driver, may do in the run; None: nothing.

    `attempts` are those of the run, if they have just been read.
    """
    run, owner = claimant.run, claimant.owner
    attempts = read_attempts(run) if attempts is None else attempts
    try:
        refuse_if_superseded(attempts, owner, claimant.driver)
        refuse_if_deleted(run)
        if claimant.driver and not attempts and not newest_status(list_statuses(run), claimant.driver):
            raise SupersededError(f"{run.location} was deleted while this job trained it, or was about to")
    except ConflictError as error:
        return error
    return read_error(run, attempts[-1].number) if attempts and attempts[-1].owner == owner else None
