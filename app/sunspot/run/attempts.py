"""Attempts determine which process owns a run, and which steps are in the run's lineage (`lineage`).

Each worker group claims the next number in `attempts/` with a conditional write when it starts. The newest attempt owns
the run. No lease is needed, because an older attempt checks for a newer one before each commit or deletion. (If the
same process is rank 0 of both attempts, it can still complete the older attempt's commit: see
`checkpoints.ensure_committer`.) The new attempt chooses its starting checkpoint only after its claim, so the older
attempt cannot delete that checkpoint. An attempt that has not chosen its starting checkpoint is not in the lineage.

Each claim has a nonce. A run can be deleted and started again under the same name, and both runs then have an attempt
with the same number. Names of checkpoints and audit folders contain the nonce, so a process of the deleted run never
overwrites the new run's objects.
"""

import contextlib
import functools
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    SmallCount,
    Timestamp,
    read_if_exists,
    read_verified,
    with_checksum,
)
from sunspot.run.owner import Owner
from sunspot.run.requests import read_submissions, refuse_if_deleted
from sunspot.run.status import list_statuses, newest_status

log = logging.getLogger(__name__)

CLAIM = re.compile(r"(0[0-9]{3}|[1-9][0-9]{3,8})\.json")
"""Pattern for the names of the files in `attempts/` that claim a number."""

MAX_ATTEMPTS_CACHED = 10_000
"""Maximum number of attempts, over all runs, that a process keeps in memory. Each attempt takes a few kB."""

IN_PLACE = "in place"
"""The tier of an attempt whose workers continue with the state that they already have."""

CLAIM_TRIES = 20
"""Number of consecutive claims that a process can lose to other processes before it raises an error."""


@dataclass(frozen=True)
class Metadata:
    """The worker group of an attempt, with its settings and versions."""

    settings: dict[str, str] = field(default_factory=dict)
    "Values of the settings, keyed by environment variable."
    versions: dict[str, str] = field(default_factory=dict)
    host: str = ""
    "The host of rank 0."
    nodes: dict[str, str] = field(default_factory=dict)
    "The host of each rank."
    processes: tuple[str, ...] = ()
    "A unique ID of each rank's process."
    groups: dict[str, str] = field(default_factory=dict)
    "The node group of each host, if the cluster names the group."
    world_size: SmallCount = 0
    driver: str = ""
    "The ID of the driver that the attempt's workers belong to (`status.new_driver`)."
    after: tuple[str, ...] = ()
    "The IDs of the drivers that began before this driver."
    tier: str = ""
    "The source of the state: in place, memory, storage or beginning. Empty before the attempt has chosen one."


@dataclass(frozen=True)
class Attempt:
    """One start of a worker group, as recorded in `attempts/NNNN.json`."""

    number: Count
    owner: str
    "The job or process that trains. All attempts of a job have the same owner."
    starts_from: CheckpointName | None
    "The name of the checkpoint that the attempt starts from, or None if it starts from scratch."
    step: Count
    "The number of optimizer steps taken before that checkpoint."
    skipped: tuple[str, ...] = ()
    "Newer checkpoints that could not be used, with the reasons."
    time: Timestamp = field(default_factory=time.time)
    "Seconds since the epoch."
    metadata: Metadata = Metadata()
    nonce: Annotated[str, Predicate(re.compile("([0-9a-f]{8})?").fullmatch)] = ""
    "Random digits that are unique to this claim (`new_nonce`)."
    chosen: bool = True
    "False if the attempt has not chosen its starting checkpoint yet."

    @property
    def driver(self) -> str:
        """The ID of the driver that the attempt's workers belong to."""
        return self.metadata.driver

    @property
    def label(self) -> str:
        """A label for the objects that the attempt writes, unique even among deleted runs of the same name."""
        return attempt_label(self.number, self.nonce)

    def starting_from(self, name: CheckpointName | None, tier: str, skipped: tuple[str, ...] = ()) -> "Attempt":
        """Return a copy of this attempt that starts from checkpoint `name`, or from scratch if `name` is None."""
        metadata = replace(self.metadata, tier=tier)
        step = step_of(name) if name else 0
        return replace(self, starts_from=name, step=step, skipped=skipped, metadata=metadata, chosen=True)


def recorded_setting(attempts: Sequence[Attempt], name: str) -> str:
    """Return a setting's value in the newest attempt, or its default. `name` is one of `FIELDS`."""
    from sunspot.settings import FIELDS, PREFIX  # pydantic is slow to import, and most verbs do not need it

    recorded = attempts[-1].metadata.settings if attempts else {}
    return str(recorded.get(PREFIX + name.upper(), FIELDS[name].default))


