"""`sunspot submit`: starts a run's RayJob, or says why it need not or must not start."""

import argparse
import re
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from sunspot.errors import HIDDEN, ConflictError, GaveUpError, SettingsError, is_credential
from sunspot.run import Run, open_run
from sunspot.run.status import RunState, clear_stop
from sunspot.run.submissions import owner_of, record_submission
from sunspot.settings import PREFIX, differences
from sunspot.submitter.cluster.api import Cluster, connect
from sunspot.submitter.cluster.preflight import check, check_identity
from sunspot.submitter.cluster.views import JobView, job_view
from sunspot.submitter.cluster.watch import (
    GONE_WITHIN_S,
    RunSnapshot,
    command_arguments,
    delete_jobs,
    observe_run,
    require_answers,
)
from sunspot.submitter.commands.arguments import add_render_options, render_from, seconds
from sunspot.submitter.manifest.render import Rendered, settings_of
from sunspot.submitter.output import doing, print_json_line, print_text, warn

STOPPED_WITHIN_S = 180.0
"""How long a run that is being stopped may take to save and end."""

LOOK_EVERY_S = 1.0

MOST_CHANGES_SHOWN = 20

JOB_ID = PREFIX + "JOB_ID"


@dataclass(frozen=True)
class Outcome:
    """What was done to start a RayJob, or would be without `--dry-run`."""

    action: str
    "created, replaced (an ended one), attached (it is live already), or finished (nothing is left to do)."
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_render_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing, say what would be")
    parser.add_argument("--wait", action="store_true", help="then wait until the run ends; the exit code says how")
    parser.add_argument("--timeout", metavar="S", type=seconds, help="with --wait: give up after so long (exit code 5)")


def run(args: argparse.Namespace) -> None:
    if args.timeout is not None and not args.wait:
        raise SettingsError("--timeout: give --wait too")
    rendered, cluster = render_for_cluster(args)
    run = submit(cluster, rendered, args.dry_run, args.json)
    if args.wait and not args.dry_run:
        from sunspot.submitter.commands.wait import wait

        wait(cluster, run, args.timeout, args.json)


def render_for_cluster(args: argparse.Namespace) -> tuple[Rendered, Cluster]:
    """The manifest, and the cluster that it is for, in the namespace that an option, the profile or the context names.

    Raises `ClusterError` when there is no cluster to ask.
    """
    rendered = render_from(args)
    cluster = connect(args.context, rendered.chosen_namespace)
    if cluster.namespace != rendered.namespace:
        rendered = render_from(argparse.Namespace(**{**vars(args), "namespace": cluster.namespace}))
    return rendered, cluster


def submit(cluster: Cluster, rendered: Rendered, dry_run: bool, as_json: bool) -> Run:
    """Check the rendered job, start it, and print what was done; returns its run.

    Raises `ClusterError`, `StorageError` or `ConflictError` before anything is changed.
    """
    run = open_run(rendered.settings.storage_path, rendered.settings.run_name)
    with doing("checking the cluster and the storage"):
        expected, warnings = check(cluster, run, rendered.manifest)
    for text in warnings:
        warn(f"warning: {text}")
    check_identity(run, settings_of(rendered.manifest))
    outcome = start_job(cluster, run, rendered.manifest, rendered.to_yaml(), expected, dry_run)
    print_outcome(cluster, run, rendered.name, outcome, dry_run, as_json)
    return run


