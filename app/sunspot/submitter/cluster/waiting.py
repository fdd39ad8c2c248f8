"""Waits for one run to end, or watches all runs in a namespace.

Restarts runs if the operator gives up on their head pods.

KubeRay replaces a head pod that is gone. But if the head's node is frozen, or if no node has room for a new head, the
RayJob has no working head for a long time. KubeRay then fails the RayJob regardless of `backoffLimit`, although the run
is intact.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sunspot.background import map_parallel
from sunspot.errors import ClusterError, ConflictError, GaveUpError, SunspotError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import step_of
from sunspot.run.handover import is_moving, left_for_move
from sunspot.run.seen import look
from sunspot.run.status import RunState, Status
from sunspot.settings import PREFIX, Settings
from sunspot.submitter.cluster.api import ROLE, Cluster, UnreachableError
from sunspot.submitter.cluster.applied import applied_manifest
from sunspot.submitter.cluster.mover import Mover
from sunspot.submitter.cluster.observation import (
    MAX_OUTAGE_S,
    OutageReporter,
    RunAccess,
    RunSnapshot,
    follow,
    trust_job,
    warn_of_hidden,
)
from sunspot.submitter.cluster.progress_lines import ProgressLines
from sunspot.submitter.cluster.start import Submission
from sunspot.submitter.cluster.state import HEAD_GIVEN_UP, NO_ANSWER, ClusterSeen
from sunspot.submitter.cluster.stopping import POLL_EVERY_S
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import progress_note, warn
from sunspot.submitter.runs import named_run

MAX_STARTS = PREFIX + "MAX_DRIVER_STARTS"

STARTED_AGAIN = f"{NO_ANSWER}; the run is restarted"

RECREATED_WITHIN_S = 900.0
"""Seconds within which Argo CD or Flux must recreate a RayJob. k8s/gitops/flux.yaml checks every 10 minutes."""

RECONCILE_EVERY_S = 60.0
"""Seconds between checks of all RayJobs. The operator itself waits for minutes before it gives up on a head pod."""


class Restart(NamedTuple):
    """A failed RayJob that must be replaced."""

    job: JobView
    manifest: dict[str, Any] | None
    "The manifest to apply instead, or None if a GitOps tool recreates the RayJob (`JobView.gitops_tool`)."


def wait_for_end(access: RunAccess, timeout: float | None, show: ProgressLines, mover: Mover | None = None) -> RunState:
    """Follow the run until it has succeeded or been stopped, and return its state.

    Restarts the run if the operator gives up on the run's head pod. A `mover` moves the run to better places. Raises
    `SunspotError` if the run fails or is lost, `ConflictError` if it is being deleted, `NotFoundError` if it does not
    exist, `GaveUpError` after `timeout` seconds, and `ClusterError` if the API server stays unreachable.
    """
    name = access.run.name
    restarts = HeadRestarts(access.run)
    began = time.monotonic()
    try:
        snapshot = access.observe()
        access.require_known(snapshot)
        warn_of_hidden(snapshot)
        while True:
            snapshot, moved = _follow(access, began, timeout, show, mover)
            state, reason = snapshot.state()
            restart = None if moved else restarts.next(snapshot)
            if restart and access.cluster:
                moved = mover.rescue(access, snapshot) if mover else None
                if not moved:
                    show(snapshot, RunState.RETRYING, STARTED_AGAIN)
                    start_again(access, restart)
            elif not moved:
                break
            access = moved.access if moved else access
        show(snapshot, state, reason)
        if mover:
            mover.close(name)
    finally:
        show.close()
    if state in (RunState.FAILED, RunState.LOST):
        raise SunspotError(f"{name} {state}: {reason}")
    if state is RunState.DELETING:
        raise ConflictError(f"{name} is {state}: {reason}")
    return state


def _follow(
    access: RunAccess, began: float, timeout: float | None, show: ProgressLines, mover: Mover | None
) -> tuple[RunSnapshot, Submission | None]:
    """Show every change until the run has ended or moved. Return the last snapshot, and the new RayJob after a move.

    If the run failed because the operator gave up on its head pod, the failure is not shown, because the run might
    restart.
    """
    outage = OutageReporter()
    again = access.arguments
    try:
        for snapshot in follow(access):
            state, reason = snapshot.state()
            if access.cluster:
                outage.note(snapshot.cluster.trouble, snapshot.storage.trouble)
            if not head_given_up(snapshot):
                show(snapshot, state, reason)
            # While the cluster does not answer, a failure can still be followed by another attempt.
            sure = state in (RunState.SUCCEEDED, RunState.STOPPED) or not (access.cluster and snapshot.cluster.trouble)
            moved = mover.attend(access, snapshot) if mover else None
            status = snapshot.storage.status
            if moved or (state.terminal and sure and not (status and is_moving(status, time.time()))):
                return snapshot, moved
            if timeout is not None and time.monotonic() - began > timeout:
                still = f"{access.run.name} is {state} after {timeout:g} s: {reason}"
                raise GaveUpError(f"{still}. The run continues; `sunspot wait {again}` follows it again")
    except KeyboardInterrupt:
        show.close()
        warn(f"\nthe run continues; `sunspot wait {again}` follows it again, and `sunspot stop {again}` stops it")
        raise
    raise AssertionError("follow() never stops yielding")


def head_given_up(snapshot: RunSnapshot) -> bool:
    """Return True if the run failed only because the operator gave up on its head pod."""
    job = snapshot.training_job
    return bool(job and job.failure == HEAD_GIVEN_UP and snapshot.state()[0] is RunState.FAILED)


class HeadRestarts:
    """Decides whether to restart a run after the operator gave up on its head pod, and counts the restarts."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checkpoint: str | None = None
        self._count = 0
        "Number of restarts since the newest checkpoint was written."

    def next(self, snapshot: RunSnapshot) -> Restart | None:
        """Return the restart that the run needs, or None if the run needs none.

        Only RayJobs that `sunspot submit` or a GitOps tool applied are restarted. Raises `SunspotError` after
        `max_driver_starts` restarts without a new checkpoint, and `ClusterError` if the RayJob's manifest in the
        annotation APPLIED (applied.py) is invalid.
        """
        job, stored = snapshot.training_job, snapshot.storage
        if not job or not head_given_up(snapshot) or stored.summary.stop_requested or stored.trouble:
            return None
        manifest = None if job.gitops_tool else applied_manifest(job, self._run.name)
        if not manifest and not job.gitops_tool:
            return None
        checkpoint = stored.status.checkpoint if stored.status else None
        if checkpoint != self._checkpoint:
            self._checkpoint, self._count = checkpoint, 0
        most = settings_of(job.raw).get(MAX_STARTS) or Settings.model_fields["max_driver_starts"].default
        if self._count >= int(most):
            raise SunspotError(
                f"{self._run.name} failed: the operator gave up on the run's head pod again after "
                f"{plural(self._count, 'restart')} without a new checkpoint; check the head's nodes, or raise "
                f"{MAX_STARTS}"
            )
        self._count += 1
        return Restart(job, manifest)


