"""What cluster and storage know of a run: once, as a snapshot, or as it changes."""

import argparse
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sunspot.errors import ClusterError, ConflictError, NotFoundError, StorageError
from sunspot.formatting import in_words
from sunspot.run import Run
from sunspot.run.overview import HALF_DELETED, read_fresh_status, read_parts, read_state, run_exists
from sunspot.run.status import RunState, Status, deletion_begun, stop_requested
from sunspot.run.submissions import owner_of
from sunspot.settings import PREFIX
from sunspot.submitter.cluster.api import Cluster, RefusedError, UnreachableError, newest_first, try_connect
from sunspot.submitter.cluster.state import is_of, judge
from sunspot.submitter.cluster.views import JobView, PodView, WarningEvent, job_view
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.output import doing, print_json, print_text, warn
from sunspot.submitter.runs import named_run

STORAGE_PATH, NUM_WORKERS = PREFIX + "STORAGE_PATH", PREFIX + "NUM_WORKERS"

WATCH_S = 5
"""One watch of the RayJobs; pods and their warnings, which the Role may only list, are listed between two."""

STORAGE_EVERY_S = 3.0

TICK_S = 1.0

LONGEST_OUTAGE_S = 300.0
"""How long an API server may be out of reach before following gives up."""

OUTAGE_PAUSE_S = 2.0

REFUSAL_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Between tries of an API server that has answered this user before: credentials are rotated, webhooks fail."""

OUTAGE_EVERY_S = 30.0
"""How often a line says that the API server or storage is still out of reach."""

GONE_WITHIN_S = 180.0
"""How long a deleted RayJob and its pods may take to go: more than any profile's grace period."""

STORAGE_WAIT_S = 3.0
"""How long a change in the cluster is held back until storage has been read again, which explains it."""


@dataclass(frozen=True)
class RunSnapshot:
    """What is known of a run. What could not be read is old or missing, and the reason is given."""

    jobs: tuple[JobView, ...] = ()
    "Newest first."
    pods: tuple[PodView, ...] = ()
    warnings: tuple[WarningEvent, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict)
    "What of the cluster's part this user may not see (pods, events), and the API server's words on it."
    cluster_trouble: str = ""
    "Why the cluster's part is missing or old."
    status: Status | None = None
    owner: str = ""
    "The owner in storage that a process of the newest job has."
    stop_wanted: bool = False
    deleting: bool = False
    "Whether a deletion has begun."
    stored_state: tuple[RunState, str] | None = None
    "State and reason by storage alone; None if there is no run, or a RayJob to ask."
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
        """Whether the run exists at all."""
        return bool(self.jobs or self.status or self.stored_state or self.deleting)

    @property
    def driver_began(self) -> bool:
        """Whether the newest RayJob has ever had a driver."""
        return bool(self.job and self.status and is_of(self.status, self.job, self.owner))

    def state(self) -> tuple[RunState, str]:
        """The run's state, and a sentence that says why."""
        if self.deleting:
            return RunState.DELETING, HALF_DELETED
        if self.job:
            state, reason = judge(
                self.job, self.pods, self.warnings, self.status, self.owner, self.stop_wanted, self.time
            )
            unseen = "pods" in self.hidden and not state.terminal and not self.driver_began
            return state, "this user may not list its pods, which would say why" if unseen else reason
        state, reason = self.stored_state or (RunState.LOST, "its RayJob is gone, and storage knows nothing of it")
        if state is RunState.PENDING and not self.cluster_trouble:
            return RunState.LOST, "it was submitted, but its RayJob is gone; submit it again"
        return state, reason


def reach_run(args: argparse.Namespace) -> tuple[Cluster | None, Run, str]:
    """The cluster or None, the run RUN whether it exists or not, and why there is no cluster.

    The run is in `--storage`, SUNSPOT_STORAGE_PATH, or where its RayJob keeps it.
    """
    (cluster, cluster_error), storage_path = try_connect(args), args.storage
    if storage_path is None and cluster and not os.environ.get(STORAGE_PATH):
        with contextlib.suppress(ClusterError), doing("asking the cluster"):  # the next request reports an error
            jobs, _ = cluster.list_jobs(args.run)
            storage_path = settings_of(jobs[0].raw).get(STORAGE_PATH) if jobs else None
    return cluster, named_run(args.run, storage_path), cluster_error


def reach_run_in_cluster(args: argparse.Namespace) -> tuple[Cluster, Run]:
    """The same for what needs a cluster. Raises `NotFoundError` if storage knows no such run, else `ClusterError`."""
    cluster, run, cluster_error = reach_run(args)
    if cluster is None:
        require_known(None, run, observe_run(None, run, cluster_error))
        raise ClusterError(cluster_error)
    return cluster, run


def command_arguments(cluster: Cluster | None, run: Run) -> str:
    """The arguments with which a command finds this run from here."""
    words = run.name
    if named_run(run.name).location != run.location:
        words += f" --storage {run.storage.locate('').rstrip('/')}"
    return words + (cluster.options if cluster else "")


