"""Where a run stands, from cluster and storage together, as one record."""

import contextlib
from dataclasses import replace
from typing import Any

from sunspot.errors import NotFoundError, StorageError
from sunspot.run.history import measured
from sunspot.run.overview import RunView, read_view
from sunspot.run.status import RunState
from sunspot.settings import PREFIX
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.state import count_workers
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.printing import progress_note

NUM_WORKERS = PREFIX + "NUM_WORKERS"


def gather(access: RunAccess) -> tuple[RunSnapshot, RunView | None]:
    """Read all that cluster and storage know of a run; the snapshot says why one of them is missing.

    Raises `NotFoundError` when neither knows the run, or the error of the one that does not answer.
    """
    view = None
    with progress_note("reading the run"):
        snapshot = access.observe()
        if not snapshot.storage.trouble:
            try:
                with contextlib.suppress(NotFoundError):  # nothing of it there yet
                    view = read_view(access.run)
            except StorageError as error:
                snapshot = replace(snapshot, storage=replace(snapshot.storage, trouble=str(error)))
    if not view:
        access.require_known(snapshot)
    return snapshot, view


def summarize(access: RunAccess, snapshot: RunSnapshot, view: RunView | None) -> dict[str, Any]:
    """Put all that is known of a run into one record, by the names of the JSON document; None: unknown."""
    run, cluster = access.run, access.cluster
    state, reason = snapshot.state()
    known = not state.terminal and state is not RunState.SILENT  # how it trains now
    record: dict[str, Any] = {
        "run": run.name,
        "state": state,
        "reason": reason,
        **dict.fromkeys(("step", "total_steps", "epoch", "checkpoint", "metrics", "checkpoint_age_s")),
        **dict.fromkeys(("goodput", "cost", "loss")),
        **dict.fromkeys(("rows_per_s", "seconds_left", "attempt", "restarts")),
        **dict.fromkeys(("incidents", "incidents_by_cause", "steps_replayed", "warning")),
        **dict.fromkeys(("save_s", "notice_s", "memory_every")),
        **dict.fromkeys(("workers_wanted", "workers_running", "pods_wanted", "pods_running", "job", "try", "tries")),
        "namespace": cluster.namespace if cluster and snapshot.job else None,
        "storage": run.location,
        "logs": run.storage.locate(run.key("logs")),
    }
    if view:
        record |= {
            **{name: getattr(view, name) for name in ("step", "epoch", "loss", "goodput", "checkpoint_age_s")},
            **{name: getattr(view, name) for name in ("restarts", "incidents_by_cause", "steps_replayed")},
            "total_steps": view.total_steps or None,
            "checkpoint": view.checkpoint.name if view.checkpoint else None,
            "metrics": measured(view.checkpoint.metrics) if view.checkpoint else None,
            "rows_per_s": view.rows_per_s if known else None,
            "seconds_left": view.seconds_left if known else None,
            "attempt": view.attempts[-1].number if view.attempts else 0,
            "incidents": len(view.incidents),
            "cost": view.spending.record(view.step),
        }
    if snapshot.storage.status:
        record["workers_running"] = snapshot.storage.status.world_size if known else 0 if state.terminal else None
        record["warning"] = "" if state.terminal else snapshot.storage.status.warning
        record |= {name: getattr(snapshot.storage.status, name) for name in ("save_s", "notice_s", "memory_every")}
    if snapshot.job:
        wanted, running = count_workers(snapshot.job, snapshot.cluster.pods)
        record["pods_wanted"] = wanted
        record["pods_running"] = None if "pods" in snapshot.cluster.hidden else running
        record["job"] = snapshot.job.name
        record["workers_wanted"] = settings_of(snapshot.job.raw).get(NUM_WORKERS)
        record["try"] = min(snapshot.job.failed + 1, snapshot.job.tries)
        record["tries"] = snapshot.job.tries
    return record
