"""The checkpoints of a run.

A checkpoint is committed if its directory contains `manifest.json`, which is written last and deleted first. It is
intact if the size and SHA-256 of every file match the manifest. A file need not be read if storage still reports the
version that was recorded at the commit, because the file is then unchanged.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from sunspot.background import AT_ONCE, map_parallel
from sunspot.errors import DamageError, NotFoundError, OutsideStorageError, SupersededError
from sunspot.formatting import in_words
from sunspot.metric_names import HELD_OUT
from sunspot.run import Run
from sunspot.run.attempts import (
    Attempt,
    Span,
    attempt_of,
    ensure_owner,
    label_of,
    lineage,
    read_attempts,
    recorded_number,
    recorded_setting,
    step_of,
)
from sunspot.run.objects import (
    CHECKPOINT,
    CheckpointName,
    Count,
    Int64,
    Timestamp,
    is_count,
    parse_verified,
    read,
    read_content,
    read_if_exists,
    with_checksum,
)
from sunspot.run.shards import find_gaps
from sunspot.storage import open_storage
from sunspot.storage.base import Entry
from sunspot.storage.local import local_path

MANIFEST = "manifest.json"

ABANDONED_S = 24 * 3600
"""Seconds without a write after which an incomplete checkpoint counts as abandoned. Until then, a live process might
still complete the checkpoint. S3 does not list a file until its upload is complete, but no upload takes a day, and
no failing commit is retried for a day."""

SINCE_BEST = "evaluations_since_best"
"""The checkpoint metric that counts evaluations since the best one, if EARLY_STOP_EVALUATIONS is set."""

NAN_SINCE = "nan_since"
"""The checkpoint metric with the step since which the loss or the weights have not been finite.

It is the first step of the metric window in which this was detected.
"""

NAN_WINDOWS = "nan_windows"
"""The checkpoint metric that counts consecutive metric windows that ended with a loss that is not finite."""

NAN_WEIGHTS = "nan_weights"
"""The checkpoint metric that is 1 if the weights are not finite."""

NAN_ACCEPTED = "nan_accepted"
"""The checkpoint metric that is 1 if the run began with infinite weights. The run then does not check its weights."""

FILES_AT_ONCE = 2
"""Number of a checkpoint's files to read in parallel. Each read occupies a core for the SHA-256, and needs memory."""

Directories = Mapping[str, Mapping[str, Entry]]
"""A mapping from the name of each checkpoint directory to its files (`list_directories`)."""

Inspect = Callable[["Checkpoint", Mapping[str, Entry]], list[str]]
"""A function that returns a checkpoint's faults, given its manifest and its directory listing."""


class Unusable(StrEnum):
    """The reasons why training cannot continue from a checkpoint."""

    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    NOT_FINITE = "not finite"
    GONE = "gone"


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that was skipped because it cannot be used or no longer exists."""

    name: str
    kind: Unusable
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}, {self.why}"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, as described by its manifest."""

    name: CheckpointName
    step: Count
    "The number of optimizer steps taken."
    epoch: Count
    "The epoch of the last step, counted from 1."
    steps_per_epoch: Count
    total_steps: Count
    "The number of steps planned for the whole run at the time of the commit."
    attempt: Count
    metrics: dict[str, Int64 | float | None] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    "A mapping from file names to their `size` in bytes, `sha256` and `version` at the commit (`Entry.version`)."
    time: Timestamp = field(default_factory=time.time)
    evaluated: bool = True
    "False if the checkpoint ends an epoch that has not been evaluated yet."
    stopped_early: bool = False
    "True if the run ended early at this checkpoint, because evaluations did not improve."
    damage: str = ""
    "The reason why the manifest cannot be used, or an empty string if it can."

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(file["size"] for file in self.files.values())

    @property
    def finite(self) -> bool:
        """True if the weights are finite, or were not checked because of MAX_NAN_WINDOWS=0."""
        return not self.metrics.get(NAN_WEIGHTS)

    @property
    def finished(self) -> bool:
        """True if this checkpoint completed the run, according to the plan at the time of the commit."""
        return self.evaluated and (self.step >= self.total_steps or self.stopped_early)

    def completes(self, total_steps: int, early_stop: int) -> bool:
        """Return True if this checkpoint completes a run of `total_steps`, or ends it early (`is_out_of_patience`)."""
        return self.evaluated and (self.step >= total_steps or is_out_of_patience(self.metrics, early_stop))


def is_out_of_patience(metrics: Mapping[str, Any], early_stop: int) -> bool:
    """Return True if the best evaluation was at least `early_stop` evaluations ago, unless `early_stop` is 0."""
    return 0 < early_stop <= int(metrics.get(SINCE_BEST) or 0)


