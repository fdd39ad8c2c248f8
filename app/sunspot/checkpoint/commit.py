"""Commits copies of the state to storage, in a thread beside the training.

A checkpoint exists once its manifest is written, which comes after all of its files were uploaded and verified. One
is committed at a time; when storage is slower than the interval, a newer copy replaces one that still waits. Under
PARALLEL=fsdp every rank has such a thread for its part, and rank 0's commits what all have written (parts.py).

A process that outlives its group completes the commit that is under way while the next group trains, and the next
group's first commit waits for it (docs/decisions/0010-commits-outlive-changes-in-place.md).
"""

import logging
import math
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from sunspot.checkpoint.files import SnapshotWriter, refuse_unloadable
from sunspot.checkpoint.ledger import Ledger
from sunspot.checkpoint.snapshot import Snapshot
from sunspot.errors import DamageError, NotFoundError, StorageError, SupersededError
from sunspot.parallel.collectives import any_rank
from sunspot.run import Run
from sunspot.run.attempts import Attempt, lineage, read_attempts, step_of
from sunspot.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    delete_checkpoint,
    ensure_committer,
    expired,
    in_lineage,
    list_checkpoints,
    list_directories,
    may_commit,
    read_manifest,
    why_abandoned,
    write_manifest,
)
from sunspot.run.history import Journals
from sunspot.settings import Settings
from sunspot.storage.base import Entry
from sunspot.storage.limits import RetryWindow, with_deadline

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Time between two looks at what rank 0 has begun, while there is a snapshot to begin."""

REMOVAL_S = 30.0
"""Seconds that a commit that was given up may take to remove its uploads; the next commit removes the rest."""

BEGUN, WRITTEN = "sunspot-commit", "sunspot-written-{}"
"""Keys of the group's store: the step of the snapshot that rank 0 has begun, and the checkpoint all parts of which are
in storage."""


class CommitOrder:
    """Has all ranks commit the same snapshots, of which each has a part: those that rank 0 begins.

    Rank 0 tells the others by the store in which the group has met: no thread waits in a collective call for a rank
    that may have died, and no rank but rank 0 lists what is in storage by now.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group` is None for a rank alone, or one that has the whole state."""
        self._group, self.leads = group, group is None or dist.get_rank(group) == 0
        self.in_parts = group is not None

    def replaces(self, waiting: bool) -> bool:
        """Return whether a new snapshot takes the place of the newest before it, which it does if that is `waiting` on
        rank 0; all ranks call this together.
        """
        return any_rank(self._group, self.leads and waiting)[0] if self._group else waiting

    def begin(self, step: int) -> None:
        """Note that the snapshot at `step` is begun, and on rank 0 let the others begin theirs."""
        if self._group and self.leads:
            self._group.get_group_store().set(BEGUN, str(step))

    def limit(self) -> float:
        """Return the last step whose snapshot may be begun: on rank 0 any, else the newest that rank 0 has begun."""
        if self._group is None or self.leads:
            return math.inf
        begun = self._told(BEGUN)
        return -math.inf if begun is None else int(begun)

    def tell_written(self, name: str) -> None:
        """On rank 0, let the others know that all parts of a checkpoint are in storage."""
        if self._group:
            self._group.get_group_store().set(WRITTEN.format(name), "")

    def is_written(self, name: str) -> bool:
        """Return whether rank 0 has told so."""
        return self._told(WRITTEN.format(name)) is not None

    def _told(self, key: str) -> bytes | None:
        """Return what rank 0 has told; None: nothing yet."""
        assert self._group
        store = self._group.get_group_store()
        with suppress(dist.DistError):  # rank 0 is gone, and the group with it
            return store.get(key) if store.check([key]) else None
        return None


class Commit(NamedTuple):
    """A checkpoint that was committed."""

    checkpoint: Checkpoint
    seconds: float
    "Duration of the commit."


class CheckpointCommitter:
    """Commits one rank's snapshots."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        settings: Settings,
        writer: SnapshotWriter,
        order: CommitOrder,
        journals: Journals | None,
        ledger: Ledger | None,
    ) -> None:
        """`writer` writes the files of a snapshot. A checkpoint relies on `journals` and on the rows in the `ledger`
        (None: another rank has them), which are in storage before it.
        """
        self._run, self._attempt, self._settings = run, attempt, settings
        self._writer, self._order, self._journals, self._ledger = writer, order, journals, ledger
        self._previous: CheckpointCommitter | None = None
        "This process's committer for the previous group, until its commits have ended."
        self._waiting: list[Snapshot] = []
        "The snapshots not begun yet, by step: one, and on other ranks than 0 those before it that rank 0 has begun."
        self._committing: Snapshot | None = None
        self._closing = False
        self._dropped = False
        "Whether the newest snapshot that was begun is torn, and so never committed."
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._outage = RetryWindow()
        "Failed tries since the last commit."
        self._flush_requested = False
        self._stopped = False
        "True once the commit that is under way must end, because its checkpoint would no longer count."
        self._sent = ""
        "The newest checkpoint whose manifest may be in storage."
        self._newest: Commit | None = None
        self.begun_at = -math.inf
        "Beginning of the newest commit, in seconds of the monotonic clock."
        self._thread = threading.Thread(target=self._commit_all, name="checkpoint-commit", daemon=True)

    # ---------------------------------------------------------------------------------------- in the training thread

    @property
    def busy(self) -> bool:
        """True while a snapshot of this group or of the previous one is not committed yet."""
        return not self._idle or bool(self._previous and self._previous.busy)

    @property
    def newest(self) -> Commit | None:
        """The newest checkpoint that this process has committed, in this group or in an earlier one."""
        return self._previous.newest if self._previous else self._newest

    @property
    def _idle(self) -> bool:
        return not (self._committing or self._waiting)

    def follow(self, previous: "CheckpointCommitter") -> None:
        """Begin no commit until those of `previous`, this process's committer for the previous group, have ended."""
        self._previous = previous

    def stop_if_overtaken(self, attempts: list[Attempt]) -> bool:
        """Stop the commit that is under way or due if `attempts` no longer allow it, and return True if it was stopped.

        `attempts` are all of the run. A commit of a state in parts needs all processes of its group. This method does
        not wait for the commit to end.
        """
        snapshot = self._committing or next(iter(self._waiting), None)
        if not snapshot:
            return False
        left = set(self._attempt.metadata.processes) - set(attempts[-1].metadata.processes)
        lacks_parts = self._order.in_parts and bool(left)
        if lacks_parts or not may_commit(snapshot.manifest.name, self._attempt, attempts):
            self._stopped = True
            self._outage.give_up()
        return self._stopped

    def commit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot to commit; returns at once. Of a state in parts, all ranks call this together."""
        with self._changed:
            if self._order.replaces(bool(self._waiting)):
                self._waiting.pop().release()  # never begun: the newest wins
            self._waiting.append(snapshot)
            self._changed.notify_all()
            if not self._thread.ident:
                self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise the error that ended commits for good: a newer owner, or storage that failed for too long."""
        if self._error:
            raise self._error

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest snapshot is committed and return whether it is; raises like `raise_if_failed`.

        It returns without `timeout_s` too: a commit that keeps failing, or makes no progress, is given up after
        `storage_timeout_s`.
        """
        with self._changed:
            self._flush_requested = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._error or self._idle, timeout_s)
        self.raise_if_failed()
        return bool(done) and not self._dropped

    def close(self) -> None:
        """`drain`, and end the thread."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident:
            self._thread.join()

    def abandon(self) -> None:
        """Begin no further commit, because the group has ended, and return while the one that is under way goes on.

        The commit under way is rank 0's. Another rank still adds its part to it, even if it has yet to begin.
        """
        begun = -math.inf if self._order.leads else self._order.limit()
        with self._changed:
            kept = self._waiting_up_to(begun)
            for snapshot in self._waiting:
                if snapshot not in kept:
                    snapshot.release()
            self._waiting = kept
            self._closing = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ in the commit thread

    def _commit_all(self) -> None:
        while snapshot := self._begin_next():
            try:
                self._commit_with_retries(snapshot)
            except Exception as error:
                self._error = error
            if not isinstance(self._error, StorageError):  # or else an upload that hangs may still read it
                snapshot.release()
            with self._changed:
                self._committing = None
                self._changed.notify_all()
            if self._error:
                return

    def _begin_next(self) -> Snapshot | None:
        """Wait for the next snapshot whose turn it is, and begin it; None: there are no more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return None
            self._await_previous_group()
            limit = self._order.limit()
            with self._changed:
                begun = self._waiting_up_to(limit)
                if begun:
                    del self._waiting[: len(begun)]
                    self._committing = begun[-1]
                    self.begun_at = time.monotonic()
                    self._order.begin(begun[-1].manifest.step)
                    for passed in begun[:-1]:
                        passed.release()
                    return begun[-1]
                self._changed.wait(POLL_S)

    def _await_previous_group(self) -> None:
        """Wait until the commits of the previous group have ended, so that one process uploads one state at a time."""
        previous = self._previous
        if previous:
            if previous._thread.ident:
                previous._thread.join()
            if not previous._stopped:  # an outage of storage lasts until a commit of any group succeeds
                self._outage = previous._outage
            self._newest = previous.newest
            self._previous = None

    def _waiting_up_to(self, limit: float) -> list[Snapshot]:
        return [snapshot for snapshot in self._waiting if snapshot.manifest.step <= limit]

    def _commit_with_retries(self, snapshot: Snapshot) -> None:
        """Try until the snapshot is committed, a newer one may begin, or storage has failed for `storage_timeout_s`.

        If the checkpoint may no longer be committed, removes what was uploaded and raises `SupersededError`.
        """
        try:
            self._try_to_commit(snapshot)
        except SupersededError:
            name = snapshot.manifest.name
            if self._order.leads and self._sent != name:  # another attempt may start from a manifest that was sent
                with suppress(StorageError):
                    with_deadline(REMOVAL_S, f"removing {name}", delete_checkpoint, self._run, name)
            raise

    def _try_to_commit(self, snapshot: Snapshot) -> None:
        outage, limit_s, step = self._outage, self._settings.storage_timeout_s, snapshot.manifest.step
        while True:
            try:
                outage.attempt(limit_s, f"checkpoint at step {step}", lambda: self._commit(snapshot))
            except (StorageError, NotFoundError, DamageError) as error:
                self._refuse_if_stopped()
                if outage.tries == 1:  # one event for each outage, however many tries it takes
                    self._record("commit failed", step, str(error))
                else:
                    log.warning(f"no commit for {outage.seconds:.0f} s: {error}")
                if outage.over:
                    raise StorageError(
                        f"no checkpoint could be committed for {outage.seconds:.0f} s "
                        f"(SUNSPOT_STORAGE_TIMEOUT_S={limit_s:g}): {error}"
                    ) from error
            else:
                if outage.tries:
                    self._record("commits go on", step, f"none for {outage.seconds:.0f} s, {outage.tries} tries")
                    self._outage = RetryWindow()
                return
            with self._changed:
                self._flush_requested = False
                self._changed.wait_for(lambda: self._flush_requested, outage.pause_s)
            if self._waiting_up_to(self._order.limit()):
                return

    def _commit(self, snapshot: Snapshot) -> None:
        """Write one checkpoint. Killed anywhere in here, it exists or not, and the one before stands."""
        snapshot.copied.result()
        if self._drops(snapshot):
            return
        began, name = time.monotonic(), snapshot.manifest.name
        self._refuse_if_stopped()
        ensure_committer(self._run, self._attempt, name)
        committed = read_manifest(self._run, name) if self._outage.tries else None
        if not committed or committed.damage:  # or else an earlier try has committed it, and failed later
            refuse_unloadable({**snapshot.state, "extra_state": snapshot.extra_state}, self._settings.task)
            self._write_history()
            files = self._writer.files(snapshot)
            if not self._order.leads:
                return
            ensure_committer(self._run, self._attempt, name)
            if self._drops(snapshot):  # a change that went on when the copy had ended is known by now
                delete_checkpoint(self._run, name)
                return
            committed = replace(snapshot.manifest, files=files, time=time.time())
            self._sent = name
            write_manifest(self._run, committed)
        # If the run was taken over in between, the checkpoint is outside the lineage and does not count.
        ensure_committer(self._run, self._attempt, name)
        self._newest = Commit(committed, time.monotonic() - began)
        self._delete_expired(committed)

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise SupersededError(f"attempt {self._attempt.number} has ended, and its newest checkpoint does not count")

    def _write_history(self) -> None:
        """Make durable what a checkpoint relies on: journals, and the rows consumed up to it."""
        if self._journals:
            self._journals.flush()
        if self._ledger:
            self._ledger.write(self._run)

    def _drops(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is torn, and so never to be committed; records it."""
        self._dropped = snapshot.torn
        if self._dropped:
            detail = (
                "weights changed while they were copied, and not by the optimizer; from here on they are copied at once"
            )
            self._record("checkpoint dropped", snapshot.manifest.step, detail)
        return self._dropped

    def _delete_expired(self, newest: Checkpoint) -> None:
        """Keep the best and the `newest`, and nothing that killed attempts left incomplete.

        Comes after the new manifest: nothing goes before its replacement is safe.
        """
        try:
            for name in self._find_expired(newest):
                if not ensure_committer(self._run, self._attempt, newest.name).chosen:
                    return
                delete_checkpoint(self._run, name)
        except StorageError as error:
            self._record("old checkpoints not deleted", newest.step, str(error))

    def _find_expired(self, newest: Checkpoint) -> list[str]:
        directories = list_directories(self._run)
        attempts = read_attempts(self._run)
        if not attempts:
            return []  # the run has just been deleted; the next commit notices that and ends
        now = time.time() + self._run.storage.ahead_s  # by the clock that dates the files
        abandoned, committed = list[str](), dict[str, Mapping[str, Entry]]()
        for name, files in directories.items():
            # A manifest that was delayed on its way to storage may arrive after its files were removed.
            late = files.keys() == {MANIFEST} and step_of(name) < newest.step
            if MANIFEST in files and not late:
                committed[name] = files
            elif late or why_abandoned(name, files, attempts, now, newest.step):
                abandoned.append(name)
        counted = in_lineage(list_checkpoints(self._run, committed), lineage(attempts))
        keep, metric = self._settings.checkpoints_to_keep, self._settings.checkpoint_metric
        return [old.name for old in expired(counted, keep, metric, self._settings.checkpoint_order)] + abandoned

    def _record(self, event: str, step: int, detail: str) -> None:
        log.warning(f"{event} at step {step}: {detail}")
        if self._journals:
            self._journals.events.note(event, step, detail)
