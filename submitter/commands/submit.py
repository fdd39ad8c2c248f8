"""`sunspot submit`: bring a run's RayJob to life, or say why that is not needed or not right."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.errors import ClusterError, ConflictError, GaveUpError, SettingsError, StorageError
from app.run import Run, open_run
from app.run.attempts import owner_of, record_submission
from app.run.status import RunState, clear_stop
from app.settings import PREFIX, differences
from submitter.cluster.api import Cluster, connect
from submitter.cluster.views import JobView
from submitter.cluster.watch import GONE_WITHIN_S, RunSnapshot, await_gone, command_arguments, observe_run
from submitter.commands.arguments import add_render_options, render_from
from submitter.commands.preflight import check, check_identity
from submitter.manifest.render import Rendered, settings_of
from submitter.output import print_json_line, warn

STOPPED_WITHIN_S = 180.0
"""How long a run that is just being stopped may take to save and end."""

LOOK_EVERY_S = 1.0

MOST_CHANGES_SHOWN = 20

JOB_ID = PREFIX + "JOB_ID"


@dataclass(frozen=True)
class Outcome:
    """What was done, or with a dry run would be, to bring a RayJob to life."""

    action: str
    "created, replaced (an ended one), attached (it lives already), or finished (nothing is left to do)."
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_render_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing, say what would be")
    parser.add_argument("--wait", action="store_true", help="then wait until the run ends; the exit code says how")
    parser.add_argument("--timeout", metavar="S", type=float, help="with --wait: give up after so long (exit code 5)")


def run(args: argparse.Namespace) -> None:
    if args.timeout is not None and not args.wait:
        raise SettingsError("--timeout: give --wait too")
    rendered = render_from(args)
    cluster = connect(args.context, rendered.namespace)
    run = submit(cluster, rendered, args.dry_run, args.json)
    if args.wait and not args.dry_run:
        from submitter.commands.wait import wait

        wait(cluster, run, args.timeout, args.json)


def submit(cluster: Cluster, rendered: Rendered, dry_run: bool, as_json: bool) -> Run:
    """Check the rendered job, bring it to life, and say what was done; returns its run.

    Raises `ClusterError`, `StorageError` or `ConflictError`, and has changed nothing then.
    """
    run = open_run(rendered.settings.storage_path, rendered.settings.run_name)
    expected, doubts = check(cluster, run, rendered.manifest)
    for doubt in doubts:
        warn(f"warning: {doubt}")
    check_identity(run, settings_of(rendered.manifest))
    outcome = bring_up(cluster, run, rendered.manifest, rendered.to_yaml(), expected, dry_run)
    tell(cluster, run, rendered.name, outcome, dry_run, as_json)
    return run


def bring_up(
    cluster: Cluster, run: Run, manifest: dict[str, Any], text: str, expected: JobView | None, dry_run: bool = False
) -> Outcome:
    """Have the RayJob of a manifest (`text` as YAML) live, unless it has succeeded.

    `expected` is what the API server would make of it, with all defaults. Raises `ConflictError` when another RayJob
    of the run lives, and `GaveUpError` when one that is ending does not end.
    """
    name = manifest["metadata"]["name"]
    snapshot, job = _look_at(cluster, run, name)
    if snapshot.deleting:
        raise ConflictError(f"{run.name} is {RunState.DELETING}: {snapshot.state()[1]}; then submit again")
    others = [other for other in snapshot.jobs if other.live and other.name != name]
    if others:
        raise ConflictError(
            _explain_conflict(others[0], expected or JobView(manifest), command_arguments(cluster, run))
        )
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while job and _is_ending(snapshot, job) and not dry_run:
        if time.monotonic() > deadline:
            raise GaveUpError(f"{name} is still ending: {snapshot.state()[1]}; submit again when it has")
        time.sleep(LOOK_EVERY_S)
        snapshot, job = _look_at(cluster, run, name)

    state, reason = snapshot.state() if snapshot.known else (RunState.LOST, "")
    if job and not state.terminal:
        if snapshot.stop_wanted and not dry_run:
            clear_stop(run)
        return Outcome("attached", "the stop marker is cleared" if snapshot.stop_wanted else f"{state}: {reason}")
    if snapshot.status and state is RunState.SUCCEEDED and (job or snapshot.status.owner.partition("#")[0] == name):
        return Outcome("finished", reason)
    ended = [other for other in snapshot.jobs if other.terminal or other is job]
    was = f"the run was {state}: {reason}" if snapshot.known else "a new run"
    if snapshot.status and not state.terminal:
        was = f"it takes the run over from {snapshot.status.owner}: {reason}"
    if not dry_run:
        clear_stop(run)
        for other in ended:
            cluster.delete_job(other)
        if not await_gone(cluster, ended, GONE_WITHIN_S):
            raise GaveUpError(f"{ended[0].name} and its pods are still there after {GONE_WITHIN_S:.0f} s; submit again")
        record_submission(run, name, text)
        cluster.apply(manifest)
    return Outcome("replaced" if ended else "created", was)


def tell(cluster: Cluster, run: Run, job: str, outcome: Outcome, dry_run: bool, as_json: bool) -> None:
    """Print what became of a submission."""
    if as_json:
        about = {"run": run.name, "job": job, "namespace": cluster.namespace, "storage": run.location}
        print_json_line({**about, **asdict(outcome), "dry_run": dry_run})  # `submit --wait` goes on in lines
        return
    would = "would be " if dry_run else ""
    print(f"{job} {would}{outcome.action} in namespace {cluster.namespace} ({outcome.reason})")
    if outcome.action != "finished" and not dry_run:
        print(f"  sunspot wait {command_arguments(cluster, run)}")
        print(f"  sunspot logs -f {command_arguments(None, run)}")


def _look_at(cluster: Cluster, run: Run, name: str) -> tuple[RunSnapshot, JobView | None]:
    """What is known of the run, with the RayJob of this name as the one that decides."""
    snapshot = observe_run(cluster, run)
    if snapshot.cluster_trouble:
        raise ClusterError(snapshot.cluster_trouble)
    if snapshot.storage_trouble:
        raise StorageError(snapshot.storage_trouble)
    job = next((job for job in snapshot.jobs if job.name == name), None)
    if job and job is not snapshot.job:
        others = tuple(other for other in snapshot.jobs if other is not job)
        snapshot = replace(snapshot, jobs=(job, *others), owner=owner_of(run, name))
    return snapshot, job


def _is_ending(snapshot: RunSnapshot, job: JobView) -> bool:
    """Whether its driver may still hear of the stop marker, or the RayJob is being deleted."""
    if job.deleting:
        return True
    return snapshot.state()[0] is RunState.STOPPING and snapshot.driver_began


def _explain_conflict(live: JobView, wanted: JobView, again: str) -> str:
    changes = find_changes(live, wanted)
    more = [f"and {len(changes) - MOST_CHANGES_SHOWN} more"] if len(changes) > MOST_CHANGES_SHOWN else []
    lines = "\n".join(f"  {line}" for line in changes[:MOST_CHANGES_SHOWN] + more)
    return (
        f"the run is live as {live.name}, with another specification:\n{lines or '  (only its generation)'}\n"
        f"`sunspot stop {again}` saves and ends it; then submit again, and the run goes on from there"
    )


def find_changes(live: JobView, wanted: JobView) -> list[str]:
    """What differs between two RayJobs, a line each: settings by name, everything else by its path in the spec."""
    before, after = (
        {name: value for name, value in settings_of(job.raw).items() if name != JOB_ID} for job in (live, wanted)
    )
    old, new = _flatten(live.spec), _flatten(wanted.spec)
    return differences(before, after) + differences(old, new)


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a spec by its path, without settings; items of a list go by their names, where they have some."""
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        named = [item.get("name") or item.get("groupName") if isinstance(item, dict) else None for item in value]
        items = [
            (f"{path}[{name or position}]", item)
            for position, (name, item) in enumerate(zip(named, value, strict=True))
        ]
    else:
        return {path: str(value)}
    leaves: dict[str, str] = {}
    for key, item in items:
        if f"[{PREFIX}" not in key and not key.endswith("].name"):
            leaves |= _flatten(item, key)
    return leaves
