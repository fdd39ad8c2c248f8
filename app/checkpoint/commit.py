"""Committing: what makes a copy of the state a checkpoint, and cannot be half done.

Serializing, hashing, uploading and reading back happen in one thread of rank 0, one checkpoint at a time; when storage
is slower than the interval, a newer copy takes the place of one that still waits. Under PARALLEL=fsdp every rank has
such a thread for its own part, and that of rank 0 commits what all have written (app/checkpoint/sharded.py).
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
import torch

from app.checkpoint.files import Files, write_whole
from app.checkpoint.snapshot import Snapshot
from app.errors import DamageError, NotFoundError, StorageError
from app.run import Run
from app.run.attempts import Attempt, checkpoint_name, ensure_owner, lineage, read_attempts
from app.run.checkpoints import Checkpoint, delete_checkpoint, expired, in_lineage, list_checkpoints, write_manifest
from app.run.history import Journal
from app.settings import Settings
from app.storage.base import pause_after


class CheckpointCommitter:
    """Commits snapshots on rank 0, behind the training."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        settings: Settings,
        journals: Mapping[str, Journal],
        warn: Callable[[str], Any],
        before_commit: Callable[[Run], None] = lambda run: None,
        write: Callable[[Run, Snapshot], Files | None] = write_whole,
    ) -> None:
        self._run, self._attempt, self._settings, self._journals, self._warn = run, attempt, settings, journals, warn
        self._before_commit = before_commit
        "Makes durable what has to be there before the checkpoint that covers it: the rows that were consumed."
        self._write = write
        "Writes a snapshot's files; None: another rank commits them, with its own."
        self._pending: Snapshot | None = None
        self._busy = False
        self._closing = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._failing_since: float | None = None
        self._tries = 0
        "Failed ones since the last commit."
        self._hurried = False
        self.last_committed: Checkpoint | None = None
        self.commit_s: float | None = None
        "Seconds from the last committed snapshot to its commit."
        self._thread = threading.Thread(target=self._commit_all, name="checkpoint-commit", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------- in the training thread

    @property
    def busy(self) -> bool:
        """Whether a snapshot is not committed yet."""
        return self._busy or self._pending is not None

    def commit(self, snapshot: Snapshot) -> None:
        """Have a snapshot committed; the caller goes on."""
        with self._changed:
            if self._pending:
                self._pending.release()  # newest wins: it was never begun
            self._pending = snapshot
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        """Raise what ended the commits for good: a newer owner, or storage that failed for too long."""
        if self._error:
            raise self._error

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest snapshot is committed, and say whether it is; raises like `raise_if_failed`.

        It ends without `timeout_s` too: each request is bounded, and a commit that keeps failing is given up after
        `storage_timeout_s`.
        """
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._error or not (self._pending or self._busy), timeout_s)
        self.raise_if_failed()
        return bool(done)

    def finish(self) -> None:
        """`drain`, and end the thread."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # ------------------------------------------------------------------------------------------ in the commit thread

    def _commit_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                snapshot, self._pending, self._busy = self._pending, None, True
            try:
                self._commit_with_patience(snapshot)
            except Exception as error:
                self._error = error
            snapshot.release()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            if self._error:
                return

    def _commit_with_patience(self, snapshot: Snapshot) -> None:
        """Try until it is committed, a newer snapshot waits, or storage has failed for `storage_timeout_s`."""
        while True:
            try:
                self._commit(snapshot)
            except (StorageError, NotFoundError, DamageError) as error:
                self._failing_since = self._failing_since or time.monotonic()
                failing_for = time.monotonic() - self._failing_since
                if self._tries == 0:  # one event for each outage, however many tries it takes
                    self._note("commit failed", snapshot.about, str(error))
                else:
                    self._warn(f"no commit for {failing_for:.0f} s: {error}")
                if failing_for > self._settings.storage_timeout_s:
                    raise StorageError(
                        f"no checkpoint could be committed for {failing_for:.0f} s "
                        f"(SUNSPOT_STORAGE_TIMEOUT_S={self._settings.storage_timeout_s:g}): {error}"
                    ) from error
            else:
                if self._failing_since:
                    failed_for = time.monotonic() - self._failing_since
                    self._note("commits go on", snapshot.about, f"none for {failed_for:.0f} s, {self._tries} tries")
                self._failing_since, self._tries = None, 0
                return
            with self._changed:
                self._hurried = False
                self._changed.wait_for(lambda: self._hurried, pause_after(self._tries))
                self._tries += 1
                if self._pending:
                    return

    def _commit(self, snapshot: Snapshot) -> None:
        """Write one checkpoint. Killed at any point, the last one stands, and this one does or does not exist."""
        about = snapshot.about
        began = time.monotonic()
        snapshot.copied.result()
        ensure_owner(self._run, self._attempt)
        for journal in self._journals.values():
            journal.flush()
        self._before_commit(self._run)
        files = self._write(self._run, snapshot)
        if files is None:
            return
        ensure_owner(self._run, self._attempt)
        committed = Checkpoint(**{**vars(about), "files": files, "time": time.time()})
        write_manifest(self._run, committed)
        ensure_owner(self._run, self._attempt)  # taken over in between, it is outside the lineage and does not count
        self.last_committed, self.commit_s = committed, time.monotonic() - began
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        """Keep the best and the newest. Comes after the new manifest: nothing goes before what replaces it is safe."""
        try:
            mine = in_lineage(list_checkpoints(self._run), lineage(read_attempts(self._run)))
            keep, metric = self._settings.checkpoints_to_keep, self._settings.checkpoint_metric
            for checkpoint in expired(mine, keep, metric, self._settings.checkpoint_order):
                ensure_owner(self._run, self._attempt)
                delete_checkpoint(self._run, checkpoint.name)
        except StorageError as error:
            self._note("old checkpoints not deleted", self.last_committed, str(error))

    def _note(self, what: str, about: Checkpoint | None, detail: str) -> None:
        step = about.step if about else 0
        self._warn(f"{what} at step {step}: {detail}")
        if "events" in self._journals:
            self._journals["events"].append({"step": step, "time": time.time(), "event": what, "detail": detail})


def describe(
    attempt: Attempt, step: int, steps_per_epoch: int, total_steps: int, metrics: dict[str, Any], evaluated: bool = True
) -> Checkpoint:
    """The manifest's content for a checkpoint at `step`, its files not yet known."""
    epoch = (step - 1) // steps_per_epoch + 1
    name = checkpoint_name(step, attempt.number)
    return Checkpoint(name, step, epoch, steps_per_epoch, total_steps, attempt.number, metrics, evaluated=evaluated)


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # as it is, it is no plain string
        "ray": ray.__version__,
        "numpy": np.__version__,
    }
