"""Waits for runs: for one to its end, or for all of a namespace; starts one again whose head the operator has given up.

KubeRay replaces a head whose pod has gone. If no head answers for too long, as its node is frozen or a new one finds no
node, the RayJob is Failed, and `backoffLimit` does not apply. Nothing is wrong with the run then.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sunspot.background import map_parallel
from sunspot.errors import ClusterError, ConflictError, GaveUpError, StorageError, SunspotError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import step_of
from sunspot.run.status import RunState, Status
from sunspot.settings import PREFIX, Settings
from sunspot.submitter.cluster.api import ROLE, Cluster, UnreachableError
from sunspot.submitter.cluster.applied import applied_manifest
from sunspot.submitter.cluster.observation import (
    MAX_OUTAGE_S,
    ClusterPart,
    OutageReporter,
    RunAccess,
    RunSnapshot,
    follow,
    read_storage,
    trust_job,
    warn_of_hidden,
)
from sunspot.submitter.cluster.progress_lines import ProgressLines
from sunspot.submitter.cluster.state import HEAD_GIVEN_UP, NO_ANSWER
from sunspot.submitter.cluster.stopping import LOOK_EVERY_S
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import progress_note, warn
from sunspot.submitter.runs import named_run

MAX_STARTS = PREFIX + "MAX_DRIVER_STARTS"

STARTED_AGAIN = f"{NO_ANSWER}; the run is started again"

PUT_BACK_WITHIN_S = 900.0
"""How long Argo CD or Flux may take to put a RayJob back: in k8s/gitops/flux.yaml, Flux looks every 10 minutes."""

RECONCILE_EVERY_S = 60.0
"""Between two looks at all RayJobs: before it gives up a head, the operator itself waits for minutes."""


class Restart(NamedTuple):
    """A RayJob that failed, and is to start again."""

    job: JobView
    manifest: dict[str, Any] | None
    "What is applied in its place; None: what keeps it from a repository puts it back (`JobView.kept_by`)."


def wait_for_end(access: RunAccess, timeout: float | None, show: ProgressLines) -> RunState:
    """Follow the run to its end; the job goes on whatever happens to this command.

    A run that ends because the operator gave up its head is started again. Returns whether the run succeeded or was
    stopped. Raises `SunspotError` when it failed or is lost, `ConflictError` when it is being deleted, `NotFoundError`
    when there is no such run, `GaveUpError` after `timeout` seconds, and `ClusterError` when the API server stays out
    of reach.
    """
    name, cluster = access.run.name, access.cluster
    restarts = HeadRestarts(access.run)
    began = time.monotonic()
    try:
        snapshot = access.observe()
        access.require_known(snapshot)
        warn_of_hidden(snapshot)
        while True:
            snapshot = _follow(access, began, timeout, show)
            state, reason = snapshot.state()
            restart = restarts.next(snapshot)
            if not (cluster and restart):
                break
            show(snapshot, RunState.RETRYING, STARTED_AGAIN)
            start_again(access, restart)
        show(snapshot, state, reason)
    finally:
        show.close()
    if state in (RunState.FAILED, RunState.LOST):
        raise SunspotError(f"{name} {state}: {reason}")
    if state is RunState.DELETING:
        raise ConflictError(f"{name} is {state}: {reason}")
    return state


def _follow(access: RunAccess, began: float, timeout: float | None, show: ProgressLines) -> RunSnapshot:
    """Show every change until the run has ended, but an end because its head was given up, which may be none."""
    outage = OutageReporter()
    again = access.arguments
    try:
        for snapshot in follow(access):
            state, reason = snapshot.state()
            if access.cluster:
                outage.note(snapshot)
            if not head_given_up(snapshot):
                show(snapshot, state, reason)
            # As long as the cluster does not answer, a failure may be followed by another try.
            sure = state in (RunState.SUCCEEDED, RunState.STOPPED) or not (access.cluster and snapshot.cluster.trouble)
            if state.terminal and sure:
                return snapshot
            if timeout is not None and time.monotonic() - began > timeout:
                still = f"{access.run.name} is {state} after {timeout:g} s: {reason}"
                raise GaveUpError(f"{still}. It goes on; `sunspot wait {again}` comes back to it")
    except KeyboardInterrupt:
        show.close()
        warn(f"\nthe run goes on; `sunspot wait {again}` comes back to it, `sunspot stop {again}` ends it")
        raise
    raise AssertionError("following never ends by itself")


def head_given_up(snapshot: RunSnapshot) -> bool:
    """Whether the run has failed only because the operator gave up its head."""
    return bool(snapshot.job and snapshot.job.failure == HEAD_GIVEN_UP and snapshot.state()[0] is RunState.FAILED)


class HeadRestarts:
    """Counts the restarts of a run whose head was given up.

    The operator's own limit lies between two of them. The driver counts them too, as it is the same job that starts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checkpoint: str | None = None
        self._count = 0
        "Restarts since that checkpoint was new."

    def next(self, snapshot: RunSnapshot) -> Restart | None:
        """Return what is to start again; None when the run ended otherwise, was stopped, or is not ours to start.

        Ours are the RayJobs that `sunspot submit` applied or that GitOps keeps from a repository. Raises `SunspotError`
        after as many restarts in a row without a new checkpoint as a job may have starts of its driver, and
        `ClusterError` if the RayJob's annotation does not hold its manifest.
        """
        job, stored = snapshot.job, snapshot.storage
        if not job or not head_given_up(snapshot) or stored.stop_wanted or stored.trouble:
            return None
        manifest = None if job.kept_by else applied_manifest(job, self._run.name)
        if not manifest and not job.kept_by:
            return None
        checkpoint = stored.status.checkpoint if stored.status else None
        if checkpoint != self._checkpoint:
            self._checkpoint, self._count = checkpoint, 0
        most = settings_of(job.raw).get(MAX_STARTS) or Settings.model_fields["max_driver_starts"].default
        if self._count >= int(most):
            raise SunspotError(
                f"{self._run.name} failed: its head was given up again after {plural(self._count, 'restart')} without "
                f"a new checkpoint; look at the nodes it was on. {MAX_STARTS} allows more"
            )
        self._count += 1
        return Restart(job, manifest)


