"""Combines data from the cluster and from storage into records for `status` and `list`."""

import contextlib
import time
from dataclasses import replace
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import ClusterError, NotFoundError, StorageError
from sunspot.run import Run
from sunspot.run.attempts import step_of
from sunspot.run.history import model_metrics
from sunspot.run.overview import RunSummary, list_runs, read_statuses, state_from_storage
from sunspot.run.owner import Owner
from sunspot.run.seen import RunDetails, RunSeen, read_details
from sunspot.run.status import RunState, Status
from sunspot.storage.base import Storage
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.gone_jobs import find_gone_job
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.state import NUM_WORKERS, ClusterSeen, count_workers, judge
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import progress_note, warn


def read_run(access: RunAccess) -> tuple[RunSnapshot, RunDetails | None]:
    """Read everything about a run from the cluster and storage.

    If one of them does not answer, the snapshot contains its error. Raises `NotFoundError` if the run does not exist,
    or the recorded error if that cannot be determined.
    """
    view = None
    with progress_note("reading the run"):
        snapshot = access.observe()
        if snapshot.lacks_workers:
            snapshot = access.with_nodes(snapshot)
        if not snapshot.storage.trouble:
            try:
                with contextlib.suppress(NotFoundError):  # storage has no files of the run yet
                    view = read_details(access.run)
            except StorageError as error:
                snapshot = replace(snapshot, storage=replace(snapshot.storage, trouble=str(error)))
    if not view:
        access.require_known(snapshot)
    return snapshot, view


def make_record(access: RunAccess, snapshot: RunSnapshot, view: RunDetails | None) -> dict[str, Any]:
    """Return a run as a record with the keys of the JSON document. Unknown values are None."""
    run = access.run
    cluster = access.cluster
    job = snapshot.job
    status = snapshot.storage.status
    state, reason = snapshot.state()
    is_current = not state.terminal and state is not RunState.SILENT
    record: dict[str, Any] = {
        "run": run.name,
        "state": state,
        "reason": reason,
        **dict.fromkeys(("step", "total_steps", "epoch", "checkpoint", "metrics", "checkpoint_age_s")),
        **dict.fromkeys(("goodput", "cost", "labels", "loss", "rows_per_s", "seconds_left", "attempt", "restarts")),
        **dict.fromkeys(("incidents", "incidents_by_cause", "steps_replayed", "warning", "nan_since")),
        **dict.fromkeys(("save_s", "notice_s", "memory_every")),
        **dict.fromkeys(("workers_wanted", "workers_running", "pods_wanted", "pods_running", "job", "try", "tries")),
        "where": Owner.parse(status.owner).record() if status else None,
        "namespace": cluster.namespace if cluster and job else None,
        "storage": run.location,
        "logs": run.storage.locate(run.key("logs")),
    }
    if view:
        record |= {
            **{name: getattr(view, name) for name in ("step", "epoch", "loss", "goodput", "checkpoint_age_s")},
            **{name: getattr(view, name) for name in ("restarts", "incidents_by_cause", "steps_replayed")},
            "total_steps": view.total_steps or None,
            "checkpoint": view.checkpoint.name if view.checkpoint else None,
            "metrics": model_metrics(view.checkpoint.metrics) if view.checkpoint else None,
            "rows_per_s": view.rows_per_s if is_current else None,
            "seconds_left": view.seconds_left if is_current else None,
            "attempt": view.attempts[-1].number if view.attempts else 0,
            "incidents": len(view.incidents),
            "cost": view.spending.record(view.step),
            "labels": view.labels,
        }
    if status:
        record["workers_running"] = status.world_size if is_current else 0 if state.terminal else None
        warnings = "; ".join(filter(None, (status.nan_warning, status.warning)))
        record["warning"] = "" if state.terminal else warnings
        record["nan_since"] = status.nan_since or None
        record |= {name: getattr(status, name) for name in ("save_s", "notice_s", "memory_every")}
    if job:
        wanted, running = count_workers(snapshot.cluster, job)
        record["pods_wanted"] = wanted
        record["pods_running"] = None if "pods" in snapshot.cluster.hidden else running
        record["job"] = job.name
        record["workers_wanted"] = settings_of(job.raw).get(NUM_WORKERS)
        record["try"] = min(job.failed + 1, job.tries)
        record["tries"] = job.tries
    return record


# -------------------------------------------------------------------------------------------------------------- listing


def describe_runs(
    storage: Storage, limit: int | None = None, cluster: Cluster | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return records of the `limit` most recently modified runs, and the number of runs left out.

    If `limit` is None, all runs are included.
    """
    with progress_note("listing the runs"):
        runs = list_runs(storage)
        jobs, known = _list_jobs(storage, cluster)
    stored = {run.name for run in runs}
    runs += [RunSummary(name, job.created, submitted=job.created) for name, job in jobs.items() if name not in stored]
    runs.sort(key=lambda run: run.modified, reverse=True)
    shown = runs[:limit]
    found = list(zip(shown, read_statuses(storage, shown), strict=True))

    def describe(each: tuple[RunSummary, Status | None]) -> dict[str, Any]:
        run, status = each
        job, gone = jobs.get(run.name), None
        state, reason = state_from_storage(status, run, time.time())
        if cluster and known is not None and not job and not run.deleting:
            gone = find_gone_job(cluster, Run(storage, run.name), state, status, known)
        unseen = f"`sunspot status {run.name}` examines its pods"
        seen = ClusterSeen((job,) if job else (), unseen_pods=unseen, gone=gone)
        return _describe(run, status, *judge(seen, RunSeen(status, run.stop_requested, run.deleting, state, reason)))

    with progress_note("reading the runs"):
        rows = map_parallel(describe, found)
    return rows, len(runs) - len(shown)


def _list_jobs(storage: Storage, cluster: Cluster | None) -> tuple[dict[str, JobView], set[str] | None]:
    """Return the newest RayJob of each run in this storage, and the names of all RayJobs.

    The names are None if the cluster does not answer.
    """
    newest: dict[str, JobView] = {}
    try:
        jobs = cluster.list_jobs() if cluster else []
    except ClusterError as error:
        warn(f"from storage alone, without the cluster: {error}")
        return newest, None
    here = storage.locate("").rstrip("/")
    for job in jobs:
        if settings_of(job.raw).get(STORAGE_PATH, "").rstrip("/") == here:
            newest.setdefault(job.raw["metadata"]["labels"][RUN_LABEL], job)
    return newest, {job.name for job in jobs}


def _describe(run: RunSummary, status: Status | None, state: RunState, reason: str) -> dict[str, Any]:
    return {
        "run": run.name,
        "state": state.value,
        "reason": reason,
        "where": Owner.parse(status.owner).record() if status else None,
        "step": status.step if status else step_of(run.checkpoint) if run.checkpoint else 0,
        "total_steps": status.total_steps if status else 0,
        "epoch": status.epoch if status else 0,
        "loss": status.loss if status else None,
        "test_loss": status.test_loss if status else None,
        "nan_since": (status.nan_since or None) if status else None,
        "checkpoint": run.checkpoint,
        "checkpoint_time": run.checkpoint_time or None,
        "modified": run.modified,
        "bytes": run.bytes,
    }
