"""Commits copies of the training state to storage in a background thread.

A checkpoint exists once its manifest is written, after all of its files were uploaded and verified. The thread commits
one checkpoint at a time. If a commit takes longer than the checkpoint interval, a newer copy replaces a copy that is
still waiting. Under PARALLEL=fsdp, every rank has such a thread for its part (shard) of the state, and rank 0's thread
commits all ranks' parts (parts.py).

A process that outlives its group completes its commit while the next group trains. The first commit of the next group
waits until that commit has ended (docs/decisions/0010-commits-outlive-changes-in-place.md).
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
"""Seconds between polls for rank 0's commit while a snapshot is waiting."""

REMOVAL_S = 30.0
"""Time limit in seconds for removing an abandoned commit's uploads. The next commit removes the rest."""

BEGUN = "sunspot-commit"
"""Key in the group's store for the step of the newest snapshot that rank 0 has started committing."""

WRITTEN = "sunspot-written-{}"
"""Key in the group's store that exists once all parts of a checkpoint are in storage."""


class CommitCoordinator:
    """Makes all ranks commit their shards of the snapshots that rank 0 commits.

    Rank 0 informs the other ranks through the group's store, so no thread waits in a collective for a rank that might
    have died. Only rank 0 lists the files in storage.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Create the coordinator. `group` is None if this rank is the only worker or has the whole state."""
        self._group = group
        self.leads = group is None or dist.get_rank(group) == 0
        self.in_parts = group is not None

    def replaces_newest(self, waiting: bool) -> bool:
        """Return True if a new snapshot replaces the previous snapshot. All ranks must call this together.

        `waiting` is True if the previous snapshot still waits for its commit. Only rank 0's value counts.
        """
        return any_rank(self._group, self.leads and waiting)[0] if self._group else waiting

    def announce_begun(self, step: int) -> None:
        """Allow the other ranks to commit their snapshots at `step`. Does nothing on ranks other than 0."""
        if self._group and self.leads:
            self._group.get_group_store().set(BEGUN, str(step))

    def last_step(self) -> float:
        """Return the last step at which a snapshot can be committed.

        On rank 0, this is infinity. On other ranks, it is the step of the last commit that rank 0 has begun.
        """
        if self._group is None or self.leads:
            return math.inf
        begun = self._read(BEGUN)
        return -math.inf if begun is None else int(begun)

    def announce_written(self, name: str) -> None:
        """Inform the other ranks that all parts of a checkpoint are in storage. Only rank 0 calls this."""
        if self._group:
            self._group.get_group_store().set(WRITTEN.format(name), "")

    def is_written(self, name: str) -> bool:
        """Return True if rank 0 has announced that all parts of a checkpoint are in storage."""
        return self._read(WRITTEN.format(name)) is not None

    def _read(self, key: str) -> bytes | None:
        """Return the value that rank 0 stored under a key, or None."""
        assert self._group
        store = self._group.get_group_store()
        with suppress(dist.DistError):  # rank 0 and the group are lost
            return store.get(key) if store.check([key]) else None
        return None


class Commit(NamedTuple):
    """A committed checkpoint."""

    checkpoint: Checkpoint
    seconds: float
    "The duration of the commit."