def start_again(access: RunAccess, restart: Restart) -> None:
    """Replace a failed RayJob with a new one of the same name and owner ID.

    A pod of the old RayJob can no longer change the run, even if its node was frozen and recovers (run/attempts.py).

    Raises `ClusterError` or `GaveUpError` if the RayJob cannot be replaced within MAX_OUTAGE_S. For a RayJob that a
    GitOps tool must recreate, the limit is RECREATED_WITHIN_S.
    """
    cluster, job = access.require_cluster(), restart.job
    deadline = time.monotonic() + (MAX_OUTAGE_S if restart.manifest else RECREATED_WITHIN_S)
    try:
        with progress_note(f"restarting {job.name}"):
            while trouble := _replace(cluster, restart):
                if time.monotonic() > deadline:
                    raise trouble
                time.sleep(POLL_EVERY_S)
    except KeyboardInterrupt:
        again = f"{job.gitops_tool} recreates it" if job.gitops_tool else "if it is gone, submit the run again"
        warn(f"\n{job.name} might be gone; {again}")
        raise


def _replace(cluster: Cluster, restart: Restart) -> SunspotError | None:
    """Delete the RayJob. Then apply it again, or check that the GitOps tool that manages it has recreated it.

    Returns None once the RayJob is replaced, and an error until then. This function can be called repeatedly.
    """
    job = restart.job
    try:
        if restart.manifest and not cluster.allows("create", "ray.io", "rayjobs"):
            fault = f"{job.name} was submitted, and this user has no permission to create it again"
            fix = f"ask for the Role {ROLE} in k8s/base, or let someone else run `sunspot wait`"
            raise ClusterError(f"{fault}; {fix}")
        cluster.delete_job(job)
        if cluster.has_job(job):
            return GaveUpError(
                f"{job.name} was deleted but still exists; check that the operator is running, then submit again"
            )
        if restart.manifest:
            cluster.apply(restart.manifest)
        elif not cluster.find("job", job.name):
            fault = f"{job.name} was deleted in order to restart it, but {job.gitops_tool} has not recreated it"
            return GaveUpError(f"{fault}; sync it by hand, and see docs/gitops.md for automatic syncs")
    except UnreachableError as error:
        return error
    return None