def start_again(access: RunAccess, restart: Restart) -> None:
    """Replace a failed RayJob by a new one of the same name, and so of the same owner in storage.

    Its old pods may take their time: one on a frozen node goes when the node comes back, and what it still does then
    changes nothing of the run (run/attempts.py). Raises `ClusterError` or `GaveUpError` when the API server is out
    of reach, or keeps the old one, for MAX_OUTAGE_S, and when nothing puts it back for PUT_BACK_WITHIN_S.
    """
    cluster, job = access.require_cluster(), restart.job
    deadline = time.monotonic() + (MAX_OUTAGE_S if restart.manifest else PUT_BACK_WITHIN_S)
    try:
        with progress_note(f"starting {job.name} again"):
            while trouble := _replace(cluster, restart):
                if time.monotonic() > deadline:
                    raise trouble
                time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        again = f"{job.kept_by} puts it back" if job.kept_by else "if it is gone, submit the run again"
        warn(f"\n{job.name} may be gone; {again}")
        raise


def _replace(cluster: Cluster, restart: Restart) -> SunspotError | None:
    """Delete the RayJob, and create it or look whether it is back; returns what is in the way. Harmless to repeat."""
    job = restart.job
    try:
        if restart.manifest and not cluster.allows("create", "ray.io", "rayjobs"):
            told = f"{job.name} was submitted, and this user may not create it again"
            raise ClusterError(f"{told}; have the Role {ROLE} of k8s/base bound to you, or somebody else `wait` for it")
        cluster.delete_job(job)
        if cluster.has_job(job):
            return GaveUpError(f"{job.name} is deleted and still there; does the operator run? Submit again then")
        if restart.manifest:
            cluster.apply(restart.manifest)
        elif not cluster.find("job", job.name):
            told = f"{job.name} was deleted to start again, and {job.kept_by} has not put it back"
            return GaveUpError(f"{told}; sync it by hand, and see docs/gitops.md for how it does so by itself")
    except UnreachableError as error:
        return error
    return None


# ---------------------------------------------------------------------------------------------- all runs of a namespace