def write_manifest(run: Run, checkpoint: Checkpoint) -> None:
    """Commit a checkpoint by writing its manifest."""
    record = {name: value for name, value in asdict(checkpoint).items() if name != "damage"}
    run.storage.write(_key(run, checkpoint.name, MANIFEST), with_checksum(record))


def list_directories(run: Run) -> dict[str, dict[str, Entry]]:
    """Return a mapping from the name of each checkpoint directory, committed or not, to its files."""
    found: dict[str, dict[str, Entry]] = {}
    for path, entry in run.entries("checkpoints"):
        name, _, file = path.partition("/")
        if CHECKPOINT.fullmatch(name):
            found.setdefault(name, {})[file] = entry
    return found


def list_checkpoints(run: Run, directories: Directories | None = None) -> list[Checkpoint]:
    """Return all committed checkpoints, sorted by step. If a manifest cannot be used, `damage` is set."""
    directories = list_directories(run) if directories is None else directories
    names = [name for name, files in directories.items() if MANIFEST in files]
    found = map_parallel(lambda name: read_manifest(run, name), by_step(names))
    return [checkpoint for checkpoint in found if checkpoint]


def by_step(names: Iterable[str]) -> list[str]:
    """Return checkpoint names sorted by step."""
    return sorted(names, key=lambda name: (step_of(name), attempt_of(name)))


def leads_to_newest(name: str, spans: list[Span]) -> bool:
    """Return True if a checkpoint is in the lineage `spans`. Late commits of superseded attempts are not in it."""
    label, step = label_of(name), step_of(name)
    return any(span.label == label and span.reaches(span.attempt, step) for span in spans)


def may_commit(name: str, attempt: Attempt, attempts: list[Attempt]) -> bool:
    """Return True if rank 0 of `attempt` is allowed to commit the attempt's checkpoint `name`.

    A commit is allowed if the same process is also rank 0 of each later attempt, and the newest attempt builds on the
    checkpoint (docs/decisions/0010-commits-outlive-changes-in-place.md). `attempts` are all attempts of the run.
    """
    committer = attempt.metadata.processes[:1]
    later_attempts = [later for later in attempts if later.number > attempt.number]
    same = all((later.owner, later.metadata.processes[:1]) == (attempt.owner, committer) for later in later_attempts)
    return same and (bool(committer) or not later_attempts) and leads_to_newest(name, lineage(attempts))


def ensure_committer(run: Run, attempt: Attempt, name: str) -> Attempt:
    """Return the newest attempt if rank 0 of `attempt` is allowed to commit the checkpoint `name` (`may_commit`).

    Raises `SupersededError` if the commit is not allowed. Call this before the commit, and before deleting any other
    checkpoint. Do not delete a checkpoint until the returned attempt has chosen where it starts (`Attempt.chosen`).
    """
    try:
        ensure_owner(run, attempt)
        return attempt
    except SupersededError:
        attempts = read_attempts(run)
        if not may_commit(name, attempt, attempts):
            raise
        return attempts[-1]


def classify(directories: Directories, spans: list[Span]) -> tuple[list[str], list[str], list[str]]:
    """Return three lists of names, sorted by step: checkpoints in the lineage, superseded ones, and incomplete ones."""
    committed = by_step(name for name, files in directories.items() if MANIFEST in files)
    counted = [name for name in committed if leads_to_newest(name, spans)]
    superseded = [name for name in committed if not leads_to_newest(name, spans)]
    return counted, superseded, by_step(directories.keys() - set(committed))


def why_abandoned(
    name: str, files: Mapping[str, Entry], attempts: list[Attempt], now: float, committed: int = 0
) -> str:
    """Return why an incomplete checkpoint will never be completed, or an empty string if it still might be.

    If an older attempt's checkpoint is not in the lineage, the checkpoint is abandoned. Any other checkpoint is
    abandoned once a later step has been committed, or once no file has been written for ABANDONED_S seconds. Until
    then, even a superseded process can still write the manifest.

    `committed` is the newest step that the current committer (`ensure_committer`) has committed, or 0. `now` is in
    seconds since the epoch.
    """
    if attempt_of(name) < attempts[-1].number and not leads_to_newest(name, lineage(attempts)):
        return "its attempt is superseded"
    if step_of(name) < committed:
        return f"step {committed} has been committed since"
    age = now - max(entry.modified for entry in files.values())
    return f"untouched for {in_words(age)}" if age > ABANDONED_S else ""


