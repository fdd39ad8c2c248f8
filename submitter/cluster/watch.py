"""All that is known of a run at one moment, from its cluster and its storage: once, or as it changes."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.errors import ClusterError, StorageError
from app.formatting import in_words
from app.run import Run
from app.run.attempts import owner_of
from app.run.overview import HALF_DELETED, is_there, read_state, read_statuses
from app.run.status import RunState, Status, deletion_begun, stop_requested
from app.settings import PREFIX
from submitter.cluster.api import Cluster, RefusedError, UnreachableError, newest_first, try_connect
from submitter.cluster.state import is_of, judge
from submitter.cluster.views import JobView, PodView, WarningEvent
from submitter.manifest.render import settings_of
from submitter.output import warn
from submitter.runs import named_run

STORAGE_PATH, NUM_WORKERS = PREFIX + "STORAGE_PATH", PREFIX + "NUM_WORKERS"

WATCH_S = 5
"""One watch of the RayJobs; between two of them, the pods and their warnings are listed (nobody may watch those)."""

STORAGE_EVERY_S = 3.0

TICK_S = 1.0

LONGEST_OUTAGE_S = 300.0
"""How long an API server may be gone before following it is given up."""

OUTAGE_PAUSE_S = 2.0

OUTAGE_EVERY_S = 30.0
"""How often a line says that the API server or storage is still gone."""

GONE_WITHIN_S = 180.0
"""How long a deleted RayJob and its pods may take to go: longer than the grace period of any profile."""

STORAGE_PATIENCE_S = 3.0
"""How long news of the cluster is held back until storage, asked anew, has said what that means."""


@dataclass(frozen=True)
class RunSnapshot:
    """What is known of a run; what could not be asked is as it was, or missing, and says why."""

    jobs: tuple[JobView, ...] = ()
    "Newest first."
    pods: tuple[PodView, ...] = ()
    warnings: tuple[WarningEvent, ...] = ()
    cluster_trouble: str = ""
    "Why the cluster's part is missing or old."
    status: Status | None = None
    owner: str = ""
    "Who a process of the newest job would be in storage."
    stop_wanted: bool = False
    deleting: bool = False
    "Whether somebody has begun to delete the run."
    by_storage: tuple[RunState, str] | None = None
    "The run's state and why, by storage alone; None: there is no run, or a RayJob to ask."
    storage_trouble: str = ""
    "Why the storage's part is missing or old."
    time: float = field(default_factory=time.time)
    "Seconds since the epoch."

    @property
    def job(self) -> JobView | None:
        """The newest RayJob."""
        return self.jobs[0] if self.jobs else None

    @property
    def known(self) -> bool:
        """Whether there is such a run at all."""
        return bool(self.jobs or self.status or self.by_storage or self.deleting)

    @property
    def driver_began(self) -> bool:
        """Whether a driver of the newest RayJob has ever begun."""
        return bool(self.job and self.status and is_of(self.status, self.job, self.owner))

    def state(self) -> tuple[RunState, str]:
        """The run's state, and a sentence that says why."""
        if self.deleting:
            return RunState.DELETING, HALF_DELETED
        if self.job:
            return judge(self.job, self.pods, self.warnings, self.status, self.owner, self.stop_wanted, self.time)
        state, reason = self.by_storage or (RunState.LOST, "its RayJob is gone, and storage knows nothing of it")
        if state is RunState.PENDING and not self.cluster_trouble:
            return RunState.LOST, "it was submitted, but its RayJob is gone; submit it again"
        return state, reason


def reach_run(args: argparse.Namespace) -> tuple[Cluster | None, Run, str]:
    """The cluster, or None; the run RUN, there or not; and why there is no cluster."""
    cluster, cluster_error = try_connect(args)
    return cluster, locate_run(cluster, args.run, args.storage), cluster_error


def locate_run(cluster: Cluster | None, name: str, storage_path: str | None) -> Run:
    """The run `name`, there or not: in `storage_path`, by SUNSPOT_STORAGE_PATH, or where its RayJob keeps it."""
    if storage_path is None and cluster and not os.environ.get(STORAGE_PATH):
        with contextlib.suppress(ClusterError):  # whoever asks next will say so
            jobs, _ = cluster.list_jobs(name)
            storage_path = settings_of(jobs[0].raw).get(STORAGE_PATH) if jobs else None
    return named_run(name, storage_path)


