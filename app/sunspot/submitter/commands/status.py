"""`sunspot status`: where one run stands, from cluster and storage together."""

import argparse
import contextlib
from dataclasses import replace
from typing import Any

from sunspot.errors import NotFoundError, StorageError
from sunspot.formatting import as_time, in_words, plural
from sunspot.run import Run
from sunspot.run.history import in_digits, measured
from sunspot.run.overview import RunView, read_view
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.state import count_workers
from sunspot.submitter.cluster.watch import (
    NUM_WORKERS,
    RunSnapshot,
    observe_run,
    reach_run,
    require_known,
    warn_of_hidden,
)
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.output import doing, print_json, print_text, warn

add_arguments = add_run


def run(args: argparse.Namespace) -> None:
    """Print where the run stands, from cluster and storage or from the one that answers.

    Raises `NotFoundError` when neither knows the run, or the error of the one that does not answer.
    """
    cluster, run, cluster_error = reach_run(args)
    snapshot, view = gather(cluster, run, cluster_error)
    if snapshot.cluster_trouble:
        warn(f"from storage alone, without the cluster: {snapshot.cluster_trouble}")
    if snapshot.storage_trouble:
        seen = "of storage, its status alone" if snapshot.status else "from the cluster alone, without storage"
        warn(f"{seen}: {snapshot.storage_trouble}")
    warn_of_hidden(snapshot)
    others = [job.name for job in snapshot.jobs[1:] if job.live]
    if others:
        warn(f"also live, and superseded by {snapshot.jobs[0].name} once that trains: {', '.join(others)}")
    record = summarize(cluster, run, snapshot, view)
    if args.json:
        print_json(record)
    else:
        _print(record, view)


def gather(cluster: Cluster | None, run: Run, cluster_error: str = "") -> tuple[RunSnapshot, RunView | None]:
    """All that cluster and storage know of a run; the snapshot says why one of them is missing.

    Raises `NotFoundError` when neither knows the run, or the error of the one that does not answer.
    """
    view = None
    with doing("reading the run"):
        snapshot = observe_run(cluster, run, cluster_error)
        if not snapshot.storage_trouble:
            try:
                with contextlib.suppress(NotFoundError):  # nothing of it there yet
                    view = read_view(run)
            except StorageError as error:
                snapshot = replace(snapshot, storage_trouble=str(error))
    if not view:
        require_known(cluster, run, snapshot)
    return snapshot, view


def summarize(cluster: Cluster | None, run: Run, snapshot: RunSnapshot, view: RunView | None) -> dict[str, Any]:
    """Everything shown, by the names of the JSON document; None: unknown."""
    state, reason = snapshot.state()
    known = not state.terminal and state is not RunState.SILENT  # how it trains now
    record: dict[str, Any] = {
        "run": run.name,
        "state": state,
        "reason": reason,
        **dict.fromkeys(("step", "total_steps", "epoch", "checkpoint", "metrics", "checkpoint_age_s")),
        **dict.fromkeys(("goodput", "loss")),
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
        }
    if snapshot.status:
        record["workers_running"] = snapshot.status.world_size if known else 0 if state.terminal else None
        record["warning"] = "" if state.terminal else snapshot.status.warning
        record |= {name: getattr(snapshot.status, name) for name in ("save_s", "notice_s", "memory_every")}
    if snapshot.job:
        wanted, running = count_workers(snapshot.job, snapshot.pods)
        record["pods_wanted"], record["pods_running"] = wanted, None if "pods" in snapshot.hidden else running
        record["job"] = snapshot.job.name
        record["workers_wanted"] = settings_of(snapshot.job.raw).get(NUM_WORKERS)
        record["try"], record["tries"] = min(snapshot.job.failed + 1, snapshot.job.tries), snapshot.job.tries
    return record


def _print(record: dict[str, Any], view: RunView | None) -> None:
    def line(name: str, text: str) -> None:
        if text:
            print_text(f"  {name + ':':12}{text}")

    print_text(f"{record['run']}: {record['state']}")
    line("reason", record["reason"])
    line("warning", record["warning"])
    if record["job"]:
        line("job", f"{record['job']} in {record['namespace']}, try {record['try']} of {record['tries']}")
    if record["pods_running"] is not None:
        line("pods", f"{record['pods_running']} of {record['pods_wanted']} workers' pods run")
    if record["attempt"]:
        workers = record["workers_running"]
        train = f", {plural(workers, 'worker')} train{'s' * (workers == 1)}" if workers else ""
        line("attempt", f"{record['attempt']}{train}")
    if record["total_steps"]:
        line("step", f"{record['step']} of {record['total_steps']}, epoch {record['epoch']}")
    if record["loss"] is not None:
        line("loss", f"{record['loss']:.4g}")
    if record["rows_per_s"]:
        line("rows/s", f"{record['rows_per_s']:.0f}")
    if record["seconds_left"] is not None:
        line("left", in_words(record["seconds_left"]))
    if view and record["attempt"]:
        age = f", verified, {in_words(record['checkpoint_age_s'])} old" if record["checkpoint"] else ""
        line("checkpoint", f"{record['checkpoint'] or 'none yet'}{age}")
        line("metrics", ", ".join(f"{name} {in_digits(value)}" for name, value in (record["metrics"] or {}).items()))
        for each in view.passed_over:
            line("skipped", str(each))
        line("saves", _describe_saves(record))
        line("goodput", f"{record['goodput']:.0%}" if record["goodput"] is not None else "")
        line("incidents", _describe_incidents(record))
        line("begun", as_time(view.begun) if view.begun is not None else "")
    line("storage", record["storage"])
    line("logs", record["logs"])


def _describe_saves(record: dict[str, Any]) -> str:
    """`4.1 s to commit, of a notice of 30 s; copied in memory every 41 steps`: what an incident can cost."""
    parts = []
    if record["save_s"]:
        notice = f", of a notice of {record['notice_s']:.0f} s" if record["notice_s"] else ""
        parts.append(f"{record['save_s']:.1f} s to commit{notice}")
    if record["memory_every"]:
        parts.append(f"copied in memory every {plural(record['memory_every'], 'step')}")
    return "; ".join(parts)


def _describe_incidents(record: dict[str, Any]) -> str:
    """`3 (2 reclaim, 1 node lost), 14 steps replayed`."""
    if not record["incidents"]:
        return "0"
    causes = ", ".join(f"{times} {cause}" for cause, times in record["incidents_by_cause"].most_common())
    return f"{record['incidents']} ({causes}), {plural(record['steps_replayed'], 'step')} replayed"