def in_lineage(checkpoints: list[Checkpoint], spans: list[Span]) -> list[Checkpoint]:
    """Return the checkpoints that the newest attempt builds on."""
    return [checkpoint for checkpoint in checkpoints if leads_to_newest(checkpoint.name, spans)]


def read_manifest(run: Run, name: str) -> Checkpoint | None:
    """Return a checkpoint, or None if it does not exist. `damage` is set if its manifest cannot be used."""
    try:
        checkpoint: Checkpoint = parse_verified(
            Checkpoint, read_content(run.storage, _key(run, name, MANIFEST)), MANIFEST
        )
        if (checkpoint.name, checkpoint.step, checkpoint.attempt) != (name, step_of(name), attempt_of(name)):
            raise DamageError(f"{MANIFEST} cannot be used: it describes a different checkpoint")
        files = checkpoint.files.values()
        if not files or not all(is_count(file.get("size")) and isinstance(file.get("sha256"), str) for file in files):
            raise DamageError(f"{MANIFEST} cannot be used: it lists no files, or a file without a size or SHA-256")
        outside = [file for file in checkpoint.files if not is_file_name(file)]
        if outside:
            raise DamageError(
                f"{MANIFEST} cannot be used: it lists {outside[0]!r}, which is not a valid name for a checkpoint file"
            )
        return checkpoint
    except NotFoundError:
        return None
    except DamageError as error:
        return Checkpoint(name, step_of(name), 0, 0, 0, attempt_of(name), damage=str(error))


