"""The checkpoints of a run, and whether they are whole.

A checkpoint directory counts when it holds `manifest.json`, which is written last and deleted first. It is whole when
every file has the size and the SHA-256 the manifest lists. A file listed under the version it had when it was committed
has not been written since, which saves reading it.
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
    Moment,
    is_count,
    parse_verified,
    read,
    read_content,
    read_if_exists,
    with_checksum,
)
from sunspot.storage import open_storage
from sunspot.storage.base import Entry
from sunspot.storage.local import local_path

MANIFEST = "manifest.json"

ABANDONED_S = 24 * 3600
"""What a live process may have begun is left alone until it has been untouched for this long. In S3 a file shows only
when complete: no single one takes a day, nor does a commit that storage keeps refusing."""

SINCE_BEST = "evaluations_since_best"
"""In the metrics of a checkpoint: evaluations since the best one, if they may end the run (EARLY_STOP_EVALUATIONS)."""

NAN_SINCE = "nan_since"
"""Name in a checkpoint's metrics of the step since which loss or weights are not finite: the first step of the window
in which that was seen."""

NAN_WINDOWS = "nan_windows"
"""Name in a checkpoint's metrics of the number of windows in a row that ended with a loss that is not finite."""

NAN_WEIGHTS = "nan_weights"
"""Name in a checkpoint's metrics of a 1 if the weights are not finite."""

NAN_ACCEPTED = "nan_accepted"
"""Name in a checkpoint's metrics of a 1 if the run began with infinite weights, which are then not checked."""

FILES_AT_ONCE = 2
"""Files of a checkpoint that are read at once: SHA-256 takes a core for each, and storage memory."""

Directories = Mapping[str, Mapping[str, Entry]]
"""The files of each checkpoint directory, by its name (`list_directories`)."""

Inspect = Callable[["Checkpoint", Mapping[str, Entry]], list[str]]
"""Finds the faults of a checkpoint, given the listing of its directory."""


class Unusable(StrEnum):
    """Why a checkpoint cannot be gone on from."""

    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    NOT_FINITE = "not finite"
    GONE = "gone"


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that is not whole, or not there any more."""

    name: str
    kind: Unusable
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}, {self.why}"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: the content of its manifest."""

    name: CheckpointName
    step: Count
    "Optimizer steps taken."
    epoch: Count
    "The epoch, from 1, that its last step belongs to."
    steps_per_epoch: Count
    total_steps: Count
    "Steps of the whole run by its settings at the time."
    attempt: Count
    metrics: dict[str, Int64 | float | None] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    "For each file: `size` in bytes, `sha256`, and the `version` (`Entry.version`) it was committed with."
    time: Moment = field(default_factory=time.time)
    evaluated: bool = True
    "False: it ends an epoch that has not been evaluated."
    stopped_early: bool = False
    "Whether it ends the run before its last step, as evaluations did not improve."
    damage: str = ""
    "Why the manifest itself is unusable; empty when it is not."

    @property
    def bytes(self) -> int:
        return sum(file["size"] for file in self.files.values())

    @property
    def finite(self) -> bool:
        """Return True if the weights are finite, or were not checked (by older versions, or with MAX_NAN_WINDOWS=0)."""
        return not self.metrics.get(NAN_WEIGHTS)

    @property
    def finished(self) -> bool:
        """Whether it completes the run, as that was planned then."""
        return self.evaluated and (self.step >= self.total_steps or self.stopped_early)

    def completes(self, total_steps: int, early_stop: int) -> bool:
        """Return whether it completes a run of so many steps, or of `early_stop` evaluations without a better one."""
        return self.evaluated and (self.step >= total_steps or is_out_of_patience(self.metrics, early_stop))


def is_out_of_patience(metrics: Mapping[str, Any], early_stop: int) -> bool:
    """Return whether `early_stop` evaluations (0: any number) without a better one end the run."""
    return 0 < early_stop <= int(metrics.get(SINCE_BEST) or 0)


def write_manifest(run: Run, checkpoint: Checkpoint) -> None:
    """Commit: from here on the checkpoint exists."""
    record = {name: value for name, value in asdict(checkpoint).items() if name != "damage"}
    run.storage.write(_key(run, checkpoint.name, MANIFEST), with_checksum(record))


def list_directories(run: Run) -> dict[str, dict[str, Entry]]:
    """List the files of every checkpoint directory; one with MANIFEST is committed. Other folders are ignored."""
    found: dict[str, dict[str, Entry]] = {}
    for path, entry in run.entries("checkpoints"):
        name, _, file = path.partition("/")
        if CHECKPOINT.fullmatch(name):
            found.setdefault(name, {})[file] = entry
    return found