def observe_run(
    cluster: Cluster | None, run: Run, cluster_error: str = "", include: Callable[[JobView], bool] = lambda job: True
) -> RunSnapshot:
    """What is known now, of the RayJobs that `include` accepts. `cluster_error`: why there is no cluster to ask.

    Errors of cluster and storage are recorded, not raised.
    """
    snapshot = RunSnapshot(cluster_trouble=cluster_error)
    if cluster:
        try:
            jobs, _ = cluster.list_jobs(run.name)
            snapshot = replace(snapshot, **_read_cluster(cluster, [job for job in jobs if include(job)]))
        except ClusterError as error:
            snapshot = replace(snapshot, cluster_trouble=str(error))
    return replace(snapshot, **_read_storage(run, snapshot.job), time=time.time())


def observe_existing(cluster: Cluster | None, run: Run, cluster_error: str) -> RunSnapshot:
    """What is known of a run that is to be stopped or resumed.

    Raises `StorageError` when storage does not answer, `NotFoundError`, and `ConflictError` for one being deleted.
    """
    with doing("looking at the run"):
        snapshot = observe_run(cluster, run, cluster_error)
    if snapshot.storage_trouble:
        raise StorageError(snapshot.storage_trouble)
    require_known(cluster, run, snapshot)
    if snapshot.deleting:
        raise ConflictError(f"{run.name} is {RunState.DELETING}: {snapshot.state()[1]}")
    if snapshot.cluster_trouble:
        warn(f"only the storage was asked: {snapshot.cluster_trouble}")
    return snapshot


def print_state(run: Run, state: RunState, reason: str, as_json: bool) -> None:
    """Print where a run stands now, and why."""
    if as_json:
        print_json({"run": run.name, "state": state, "reason": reason})
    else:
        print_text(f"{run.name}: {state}, {reason}")


class Follower:
    """Iterates over snapshots of a run, one at every change and every second, until the caller stops.

    Iterating raises `ClusterError` when the API server refuses, or is out of reach for LONGEST_OUTAGE_S.
    """

    def __init__(self, cluster: Cluster | None, run: Run, cluster_error: str = "") -> None:
        self._cluster, self._run = cluster, run
        self._updates: queue.Queue[dict[str, Any] | Exception] = queue.Queue()
        self._wake_storage, self._ended = threading.Event(), threading.Event()
        self._snapshot = RunSnapshot(cluster_trouble=cluster_error)
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
                    listed = listed or "jobs" in update
                except queue.Empty:
                    pass
                held = time.monotonic() - self._held_since
                if (listed and (self.settled or held > STORAGE_WAIT_S)) or self._snapshot.cluster_trouble:
                    yield replace(self._snapshot, time=time.time())
        finally:
            self._ended.set()
            self._wake_storage.set()

    def _take(self, update: dict[str, Any]) -> None:
        before = self._snapshot
        self._storage_clock = update.pop("read_after", self._storage_clock)
        self._snapshot = replace(before, **update)
        if "jobs" in update and before.jobs != self._snapshot.jobs:
            self._clock += 1
            self._held_since = time.monotonic()
            self._wake_storage.set()
            if before.job and self._snapshot.job and before.job.uid != self._snapshot.job.uid:
                self._snapshot = replace(self._snapshot, status=None, owner="")

    def _pass_on_errors(self, follow: Callable[[], None]) -> None:
        """Raise a thread's error in the caller, which would wait for it for ever."""
        try:
            follow()
        except Exception as error:
            self._updates.put(error)

    def _follow_cluster(self) -> None:
        assert self._cluster
        version, jobs, gone_since = "", {}, 0.0
        refusals: Iterator[float] = iter(())  # at first, a refusal is final
        while not self._ended.is_set():
            try:
                if not version:
                    listed, version = self._cluster.list_jobs(self._run.name)
                    jobs = {job.name: job for job in listed}
                self._updates.put({**_read_cluster(self._cluster, list(jobs.values())), "cluster_trouble": ""})
                gone_since, refusals = 0.0, iter(REFUSAL_PAUSES_S)
                for kind, changed in self._cluster.watch_jobs(self._run.name, version, WATCH_S):
                    version = changed["metadata"]["resourceVersion"]
                    if kind == "BOOKMARK":
                        continue
                    job = job_view(changed)
                    if kind == "DELETED":
                        jobs.pop(job.name, None)
                    else:
                        jobs[job.name] = job
                    self._updates.put({"jobs": tuple(newest_first(list(jobs.values())))})
            except UnreachableError as error:
                gone_since = gone_since or time.monotonic()
                version = ""
                if time.monotonic() - gone_since > LONGEST_OUTAGE_S:
                    raise
                self._updates.put({"cluster_trouble": str(error)})
                self._ended.wait(OUTAGE_PAUSE_S)
            except ClusterError as error:
                version = ""
                status = error.status if isinstance(error, RefusedError) else 401  # or no credential to be had
                if status == 410:  # the version to watch from is too old
                    continue
                pause = next(refusals, None) if status in (401, 403) else None
                if pause is None:
                    raise
                self._updates.put({"cluster_trouble": str(error)})
                self._ended.wait(pause)

    def _follow_storage(self) -> None:
        while not self._ended.is_set():
            self._wake_storage.clear()
            clock = self._clock
            self._updates.put({**_read_storage(self._run, self._snapshot.job), "read_after": clock})
            self._wake_storage.wait(STORAGE_EVERY_S)