def is_file_name(name: str) -> bool:
    """Return True if `name` is a relative path that stays inside its folder."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def find_faults(run: Run, checkpoint: Checkpoint, listed: Mapping[str, Entry] | None = None) -> list[str]:
    """Return a line for each fault of a checkpoint. The list is empty if every byte matches the manifest.

    `listed` contains the checkpoint's files as returned by `list_directories`. If it is given, only files whose version
    has changed since the commit are read. A version changes if the file is rewritten or the run is copied. Without
    `listed`, also checks that the parts of a sharded checkpoint contain each value exactly once.
    """
    if checkpoint.damage:
        return [checkpoint.damage]

    def find(file: str) -> list[str]:
        if listed is not None:
            fault = _fault_in_listing(checkpoint, file, listed)
            if fault:
                return [fault]
            if listed[file].version == checkpoint.files[file].get("version"):
                return []
        return compare_bytes(run, checkpoint, file)

    found = [fault for faults in map_parallel(find, checkpoint.files, FILES_AT_ONCE) for fault in faults]
    return found or (find_gaps(run, checkpoint) if listed is None else [])


def find_faults_in_listing(checkpoint: Checkpoint, listed: Mapping[str, Entry]) -> list[str]:
    """Return the faults of a checkpoint that can be found without reading its files."""
    if checkpoint.damage:
        return [checkpoint.damage]
    return [fault for file in checkpoint.files if (fault := _fault_in_listing(checkpoint, file, listed))]


def is_unchanged(checkpoint: Checkpoint, listed: Mapping[str, Entry]) -> bool:
    """Return True if, according to storage, no file has been written since the commit."""
    files = checkpoint.files.items()
    return all(file in listed and listed[file].version == each.get("version") for file, each in files)


def _fault_in_listing(checkpoint: Checkpoint, file: str, listed: Mapping[str, Entry]) -> str:
    expected = checkpoint.files[file]["size"]
    if file not in listed:
        return f"{file} is missing"
    return "" if listed[file].size == expected else f"{file} has {listed[file].size} bytes instead of {expected}"


def compare_bytes(
    run: Run, checkpoint: Checkpoint, file: str, copy: Callable[[bytes | bytearray], Any] | None = None
) -> list[str]:
    """Compare a file with the manifest. Return a list with the problem found, or an empty list if the file is intact.

    If `copy` is given, it is called with each chunk of the file's bytes.
    """
    expected = checkpoint.files[file]
    try:
        size, sha256 = run.storage.digest(_key(run, checkpoint.name, file), copy)
    except NotFoundError:
        return [f"{file} is missing"]
    except OutsideStorageError as error:
        return [str(error)]
    if size != expected["size"]:
        return [f"{file} has {size} bytes instead of {expected['size']}"]
    if sha256 != expected["sha256"]:
        return [f"{file} has SHA-256 {sha256[:12]}... instead of {expected['sha256'][:12]}..."]
    return []


def verify(
    run: Run, names: Sequence[str], directories: Directories | None = None, inspect: Inspect | None = None
) -> list[tuple[Checkpoint, list[str]]]:
    """Return each checkpoint with its faults. Checkpoints that are deleted in the meantime are omitted.

    Without `directories`, every byte is read, one checkpoint at a time. With `directories`, only files that have
    changed since the commit are read. If `inspect` is also given, it is called instead of `find_faults`.
    """

    def check(name: str) -> tuple[Checkpoint, list[str]] | None:
        checkpoint = read_manifest(run, name)
        if checkpoint is None:
            return None
        listed = None if directories is None else directories[name]
        faults = inspect(checkpoint, listed) if inspect and listed else find_faults(run, checkpoint, listed)
        return (checkpoint, faults) if not faults or run.storage.exists(_key(run, name, MANIFEST)) else None

    checked = map_parallel(check, names, 1 if directories is None else AT_ONCE)
    return [each for each in checked if each]


def find_newest_good(
    run: Run, attempts: list[Attempt], trust_listing: bool = False, inspect: Inspect | None = None
) -> tuple[Checkpoint | None, tuple[SkippedCheckpoint, ...]]:
    """Return the newest intact checkpoint of the run's lineage, and the skipped newer checkpoints, newest first.

    Checkpoints with weights that are not finite are skipped too, unless all intact checkpoints have such weights. If
    `inspect` is given, it is called instead of `find_faults`.

    With `trust_listing`, files with an unchanged version are not read. The returned checkpoint may then be displayed,
    but must not be loaded.
    """
    inspect = inspect or (lambda found, listed: find_faults(run, found, listed if trust_listing else None))
    spans = lineage(attempts)
    directories = list_directories(run)
    skipped: list[SkippedCheckpoint] = []
    not_finite: tuple[Checkpoint, tuple[SkippedCheckpoint, ...]] | None = None
    for name in reversed(by_step(name for name in directories if leads_to_newest(name, spans))):
        if MANIFEST not in directories[name]:
            skipped.append(SkippedCheckpoint(name, Unusable.INCOMPLETE, "it has no manifest"))
            continue
        checkpoint = read_manifest(run, name)
        if checkpoint is None:  # deleted since it was listed
            continue
        faults = inspect(checkpoint, directories[name])
        if faults:
            skipped.append(SkippedCheckpoint(name, Unusable.DAMAGED, "; ".join(faults)))
        elif checkpoint.finite:
            return checkpoint, tuple(skipped)
        else:
            not_finite = not_finite or (checkpoint, tuple(skipped))
            skipped.append(SkippedCheckpoint(name, Unusable.NOT_FINITE, "some of its weights are NaN or infinite"))
    return not_finite or (None, tuple(skipped))


class Retention(NamedTuple):
    """The rules that decide which checkpoints a run keeps besides the newest."""

    keep: int
    "The number of best checkpoints to keep."
    metric: str
    "The metric that ranks the checkpoints."
    order: str
    "`min` if lower values are better, or `max`."


def retention(attempts: list[Attempt]) -> Retention:
    """Return the newest attempt's CHECKPOINTS_TO_KEEP, CHECKPOINT_METRIC and CHECKPOINT_ORDER."""
    return Retention(
        keep=int(recorded_number(attempts, "checkpoints_to_keep")),
        metric=recorded_setting(attempts, "checkpoint_metric"),
        order=recorded_setting(attempts, "checkpoint_order"),
    )


def ranking_metric(checkpoints: Iterable[Checkpoint], metric: str) -> str:
    """Return the held-out variant of `metric` if any checkpoint has it. Otherwise, return `metric` itself."""
    held_out = f"{HELD_OUT}{metric}"
    return held_out if any(held_out in checkpoint.metrics for checkpoint in checkpoints) else metric