def list_checkpoints(run: Run, directories: Directories | None = None) -> list[Checkpoint]:
    """Return every committed checkpoint, by step; one with an unusable manifest has `damage`."""
    directories = list_directories(run) if directories is None else directories
    names = [name for name, files in directories.items() if MANIFEST in files]
    found = map_parallel(lambda name: read_manifest(run, name), by_step(names))
    return [checkpoint for checkpoint in found if checkpoint]


def by_step(names: Iterable[str]) -> list[str]:
    """Return names of checkpoints sorted by step."""
    return sorted(names, key=lambda name: (step_of(name), attempt_of(name)))


def leads_to_newest(name: str, spans: list[Span]) -> bool:
    """Return whether a checkpoint is on the way to the newest attempt; a late commit of a superseded one is not."""
    label, step = label_of(name), step_of(name)
    return any(span.label == label and span.reaches(span.attempt, step) for span in spans)


def may_commit(name: str, attempt: Attempt, attempts: list[Attempt]) -> bool:
    """Return True if rank 0 of `attempt` may commit the attempt's checkpoint `name`.

    `attempts` are those of the run. The process may commit as long as it is also rank 0 of each later attempt, and the
    checkpoint leads to the newest one (docs/decisions/0010-commits-outlive-changes-in-place.md).
    """
    committer = attempt.metadata.processes[:1]
    since = [later for later in attempts if later.number > attempt.number]
    same = all((later.owner, later.metadata.processes[:1]) == (attempt.owner, committer) for later in since)
    return same and (bool(committer) or not since) and leads_to_newest(name, lineage(attempts))


def ensure_committer(run: Run, attempt: Attempt, name: str) -> Attempt:
    """Return the newest attempt if rank 0 of `attempt` may commit the checkpoint `name` (`may_commit`).

    Call this before the commit, and before each deletion of another checkpoint. While the newest attempt has not chosen
    its start, nothing may be deleted. Raises `SupersededError` if the process may not commit.
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
    """Return the names, by step, of checkpoints that count, of superseded and of incomplete ones."""
    committed = by_step(name for name, files in directories.items() if MANIFEST in files)
    counted = [name for name in committed if leads_to_newest(name, spans)]
    superseded = [name for name in committed if not leads_to_newest(name, spans)]
    return counted, superseded, by_step(directories.keys() - set(committed))


def why_abandoned(
    name: str, files: Mapping[str, Entry], attempts: list[Attempt], now: float, committed: int = 0
) -> str:
    """Return why an incomplete checkpoint of these attempts will not be completed; empty while it may be.

    A superseded process can still write the manifest. If that would count, the files stay for a while, or until the
    process that may commit now (`ensure_committer`) has `committed` a later step. `now` is in seconds since the epoch.
    """
    if attempt_of(name) < attempts[-1].number and not leads_to_newest(name, lineage(attempts)):
        return "its attempt is superseded"
    if step_of(name) < committed:
        return f"step {committed} has been committed since"
    age = now - max(entry.modified for entry in files.values())
    return f"untouched for {in_words(age)}" if age > ABANDONED_S else ""


def in_lineage(checkpoints: list[Checkpoint], spans: list[Span]) -> list[Checkpoint]:
    """Return the checkpoints that lead to the newest attempt."""
    return [checkpoint for checkpoint in checkpoints if leads_to_newest(checkpoint.name, spans)]


def read_manifest(run: Run, name: str) -> Checkpoint | None:
    """Return the checkpoint, with `damage` when its manifest is unusable; None when it does not exist (any more)."""
    try:
        checkpoint: Checkpoint = parse_verified(
            Checkpoint, read_content(run.storage, _key(run, name, MANIFEST)), MANIFEST
        )
        if (checkpoint.name, checkpoint.step, checkpoint.attempt) != (name, step_of(name), attempt_of(name)):
            raise DamageError(f"{MANIFEST} cannot be used: it describes another checkpoint")
        files = checkpoint.files.values()
        if not files or not all(is_count(file.get("size")) and isinstance(file.get("sha256"), str) for file in files):
            raise DamageError(f"{MANIFEST} cannot be used: it lists no file, or not its size and SHA-256")
        outside = [file for file in checkpoint.files if not is_file_name(file)]
        if outside:
            raise DamageError(
                f"{MANIFEST} cannot be used: it lists {outside[0]!r}, which is not the name of a file in the checkpoint"
            )
        return checkpoint
    except NotFoundError:
        return None
    except DamageError as error:
        return Checkpoint(name, step_of(name), 0, 0, 0, attempt_of(name), damage=str(error))


def is_file_name(name: str) -> bool:
    """Return True if `name` is a relative path that cannot lead out of its folder."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def find_faults(run: Run, checkpoint: Checkpoint, listed: Mapping[str, Entry] | None = None) -> list[str]:
    """Return what is wrong with a checkpoint, a line per fault; empty when every byte matches the manifest.

    With `listed`, its directory in `list_directories`, files listed under the version that the commit saw are not read
    again; those of a copied run and those written since are.
    """
    if checkpoint.damage:
        return [checkpoint.damage]

    def find(file: str) -> list[str]:
        if listed is not None:
            if fault := _fault_in_listing(checkpoint, file, listed):
                return [fault]
            if listed[file].version == checkpoint.files[file].get("version"):
                return []
        return compare_bytes(run, checkpoint, file)

    return [fault for faults in map_parallel(find, checkpoint.files, FILES_AT_ONCE) for fault in faults]


