"""Finds a run's checkpoints, code archives and unfinished uploads that are no longer needed."""

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
from sunspot.run.requests import list_submissions
from sunspot.run.seen import look
from sunspot.run.status import RunState
from sunspot.submitter.printing import warn
from sunspot.submitter.runs import list_unfinished


@dataclass(frozen=True)
class Removal:
    """An object to remove, and the reason for removing it."""

    name: str
    "The checkpoint's name, or another object's key."
    bytes: int
    why: str
    remove: Callable[[], None]


def find_removals(run: Run, keep: int | None, now: float) -> Iterator[Removal]:
    """Yield all objects of the run that are no longer needed. `now` is the time on this machine's clock."""
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
    """Yield old code archives that neither the newest submission nor the newest attempt uses."""
    submissions = list_submissions(run)
    newest = read_content(run.storage, submissions[-1]).decode(errors="replace") if submissions else ""
    named = newest + recorded_setting(read_attempts(run), "code")
    for entry in run.storage.list(run.key(FOLDER)):
        if entry.key not in named and now + run.storage.ahead_s - entry.modified > ABANDONED_S:
            why = "code of an earlier start that the run no longer uses"
            yield Removal(entry.key, entry.size, why, lambda key=entry.key: run.storage.delete(key))  # type: ignore[misc]


def _find_checkpoints(run: Run, keep: int | None, now: float) -> Iterator[Removal]:
    # Checkpoints are listed before the attempts are read, so the attempt of every listed checkpoint is among them.
    directories = list_directories(run)
    attempts = read_attempts(run)
    if attempts and not attempts[-1].chosen:
        newest_attempt = attempts[-1].number
        choosing = f"attempt {newest_attempt} is still choosing the checkpoint to start from"
        warn(f"{choosing}, so no checkpoint is removed; try again later")
        return
    ended = look(run).state in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)
    newest, passed_over = find_newest_good(run, attempts)
    if newest is None:
        if directories:
            warn(
                "no checkpoint is intact, so no checkpoint files are removed, because they might be all that is left "
                "of the run"
            )
        return

    def removal(name: str, why: str) -> Removal:
        size = sum(entry.size for entry in directories[name].values())

        def remove() -> None:
            try:
                ensure_owner(run, attempts[-1])
            except SupersededError as error:
                raise ConflictError(f"{run.location}: a new attempt has begun; try again") from error
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
            yield removal(name, "it belongs to a superseded attempt that the newest attempt does not build on")
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
    kept = keep or kept
    metric = ranking_metric(whole, metric)
    for checkpoint in expired(whole, kept, metric, order):
        if checkpoint.name != newest.name:
            yield removal(checkpoint.name, f"neither the newest nor among the best {kept} by {metric} ({order})")