def command_arguments(cluster: Cluster | None, run: Run) -> str:
    """The run as the words of a command that finds it again from here."""
    words = run.name
    if named_run(run.name).location != run.location:
        words += f" --storage {run.storage.locate('').rstrip('/')}"
    return words + (cluster.options if cluster else "")


def observe_run(
    cluster: Cluster | None, run: Run, cluster_error: str = "", counts: Callable[[JobView], bool] = lambda job: True
) -> RunSnapshot:
    """What is known now; `cluster_error` says why there is no cluster to ask. Trouble is noted, not raised.

    Of the RayJobs with the run's name, those are looked at that `counts` holds for.
    """
    snapshot = RunSnapshot(cluster_trouble=cluster_error)
    if cluster:
        try:
            jobs, _ = cluster.list_jobs(run.name)
            snapshot = replace(snapshot, **_about(cluster, [job for job in jobs if counts(job)]))
        except ClusterError as error:
            snapshot = replace(snapshot, cluster_trouble=str(error))
    try:
        return replace(snapshot, **_stored(run, snapshot.job.name if snapshot.job else ""), time=time.time())
    except StorageError as error:
        return replace(snapshot, storage_trouble=str(error), time=time.time())


class Follower:
    """Follows a run: iterating gives what is known at every change, and every second. Ends when the caller does.

    The iteration raises `ClusterError` when the API server refuses, or was gone for LONGEST_OUTAGE_S.
    """

    def __init__(self, cluster: Cluster | None, run: Run, cluster_error: str = "") -> None:
        self._cluster, self._run = cluster, run
        self._news: queue.Queue[dict[str, Any] | Exception] = queue.Queue()
        self._wake_storage, self._ended = threading.Event(), threading.Event()
        self._snapshot = RunSnapshot(cluster_trouble=cluster_error)
        self._clock = 0
        "Counts the changes of the RayJobs."
        self._storage_clock = -1
        "The change that storage was asked after."
        self._held_since = time.monotonic()

    @property
    def settled(self) -> bool:
        """Whether storage was asked (or could not be) after the last change of the RayJobs."""
        return self._storage_clock >= self._clock

    def __iter__(self) -> Iterator[RunSnapshot]:
        feeds = [self._follow_storage, *([self._follow_cluster] if self._cluster else [])]
        for feed in feeds:
            threading.Thread(target=self._pass_on_errors, args=(feed,), daemon=True).start()
        listed = self._cluster is None
        try:
            while True:
                try:
                    news = self._news.get(timeout=TICK_S)
                    if isinstance(news, Exception):
                        raise news
                    self._take(news)
                    listed = listed or "jobs" in news
                except queue.Empty:
                    pass
                held = time.monotonic() - self._held_since
                if (listed and (self.settled or held > STORAGE_PATIENCE_S)) or self._snapshot.cluster_trouble:
                    yield replace(self._snapshot, time=time.time())
        finally:
            self._ended.set()
            self._wake_storage.set()

    def _take(self, news: dict[str, Any]) -> None:
        before = self._snapshot
        self._storage_clock = news.pop("asked_after", self._storage_clock)
        self._snapshot = replace(before, **news)
        if "jobs" in news and before.jobs != self._snapshot.jobs:
            self._clock += 1
            self._held_since = time.monotonic()
            self._wake_storage.set()
            if before.job and self._snapshot.job and before.job.uid != self._snapshot.job.uid:
                self._snapshot = replace(self._snapshot, status=None, owner="")

    def _pass_on_errors(self, feed: Callable[[], None]) -> None:
        """A feed that ended in silence would be waited for in vain."""
        try:
            feed()
        except Exception as error:
            self._news.put(error)

    def _follow_cluster(self) -> None:
        assert self._cluster
        version, jobs, gone_since = "", {}, 0.0
        while not self._ended.is_set():
            try:
                if not version:
                    listed, version = self._cluster.list_jobs(self._run.name)
                    jobs = {job.name: job for job in listed}
                self._news.put({**_about(self._cluster, list(jobs.values())), "cluster_trouble": ""})
                gone_since = 0.0
                for kind, job in self._cluster.watch_jobs(self._run.name, version, WATCH_S):
                    version = job.version
                    if kind == "DELETED":
                        jobs.pop(job.name, None)
                    elif kind != "BOOKMARK":
                        jobs[job.name] = job
                    self._news.put({"jobs": tuple(newest_first(list(jobs.values())))})
            except UnreachableError as error:
                gone_since = gone_since or time.monotonic()
                version = ""
                if time.monotonic() - gone_since > LONGEST_OUTAGE_S:
                    raise
                self._news.put({"cluster_trouble": str(error)})
                self._ended.wait(OUTAGE_PAUSE_S)
            except RefusedError as error:
                if error.status != 410:  # 410: the version to watch from is too old
                    raise
                version = ""

    def _follow_storage(self) -> None:
        while not self._ended.is_set():
            self._wake_storage.clear()
            clock, job = self._clock, self._snapshot.job
            try:
                news = {**_stored(self._run, job.name if job else ""), "storage_trouble": ""}
            except StorageError as error:
                news = {"storage_trouble": str(error)}
            self._news.put({**news, "asked_after": clock})
            self._wake_storage.wait(STORAGE_EVERY_S)


