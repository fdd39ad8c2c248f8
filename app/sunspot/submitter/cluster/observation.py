"""Connects to a run's cluster and storage, and reads the run from both."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sunspot.errors import ClusterError, ConflictError, NotFoundError, RefusedStorageError, SettingsError, StorageError
from sunspot.formatting import in_words
from sunspot.run import Run
from sunspot.run.overview import describe_absence
from sunspot.run.seen import RunSeen, look
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import Cluster, RefusedError, UnreachableError, try_connect
from sunspot.submitter.cluster.gone_jobs import find_gone_job
from sunspot.submitter.cluster.kubeconfig import is_configured
from sunspot.submitter.cluster.state import (
    ClusterSeen,
    describe_failed_tries,
    find_unmet_request,
    judge,
    was_written_by,
    without_next_job,
)
from sunspot.submitter.cluster.views import JobView, mark_lost_pods
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import progress_note, warn
from sunspot.submitter.runs import Target, named_run

POLL_EVERY_S = 3.0
"""Seconds between two reads while a run is followed."""

MAX_OUTAGE_S = 300.0
"""Seconds for which an API server can be unreachable before `follow` raises."""

REFUSAL_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds to wait before each retry after an API server rejects a request that it accepted before. The user's
credentials might have been rotated, or a webhook might have failed."""

PODS_HIDDEN = "this user is not allowed to list its pods, which would show why"

OUTAGE_EVERY_S = 30.0
"""Seconds between two warnings that the API server or storage is still unreachable."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run as seen in the cluster and in storage."""

    cluster: ClusterSeen
    storage: RunSeen

    @property
    def job(self) -> JobView | None:
        """The newest RayJob."""
        return self.cluster.job

    @property
    def training_job(self) -> JobView | None:
        """The newest RayJob, ignoring a RayJob in a new place to which the run is still moving."""
        return without_next_job(self.cluster, self.storage).job

    @property
    def lacks_workers(self) -> bool:
        """True if the run's driver is running, but fewer workers are training than requested."""
        status, job = self.storage.status, self.training_job
        if not (status and job and self.driver_began):
            return False
        fewer = status.state is RunState.RUNNING and find_unmet_request(job, self.storage)
        return bool(fewer) or status.state is RunState.STARTING

    @property
    def known(self) -> bool:
        """True if the run exists in the cluster or in storage."""
        return bool(self.cluster.jobs) or self.storage.exists

    @property
    def driver_began(self) -> bool:
        """True if the training RayJob has ever had a driver."""
        job = self.training_job
        return bool(job and was_written_by(self.storage, job))

    def state(self) -> tuple[RunState, str]:
        """Return the run's state and the reason for it."""
        return judge(self.cluster, self.storage)