def start_job(
    cluster: Cluster, run: Run, manifest: dict[str, Any], text: str, expected: JobView | None, dry_run: bool = False
) -> Outcome:
    """Start the RayJob of a manifest (`text`: as YAML) unless it is live or has succeeded.

    `expected` is the RayJob as the API server would complete it. Raises `ConflictError` when another RayJob of the run
    is live, and `GaveUpError` when an ending one does not end.
    """
    name = manifest["metadata"]["name"]
    snapshot, job = _observe_job(cluster, run, name)
    if snapshot.deleting:
        raise ConflictError(f"{run.name} is {RunState.DELETING}: {snapshot.state()[1]}; then submit again")
    others = [other for other in snapshot.jobs if other.live and other.name != name]
    if others:
        wanted, again = expected or job_view(manifest), command_arguments(cluster, run)
        raise ConflictError(_explain_conflict(others[0], wanted, again))
    deadline = time.monotonic() + STOPPED_WITHIN_S
    with doing(f"waiting for {name} to save and end"):
        while job and _is_ending(snapshot, job) and not dry_run:
            if time.monotonic() > deadline:
                raise GaveUpError(f"{name} is still ending: {snapshot.state()[1]}; submit again when it has")
            time.sleep(LOOK_EVERY_S)
            snapshot, job = _observe_job(cluster, run, name)

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
        with doing("waiting for the old cluster to go"):
            gone = delete_jobs(cluster, ended, GONE_WITHIN_S)
        if not gone:
            raise GaveUpError(f"{ended[0].name} and its pods are still there after {GONE_WITHIN_S:.0f} s; submit again")
        with doing(f"applying {name}"):
            record_submission(run, name, text)
            cluster.apply(manifest)
    return Outcome("replaced" if ended else "created", was)


def print_outcome(cluster: Cluster, run: Run, job: str, outcome: Outcome, dry_run: bool, as_json: bool) -> None:
    """Print what became of a submission."""
    if as_json:
        record = {"run": run.name, "job": job, "namespace": cluster.namespace, "storage": run.location}
        print_json_line({**record, **asdict(outcome), "dry_run": dry_run})  # `submit --wait` prints more lines
        return
    would = "would be " if dry_run else ""
    print_text(f"{job} {would}{outcome.action} in namespace {cluster.namespace} ({outcome.reason})")
    if outcome.action != "finished" and not dry_run:
        print_text(f"  sunspot wait {command_arguments(cluster, run)}")
        print_text(f"  sunspot logs -f {command_arguments(None, run)}")


def _observe_job(cluster: Cluster, run: Run, name: str) -> tuple[RunSnapshot, JobView | None]:
    """What is known of the run, with the RayJob of this name, if there is one, as its newest."""
    snapshot = observe_run(cluster, run)
    require_answers(snapshot)
    job = next((job for job in snapshot.jobs if job.name == name), None)
    if job and job is not snapshot.job:
        others = tuple(other for other in snapshot.jobs if other is not job)
        snapshot = replace(snapshot, jobs=(job, *others), owner=owner_of(run, name))
    return snapshot, job


def _is_ending(snapshot: RunSnapshot, job: JobView) -> bool:
    """Whether the RayJob is being deleted, or its driver may still see the stop marker."""
    return job.deleting or (snapshot.state()[0] is RunState.STOPPING and snapshot.driver_began)


def _explain_conflict(live: JobView, wanted: JobView, again: str) -> str:
    """Why `wanted` is refused: a line for each difference, settings by name, the rest by its path in the spec."""
    before, after = (
        {name: value for name, value in settings_of(job.raw).items() if name != JOB_ID} for job in (live, wanted)
    )
    in_spec = [_without_credential(line) for line in differences(_flatten(live.spec), _flatten(wanted.spec))]
    changes = differences(before, after) + in_spec
    more = [f"and {len(changes) - MOST_CHANGES_SHOWN} more"] if len(changes) > MOST_CHANGES_SHOWN else []
    lines = "\n".join(f"  {line}" for line in changes[:MOST_CHANGES_SHOWN] + more)
    return (
        f"the run is live as {live.name}, with another specification:\n{lines or '  (only its generation)'}\n"
        f"`sunspot stop {again}` saves and ends it; then submit again, and the run goes on from there"
    )


def _without_credential(change: str) -> str:
    """A line of a diff; of a variable that holds a secret, without its values."""
    variable = re.match(r"\S*\benv\[([^\]]+)\]\.value: ", change)
    secret = variable and is_credential(variable[1], change[variable.end() :])
    return f"{variable[0]}{HIDDEN} -> {HIDDEN}" if variable and secret else change


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a spec but settings, by its path; items of a list by their names, if they have any."""
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