def find_faults_in_listing(checkpoint: Checkpoint, listed: Mapping[str, Entry]) -> list[str]:
    """Return what is wrong with a checkpoint as far as its manifest and the listing of its directory tell."""
    if checkpoint.damage:
        return [checkpoint.damage]
    return [fault for file in checkpoint.files if (fault := _fault_in_listing(checkpoint, file, listed))]


def is_unchanged(checkpoint: Checkpoint, listed: Mapping[str, Entry]) -> bool:
    """Return whether storage has seen none of its files written since the commit: then their bytes are proven."""
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
    """Read a file, and compare it with the manifest: its fault, if it has one; `copy` gets the bytes, too."""
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
    """Return each checkpoint with its faults, except those a live run deletes meanwhile, which only look damaged.

    Without `directories`, every byte is read (`find_faults`), of one checkpoint at a time. With them, `inspect` may
    find the faults.
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
    """Return the newest whole checkpoint of the run's lineage, and the newer ones passed over, newest first.

    One whose weights are not finite is passed over, too, unless all whole ones are like that.
    `trust_listing` skips reading what the listing shows to be unchanged (`find_faults`): for display, not for loading.
    `inspect` finds a checkpoint's faults in place of both.
    """
    inspect = inspect or (lambda found, listed: find_faults(run, found, listed if trust_listing else None))
    spans, directories = lineage(attempts), list_directories(run)
    passed: list[SkippedCheckpoint] = []
    not_finite: tuple[Checkpoint | None, tuple[SkippedCheckpoint, ...]] = None, ()
    for name in reversed(by_step(name for name in directories if leads_to_newest(name, spans))):
        if MANIFEST not in directories[name]:
            passed.append(SkippedCheckpoint(name, Unusable.INCOMPLETE, "it has no manifest"))
        elif checkpoint := read_manifest(run, name):
            faults = inspect(checkpoint, directories[name])
            if not faults and checkpoint.finite:
                return checkpoint, tuple(passed)
            if faults:
                passed.append(SkippedCheckpoint(name, Unusable.DAMAGED, "; ".join(faults)))
                continue
            if not_finite[0] is None:
                not_finite = checkpoint, tuple(passed)
            passed.append(SkippedCheckpoint(name, Unusable.NOT_FINITE, "some of its weights are NaN or infinite"))
    return not_finite if not_finite[0] else (None, tuple(passed))


def retention(attempts: list[Attempt]) -> tuple[int, str, str]:
    """Return CHECKPOINTS_TO_KEEP, CHECKPOINT_METRIC and CHECKPOINT_ORDER of the newest attempt."""
    metric, order = (recorded_setting(attempts, name) for name in ("checkpoint_metric", "checkpoint_order"))
    return int(recorded_number(attempts, "checkpoints_to_keep")), metric, order


def ranking_metric(checkpoints: Iterable[Checkpoint], metric: str) -> str:
    """Return the name by which CHECKPOINT_METRIC ranks these: that of held-out rows, if any were evaluated on some."""
    held_out = f"{HELD_OUT}{metric}"
    return held_out if any(held_out in checkpoint.metrics for checkpoint in checkpoints) else metric


def best_first(checkpoints: list[Checkpoint], metric: str, order: str) -> list[Checkpoint]:
    """Sort from the best by `metric` to the worst, the later first among equals; `order` is min or max.

    A metric that is not finite ranks last, but before weights that are not finite.
    """
    sign = 1 if order == "min" else -1

    def badness(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        value = checkpoint.metrics.get(metric)
        number = sign * value if value is not None and math.isfinite(value) else math.inf
        return not checkpoint.finite, number, -checkpoint.step

    return sorted(checkpoints, key=badness)


def expired(checkpoints: list[Checkpoint], keep: int, metric: str, order: str) -> list[Checkpoint]:
    """Return the checkpoints, given by step, that are neither the newest nor among the `keep` best.

    Nor do they include the newest one with finite weights.
    """
    finite = [checkpoint for checkpoint in checkpoints if checkpoint.finite]
    best = best_first(checkpoints, ranking_metric(checkpoints, metric), order)[:keep]
    kept = [*best, *checkpoints[-1:], *finite[-1:]]
    return [checkpoint for checkpoint in checkpoints if checkpoint not in kept]


def delete_checkpoint(run: Run, name: str) -> None:
    """Delete a checkpoint, its manifest first: interrupted, it is incomplete and ignored."""
    run.storage.delete(_key(run, name, MANIFEST))
    run.storage.delete_many([entry.key for entry in run.storage.list(run.key("checkpoints", name))])


def _key(run: Run, name: str, file: str) -> str:
    return run.key("checkpoints", name, file)


def choose(run: Run, which: str) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint with a name, or the 'newest' or 'best' whole one, and a line on each that was passed over.

    Raises `NotFoundError`, or `DamageError` when none is whole.
    """
    if which not in ("newest", "best"):
        refuse_if_absent(run, which, list_directories(run))
        if named := read_manifest(run, which):
            return named, []
        raise NotFoundError(f"{run.storage.locate(run.key('checkpoints', which))}: deleted meanwhile")
    notes: list[str] = []
    attempts = read_attempts(run)
    if which == "newest":
        chosen, passed_over = find_newest_good(run, attempts, trust_listing=True)
    else:
        directories = list_directories(run)
        names, _, _ = classify(directories, lineage(attempts))
        _, metric, order = retention(attempts)
        checked = verify(run, names, directories)
        good = [checkpoint for checkpoint, faults in checked if not faults]
        whole = best_first(good, ranking_metric(good, metric), order)
        chosen = whole[0] if whole else None
        passed_over = tuple(
            SkippedCheckpoint(c.name, Unusable.DAMAGED, "; ".join(faults)) for c, faults in checked if faults
        )
        if chosen and metric not in chosen.metrics:
            notes.append(f"no checkpoint has the metric {metric} (SUNSPOT_CHECKPOINT_METRIC); this is the newest")
    notes += [f"passed over {each}" for each in passed_over]
    if chosen:
        return chosen, notes
    if any(each.kind is Unusable.DAMAGED for each in passed_over):
        raise DamageError(f"{run.location}: no checkpoint is whole: {'; '.join(map(str, passed_over))}")
    raise NotFoundError(f"{run.location}: no checkpoint yet")