class Reconciler:
    """Looks after the newest RayJob of each run of a namespace, whoever applied it: starts it again, and annotates it.

    The annotations say where the run stands, for Argo CD, dashboards and kubectl. It keeps nothing that a new start of
    it would miss.

    `show` is called with the name of a run, its state, and the reason for an end, whenever that changes.
    """

    def __init__(self, cluster: Cluster, storage_path: str | None, show: Callable[[str, RunState, str], None]) -> None:
        self._cluster, self._storage_path, self._show = cluster, storage_path, show
        self._outage = OutageReporter()
        self._runs: dict[tuple[str, str | None], tuple[RunAccess, HeadRestarts]] = {}
        self._states: dict[str, tuple[RunState, str]] = {}
        self._troubles: dict[str, str] = {}
        self._done: set[str] = set()
        "The uids of RayJobs that have ended, or are being started again."

    def reconcile(self) -> None:
        """Look at every run once. Raises `ClusterError` when the API server refuses to list RayJobs."""
        try:
            jobs = self._cluster.list_jobs()
        except UnreachableError as error:
            self._outage.note(RunSnapshot(ClusterPart(trouble=str(error))))
            return
        self._outage.note(RunSnapshot())
        newest = {job.raw["metadata"]["labels"][RUN_LABEL]: job for job in reversed(jobs)}
        map_parallel(lambda each: self._attend(*each), newest.items())

    def _attend(self, name: str, job: JobView) -> None:
        """Look at one run. What is wrong with it or its storage is said once, and keeps no other from its turn."""
        if job.uid in self._done:
            return
        try:
            access, restarts = self._reach(name, job)
            snapshot = RunSnapshot(ClusterPart((job,)), read_storage(access.run, job))
            if snapshot.storage.trouble:
                raise StorageError(snapshot.storage.trouble)
            state, reason = snapshot.state()
            if restart := restarts.next(snapshot):
                self._done.add(job.uid)
                self._say(name, RunState.RETRYING, STARTED_AGAIN)
                # In a thread: Argo CD or Flux may take minutes, for which no other run waits.
                threading.Thread(target=self._start_again, args=(access, restart), daemon=True).start()
                return
            self._say(name, state, reason if state.terminal else "")
            notes = annotations(state, snapshot.storage.status)
            if not notes.items() <= (job.raw["metadata"].get("annotations") or {}).items():
                self._cluster.annotate(job, notes)
            if job.terminal:
                self._done.add(job.uid)
            self._troubles.pop(name, None)
        except SunspotError as error:
            if self._troubles.get(name) != str(error):
                self._troubles[name] = str(error)
                warn(f"{name}: {error}")

    def _reach(self, name: str, job: JobView) -> tuple[RunAccess, HeadRestarts]:
        path = self._storage_path or settings_of(job.raw).get(STORAGE_PATH)
        if (name, path) not in self._runs:
            run = named_run(name, self._storage_path)
            access = RunAccess(run if self._storage_path else trust_job(run, job), self._cluster)
            self._runs[name, path] = access, HeadRestarts(access.run)
        return self._runs[name, path]

    def _say(self, name: str, state: RunState, reason: str) -> None:
        if self._states.get(name) != (state, reason):
            self._states[name] = (state, reason)
            self._show(name, state, reason)

    def _start_again(self, access: RunAccess, restart: Restart) -> None:
        try:
            start_again(access, restart)
        except SunspotError as error:
            warn(f"{access.run.name}: {error}")
            if isinstance(error, UnreachableError):
                self._done.discard(restart.job.uid)  # the next look tries it again


def annotations(state: RunState, status: Status | None) -> dict[str, str]:
    """Return what a RayJob is annotated with; of its checkpoint the time, as an age grows while nobody writes it."""
    notes = {"state": str(state)}
    if status:
        notes |= {"step": str(status.step), "total-steps": str(status.total_steps)}
    if status and status.checkpoint and status.checkpoint_time is not None:
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.checkpoint_time))
        notes |= {"checkpoint": str(step_of(status.checkpoint)), "checkpoint-time": made}
    return {f"sunspot/{name}": text for name, text in notes.items()}
