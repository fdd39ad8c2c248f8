"""Combines data from the cluster and from storage into records for `status` and `list`."""

import contextlib
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Field

from sunspot.background import map_parallel
from sunspot.errors import ClusterError, NotFoundError, StorageError
from sunspot.run.attempts import step_of
from sunspot.run.epochs import SourceProgress
from sunspot.run.forecast import forecast
from sunspot.run.history import model_metrics
from sunspot.run.overview import RunSummary, list_runs
from sunspot.run.owner import Owner
from sunspot.run.seen import RunDetails, RunSeen, read_details, read_listed
from sunspot.run.status import RunState
from sunspot.storage.base import Storage
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.gone_jobs import find_gone_job
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.state import ClusterSeen, count_workers, judge, wanted_workers, without_next_job
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import progress_note, warn

Number = int | float
"""A number in a JSON document, shown as it was recorded, with or without decimals."""


def read_run(access: RunAccess) -> tuple[RunSnapshot, RunDetails | None]:
    """Read everything about a run from the cluster and storage.

    If the cluster or storage does not answer, the snapshot contains the error. Raises `NotFoundError` if the run does
    not exist, or the snapshot's error if it is unknown whether the run exists.
    """
    details = None
    with progress_note("reading the run"):
        snapshot = access.observe()
        if snapshot.lacks_workers:
            snapshot = access.with_nodes(snapshot)
        if not snapshot.storage.trouble:
            try:
                with contextlib.suppress(NotFoundError):  # storage has no files of the run yet
                    details = read_details(snapshot.storage)
            except StorageError as error:
                snapshot = replace(snapshot, storage=replace(snapshot.storage, trouble=str(error)))
    if not details:
        access.require_known(snapshot)
    return snapshot, details


class Record(BaseModel):
    """A JSON document whose keys are in the order of the fields."""

    def document(self) -> dict[str, Any]:
        """Return the document as a dict of values that JSON can represent."""
        return self.model_dump(mode="json", by_alias=True)


class StatusRecord(Record):
    """The JSON document printed by `sunspot status --json`. Unknown values are None."""

    run: str
    state: RunState
    reason: str
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    sources: list[SourceProgress] | None = None
    "The progress in each source of a mixture."
    checkpoint: str | None = None
    "The name of the newest verified checkpoint."
    metrics: dict[str, Number] | None = None
    "The model's metrics in `checkpoint`."
    checkpoint_age_s: Number | None = None
    goodput: Number | None = None
    cost: dict[str, Number | None] | None = None
    labels: dict[str, str] | None = None
    loss: Number | None = None
    rows_per_s: Number | None = None
    seconds_left: Number | None = None
    deadline: Number | None = None
    "The setting DEADLINE of a run that has not ended, in seconds since the epoch."
    late_s: Number | None = None
    "Seconds by which the run will miss its deadline, or 0."
    budget: Number | None = None
    expected_cost: Number | None = None
    attempt: int | None = None
    "The number of the newest attempt, or 0 before the first one."
    restarts: int | None = None
    incidents: int | None = None
    incidents_by_cause: dict[str, int] | None = None
    steps_replayed: int | None = None
    replayed_at_least: bool | None = None
    "True if more than `steps_replayed` steps may have been repeated."
    warning: str | None = None
    nan_since: int | None = None
    save_s: Number | None = None
    notice_s: Number | None = None
    memory_every: int | None = None
    workers_wanted: str | None = None
    "The number of workers that the run should have: NUM_WORKERS of the newest RayJob, narrowed by `sunspot scale`."
    workers_running: int | None = None
    pods_wanted: int | None = None
    pods_running: int | None = None
    job: str | None = None
    "The name of the newest RayJob."
    try_number: int | None = Field(default=None, serialization_alias="try")
    tries: int | None = None
    where: dict[str, str] | None = None
    "The run's last owner (`Owner.record`)."
    namespace: str | None = None
    storage: str
    logs: str


class ListRecord(Record):
    """One run in the JSON document printed by `sunspot list --json`."""

    run: str
    state: RunState
    reason: str
    where: dict[str, str] | None
    "The run's last owner (`Owner.record`), or None before its driver started."
    step: int
    total_steps: int
    "The run's total number of steps, or 0 if it is not known."
    epoch: int
    loss: Number | None
    test_loss: Number | None
    nan_since: int | None
    checkpoint: str | None
    checkpoint_time: Number | None
    modified: Number
    bytes: int