def refuse_if_absent(run: Run, name: str, directories: Directories) -> None:
    """Raise `NotFoundError`, with the reason, unless `name` is a checkpoint that counts."""
    counted, superseded, incomplete = classify(directories, lineage(read_attempts(run)))
    location = run.storage.locate(run.key("checkpoints", name))
    if name in superseded:
        raise NotFoundError(
            f"{location}: written by a superseded attempt; it does not lead to the newest one, and is never used"
        )
    if name in incomplete:
        raise NotFoundError(f"{location}: incomplete, it has no {MANIFEST}, and counts as not there")
    if name not in counted:
        raise NotFoundError(f"{location}: no such checkpoint; `sunspot checkpoints ls {run.name}` lists them")


@dataclass(frozen=True)
class CheckpointDirectory(Run):
    """A checkpoint directory by itself, wherever it was copied to and whatever it is called now."""

    def key(self, *parts: str) -> str:
        """Return the storage key: the directory is the checkpoint, so of a key in a run only the file is used."""
        return "/".join(part for part in (self.name, *parts[2:]) if part)


@dataclass(frozen=True)
class Named:
    """What a manifest says first: which checkpoint it describes."""

    name: CheckpointName


def open_directory(location: str) -> tuple[Run, Checkpoint]:
    """Return the checkpoint in a directory, a path or a URL. Raises `NotFoundError` when it holds no manifest."""
    # A link that the user names is followed.
    location = location.rstrip("/") if "://" in location else os.path.realpath(local_path(location))
    parent, _, name = location.rpartition("/")
    directory = CheckpointDirectory(open_storage(parent or "/"), name)
    named = read_if_exists(lambda: read(directory, Named, "checkpoints", name, MANIFEST))
    checkpoint = read_manifest(directory, named.name) if named else None
    if checkpoint is None:
        raise NotFoundError(f"{location}: holds no {MANIFEST}, so it is no checkpoint, or an incomplete one")
    return directory, checkpoint