@dataclass(frozen=True)
class RunAccess:
    """A run, which might not exist, and the cluster that it might run in."""

    run: Run
    cluster: Cluster | None = None
    cluster_error: str = ""
    "The reason why no cluster is available, or an empty string."

    @property
    def arguments(self) -> str:
        """The command-line arguments that identify this run for any subcommand."""
        return stored_arguments(self.run) + (self.cluster.options if self.cluster else "")

    def observe(self, include: Callable[[JobView], bool] = lambda job: True) -> RunSnapshot:
        """Read the run from the cluster and from storage. Errors are recorded in the snapshot, not raised.

        RayJobs for which `include` returns False are ignored.
        """
        seen = ClusterSeen(trouble=self.cluster_error)
        if self.cluster:
            try:
                seen = read_cluster(self.cluster, list(filter(include, self.cluster.list_jobs(self.run.name))))
            except ClusterError as error:
                seen = ClusterSeen(trouble=str(error))
        storage = self.look(RunSeen(self.run))
        if storage.outside_clusters and not self.cluster and not is_configured():
            seen = ClusterSeen()  # there is no cluster, and the run needs none
        return self.combine(seen, storage)

    def look(self, before: RunSeen) -> RunSeen:
        """Read the run from storage. If storage does not answer, return `before` with the error added."""
        try:
            return look(self.run)
        except StorageError as error:
            return replace(before, trouble=str(error), refused=isinstance(error, RefusedStorageError))

    def combine(self, seen: ClusterSeen, storage: RunSeen) -> RunSnapshot:
        """Combine what was seen in the cluster and in storage into a snapshot.

        If the cluster has no RayJob for the run, also find out whether one was deleted.
        """
        gone = None
        if self.cluster and not seen.trouble and not seen.jobs and storage.exists:
            gone = find_gone_job(self.cluster, storage)
        return RunSnapshot(replace(seen, gone=gone, time=time.time()), storage)

    def with_nodes(self, snapshot: RunSnapshot) -> RunSnapshot:
        """Return the snapshot with all nodes of the cluster. The nodes show why pods are lost or not scheduled.

        If this user cannot list nodes, the API server's message is recorded in `hidden`.
        """
        if not self.cluster or snapshot.cluster.nodes or "nodes" in snapshot.cluster.hidden:
            return snapshot
        seen = snapshot.cluster
        try:
            nodes = tuple(self.cluster.list_all("nodes"))
            seen = replace(seen, nodes=nodes, pods=mark_lost_pods(seen.pods, nodes))
        except ClusterError as error:
            seen = replace(seen, hidden={**seen.hidden, "nodes": str(error)})
        return replace(snapshot, cluster=seen)

    def observe_existing(self) -> RunSnapshot:
        """Read a run that is about to be stopped or resumed.

        Raises `StorageError` if storage does not answer, `NotFoundError` if the run does not exist, and `ConflictError`
        if it is being deleted.
        """
        with progress_note("looking at the run"):
            snapshot = self.observe()
        if snapshot.storage.trouble:
            raise StorageError(snapshot.storage.trouble)
        self.require_known(snapshot)
        if snapshot.storage.summary.deleting:
            raise ConflictError(f"{self.run.name} is {RunState.DELETING}: {snapshot.state()[1]}")
        if snapshot.cluster.trouble:
            warn(f"cannot query the cluster ({snapshot.cluster.trouble}), so only the run's storage was checked")
        return snapshot

    def require_known(self, snapshot: RunSnapshot) -> None:
        """Raise `NotFoundError` if the run does not exist.

        If it is unknown whether the run exists, raises the snapshot's error instead.
        """
        if snapshot.known:
            return
        if snapshot.storage.trouble:
            raise StorageError(snapshot.storage.trouble)
        trouble = snapshot.cluster.trouble
        storage = self.run.storage.locate("").rstrip("/")
        if self.cluster and trouble:
            raise ClusterError(trouble)
        if not self.cluster and not is_configured():
            raise NotFoundError(describe_absence(self.run))
        nor = f" (the cluster was not searched: {trouble})" if trouble else ""
        if self.cluster:
            nor = f", nor in namespace {self.cluster.namespace} of {self.cluster.server}"
        raise NotFoundError(f"no run {self.run.name} in {storage}{nor}; check the name, --storage and --namespace")

    def require_cluster(self) -> Cluster:
        """Return the cluster.

        Without a cluster, raises `NotFoundError` if the run is not in storage, and `ClusterError` otherwise.
        """
        if self.cluster is None:
            self.require_known(self.observe())
            raise ClusterError(self.cluster_error)
        return self.cluster


def reach_run(target: Target, changed_by: str = "") -> RunAccess:
    """Connect to the cluster, if there is one, and open the run.

    The storage location is the target's or SUNSPOT_STORAGE_PATH. If neither is set, the location is taken from the
    run's RayJob. `changed_by` is the name of a command that writes or deletes. Raises `SettingsError` if the RayJob's
    location must not be used (see `trust_job`).
    """
    cluster, cluster_error = try_connect(target.context, target.namespace)
    run = named_run(target.run, target.storage)
    if target.storage is None and cluster and not os.environ.get(STORAGE_PATH):
        job = None
        # If the cluster does not answer, the next request reports the error.
        with contextlib.suppress(ClusterError), progress_note("asking the cluster"):
            job = next(iter(cluster.list_jobs(target.run)), None)
        run = trust_job(run, job, changed_by) if job else run
    return RunAccess(run, cluster, cluster_error)


def trust_job(default: Run, job: JobView, changed_by: str = "") -> Run:
    """Return the run in the storage location that its RayJob names. `default` is the run in the configured location.

    Anyone who can create a RayJob can choose the location in it, so the location is only used for reading. It must also
    be in a bucket, because a path can mean a different folder on this machine than in the pods. Raises `SettingsError`
    if the location is a path. If `changed_by` names a command, raises this error for every location except that of
    `default`.
    """
    path = settings_of(job.raw).get(STORAGE_PATH)
    if path is None or path.rstrip("/") == default.storage.locate("").rstrip("/"):
        return default
    run = named_run(default.name, path)
    if run.storage.is_bucket and not changed_by:
        return run
    why = "a path in its pods might be a different folder on this machine"
    if changed_by:
        why = f"`sunspot {changed_by}` would change files there"
    again = f"`sunspot {changed_by or 'status'} {run.name} --storage {shlex.quote(path)}`"
    raise SettingsError(
        f"the location {path} of run {run.name} is known only from the RayJob {job.name}, and {why}. If it is the "
        f"right location, run {again}, or set {STORAGE_PATH}"
    )


