"""`sunspot status`: shows a run's state, combined from the cluster and storage."""

import argparse
import time

from sunspot.formatting import as_time, in_words, plural
from sunspot.run.forecast import forecast
from sunspot.run.history import format_metric
from sunspot.run.incidents import describe_replayed
from sunspot.run.owner import Owner
from sunspot.run.seen import RunDetails
from sunspot.submitter.cluster.observation import RunAccess, reach_run, warn_of_hidden
from sunspot.submitter.cluster.records import StatusRecord, make_status_record, read_run
from sunspot.submitter.cluster.state import read_workers
from sunspot.submitter.commands.arguments import add_run_and_cluster, run_target
from sunspot.submitter.printing import clear_screen, print_json, print_json_line, print_text, warn

WATCH_EVERY_S = 5.0
"""Seconds between two outputs of `--watch`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument("--watch", action="store_true", help="repeat every 5 s until the run has ended")


def run(args: argparse.Namespace) -> None:
    """Print the state of the run. With `--watch`, repeat until the run has ended."""
    access = reach_run(run_target(args))
    while True:
        record, details = _look(access)
        if args.watch and not args.json:
            clear_screen()
        if args.json:
            (print_json_line if args.watch else print_json)(record.document())
        else:
            _print(record, details)
        if not args.watch or record.state.terminal:
            return
        time.sleep(WATCH_EVERY_S)


def _look(access: RunAccess) -> tuple[StatusRecord, RunDetails | None]:
    """Read the run, and warn if the cluster or storage does not answer."""
    snapshot, details = read_run(access)
    if snapshot.cluster.trouble:
        warn(f"cannot query the cluster ({snapshot.cluster.trouble}), so this status comes only from storage")
    if snapshot.storage.trouble:
        known = "the status in storage" if snapshot.storage.status else "the cluster"
        warn(f"storage cannot be read ({snapshot.storage.trouble}), so this status comes only from {known}")
    warn_of_hidden(snapshot)
    older = [job.name for job in snapshot.cluster.jobs[1:] if job.live]
    if older:
        newest = snapshot.cluster.jobs[0].name
        warn(f"these RayJobs are also live, but will be superseded once {newest} trains: {', '.join(older)}")
    return make_status_record(access, snapshot, details), details


def _print(record: StatusRecord, details: RunDetails | None) -> None:
    def line(name: str, text: str) -> None:
        if text:
            print_text(f"  {name + ':':12}{text}")

    print_text(f"{record.run}: {record.state}")
    line("reason", record.reason)
    line("warning", record.warning or "")
    if record.job:
        line("job", f"{record.job} in {record.namespace}, try {record.try_number} of {record.tries}")
    if record.pods_running is not None:
        line("pods", f"{record.pods_running} of {record.pods_wanted} worker pods running")
    if record.attempt:
        workers = record.workers_running
        asked = read_workers(record.workers_wanted or "")
        train = f", {plural(workers, 'worker')} training" if workers else ""
        if workers and asked and workers < asked.most:
            train = f", {workers} of {asked} workers training"
        line("attempt", f"{record.attempt}{train}")
    if record.total_steps:
        line("step", f"{record.step} of {record.total_steps}, epoch {record.epoch}")
    for source in record.sources or ():
        counted = f"{source.epochs:.2f} epochs of {source.rows} rows"
        line("source", f"{source.source}: {counted}, {source.share:.3g} of the run's rows")
    if record.loss is not None:
        line("loss", f"{record.loss:.4g}")
    if record.rows_per_s:
        line("rows/s", f"{record.rows_per_s:.0f}")
    if record.seconds_left is not None:
        line("left", in_words(record.seconds_left))
    expected = forecast(details) if details else None
    if expected:
        line("deadline", expected.describe_deadline())
        line("budget", expected.describe_budget())
    if details and record.attempt:
        age = f", verified, {in_words(details.checkpoint_age_s)} old" if details.checkpoint_age_s is not None else ""
        line("checkpoint", f"{record.checkpoint or 'none yet'}{age}")
        line("metrics", ", ".join(f"{name} {format_metric(value)}" for name, value in (record.metrics or {}).items()))
        for each in details.passed_over:
            line("skipped", str(each))
        line("saves", _describe_saves(record))
        line("goodput", f"{record.goodput:.0%}" if record.goodput is not None else "")
        line("incidents", _describe_incidents(details))
        line("labels", ", ".join(f"{name}={value}" for name, value in details.labels.items()))
        line("cost", details.spending.describe(details.step))
        line("begun", as_time(details.begun) if details.begun is not None else "")
    if record.where:
        line("where", Owner(**record.where).describe())
    line("storage", record.storage)
    line("logs", record.logs)


def _describe_saves(record: StatusRecord) -> str:
    """Return text like `4.1 s to commit (notice: 30 s); copied to memory every 41 steps`."""
    parts = []
    if record.save_s:
        notice = f" (notice: {record.notice_s:.0f} s)" if record.notice_s else ""
        parts.append(f"{record.save_s:.1f} s to commit{notice}")
    if record.memory_every:
        parts.append(f"copied to memory every {plural(record.memory_every, 'step')}")
    return "; ".join(parts)


def _describe_incidents(details: RunDetails) -> str:
    """Return text like `3 (2 preempted, 1 node lost), 14 steps replayed`."""
    if not details.incidents:
        return "0"
    causes = ", ".join(f"{times} {cause}" for cause, times in details.incidents_by_cause.most_common())
    replayed = describe_replayed(details.steps_replayed, details.replayed_at_least)
    return f"{len(details.incidents)} ({causes}), {replayed} replayed"