# ---------------------------------------------------------------------------------------------- all runs in a namespace


class Reconciler:
    """Restarts and annotates the newest RayJob of each run in a namespace, regardless of who applied it.

    The annotations show the run's state and progress to Argo CD, dashboards and kubectl. A reconciler can be replaced
    at any time, because it keeps no important state.

    `show` is called with a run's name, state and reason whenever the state or the reason changes. The reason is empty
    unless the run has ended or is being restarted. A `mover` moves the runs to better places, even if their cluster no
    longer answers.
    """

    def __init__(
        self,
        cluster: Cluster,
        storage_path: str | None,
        show: Callable[[str, RunState, str], None],
        mover: Mover | None = None,
    ) -> None:
        self._cluster = cluster
        self._mover = mover
        self._storage_path = storage_path
        self._show = show
        self._outage = OutageReporter()
        self._runs: dict[tuple[str, str | None], tuple[RunAccess, HeadRestarts]] = {}
        self._states: dict[str, tuple[RunState, str]] = {}
        self._troubles: dict[str, str] = {}
        self._jobs: list[JobView] = []
        "The RayJobs in the cluster's last answer."
        self._done: set[str] = set()
        "The uids of RayJobs that have ended or are being restarted."

    def reconcile(self) -> None:
        """Check every run once. Raises `ClusterError` if RayJobs cannot be listed."""
        trouble = ""
        try:
            self._jobs = self._cluster.list_jobs()
        except UnreachableError as error:
            trouble = str(error)
        self._outage.note(trouble)
        if trouble and not self._mover:
            return
        jobs = self._jobs
        by_run: dict[str, list[JobView]] = {}
        for job in jobs:
            by_run.setdefault(job.raw["metadata"]["labels"][RUN_LABEL], []).append(job)
        map_parallel(lambda each: self._attend(*each), by_run.items())

    def _attend(self, name: str, jobs: list[JobView]) -> None:
        """Check one run, given its RayJobs, newest first. An error is printed once and does not affect other runs."""
        job = jobs[0]
        if job.uid in self._done:
            return
        try:
            access, restarts = self._reach(name, job)
            snapshot = RunSnapshot(ClusterSeen(tuple(jobs)), look(access.run))
            if self._mover:
                self._mover.attend(access, snapshot)
            state, reason = snapshot.state()
            restart = restarts.next(snapshot)
            if restart:
                self._done.update(each.uid for each in jobs)
                self._show_once(name, RunState.RETRYING, STARTED_AGAIN)
                # Restart in a thread, because Argo CD or Flux can take minutes and other runs must not wait.
                threading.Thread(target=self._start_again, args=(access, snapshot, restart), daemon=True).start()
                return
            self._show_once(name, state, reason if state.terminal else "")
            notes = annotations(state, snapshot.storage.status)
            training = snapshot.training_job
            if training and not notes.items() <= (training.raw["metadata"].get("annotations") or {}).items():
                self._cluster.annotate(training, notes)
            status = snapshot.storage.status
            if job.terminal and training is job and not (self._mover and status and left_for_move(status)):
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

    def _show_once(self, name: str, state: RunState, reason: str) -> None:
        if self._states.get(name) != (state, reason):
            self._states[name] = (state, reason)
            self._show(name, state, reason)

    def _start_again(self, access: RunAccess, snapshot: RunSnapshot, restart: Restart) -> None:
        try:
            if not (self._mover and self._mover.rescue(access, snapshot)):
                start_again(access, restart)
        except SunspotError as error:
            warn(f"{access.run.name}: {error}")
            if isinstance(error, UnreachableError):
                self._done.difference_update(each.uid for each in snapshot.cluster.jobs)  # the next check tries again


def annotations(state: RunState, status: Status | None) -> dict[str, str]:
    """Return RayJob annotations with the run's state, progress and newest checkpoint.

    They contain the checkpoint's time instead of its age, because the age would soon be wrong.
    """
    notes = {"state": str(state)}
    if status:
        notes |= {"step": str(status.step), "total-steps": str(status.total_steps)}
    if status and status.checkpoint and status.checkpoint_time is not None:
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.checkpoint_time))
        notes |= {"checkpoint": str(step_of(status.checkpoint)), "checkpoint-time": made}
    return {f"sunspot/{name}": text for name, text in notes.items()}
