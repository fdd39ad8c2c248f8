"""Follows a run as it changes, to its end."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from sunspot.errors import ClusterError
from sunspot.formatting import in_words
from sunspot.submitter.cluster.api import RefusedError, UnreachableError, newest_first
from sunspot.submitter.cluster.observation import (
    ClusterPart,
    RunAccess,
    RunSnapshot,
    StoragePart,
    read_cluster,
    read_storage,
)
from sunspot.submitter.cluster.views import JobView, job_view
from sunspot.submitter.printing import warn

WATCH_S = 5
"""One watch of the RayJobs; pods and their warnings, which the Role may only list, are listed between two."""

STORAGE_EVERY_S = 3.0

TICK_S = 1.0

MAX_OUTAGE_S = 300.0
"""How long an API server may be out of reach before following gives up."""

OUTAGE_PAUSE_S = 2.0

REFUSAL_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Between tries of an API server that has answered this user before: credentials are rotated, webhooks fail."""

OUTAGE_EVERY_S = 30.0
"""How often a line says that the API server or storage is still out of reach."""

STORAGE_WAIT_S = 3.0
"""How long a change in the cluster is held back until storage has been read again, which explains it."""


class StorageRead(NamedTuple):
    """What one look at storage has found."""

    clock: int
    "The change of the RayJobs after which it was made."
    part: StoragePart


class Follower:
    """Iterates over snapshots of a run, one at every change and every second, until the caller stops.

    Iterating raises `ClusterError` when the API server refuses, or is out of reach for MAX_OUTAGE_S.
    """

    def __init__(self, access: RunAccess) -> None:
        self._cluster, self._run = access.cluster, access.run
        self._updates: queue.Queue[ClusterPart | StorageRead | Exception] = queue.Queue()
        self._wake_storage = threading.Event()
        self._ended = threading.Event()
        self._snapshot = RunSnapshot(ClusterPart(trouble=access.cluster_error))
        self._clock = 0
        "Counts the changes of the RayJobs."
        self._storage_clock = -1
        "The change after which storage was last read."
        self._held_since = time.monotonic()

    @property
    def settled(self) -> bool:
        """Whether storage was read, or failed to be, after the last change of the RayJobs."""
        return self._storage_clock >= self._clock

    def __iter__(self) -> Iterator[RunSnapshot]:
        followers = [self._follow_storage, *([self._follow_cluster] if self._cluster else [])]
        for follow in followers:
            threading.Thread(target=self._pass_on_errors, args=(follow,), daemon=True).start()
        listed = self._cluster is None
        try:
            while True:
                try:
                    update = self._updates.get(timeout=TICK_S)
                    if isinstance(update, Exception):
                        raise update
                    self._take(update)
                    listed = listed or (isinstance(update, ClusterPart) and not update.trouble)
                except queue.Empty:
                    pass
                held = time.monotonic() - self._held_since
                if (listed and (self.settled or held > STORAGE_WAIT_S)) or self._snapshot.cluster.trouble:
                    yield replace(self._snapshot, time=time.time())
        finally:
            self._ended.set()
            self._wake_storage.set()

    def _take(self, update: ClusterPart | StorageRead) -> None:
        before = self._snapshot
        if isinstance(update, StorageRead):
            self._storage_clock, part = update
            if part.trouble:
                part = replace(before.storage, trouble=part.trouble)
            self._snapshot = replace(before, storage=part)
            return
        self._snapshot = replace(before, cluster=update)
        if before.cluster.jobs == update.jobs:
            return
        self._clock += 1
        self._held_since = time.monotonic()
        self._wake_storage.set()
        if before.job and self._snapshot.job and before.job.uid != self._snapshot.job.uid:
            self._snapshot = replace(self._snapshot, storage=replace(before.storage, status=None, owner=""))

    def _pass_on_errors(self, follow: Callable[[], None]) -> None:
        """Raise a thread's error in the caller, which would wait for it for ever."""
        try:
            follow()
        except Exception as error:
            self._updates.put(error)

    def _follow_cluster(self) -> None:
        assert self._cluster
        version, gone_since = "", 0.0
        jobs: dict[str, JobView] = {}
        part = ClusterPart()
        refusals: Iterator[float] = iter(())  # at first, a refusal is final
        while not self._ended.is_set():
            try:
                if not version:
                    listed, version = self._cluster.list_jobs(self._run.name)
                    jobs = {job.name: job for job in listed}
                part = read_cluster(self._cluster, list(jobs.values()))
                self._updates.put(part)
                gone_since = 0.0
                refusals = iter(REFUSAL_PAUSES_S)
                for kind, changed in self._cluster.watch_jobs(self._run.name, version, WATCH_S):
                    version = changed["metadata"]["resourceVersion"]
                    if kind == "BOOKMARK":
                        continue
                    job = job_view(changed)
                    if kind == "DELETED":
                        jobs.pop(job.name, None)
                    else:
                        jobs[job.name] = job
                    part = replace(part, jobs=tuple(newest_first(list(jobs.values()))))
                    self._updates.put(part)
            except UnreachableError as error:
                gone_since = gone_since or time.monotonic()
                version = ""
                if time.monotonic() - gone_since > MAX_OUTAGE_S:
                    raise
                self._updates.put(replace(part, trouble=str(error)))
                self._ended.wait(OUTAGE_PAUSE_S)
            except ClusterError as error:
                version = ""
                status = error.status if isinstance(error, RefusedError) else 401  # or no credential to be had
                if status == 410:  # the version to watch from is too old
                    continue
                pause = next(refusals, None) if status in (401, 403) else None
                if pause is None:
                    raise
                self._updates.put(replace(part, trouble=str(error)))
                self._ended.wait(pause)

    def _follow_storage(self) -> None:
        while not self._ended.is_set():
            self._wake_storage.clear()
            clock = self._clock
            self._updates.put(StorageRead(clock, read_storage(self._run, self._snapshot.job)))
            self._wake_storage.wait(STORAGE_EVERY_S)


class OutageReporter:
    """Says on stderr, now and then, that the API server or storage is out of reach, and when it is back."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def note(self, snapshot: RunSnapshot) -> None:
        """Report what this snapshot says of them."""
        now = time.monotonic()
        for what, trouble in (("the API server", snapshot.cluster.trouble), ("storage", snapshot.storage.trouble)):
            gone = in_words(now - self._since.setdefault(what, now))
            if not trouble:
                del self._since[what]
                if self._said.pop(what, None) is not None:
                    warn(f"{what} is back after {gone}")
            elif now - self._said.get(what, float("-inf")) >= OUTAGE_EVERY_S:
                self._said[what] = now
                warn(f"{what} unreachable for {gone}, still waiting; the run is not affected: {trouble}")