def make_status_record(access: RunAccess, snapshot: RunSnapshot, details: RunDetails | None) -> StatusRecord:
    """Return the record of one run. `details` is None if storage has no files of the run yet, or cannot be read."""
    run = access.run
    seen, status = without_next_job(snapshot.cluster, snapshot.storage), snapshot.storage.status
    job = seen.job
    state, reason = snapshot.state()
    is_current = not state.terminal and state is not RunState.SILENT
    logs = run.storage.locate(run.key("logs"))
    record = StatusRecord(run=run.name, state=state, reason=reason, storage=run.location, logs=logs)
    if details:
        record.step = details.step
        record.total_steps = details.total_steps or None
        record.epoch = details.epoch
        record.sources = details.sources or None
        record.checkpoint = details.checkpoint.name if details.checkpoint else None
        record.metrics = model_metrics(details.checkpoint.metrics) if details.checkpoint else None
        record.checkpoint_age_s = details.checkpoint_age_s
        record.goodput = details.goodput
        record.cost = details.spending.record(details.step)
        record.labels = details.labels
        record.loss = details.loss
        record.rows_per_s = details.rows_per_s if is_current else None
        record.seconds_left = details.seconds_left if is_current else None
        expected = forecast(details)
        record.deadline = expected.deadline
        record.late_s = None if expected.deadline is None else expected.late_s
        record.budget = expected.budget
        record.expected_cost = expected.total if is_current else None
        record.attempt = details.attempts[-1].number if details.attempts else 0
        record.restarts = details.restarts
        record.incidents = len(details.incidents)
        record.incidents_by_cause = details.incidents_by_cause
        record.steps_replayed = details.steps_replayed
        record.replayed_at_least = details.replayed_at_least
    if status:
        record.workers_running = status.world_size if is_current else 0 if state.terminal else None
        of_goal = forecast(details).warnings if details else []
        warnings = "; ".join(filter(None, (status.nan_warning, status.warning, *of_goal)))
        record.warning = "" if state.terminal else warnings
        record.nan_since = status.nan_since or None
        record.save_s = status.save_s
        record.notice_s = status.notice_s
        record.memory_every = status.memory_every
        record.where = Owner.parse(status.owner).record()
    if job and access.cluster:
        record.pods_wanted, running = count_workers(seen, job)
        record.pods_running = None if snapshot.cluster.unseen_pods else running
        record.job = job.name
        wanted = wanted_workers(job, snapshot.storage)
        record.workers_wanted = str(wanted) if wanted else None
        record.try_number = min(job.failed + 1, job.tries)
        record.tries = job.tries
        record.namespace = access.cluster.namespace
    return record


# -------------------------------------------------------------------------------------------------------------- listing


def describe_runs(
    storage: Storage, limit: int | None = None, cluster: Cluster | None = None
) -> tuple[list[ListRecord], int]:
    """Return records of the `limit` most recently modified runs, and the number of omitted runs.

    If `limit` is None, all runs are included.
    """
    with progress_note("listing the runs"):
        runs = list_runs(storage)
        jobs, known = _list_jobs(storage, cluster)
    for name, job in jobs.items():
        runs.setdefault(name, RunSummary(modified=job.created, submitted=job.created))
    newest_first = sorted(runs, key=lambda name: runs[name].modified, reverse=True)

    def describe(seen: RunSeen) -> ListRecord:
        name = seen.run.name
        gone = find_gone_job(cluster, seen, known) if cluster and known is not None and name not in jobs else None
        unseen = f"`sunspot status {name}` examines its pods"
        in_cluster = ClusterSeen((jobs[name],) if name in jobs else (), unseen_pods=unseen, gone=gone)
        return make_list_record(seen, *judge(in_cluster, seen))

    with progress_note("reading the runs"):
        seen = read_listed(storage, {name: runs[name] for name in newest_first[:limit]})
        return map_parallel(describe, seen), len(runs) - len(seen)


def _list_jobs(storage: Storage, cluster: Cluster | None) -> tuple[dict[str, JobView], set[str] | None]:
    """Return the newest RayJob of each run in this storage, and the names of all RayJobs.

    The names are None if the cluster does not answer.
    """
    newest: dict[str, JobView] = {}
    try:
        jobs = cluster.list_jobs() if cluster else []
    except ClusterError as error:
        warn(f"cannot query the cluster ({error}), so these states come only from storage")
        return newest, None
    here = storage.locate("").rstrip("/")
    for job in jobs:
        if settings_of(job.raw).get(STORAGE_PATH, "").rstrip("/") == here:
            newest.setdefault(job.raw["metadata"]["labels"][RUN_LABEL], job)
    return newest, {job.name for job in jobs}


def make_list_record(seen: RunSeen, state: RunState, reason: str) -> ListRecord:
    """Return the record of a run in the list. `state` and `reason` are derived from the cluster and storage."""
    status, checkpoint = seen.progress, seen.summary.checkpoint
    return ListRecord(
        run=seen.run.name,
        state=state,
        reason=reason,
        where=Owner.parse(status.owner).record() if status else None,
        step=status.step if status else step_of(checkpoint) if checkpoint else 0,
        total_steps=status.total_steps if status else 0,
        epoch=status.epoch if status else 0,
        loss=status.loss if status else None,
        test_loss=status.test_loss if status else None,
        nan_since=(status.nan_since or None) if status else None,
        checkpoint=checkpoint,
        checkpoint_time=seen.summary.checkpoint_time or None,
        modified=seen.summary.modified,
        bytes=seen.summary.bytes,
    )