class CheckpointCommitter:
    """Commits one rank's snapshots."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        settings: Settings,
        writer: SnapshotWriter,
        coordinator: CommitCoordinator,
        journals: Journals | None,
        ledger: Ledger | None,
    ) -> None:
        """Create a committer. Its thread starts with the first `commit`.

        `writer` writes a snapshot's files. The `journals` and the rows in the `ledger` are written to storage before
        each checkpoint, because the checkpoint relies on them. `journals` and `ledger` are None if another rank writes
        them.
        """
        self._run = run
        self._attempt = attempt
        self._settings = settings
        self._writer = writer
        self._coordinator = coordinator
        self._journals = journals
        self._ledger = ledger
        self._previous: CheckpointCommitter | None = None
        "This process's committer for the previous group, or None once its commits have ended."
        self._waiting: list[Snapshot] = []
        """The snapshots that wait for their commit, ordered by step.

        On ranks other than 0, they include older snapshots that rank 0 has started committing.
        """
        self._committing: Snapshot | None = None
        self._closing = False
        self._dropped = False
        "True if a tensor changed while it was being copied to the last snapshot that was due for a commit."
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._outage = RetryWindow()
        "The failed attempts since the last commit."
        self._flush_requested = False
        self._stopped = False
        "True once the commit in progress must stop, because its checkpoint would be ignored."
        self._sent = ""
        "The name of the newest checkpoint whose manifest might be in storage."
        self._newest: Commit | None = None
        self.begun_at = -math.inf
        "The start of the newest commit, in `time.monotonic` seconds."
        self._thread = threading.Thread(target=self._commit_all, name="checkpoint-commit", daemon=True)

    # ---------------------------------------------------------------------------------------- training thread

    @property
    def busy(self) -> bool:
        """True while a snapshot of this group or the previous group is not committed yet."""
        return not self._idle or bool(self._previous and self._previous.busy)

    @property
    def newest(self) -> Commit | None:
        """The newest checkpoint that this process has committed in this group or an earlier group, or None."""
        return self._previous.newest if self._previous else self._newest

    @property
    def _idle(self) -> bool:
        return not (self._committing or self._waiting)

    def follow(self, previous: "CheckpointCommitter") -> None:
        """Make each commit wait for the commits of `previous`, this process's committer for the previous group."""
        self._previous = previous

    def stop_if_overtaken(self, attempts: list[Attempt]) -> bool:
        """Stop all commits if the current or next commit is no longer allowed (`may_commit`).

        Returns True if commits have stopped. `attempts` are all attempts of the run. This method does not wait for a
        commit to finish.
        """
        snapshot = self._committing or next(iter(self._waiting), None)
        if snapshot and not may_commit(snapshot.manifest.name, self._attempt, attempts):
            self._stop()
        return self._stopped

    def commit(self, snapshot: Snapshot) -> None:
        """Queue a snapshot to be committed. If the state is sharded, all ranks must call this together."""
        with self._changed:
            if self._coordinator.replaces_newest(bool(self._waiting)):
                self._waiting.pop().release()  # its commit has not begun, so the newer snapshot replaces it
            self._waiting.append(snapshot)
            self._changed.notify_all()
            if not self._thread.ident:
                self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise the error that stopped all commits, if any.

        Commits stop if another process owns the run, or if storage fails for too long.
        """
        if self._error:
            raise self._error

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest snapshot is committed. Return False after `timeout_s`, or if the snapshot was dropped.

        Even without `timeout_s`, this method returns eventually, because a commit fails after `storage_timeout_s`
        without progress. Raises the same errors as `raise_if_failed`.
        """
        with self._changed:
            self._flush_requested = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._error or self._idle, timeout_s)
        self.raise_if_failed()
        return bool(done) and not self._dropped

    def close(self) -> None:
        """Call `drain`, then stop the thread."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident:
            self._thread.join()

    def abandon(self) -> None:
        """Start no more commits. Call this once the group has ended.

        A commit in progress still finishes, unless the state is sharded. A sharded commit is stopped, because other
        ranks might not write their parts.
        """
        if self._coordinator.in_parts:
            self._stop()
        with self._changed:
            for snapshot in self._waiting:
                snapshot.release()
            self._waiting = []
            self._closing = True
            self._changed.notify_all()

    def _stop(self) -> None:
        self._stopped = True
        self._outage.give_up()

    # ------------------------------------------------------------------------------------------ commit thread

    def _commit_all(self) -> None:
        while snapshot := self._begin_next():
            try:
                self._commit_with_retries(snapshot)
            except Exception as error:
                self._error = error
            if not isinstance(self._error, StorageError):  # otherwise a hung upload might still read it
                snapshot.release()
            with self._changed:
                self._committing = None
                self._changed.notify_all()
            if self._error:
                return

    def _begin_next(self) -> Snapshot | None:
        """Wait for the next snapshot that can be committed, and return it, or None if there are no more snapshots."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return None
            self._await_previous_group()
            last_step = self._coordinator.last_step()
            with self._changed:
                begun = self._waiting_up_to(last_step)
                if begun:
                    del self._waiting[: len(begun)]
                    self._committing = begun[-1]
                    self.begun_at = time.monotonic()
                    self._coordinator.announce_begun(begun[-1].manifest.step)
                    for skipped in begun[:-1]:
                        skipped.release()
                    return begun[-1]
                self._changed.wait(POLL_S)

    def _await_previous_group(self) -> None:
        """Wait until the previous group's commits have ended, because a process uploads only one state at a time."""
        previous = self._previous
        if previous:
            if previous._thread.ident:
                previous._thread.join()
            if not previous._stopped:  # an outage continues until a commit of any group succeeds
                self._outage = previous._outage
            self._newest = previous.newest
            self._previous = None

    def _waiting_up_to(self, last_step: float) -> list[Snapshot]:
        return [snapshot for snapshot in self._waiting if snapshot.manifest.step <= last_step]

    def _commit_with_retries(self, snapshot: Snapshot) -> None:
        """Try to commit a snapshot until the commit succeeds, or until a newer snapshot can be committed.

        Raises `StorageError` if storage fails for `storage_timeout_s`. If the commit is no longer allowed, removes the
        uploaded files and raises `SupersededError`.
        """
        try:
            self._try_to_commit(snapshot)
        except SupersededError:
            name = snapshot.manifest.name
            if self._coordinator.leads and self._sent != name:  # another attempt might start from a sent manifest
                with suppress(StorageError):
                    with_deadline(REMOVAL_S, f"removing {name}", delete_checkpoint, self._run, name)
            raise

    def _try_to_commit(self, snapshot: Snapshot) -> None:
        outage = self._outage
        limit_s = self._settings.storage_timeout_s
        step = snapshot.manifest.step
        while True:
            try:
                outage.attempt(limit_s, f"checkpoint at step {step}", lambda: self._commit(snapshot))
            except (StorageError, NotFoundError, DamageError) as error:
                self._refuse_if_stopped()
                if outage.tries == 1:  # one event per outage, not per attempt
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
                    self._record(
                        "commits go on",
                        step,
                        f"no commit for {outage.seconds:.0f} s, in {outage.tries} failed attempts",
                    )
                    self._outage = RetryWindow()
                return
            with self._changed:
                self._flush_requested = False
                self._changed.wait_for(lambda: self._flush_requested, outage.pause_s)
            if self._waiting_up_to(self._coordinator.last_step()):
                return  # a newer snapshot can be committed instead

    def _commit(self, snapshot: Snapshot) -> None:
        """Write a checkpoint.

        If the process is killed during the commit, the new checkpoint is either complete or does not exist, and the
        previous checkpoint stays intact.
        """
        snapshot.copied.result()
        if self._drops(snapshot):
            return
        began = time.monotonic()
        name = snapshot.manifest.name
        self._refuse_if_stopped()
        ensure_committer(self._run, self._attempt, name)
        committed = read_manifest(self._run, name) if self._outage.tries else None
        if not committed or committed.damage:  # otherwise an earlier attempt committed it and failed later
            refuse_unloadable({**snapshot.state, "extra_state": snapshot.extra_state}, self._settings.task)
            self._write_history()
            files = self._writer.files(snapshot)
            if not self._coordinator.leads:
                return
            ensure_committer(self._run, self._attempt, name)
            if self._drops(snapshot):  # by now, any change that was in progress when the copy finished is known
                delete_checkpoint(self._run, name)
                return
            committed = replace(snapshot.manifest, files=files, time=time.time())
            self._sent = name
            write_manifest(self._run, committed)
        # If another process has taken over the run, the checkpoint is outside the lineage and does not count.
        ensure_committer(self._run, self._attempt, name)
        self._newest = Commit(committed, time.monotonic() - began)
        self._delete_expired(committed)

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise SupersededError(f"attempt {self._attempt.number} has ended, so this checkpoint is not committed")

    def _write_history(self) -> None:
        """Write the journals and the consumed rows, because a checkpoint relies on them."""
        if self._journals:
            self._journals.flush()
        if self._ledger:
            self._ledger.write(self._run)

    def _drops(self, snapshot: Snapshot) -> bool:
        """Return True, and record an event, if a tensor changed while it was being copied to the snapshot."""
        self._dropped = snapshot.torn
        if self._dropped:
            detail = (
                "weights changed while they were being copied, but not by the optimizer; from now on they are "
                "copied at once"
            )
            self._record("checkpoint dropped", snapshot.manifest.step, detail)
        return self._dropped

    def _delete_expired(self, newest: Checkpoint) -> None:
        """Delete incomplete checkpoints of killed attempts, and all other checkpoints except the best and the `newest`.

        Call this only after the manifest of `newest` is written, so that no checkpoint is deleted before its
        replacement is safe.
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
            return []  # the run was just deleted, which the next commit will notice
        now = time.time() + self._run.storage.ahead_s  # by the storage's clock, which dates the files
        abandoned = list[str]()
        committed = dict[str, Mapping[str, Entry]]()
        for name, files in directories.items():
            # A delayed manifest can arrive in storage after its files were removed.
            late = files.keys() == {MANIFEST} and step_of(name) < newest.step
            if MANIFEST in files and not late:
                committed[name] = files
            elif late or why_abandoned(name, files, attempts, now, newest.step):
                abandoned.append(name)
        counted = in_lineage(list_checkpoints(self._run, committed), lineage(attempts))
        keep = self._settings.checkpoints_to_keep
        metric = self._settings.checkpoint_metric
        return [old.name for old in expired(counted, keep, metric, self._settings.checkpoint_order)] + abandoned

    def _record(self, event: str, step: int, detail: str) -> None:
        log.warning(f"{event} at step {step}: {detail}")
        if self._journals:
            self._journals.events.note(event, step, detail)