def _read_cluster(cluster: Cluster, jobs: list[JobView]) -> dict[str, Any]:
    """What this user may see of the cluster's part; the RayJobs at least."""
    newest = newest_first(jobs)
    seen: dict[str, tuple[Any, ...]] = {"pods": (), "events": ()}
    hidden = {}
    for what, read in (
        ("pods", lambda: cluster.list_pods(newest)),
        ("events", lambda: cluster.list_warnings(newest[:1])),
    ):
        try:
            seen[what] = tuple(read())
        except RefusedError as error:
            if error.status != 403:
                raise
            hidden[what] = str(error)
    return {"jobs": tuple(newest), "pods": seen["pods"], "warnings": seen["events"], "hidden": hidden}


def warn_of_hidden(snapshot: RunSnapshot) -> None:
    """Say what this user may not see of a run, which may be what explains it."""
    for what, refusal in snapshot.hidden.items():
        warn(f"without its {what}: {refusal}")


def _read_storage(run: Run, job: JobView | None) -> dict[str, Any]:
    """What storage knows of a run whose newest RayJob is `job`, or why it does not answer."""
    try:
        status, stop_wanted, deleting = read_parts(
            lambda: read_fresh_status(run), lambda: stop_requested(run), lambda: deletion_begun(run)
        )
        return {
            "status": status,
            "stop_wanted": stop_wanted,
            "deleting": deleting,
            "owner": owner_of(run, job.name) if job else "",
            "stored_state": read_state(run, status) if not job and (status or run_exists(run)) else None,
            "storage_trouble": "",
        }
    except StorageError as error:
        return {"storage_trouble": str(error)}


def delete_jobs(cluster: Cluster, jobs: Sequence[JobView], seconds: float, frozen: bool = False) -> bool:
    """Delete RayJobs, and wait until they and their clusters' pods are gone; returns whether they are.

    Pods on nodes that do not answer are waited for only with `frozen`: what they still do changes no run.
    """
    for job in jobs:
        cluster.delete_job(job)
    deadline = time.monotonic() + seconds
    own = [job for job in jobs if not job.borrows_cluster]  # a cluster of somebody else stays

    def any_left() -> bool:
        pods = cluster.list_pods(own)
        return any(cluster.has_job(job) for job in jobs) or any(frozen or not pod.overdue(time.time()) for pod in pods)

    while any_left():
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK_S)
    return True


def require_known(cluster: Cluster | None, run: Run, snapshot: RunSnapshot) -> None:
    """Raise `NotFoundError` if there is no such run, or the error that keeps it from being seen."""
    if snapshot.known:
        return
    if snapshot.storage_trouble:
        raise StorageError(snapshot.storage_trouble)
    if cluster and snapshot.cluster_trouble:
        raise ClusterError(snapshot.cluster_trouble)
    in_cluster = f", nor in namespace {cluster.namespace} of {cluster.server}" if cluster else ""
    trouble = f" (the cluster was not asked: {snapshot.cluster_trouble})" if snapshot.cluster_trouble else in_cluster
    place = run.storage.locate("").rstrip("/")
    raise NotFoundError(f"no run {run.name} in {place}{trouble}; check the name, --storage and --namespace")


def require_answers(snapshot: RunSnapshot) -> None:
    """Raise the error that kept the cluster or storage from answering."""
    if snapshot.cluster_trouble:
        raise ClusterError(snapshot.cluster_trouble)
    if snapshot.storage_trouble:
        raise StorageError(snapshot.storage_trouble)


class Outage:
    """Says on stderr, now and then, that the API server or storage is out of reach, and when it is back."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def note(self, snapshot: RunSnapshot) -> None:
        """Report what this snapshot says of them."""
        now = time.monotonic()
        for what, trouble in (("the API server", snapshot.cluster_trouble), ("storage", snapshot.storage_trouble)):
            gone = in_words(now - self._since.setdefault(what, now))
            if not trouble:
                del self._since[what]
                if self._said.pop(what, None) is not None:
                    warn(f"{what} is back after {gone}")
            elif now - self._said.get(what, float("-inf")) >= OUTAGE_EVERY_S:
                self._said[what] = now
                warn(f"{what} unreachable for {gone}, still waiting; the run is not affected: {trouble}")
