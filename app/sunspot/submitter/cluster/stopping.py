"""Stops a run, and deletes the RayJobs that would restart it."""

import time
from collections.abc import Sequence

from sunspot.errors import ClusterError, GaveUpError
from sunspot.run.requests import describe_requester, request_stop, resume_hint
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot, follow
from sunspot.submitter.cluster.state import was_written_by
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.printing import progress_note

GONE_WITHIN_S = 180.0
"""Seconds within which a deleted RayJob and its pods must be gone. This exceeds the grace period of every profile."""

POLL_EVERY_S = 1.0
"""Seconds between checks of a RayJob that is ending or being deleted."""


def stop_run(access: RunAccess, timeout: float = 600, wait: bool = True) -> tuple[RunState, str]:
    """Write the stop marker, wait until the run has saved and ended, and delete RayJobs that would restart it.

    Returns the run's final state and the reason. Without `wait`, only writes the marker. A RayJob that has ended is
    kept for `resume`.

    Raises `NotFoundError` if the run does not exist, `GaveUpError` if it has not ended after `timeout` seconds, and
    `ClusterError` if the cluster does not answer. In the last two cases, the marker stays.
    """
    snapshot = access.observe_existing()
    state, reason = snapshot.state()
    if state is RunState.SUCCEEDED:
        return state, f"there is nothing to stop: {reason}"
    request_stop(access.run, describe_requester())
    if not wait:
        return RunState.STOPPING, "it will save and stop; its cluster is removed once its RayJob has ended"
    try:
        return _wait_and_delete(access, snapshot, timeout)
    except ClusterError as error:
        left = "the stop marker is in storage, so the run will save and stop"
        again = f"`sunspot stop {access.arguments}` waits for that and removes its cluster, once the API server answers"
        raise ClusterError(f"{error}. {left}; {again}") from error


def _wait_and_delete(access: RunAccess, snapshot: RunSnapshot, timeout: float) -> tuple[RunState, str]:
    """Wait until a run with a stop marker has ended, and delete the RayJobs that would restart it."""
    state, reason = snapshot.state()
    began = time.monotonic()
    deleted = False
    if _may_save(snapshot) and state is not RunState.RETRYING:
        with progress_note("waiting for the run to save and end"):
            for snapshot in follow(access):
                state, reason = snapshot.state()
                if not _may_save(snapshot):
                    break
                if time.monotonic() - began > timeout:
                    late = f"{access.run.name} has not ended after {timeout:.0f} s ({state}: {reason})"
                    again = f"its stop marker stays, and `sunspot stop {access.arguments}` waits again"
                    raise GaveUpError(f"{late}; {again}")
    if access.cluster:
        left = max(GONE_WITHIN_S, timeout - (time.monotonic() - began))
        # A GitOps tool would recreate a RayJob from a repository, which would restart the run.
        ended = [job for job in snapshot.cluster.jobs if job.terminal or (job is snapshot.job and state.terminal)]
        ours = [job for job in snapshot.cluster.jobs if not job.gitops_tool and job not in ended]
        with progress_note("waiting until its pods are gone"):
            gone = delete_jobs(access.cluster, ours, left)
        if not gone:
            name = access.run.name
            raise GaveUpError(f"{name} has ended ({reason}), but its pods still exist; Kubernetes will remove them")
        deleted = bool(snapshot.job and snapshot.job in ours)
    if state is RunState.SUCCEEDED:
        return state, f"the run was complete before it could stop: {reason}"
    if state is not RunState.FAILED:
        state = RunState.STOPPED
    checkpoint = snapshot.storage.status and snapshot.storage.status.checkpoint
    saved = f"saved as {checkpoint}" if checkpoint else "it had not saved anything yet"
    on_cluster = snapshot.job is not None
    how = "submit it again to continue" if deleted else resume_hint(access.arguments, on_cluster)
    return state, f"{saved}; {how}"


def _may_save(snapshot: RunSnapshot) -> bool:
    """Return True if the run might have a driver that still saves, in this cluster or elsewhere."""
    began = any(was_written_by(snapshot.storage, job) for job in snapshot.cluster.jobs if not job.terminal)
    return not snapshot.state()[0].terminal and (began or not snapshot.training_job)


def delete_jobs(cluster: Cluster, jobs: Sequence[JobView], seconds: float, frozen: bool = False) -> bool:
    """Delete RayJobs, and return True once they and their pods are gone, or False after `seconds`.

    Pods on unresponsive nodes are ignored, because they can no longer change the run. If `frozen` is True, this
    function waits for these pods, too, because they might still write objects of a run that is being deleted.
    """
    for job in jobs:
        cluster.delete_job(job)
    deadline = time.monotonic() + seconds
    own = [job for job in jobs if not job.borrows_cluster]  # borrowed clusters are kept

    while True:
        left = [pod for pod in cluster.list_pods(own) if frozen or not pod.overdue(time.time())]
        if not left and not any(cluster.has_job(job) for job in jobs):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_EVERY_S)