def _about(cluster: Cluster, jobs: list[JobView]) -> dict[str, Any]:
    newest = newest_first(jobs)
    return {
        "jobs": tuple(newest),
        "pods": tuple(cluster.list_pods(newest)),
        "warnings": tuple(cluster.list_warnings(newest[:1])),
    }


def _stored(run: Run, job: str) -> dict[str, Any]:
    status = read_statuses(run.storage, [run.name])[run.name]  # None, too, when it cannot be used
    return {
        "status": status,
        "stop_wanted": stop_requested(run),
        "deleting": deletion_begun(run),
        "owner": owner_of(run, job) if job else "",
        "by_storage": read_state(run) if not job and (status or is_there(run)) else None,
    }


def await_gone(cluster: Cluster, jobs: Sequence[JobView], seconds: float) -> bool:
    """Wait until deleted RayJobs and the pods of their clusters are gone; whether they are."""
    deadline = time.monotonic() + seconds
    made = [job for job in jobs if not job.spec.get("clusterSelector")]  # a cluster that was borrowed stays
    while any((now := cluster.find_job(job.name)) and now.uid == job.uid for job in jobs) or cluster.list_pods(made):
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK_S)
    return True


def not_found_message(cluster: Cluster | None, run: Run, snapshot: RunSnapshot) -> str:
    """Where a run was looked for and not found."""
    in_cluster = f", nor in namespace {cluster.namespace} of {cluster.server}" if cluster else ""
    trouble = f" (the cluster was not asked: {snapshot.cluster_trouble})" if snapshot.cluster_trouble else in_cluster
    place = run.storage.locate("").rstrip("/")
    return f"no run {run.name} in {place}{trouble}; check the name, --storage and --namespace"


class Outage:
    """Says on stderr that the API server or storage is out of reach, now and then, and that it is back."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._since: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def note(self, snapshot: RunSnapshot | None) -> None:
        """Look at what is known; None: there is no cluster to be gone."""
        if snapshot:
            self._note("the API server", snapshot.cluster_trouble)
            self._note("storage", snapshot.storage_trouble)

    def _note(self, what: str, trouble: str) -> None:
        now = time.monotonic()
        if not trouble:
            if what in self._said:
                warn(f"{what} is back after {in_words(now - self._since[what])}")
            self._since.pop(what, None)
            self._said.pop(what, None)
            return
        self._since.setdefault(what, now)
        if now - self._said.get(what, float("-inf")) >= OUTAGE_EVERY_S:
            self._said[what] = now
            gone = in_words(now - self._since[what])
            warn(f"{what} unreachable for {gone}, still waiting; the run is not affected: {trouble}")