def recorded_multiple(attempts: Sequence[Attempt]) -> int:
    """Return how many workers hold one replica of the model under PARALLEL=hsdp, or 1 without hsdp.

    The number is read from the newest attempt. Raises `DamageError` if the recorded value is not a number.
    """
    replicated = recorded_setting(attempts, "parallel") == "hsdp"
    return max(1, int(recorded_number(attempts, "shard_degree"))) if replicated else 1


def recorded_number(attempts: Sequence[Attempt], name: str) -> float:
    """Return a setting's value in the newest attempt as a number. Raises `DamageError` if it is not a number."""
    text = recorded_setting(attempts, name)
    with contextlib.suppress(ValueError):
        number = float(text)
        if abs(number) <= MAX_NUMBER:
            return number
    raise DamageError(f"attempt {attempts[-1].number} cannot be used: its {name.upper()}={text[:100]} is not a number")


class Span(NamedTuple):
    """The steps of an attempt that are in the run's lineage.

    The steps begin after step `after`, and end with step `upto`, or with the attempt's last step if `upto` is None.
    """

    attempt: int
    after: int
    upto: int | None
    nonce: str = ""

    @property
    def label(self) -> str:
        """The attempt's label (`Attempt.label`)."""
        return attempt_label(self.attempt, self.nonce)

    def holds(self, attempt: int, step: int) -> bool:
        """Return True if the span contains `step` of `attempt`."""
        return self.after < step and self.reaches(attempt, step)

    def reaches(self, attempt: int, step: int) -> bool:
        """Return True if the span contains `step` of `attempt`, or starts right after this step.

        In both cases, `attempt` can evaluate the model at `step`.
        """
        return attempt == self.attempt and self.after <= step and (self.upto is None or step <= self.upto)


def read_attempts(run: Run) -> list[Attempt]:
    """Return all attempts, oldest first. Raises `DamageError`, with a fix, if an attempt cannot be used."""
    files = _list_files(run)

    def read_one(file: str) -> Attempt:
        try:
            return _read_chosen(run, file, files)
        except DamageError as error:
            number = _number_of(file)
            raise DamageError(
                f"{error}. The file should record attempt {number}: restore the file, or start the run once with "
                f"SUNSPOT_ACCEPT={_loss_of(number)} to give up the steps of this attempt"
            ) from error

    found = map_parallel(read_one, filter(CLAIM.fullmatch, files))
    return sorted(found, key=lambda attempt: attempt.number)


def give_up_damaged(run: Run, environment: Mapping[str, str]) -> None:
    """Give up damaged attempts, if the setting ACCEPT in `environment` accepts their loss.

    Each of these attempts is replaced by a claim without steps. The attempt's number stays taken, so its objects cannot
    be mistaken for those of a later attempt.
    """
    from sunspot.settings import accepts  # pydantic is slow to import, and most verbs do not need it

    files = _list_files(run)
    for file in filter(CLAIM.fullmatch, files):
        number = _number_of(file)
        if accepts(environment, _loss_of(number)):
            try:
                _read_chosen(run, file, files)
            except DamageError as error:
                log.warning(f"giving up the steps of attempt {number}: {error}")
                nowhere = Attempt(number, "nobody", None, 0, nonce=new_nonce(), chosen=False)
                run.storage.write(run.key("attempts", file), with_checksum(asdict(nowhere)))


def _loss_of(number: int) -> str:
    """Return the value of ACCEPT that accepts the loss of an attempt."""
    return f"loss-of-{attempt_label(number)}"


def _read_chosen(run: Run, file: str, files: Mapping[str, str]) -> Attempt:
    """Return the attempt in a claim file, with the start point that it has chosen, if any.

    `files` maps the names of the files in `attempts/` to their versions.
    """
    claimed = _read_version(run, file, files[file])
    chosen = _start_file(claimed)
    return claimed if claimed.chosen or chosen not in files else _read_version(run, chosen, files[chosen])


@functools.lru_cache(MAX_ATTEMPTS_CACHED)
def _read_version(run: Run, file: str, version: str) -> Attempt:
    """Return the attempt that is stored in `file`.

    The result is cached, because each commit reads all attempts again.
    """
    return _read_attempt(run, file)


def _read_attempt(run: Run, file: str) -> Attempt:
    """Return the attempt stored in a file.

    Raises `DamageError` if the attempt belongs in a file with another name, or if its start step is inconsistent with
    the checkpoint that it starts from.
    """
    attempt = read_verified(run, Attempt, "attempts", file)
    place = run.storage.locate(run.key("attempts", file))
    if file not in (f"{attempt.number:04d}.json", _start_file(attempt)):
        raise DamageError(
            f"{place} cannot be used: it is the record of attempt {attempt.number} {attempt.nonce}".rstrip()
        )
    origin = attempt.starts_from
    if (step_of(origin) if origin else 0) != attempt.step or (origin and attempt_of(origin) >= attempt.number):
        raise DamageError(
            f"{place} cannot be used, because attempt {attempt.number} cannot start at step {attempt.step} from "
            f"{origin or 'scratch'}"
        )
    return attempt


