"""What cluster and storage know of a run at one time, and how both are reached."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sunspot.errors import ClusterError, ConflictError, NotFoundError, StorageError
from sunspot.run import Run
from sunspot.run.overview import HALF_DELETED, read_fresh_status, read_parts, read_state, run_exists
from sunspot.run.requests import deletion_begun, stop_requested
from sunspot.run.status import RunState, Status
from sunspot.run.submissions import owner_of
from sunspot.settings import PREFIX
from sunspot.submitter.cluster.api import Cluster, RefusedError, newest_first, try_connect
from sunspot.submitter.cluster.state import is_of, judge
from sunspot.submitter.cluster.views import JobView, PodView, WarningEvent
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.output import doing, warn
from sunspot.submitter.runs import Target, named_run

STORAGE_PATH = PREFIX + "STORAGE_PATH"


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


@dataclass(frozen=True)
class RunAccess:
    """A run, whether or not it exists, and the cluster that may have it."""

    run: Run
    cluster: Cluster | None = None
    cluster_error: str = ""
    "Why there is no cluster to ask."

    @property
    def arguments(self) -> str:
        """The arguments with which a command finds this run from here."""
        return stored_arguments(self.run) + (self.cluster.options if self.cluster else "")

    def observe(self, include: Callable[[JobView], bool] = lambda job: True) -> RunSnapshot:
        """Look at the run, of its RayJobs at those that `include` accepts.

        Errors of cluster and storage are recorded, not raised.
        """
        snapshot = RunSnapshot(cluster_trouble=self.cluster_error)
        if self.cluster:
            try:
                jobs, _ = self.cluster.list_jobs(self.run.name)
                snapshot = replace(snapshot, **read_cluster(self.cluster, [job for job in jobs if include(job)]))
            except ClusterError as error:
                snapshot = replace(snapshot, cluster_trouble=str(error))
        return replace(snapshot, **read_storage(self.run, snapshot.job), time=time.time())

    def observe_existing(self) -> RunSnapshot:
        """Look at a run that is to be stopped or resumed.

        Raises `StorageError` when storage does not answer, `NotFoundError`, and `ConflictError` for one being deleted.
        """
        with doing("looking at the run"):
            snapshot = self.observe()
        if snapshot.storage_trouble:
            raise StorageError(snapshot.storage_trouble)
        self.require_known(snapshot)
        if snapshot.deleting:
            raise ConflictError(f"{self.run.name} is {RunState.DELETING}: {snapshot.state()[1]}")
        if snapshot.cluster_trouble:
            warn(f"only the storage was asked: {snapshot.cluster_trouble}")
        return snapshot

    def require_known(self, snapshot: RunSnapshot) -> None:
        """Raise `NotFoundError` if there is no such run, or the error that keeps it from being seen."""
        if snapshot.known:
            return
        if snapshot.storage_trouble:
            raise StorageError(snapshot.storage_trouble)
        cluster, trouble = self.cluster, ""
        if cluster and snapshot.cluster_trouble:
            raise ClusterError(snapshot.cluster_trouble)
        if snapshot.cluster_trouble:
            trouble = f" (the cluster was not asked: {snapshot.cluster_trouble})"
        elif cluster:
            trouble = f", nor in namespace {cluster.namespace} of {cluster.server}"
        place = self.run.storage.locate("").rstrip("/")
        raise NotFoundError(f"no run {self.run.name} in {place}{trouble}; check the name, --storage and --namespace")

    def require_cluster(self) -> Cluster:
        """Return the cluster. Without one, raises `NotFoundError` if storage knows no such run, else `ClusterError`."""
        if self.cluster is None:
            self.require_known(self.observe())
            raise ClusterError(self.cluster_error)
        return self.cluster


def reach_run(target: Target) -> RunAccess:
    """Find the cluster, if there is one, and where the run is stored.

    That is where the target or SUNSPOT_STORAGE_PATH says, or else where its RayJob keeps it.
    """
    cluster, cluster_error = try_connect(target.context, target.namespace)
    storage_path = target.storage
    if storage_path is None and cluster and not os.environ.get(STORAGE_PATH):
        with contextlib.suppress(ClusterError), doing("asking the cluster"):  # the next request reports an error
            jobs, _ = cluster.list_jobs(target.run)
            storage_path = settings_of(jobs[0].raw).get(STORAGE_PATH) if jobs else None
    return RunAccess(named_run(target.run, storage_path), cluster, cluster_error)


def stored_arguments(run: Run) -> str:
    """The arguments with which a command that reads storage alone finds this run from here."""
    if named_run(run.name).location == run.location:
        return run.name
    return f"{run.name} --storage {run.storage.locate('').rstrip('/')}"


def require_answers(snapshot: RunSnapshot) -> None:
    """Raise the error that kept the cluster or storage from answering."""
    if snapshot.cluster_trouble:
        raise ClusterError(snapshot.cluster_trouble)
    if snapshot.storage_trouble:
        raise StorageError(snapshot.storage_trouble)


def warn_of_hidden(snapshot: RunSnapshot) -> None:
    """Say what this user may not see of a run, which may be what explains it."""
    for what, refusal in snapshot.hidden.items():
        warn(f"without its {what}: {refusal}")


def read_cluster(cluster: Cluster, jobs: list[JobView]) -> dict[str, Any]:
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


def read_storage(run: Run, job: JobView | None) -> dict[str, Any]:
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
