"""Every run below a storage path, and where each stands, as storage and the cluster know them."""

import time
from typing import Any

from sunspot.errors import ClusterError
from sunspot.run import Run
from sunspot.run.attempts import step_of
from sunspot.run.overview import RunSummary, list_runs, read_statuses, state_from_storage
from sunspot.run.status import Status
from sunspot.run.submissions import owner_of
from sunspot.storage.base import Storage
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.observation import STORAGE_PATH
from sunspot.submitter.cluster.state import JobInCluster, StoredRecord, judge
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.printing import progress_note, warn


def describe_runs(
    storage: Storage, limit: int | None = None, cluster: Cluster | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Describe the `limit` (None: all) runs modified last; also returns how many older ones are left out."""
    with progress_note("listing the runs"):
        runs = list_runs(storage)
        jobs = _newest_jobs(storage, cluster)
    stored = {run.name for run in runs}
    runs += [RunSummary(name, job.created, submitted=job.created) for name, job in jobs.items() if name not in stored]
    runs.sort(key=lambda run: run.modified, reverse=True)
    shown = runs[:limit]
    statuses = read_statuses(storage, shown)
    now = time.time()
    described = [
        _describe(storage, run, status, jobs.get(run.name), now) for run, status in zip(shown, statuses, strict=True)
    ]
    return described, len(runs) - len(shown)


def _newest_jobs(storage: Storage, cluster: Cluster | None) -> dict[str, JobView]:
    """Find the newest RayJob of each run in this storage; none when the cluster does not answer."""
    newest: dict[str, JobView] = {}
    try:
        jobs = cluster.list_jobs()[0] if cluster else []
    except ClusterError as error:
        warn(f"from storage alone, without the cluster: {error}")
        return newest
    here = storage.locate("").rstrip("/")
    for job in jobs:
        if settings_of(job.raw).get(STORAGE_PATH, "").rstrip("/") == here:
            newest.setdefault(job.raw["metadata"]["labels"][RUN_LABEL], job)
    return newest


def _describe(
    storage: Storage, run: RunSummary, status: Status | None, job: JobView | None, now: float
) -> dict[str, Any]:
    if job and not run.deleting:
        owner = owner_of(Run(storage, run.name), job.name)
        state, reason = judge(JobInCluster(job, now=now), StoredRecord(status, owner, run.stop_requested))
    else:
        state, reason = state_from_storage(status, run, now)
    return {
        "run": run.name,
        "state": state.value,
        "reason": reason,
        "step": status.step if status else step_of(run.checkpoint) if run.checkpoint else 0,
        "total_steps": status.total_steps if status else 0,
        "epoch": status.epoch if status else 0,
        "loss": status.loss if status else None,
        "test_loss": status.test_loss if status else None,
        "checkpoint": run.checkpoint,
        "checkpoint_time": run.checkpoint_time or None,
        "modified": run.modified,
        "bytes": run.bytes,
    }