def attempts_with_start(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts that have chosen where to start."""
    return [attempt for attempt in attempts if attempt.chosen]


def lineage(attempts: list[Attempt]) -> list[Span]:
    """Return the run's lineage: the newest attempt's span of steps, and the earlier spans on which it builds.

    The newest span comes first. Attempts that have not chosen where to start are ignored. If attempt n starts from a
    checkpoint of attempt m, the steps of m up to that checkpoint are in the lineage. Later steps of m are not, even if
    they were committed after n began.
    """
    by_label = {attempt.label: attempt for attempt in attempts if attempt.chosen}
    spans = []
    current = next((attempt for attempt in reversed(attempts) if attempt.chosen), None)
    upto = None
    while current:
        spans.append(Span(current.number, current.step, upto, current.nonce))
        upto = current.step
        current = by_label.get(label_of(current.starts_from)) if current.starts_from else None
    return spans


def new_nonce() -> str:
    """Return eight random hexadecimal digits. More are not needed, because few claims share a run name and number."""
    return uuid.uuid4().hex[:8]


def attempt_label(number: int, nonce: str = "") -> str:
    """Return the label of an attempt (`Attempt.label`)."""
    return f"attempt-{number:04d}" + (f"-{nonce}" if nonce else "")


def checkpoint_name(step: int, attempt: int, nonce: str = "") -> str:
    """Return the name of a checkpoint. It is unique, because an attempt takes each step once."""
    return f"step-{step:08d}-{attempt_label(attempt, nonce)}"


def attempt_of(checkpoint: str) -> int:
    """Return the attempt number in a checkpoint's name."""
    return int(checkpoint.split("-")[3])


def step_of(checkpoint: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.split("-")[1])


def nonce_of(checkpoint: str) -> str:
    """Return the attempt's nonce in a checkpoint's name, or an empty string if the name contains no nonce."""
    return "".join(checkpoint.split("-")[4:])


def label_of(checkpoint: str) -> str:
    """Return the attempt's label in a checkpoint's name."""
    return checkpoint.split("-", 2)[2]


def refuse_if_superseded(attempts: list[Attempt], owner: str, driver: str = "") -> None:
    """Raise `SupersededError` if another owner has taken over the run. A takeover is final.

    The error is also raised if a later driver of the same job has replaced `driver`. The operator starts a new driver
    if the head does not answer, but the old driver might only be frozen.
    """
    if not attempts:
        return
    newest = attempts[-1]
    lost = newest.owner != owner and any(attempt.owner == owner for attempt in attempts)
    restarted = driver and newest.driver != driver and any(attempt.driver == driver for attempt in attempts)
    overtaken = driver and any(driver in attempt.metadata.after for attempt in attempts)
    if lost or restarted or overtaken:
        raise _superseded(newest)


def refuse_if_left(run: Run, attempts: list[Attempt], owner: str) -> None:
    """Raise `SupersededError` if this owner has never claimed the run, and must not claim it now.

    An owner must not claim the run if its RayJob was withdrawn, or was submitted before the RayJob of the newest
    attempt. Such a RayJob can still be running if its cluster did not answer when the RayJob should have been deleted.
    """
    own = Owner.parse(owner)
    if not own.place or any(attempt.owner == owner for attempt in attempts):
        return
    submitted = read_submissions(run)
    numbers = {(record.job, record.place): number for number, record in enumerate(submitted)}  # newest submissions
    mine = numbers.get((own.job, own.place))
    if mine is None:
        return  # another tool applied the RayJob
    if submitted[mine].withdrawn:
        raise SupersededError(f"{own.describe()} was withdrawn, because the run stays in its old place")
    newest = Owner.parse(attempts[-1].owner) if attempts else own
    if numbers.get((newest.job, newest.place), -1) > mine:
        raise _superseded(attempts[-1])


def claim(run: Run, attempts: list[Attempt], attempt: Attempt) -> bool:
    """Claim the run for `attempt`. Return False if its number is already taken.

    Raises `SupersededError` if the owner has lost the run, or if the run is being deleted.
    """
    refuse_if_superseded(attempts, attempt.owner, attempt.driver)
    refuse_if_left(run, attempts, attempt.owner)
    refuse_if_deleted(run)
    return run.storage.create(_key(run, attempt.number), with_checksum(asdict(attempt)))


def claim_next(run: Run, make: Callable[[list[Attempt]], Attempt | None]) -> list[Attempt]:
    """Call `make` with all attempts so far, and claim the attempt that it returns. Repeat if its number is taken.

    Returns all attempts, oldest first, including the new one, or an empty list if `make` returns None. Raises
    `ConflictError` after CLAIM_TRIES lost claims. Raises `SupersededError` if `claim` raises it, or if the run was
    deleted.
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
            refuse_if_deleted(run)  # a deletion can have begun, and removed the objects that these attempts refer to
            return [*before, attempt]
    raise ConflictError(f"{run.location}: other processes claimed the run first, {CLAIM_TRIES} times in a row")


def next_number(attempts: Sequence[Attempt]) -> int:
    """Return the next number to claim. `attempts` are sorted, oldest first."""
    return attempts[-1].number + 1 if attempts else 1


def record_start(run: Run, attempt: Attempt) -> None:
    """Record the start point chosen by a claimed `attempt`. Raises the same errors as `ensure_owner`."""
    key = run.key("attempts", _start_file(attempt))
    run.storage.create(key, with_checksum(asdict(attempt)))
    try:
        ensure_owner(run, attempt)
    except SupersededError:
        run.storage.delete(key)  # if the run has been deleted, no object must be left behind
        raise


def ensure_owner(run: Run, attempt: Attempt) -> None:
    """Raise `SupersededError` if a newer attempt has begun or the run was deleted.

    Call this before each commit and each deletion.
    """
    run.storage.refresh(run.key("attempts"))
    if run.storage.exists(_key(run, attempt.number + 1)):
        attempts = read_attempts(run)
        if attempts:  # empty if the run has just been deleted
            raise _superseded(attempts[-1])
    claimed = read_if_exists(lambda: _read_attempt(run, f"{attempt.number:04d}.json"))
    if not claimed or claimed.nonce != attempt.nonce:
        raise _deleted(run, attempt)


def is_of_newest_driver(run: Run, attempt: Attempt) -> bool:
    """Return True if the run's newest attempt belongs to the same driver as `attempt`."""
    newest = read_attempts(run)[-1:]
    return any((each.owner, each.driver) == (attempt.owner, attempt.driver) for each in newest)


@dataclass(frozen=True)
class FatalError:
    """The fatal error that ended an attempt."""

    type: str
    message: str
    time: Timestamp


def record_error(run: Run, attempt: int, error: Exception) -> None:
    """Record the fatal error that ended an attempt. Later drivers of the same job raise it instead of training."""
    ended = FatalError(type(error).__name__, str(error), time.time())
    run.storage.write(run.key("attempts", f"{attempt:04d}-error.json"), with_checksum(asdict(ended)))


def read_error(run: Run, attempt: int) -> Exception | None:
    """Return the fatal error that ended an attempt, or None. Raises `DamageError` if the error's record is damaged."""
    ended = read_if_exists(lambda: read_verified(run, FatalError, "attempts", f"{attempt:04d}-error.json"))
    return by_name(ended.type)(ended.message) if ended else None


def _superseded(newest: Attempt) -> SupersededError:
    owner = Owner.parse(newest.owner).describe()
    return SupersededError(
        f"attempt {newest.number} of {owner} has owned the run since {as_time(newest.time)}; "
        "this process has ended, and its retries will not claim the run again. To take the run back, start it again, "
        "or submit it with --take-over"
    )


def _deleted(run: Run, attempt: Attempt) -> SupersededError:
    return SupersededError(f"{run.location} was deleted while attempt {attempt.number} trained; this process has ended")


def _key(run: Run, number: int) -> str:
    return run.key("attempts", f"{number:04d}.json")


def _start_file(attempt: Attempt) -> str:
    """Return the name of the file that records where an attempt starts."""
    return f"{attempt.number:04d}-start-{attempt.nonce}.json"


def _list_files(run: Run) -> dict[str, str]:
    """Return a mapping from the names of the files in `attempts/` to their versions."""
    return {file: entry.version for file, entry in run.entries("attempts")}


def newest_number(run: Run) -> int:
    """Return the newest attempt's number, or 0 if there are no attempts."""
    return max(map(_number_of, filter(CLAIM.fullmatch, _list_files(run))), default=0)


def _number_of(file: str) -> int:
    return int(file.removesuffix(".json"))


def fatal_error(claimant: Claimant, attempts: list[Attempt] | None = None) -> Exception | None:
    """Return the error that prevents the claimant from training the run, or None.

    `attempts` are the run's attempts, if the caller has just read them.
    """
    run, owner = claimant.run, claimant.owner
    attempts = read_attempts(run) if attempts is None else attempts
    try:
        refuse_if_superseded(attempts, owner, claimant.driver)
        refuse_if_deleted(run)
        if claimant.driver and not attempts and not newest_status(list_statuses(run), claimant.driver):
            raise SupersededError(f"{run.location} was deleted while this job was training it or about to train it")
    except ConflictError as error:
        return error
    return read_error(run, attempts[-1].number) if attempts and attempts[-1].owner == owner else None
