"""Finds what of a run is of no use any more: checkpoints, and uploads that were never finished."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sunspot.code_archive import FOLDER
from sunspot.errors import ConflictError, StorageError, SupersededError
from sunspot.formatting import in_words
from sunspot.run import Run
from sunspot.run.attempts import attempt_of, ensure_owner, lineage, read_attempts, recorded_setting, step_of
from sunspot.run.checkpoints import (
    ABANDONED_S,
    MANIFEST,
    by_step,
    delete_checkpoint,
    expired,
    find_newest_good,
    leads_to_newest,
    list_directories,
    ranking_metric,
    retention,
    verify,
    why_abandoned,
)
from sunspot.run.objects import read_content
from sunspot.run.overview import read_state
from sunspot.run.requests import list_submissions
from sunspot.run.status import RunState
from sunspot.submitter.printing import warn
from sunspot.submitter.runs import list_unfinished


@dataclass(frozen=True)
class Removal:
    """Something to remove, and why."""

    name: str
    "Of the checkpoint, or the key of another object."
    bytes: int
    why: str
    remove: Callable[[], None]


def find_removals(run: Run, keep: int | None, now: float) -> Iterator[Removal]:
    """Find what is of no use in the run at `now` (seconds since the epoch, by this machine's clock)."""
    with contextlib.suppress(StorageError):  # without write permission, a directory's clock cannot be read
        run.storage.refresh(run.name)
    yield from _find_checkpoints(run, keep, now)
    yield from _find_code(run, now)
    for upload in list_unfinished(run):
        age = now + run.storage.ahead_s - upload.modified
        if age > ABANDONED_S:
            why = f"upload begun {in_words(age)} ago and never finished"
            yield Removal(upload.key, upload.size, why, lambda upload=upload: run.storage.discard(upload))  # type: ignore[misc]


def _find_code(run: Run, now: float) -> Iterator[Removal]:
    """Find archives of code that neither the newest submission nor the newest start names."""
    submissions = list_submissions(run)
    newest = read_content(run.storage, submissions[-1]).decode(errors="replace") if submissions else ""
    named = newest + recorded_setting(read_attempts(run), "code")
    for entry in run.storage.list(run.key(FOLDER)):
        if entry.key not in named and now + run.storage.ahead_s - entry.modified > ABANDONED_S:
            why = "code that the run was begun with, and no longer names"
            yield Removal(entry.key, entry.size, why, lambda key=entry.key: run.storage.delete(key))  # type: ignore[misc]


def _find_checkpoints(run: Run, keep: int | None, now: float) -> Iterator[Removal]:
    # In this order: the attempt that committed a listed checkpoint began before, so it is among the attempts.
    directories = list_directories(run)
    attempts = read_attempts(run)
    if attempts and not attempts[-1].chosen:
        warn(f"attempt {attempts[-1].number} is choosing the checkpoint it starts from, so none is removed; look again")
        return
    ended = read_state(run)[0] in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)
    newest, passed_over = find_newest_good(run, attempts)
    if newest is None:
        if directories:
            warn("no checkpoint is whole, so none is removed: what is left may be all there is")
        return

    def removal(name: str, why: str) -> Removal:
        size = sum(entry.size for entry in directories[name].values())

        def remove() -> None:
            try:
                ensure_owner(run, attempts[-1])
            except SupersededError as error:
                raise ConflictError(f"{run.location}: a new attempt has begun meanwhile; look again") from error
            delete_checkpoint(run, name)

        return Removal(name, size, why, remove)

    spans = lineage(attempts)
    faults = {each.name: f"{each.kind}, {each.why}" for each in passed_over}
    counted = []
    for name in by_step(directories):
        files = directories[name]
        if attempt_of(name) > attempts[-1].number:
            continue
        if MANIFEST not in files:
            why = why_abandoned(name, files, attempts, now + run.storage.ahead_s)
            why = why or ("the run has ended" if ended else "")
            if why:
                yield removal(name, f"incomplete, and {why}")
        elif not leads_to_newest(name, spans):
            yield removal(name, "of a superseded attempt: it does not lead to the newest one")
        elif step_of(name) > newest.step:
            if name in faults:
                yield removal(name, faults[name])
        else:
            counted.append(name)

    checked = verify(run, counted, directories)
    whole = [checkpoint for checkpoint, wrong in checked if not wrong or checkpoint.name == newest.name]
    for checkpoint, wrong in checked:
        if checkpoint not in whole:
            yield removal(checkpoint.name, f"damaged, {'; '.join(wrong)}")
    kept, metric, order = retention(attempts)
    kept, metric = keep or kept, ranking_metric(whole, metric)
    for checkpoint in expired(whole, kept, metric, order):
        if checkpoint.name != newest.name:
            yield removal(checkpoint.name, f"neither the newest nor among the best {kept} by {metric} ({order})")