def stored_arguments(run: Run) -> str:
    """Return the command-line arguments that identify this run for subcommands that only read storage."""
    if named_run(run.name).location == run.location:
        return run.name
    return f"{run.name} --storage {run.storage.locate('').rstrip('/')}"


def require_answers(snapshot: RunSnapshot) -> None:
    """Raise the snapshot's error if the cluster or storage did not answer."""
    if snapshot.cluster.trouble:
        raise ClusterError(snapshot.cluster.trouble)
    if snapshot.storage.trouble:
        raise StorageError(snapshot.storage.trouble)


def warn_of_hidden(snapshot: RunSnapshot) -> None:
    """Warn about each kind of object that this user cannot list.

    Nodes are excluded, because most users cannot list them.
    """
    for what, refusal in snapshot.cluster.hidden.items():
        if what != "nodes":
            warn(f"the run's {what} cannot be shown: {refusal}")


def read_cluster(cluster: Cluster, jobs: list[JobView]) -> ClusterSeen:
    """Read the pods and warnings of these RayJobs, except those that this user cannot list.

    Raises `ClusterError` if the API server does not answer.
    """
    hidden: dict[str, str] = {}

    def read_if_allowed(what: str, read: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
        try:
            return tuple(read())
        except RefusedError as error:
            if error.status != 403:
                raise
            hidden[what] = str(error)
            return ()

    pods = read_if_allowed("pods", lambda: cluster.list_pods(jobs))
    warnings = read_if_allowed("events", lambda: cluster.list_warnings(jobs[:1]))
    unseen_pods = PODS_HIDDEN if "pods" in hidden else ""
    return ClusterSeen(tuple(jobs), pods, warnings, unseen_pods=unseen_pods, hidden=hidden)


def explain_missing_output(run: Run, context: str | None, namespace: str | None) -> str:
    """Return why a run has written nothing to storage, or an empty string if the cluster does not show the reason."""
    cluster, error = try_connect(context, namespace)
    if not cluster:
        return ""
    with progress_note("asking the cluster"):
        snapshot = RunAccess(run, cluster, error).observe()
    job, stored = snapshot.job, snapshot.storage
    if not job or was_written_by(stored, job):
        return ""
    if job.terminal:
        return f"its RayJob {job.name} says: {job.message}" if job.message else ""
    return describe_failed_tries(job, stored) if job.failed else ""


# ------------------------------------------------------------------------------------------------------------ following


def follow(access: RunAccess) -> Iterator[RunSnapshot]:
    """Yield a snapshot of a run every few seconds, forever.

    If the cluster or storage does not answer, the snapshot keeps the last known values. Storage is read after the
    cluster, because a driver writes its final status to storage before its RayJob ends. Raises `ClusterError` if the
    API server rejects the user's credentials or requests, or is unreachable for MAX_OUTAGE_S.
    """
    snapshot = RunSnapshot(ClusterSeen(trouble=access.cluster_error), RunSeen(access.run))
    answered = ask_at = time.monotonic()
    refusals: Iterator[float] = iter(())  # before the first answer, a rejection is final
    while True:
        cluster = snapshot.cluster
        if access.cluster and time.monotonic() >= ask_at:
            try:
                cluster = read_cluster(access.cluster, access.cluster.list_jobs(access.run.name))
                answered = time.monotonic()
                refusals = iter(REFUSAL_PAUSES_S)
            except UnreachableError as error:
                if time.monotonic() - answered > MAX_OUTAGE_S:
                    raise
                cluster = replace(cluster, trouble=str(error))
            except ClusterError as error:
                credentials = not isinstance(error, RefusedError) or error.status in (401, 403)
                pause = next(refusals, None) if credentials else None
                if pause is None:
                    raise
                ask_at = time.monotonic() + pause
                cluster = replace(cluster, trouble=str(error))
        snapshot = access.combine(cluster, access.look(snapshot.storage))
        yield snapshot
        time.sleep(POLL_EVERY_S)


class OutageReporter:
    """Warns on stderr while the API server or storage is unreachable, and reports when it answers again."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        "The start of each service's outage on the monotonic clock, keyed by name."
        self._warned_at: dict[str, float] = {}

    def note(self, of_cluster: str, of_storage: str = "") -> None:
        """Print a line if an outage begins, continues or ends. Each argument is an error message, or empty."""
        now = time.monotonic()
        for service, trouble in (("the API server", of_cluster), ("storage", of_storage)):
            outage = in_words(now - self._since.setdefault(service, now))
            if not trouble:
                del self._since[service]
                if self._warned_at.pop(service, None) is not None:
                    warn(f"{service} is back after {outage}")
            elif now - self._warned_at.get(service, float("-inf")) >= OUTAGE_EVERY_S:
                self._warned_at[service] = now
                warn(f"{service} has been unreachable for {outage} ({trouble}); still waiting. The run is not affected")
