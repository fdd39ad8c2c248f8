"""Which checkpoint a user means: 'newest', 'best', a name, or a directory that holds one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import DamageError, NotFoundError
from app.layout import Run
from app.layout.attempts import Span, lineage, read_attempts
from app.layout.checkpoints import (
    MANIFEST,
    Checkpoint,
    Directories,
    best_first,
    check_listed,
    find_newest_good,
    list_directories,
    policy,
    read_manifest,
    sort_out,
)
from app.layout.storage import open_storage


def choose(run: Run, which: str, warn: Callable[[str], Any]) -> Checkpoint:
    """The checkpoint of a run that a name means, or the 'newest' or the 'best' one that its listing shows to be whole.

    What is passed over is told to `warn`. Raises `NotFoundError`, or `DamageError` when none is whole.
    """
    if which not in ("newest", "best"):
        refuse_if_absent(run, which, list_directories(run))
        named = read_manifest(run, which)
        if named is None:
            raise NotFoundError(f"{run.storage.locate(run.key('checkpoints', which))}: deleted meanwhile")
        return named
    attempts = read_attempts(run)
    if which == "newest":
        chosen, passed_over = find_newest_good(run, attempts, trust_listing=True)
    else:
        directories = list_directories(run)
        names, _, _ = sort_out(directories, lineage(attempts))
        _, metric, order = policy(attempts)
        checked = check_listed(run, names, directories)
        whole = best_first([checkpoint for checkpoint, faults in checked if not faults], metric, order)
        chosen = whole[0] if whole else None
        passed_over = tuple(f"{c.name}: damaged, {'; '.join(faults)}" for c, faults in checked if faults)
        if chosen and metric not in chosen.metrics:
            warn(f"no checkpoint has the metric {metric} (SUNSPOT_CHECKPOINT_METRIC); this is the newest")
    for text in passed_over:
        warn(f"passed over {text}")
    if chosen:
        return chosen
    if any(": damaged, " in text for text in passed_over):
        raise DamageError(f"{run.location}: no checkpoint is whole")
    raise NotFoundError(f"{run.location}: no checkpoint yet")


def refuse_if_absent(run: Run, name: str, directories: Directories) -> None:
    """Raise `NotFoundError`, with the reason, when `name` is not a checkpoint that counts."""
    counted, superseded, incomplete = sort_out(directories, read_spans(run))
    location = run.storage.locate(run.key("checkpoints", name))
    if name in superseded:
        raise NotFoundError(
            f"{location}: written by a superseded attempt; it does not lead to the newest one, and is never used"
        )
    if name in incomplete:
        raise NotFoundError(f"{location}: incomplete, it has no {MANIFEST}, and counts as not there")
    if name not in counted:
        raise NotFoundError(f"{location}: no such checkpoint; `sunspot checkpoints ls {run.name}` lists them")


def read_spans(run: Run) -> list[Span]:
    """The steps that count. The first attempt begins at the beginning: while it is the only one, nothing is read."""
    numbers = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.storage.list(run.key("attempts"))]
    if [int(number) for number in numbers if number.isdigit()] == [1]:
        return [Span(1, 0, None)]
    return lineage(read_attempts(run))


@dataclass(frozen=True)
class CheckpointDirectory(Run):
    """A checkpoint directory by itself, wherever it was copied to and whatever its name is now."""

    def key(self, *parts: str) -> str:
        """Of the parts of a key in a run, only the file counts: the directory is the one checkpoint."""
        return "/".join(part for part in (self.name, *parts[2:]) if part)


def open_directory(location: str) -> tuple[Run, Checkpoint]:
    """The checkpoint in a directory, a local path or a URL. Raises `NotFoundError` when it holds no manifest."""
    location = location.rstrip("/") if "://" in location else str(Path(location).expanduser().absolute())
    parent, _, name = location.rpartition("/")
    directory = CheckpointDirectory(open_storage(parent or "/"), name)
    try:
        name_in_run = json.loads(directory.storage.read(directory.key("checkpoints", name, MANIFEST)))["name"]
        checkpoint = read_manifest(directory, name_in_run)
    except NotFoundError:
        checkpoint = None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"{location}: {MANIFEST} cannot be used") from error
    if checkpoint is None:
        raise NotFoundError(f"{location}: holds no {MANIFEST}, so it is no checkpoint, or an incomplete one")
    return directory, checkpoint