def best_first(checkpoints: list[Checkpoint], metric: str, order: str) -> list[Checkpoint]:
    """Return the checkpoints sorted by `metric`, best first. If metrics are equal, the latest step comes first.

    `order` is `min` or `max`. Checkpoints without a finite value of the metric follow, and checkpoints with weights
    that are not finite come last.
    """
    sign = 1 if order == "min" else -1

    def badness(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        value = checkpoint.metrics.get(metric)
        number = sign * value if value is not None and math.isfinite(value) else math.inf
        return not checkpoint.finite, number, -checkpoint.step

    return sorted(checkpoints, key=badness)


def expired(checkpoints: list[Checkpoint], keep: int, metric: str, order: str) -> list[Checkpoint]:
    """Return the checkpoints to delete, given all checkpoints sorted by step.

    The newest, the newest with finite weights, and the `keep` best are kept.
    """
    finite = [checkpoint for checkpoint in checkpoints if checkpoint.finite]
    best = best_first(checkpoints, ranking_metric(checkpoints, metric), order)[:keep]
    kept = [*best, *checkpoints[-1:], *finite[-1:]]
    return [checkpoint for checkpoint in checkpoints if checkpoint not in kept]


def delete_checkpoint(run: Run, name: str) -> None:
    """Delete a checkpoint, manifest first, so that an interrupted deletion leaves no committed checkpoint."""
    run.storage.delete(_key(run, name, MANIFEST))
    run.storage.delete_many([entry.key for entry in run.storage.list(run.key("checkpoints", name))])


def _key(run: Run, name: str, file: str) -> str:
    return run.key("checkpoints", name, file)


def choose(run: Run, which: str) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint, and notes for the user, for example about checkpoints that were passed over.

    `which` is a checkpoint's name, or 'newest' or 'best' for the newest or best intact checkpoint. Raises
    `NotFoundError` if there is no such checkpoint, and `DamageError` if no checkpoint is intact.
    """
    if which not in ("newest", "best"):
        refuse_if_absent(run, which, list_directories(run))
        named = read_manifest(run, which)
        if named is None:
            raise NotFoundError(f"{run.storage.locate(run.key('checkpoints', which))} was just deleted")
        return named, []
    notes: list[str] = []
    attempts = read_attempts(run)
    if which == "newest":
        chosen, passed_over = find_newest_good(run, attempts, trust_listing=True)
    else:
        directories = list_directories(run)
        names, _, _ = classify(directories, lineage(attempts))
        _, metric, order = retention(attempts)
        checked = verify(run, names, directories)
        intact = [checkpoint for checkpoint, faults in checked if not faults]
        ranked = best_first(intact, ranking_metric(intact, metric), order)
        chosen = ranked[0] if ranked else None
        passed_over = tuple(
            SkippedCheckpoint(c.name, Unusable.DAMAGED, "; ".join(faults)) for c, faults in checked if faults
        )
        if chosen and metric not in chosen.metrics:
            notes.append(f"no checkpoint has the metric {metric} (SUNSPOT_CHECKPOINT_METRIC); the newest one is used")
    notes += [f"passed over {each}" for each in passed_over]
    if chosen:
        return chosen, notes
    if any(each.kind is Unusable.DAMAGED for each in passed_over):
        raise DamageError(f"{run.location}: no checkpoint is intact: {'; '.join(map(str, passed_over))}")
    raise NotFoundError(f"{run.location}: no checkpoint yet")


def refuse_if_absent(run: Run, name: str, directories: Directories) -> None:
    """Raise `NotFoundError` if `name` is not a checkpoint in the run's lineage. The message gives the reason."""
    counted, superseded, incomplete = classify(directories, lineage(read_attempts(run)))
    location = run.storage.locate(run.key("checkpoints", name))
    if name in superseded:
        raise NotFoundError(
            f"{location} will not be used: it was written by a superseded attempt, and the newest attempt does not "
            "build on it"
        )
    if name in incomplete:
        raise NotFoundError(f"{location} is incomplete and will not be used: it has no {MANIFEST}")
    if name not in counted:
        raise NotFoundError(f"{location}: no such checkpoint; `sunspot checkpoints ls {run.name}` shows which exist")


@dataclass(frozen=True)
class CheckpointDirectory(Run):
    """A checkpoint directory outside its run. It can be a copy, and can have any name."""

    def key(self, *parts: str) -> str:
        """Return the storage key of one of the checkpoint's files.

        `parts` are those of a key in a run: `checkpoints`, a checkpoint's name, and the file's name. Only the file's
        name is used.
        """
        return "/".join(part for part in (self.name, *parts[2:]) if part)


@dataclass(frozen=True)
class ManifestName:
    """The field of a manifest that names the checkpoint."""

    name: CheckpointName


def open_directory(location: str) -> tuple[Run, Checkpoint]:
    """Return the checkpoint at a path or URL. Raises `NotFoundError` if the directory has no manifest."""
    # A symlink given by the user is followed.
    location = location.rstrip("/") if "://" in location else os.path.realpath(local_path(location))
    parent, _, name = location.rpartition("/")
    directory = CheckpointDirectory(open_storage(parent or "/"), name)
    named = read_if_exists(lambda: read(directory, ManifestName, "checkpoints", name, MANIFEST))
    checkpoint = read_manifest(directory, named.name) if named else None
    if checkpoint is None:
        raise NotFoundError(f"{location} has no {MANIFEST}, so it is either incomplete or not a checkpoint")
    return directory, checkpoint
