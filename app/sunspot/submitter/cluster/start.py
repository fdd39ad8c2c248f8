"""Starts a run's RayJob, or says why it need not or must not start."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sunspot.code_archive import code_in
from sunspot.errors import HIDDEN, ClusterError, ConflictError, DamageError, GaveUpError, is_credential
from sunspot.run import Run, open_run
from sunspot.run.requests import clear_stop, newest_submission, owner_of, record_submission
from sunspot.run.status import RunState
from sunspot.settings import PREFIX, Settings, differences
from sunspot.submitter.cluster.api import Cluster, connect
from sunspot.submitter.cluster.image_digests import pin_images
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot, require_answers
from sunspot.submitter.cluster.preflight import check, check_identity
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, LOOK_EVERY_S, delete_jobs
from sunspot.submitter.cluster.views import JobView, job_view
from sunspot.submitter.code_files import CodeArchive, pack
from sunspot.submitter.manifest.render import JobRequest, Rendered, choose_profile, render, settings_of
from sunspot.submitter.manifest.yaml_files import parse_yaml, to_yaml
from sunspot.submitter.printing import progress_note, warn

STOPPED_WITHIN_S = 180.0
"""How long a run that is being stopped may take to save and end."""

MAX_CHANGES_SHOWN = 20


@dataclass(frozen=True)
class PreparedJob:
    """A RayJob that is to be started."""

    manifest: Mapping[str, Any]
    text: str
    "The manifest as YAML, which is kept in storage."
    expected: JobView | None = None
    "The RayJob as the API server would complete it, if it was asked."
    archive: CodeArchive | None = None
    "Own code to upload first."


@dataclass(frozen=True)
class Submission:
    """What was done to start a RayJob, or would be without `dry_run`."""

    access: RunAccess
    job: str
    action: str
    "created, replaced (an ended one), attached (it is live already), or finished (nothing is left to do)."
    reason: str
    dry_run: bool


def render_for_cluster(request: JobRequest, context: str | None) -> tuple[Rendered, Cluster]:
    """Render a request, by default in the context's namespace; raises `ClusterError` without a cluster to ask."""
    rendered = render_with_code(request)
    cluster = connect(context, rendered.chosen_namespace)
    if cluster.namespace != rendered.namespace:
        rendered = render(replace(request, namespace=cluster.namespace), rendered.archive)
    return rendered, cluster


def render_with_code(request: JobRequest) -> Rendered:
    """Render a request; code that is a folder is packed."""
    code = choose_profile(request).code
    return render(request, pack(Path(code).expanduser().resolve()) if code and not code_in(code) else None)


def submit(cluster: Cluster, rendered: Rendered, dry_run: bool = False) -> Submission:
    """Check the job and start it; raises `ClusterError`, `StorageError` or `ConflictError` before any change."""
    settings = rendered.settings
    access = RunAccess(open_run(settings.storage_path, settings.run_name), cluster)
    archive = rendered.archive
    if archive:
        warn(f"code: {archive}")
    with progress_note("checking the cluster and the storage"):
        pinned, images = pin_images(rendered.manifest)
        expected, warnings = check(cluster, access.run, pinned)
    for text in [*images, *(f"warning: {text}" for text in [*warnings, *find_absent(settings, archive)])]:
        warn(text)
    check_identity(access.run, settings_of(rendered.manifest))
    return start_job(access, PreparedJob(pinned, to_yaml(pinned), expected, archive), dry_run)


def find_absent(settings: Settings, archive: CodeArchive | None) -> Iterator[str]:
    """Find what pods have only with the code, and is not in it: the task, and files that its arguments name."""
    top = settings.task.partition(".")[0]
    if archive and top != "sunspot" and not (archive.holds(top) or archive.holds(f"{top}.py")):
        yield f"{PREFIX}TASK={settings.task}: the code has no {top}.py; pods do not have it, unless the image does"
    for name, value in settings.task_args.items():
        here = isinstance(value, str) and value and not value.startswith("/") and os.path.exists(value)
        if here and not (archive and archive.holds(value)):
            given = f"{PREFIX}TASK_ARGS: {name}={value!r}"
            yield f"{given} is here on this machine; pods do not have it, unless the image does"


def start_job(access: RunAccess, prepared: PreparedJob, dry_run: bool = False) -> Submission:
    """Start a RayJob unless it is live or has succeeded.

    Raises `ClusterError` without a cluster, `ConflictError` when another RayJob of the run is live, and `GaveUpError`
    when an ending one does not end.
    """
    run = access.run
    name = str(prepared.manifest["metadata"]["name"])
    cluster = access.require_cluster()

    def submission(action: str, reason: str) -> Submission:
        return Submission(access, name, action, reason, dry_run)

    # What keeps it from starting.
    snapshot, job = _observe_job(access, name)
    if snapshot.storage.deleting:
        raise ConflictError(f"{run.name} is {RunState.DELETING}: {snapshot.state()[1]}; then submit again")
    others = [other for other in snapshot.cluster.jobs if other.live and other.name != name]
    if others:
        wanted = prepared.expected or job_view(dict(prepared.manifest))
        raise ConflictError(_explain_conflict(others[0], wanted, access.arguments))

    # One that is ending is waited for.
    deadline = time.monotonic() + STOPPED_WITHIN_S
    with progress_note(f"waiting for {name} to save and end"):
        while job and _is_ending(snapshot, job) and not dry_run:
            if time.monotonic() > deadline:
                raise GaveUpError(f"{name} is still ending: {snapshot.state()[1]}; submit again when it has")
            time.sleep(LOOK_EVERY_S)
            snapshot, job = _observe_job(access, name)

    # Nothing to do: it is live, or has succeeded.
    state, reason = snapshot.state() if snapshot.known else (RunState.LOST, "")
    status, stop_wanted = snapshot.storage.status, snapshot.storage.stop_wanted
    if job and not state.terminal:
        if stop_wanted and not dry_run:
            clear_stop(run)
        return submission("attached", "the stop marker is cleared" if stop_wanted else f"{state}: {reason}")
    if status and state is RunState.SUCCEEDED and (job or status.owner.partition("#")[0] == name):
        return submission("finished", reason)

    # It starts, in the place of those that have ended.
    ended = [other for other in snapshot.cluster.jobs if other.terminal or other is job]
    was = f"the run was {state}: {reason}" if snapshot.known else "a new run"
    if status and not state.terminal:
        was = f"it takes the run over from {status.owner}: {reason}"
    if not dry_run:
        if prepared.archive:  # over what may be there: it may have been damaged, or be due to be collected
            with progress_note("uploading the code"), run.storage.writer(run.key(prepared.archive.name)) as file:
                file.write(prepared.archive.content)
        clear_stop(run)
        with progress_note("waiting for the old cluster to go"):
            gone = delete_jobs(cluster, ended, GONE_WITHIN_S)
        if not gone:
            raise GaveUpError(f"{ended[0].name} and its pods are still there after {GONE_WITHIN_S:.0f} s; submit again")
        with progress_note(f"applying {name}"):
            record_submission(run, name, prepared.text)
            cluster.apply(dict(prepared.manifest))
    return submission("replaced" if ended else "created", was)


def resume_run(access: RunAccess, snapshot: RunSnapshot) -> Submission | None:
    """Clear the stop marker, and start again what was submitted last; None: nothing was, so whoever trained it does.

    Raises `DamageError` for a submission that cannot be used, and `ClusterError` when there is no cluster to submit to.
    """
    submitted = newest_submission(access.run)
    if submitted is None:
        clear_stop(access.run)
        return None
    if snapshot.cluster.trouble:
        raise ClusterError(snapshot.cluster.trouble)
    job, text = submitted
    return start_job(access, PreparedJob(parse_submission(access.run, job, text), text))


def parse_submission(run: Run, job: str, text: str) -> dict[str, Any]:
    """Parse the manifest of a RayJob; raises `DamageError` when it is none, or that of another job."""
    place = f"the newest submission in {run.storage.locate(run.key('submissions'))}"
    try:
        documents = parse_yaml(text)
    except ValueError as error:
        raise DamageError(f"{place} cannot be used: {error}") from error
    manifest = documents[0] if len(documents) == 1 else None
    about = manifest.get("metadata") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or not isinstance(about, dict) or about.get("name") != job:
        raise DamageError(f"{place} cannot be used: it is not the manifest of {job}")
    return manifest


def _observe_job(access: RunAccess, name: str) -> tuple[RunSnapshot, JobView | None]:
    """Look at the run, with the RayJob of this name, if there is one, as its newest."""
    snapshot = access.observe()
    require_answers(snapshot)
    job = next((job for job in snapshot.cluster.jobs if job.name == name), None)
    if job and job is not snapshot.job:
        others = tuple(other for other in snapshot.cluster.jobs if other is not job)
        cluster = replace(snapshot.cluster, jobs=(job, *others))
        snapshot = RunSnapshot(cluster, replace(snapshot.storage, owner=owner_of(access.run, name)), snapshot.time)
    return snapshot, job


def _is_ending(snapshot: RunSnapshot, job: JobView) -> bool:
    """Whether the RayJob is being deleted, or its driver may still see the stop marker."""
    return job.deleting or (snapshot.state()[0] is RunState.STOPPING and snapshot.driver_began)


def _explain_conflict(live: JobView, wanted: JobView, again: str) -> str:
    """Say why `wanted` is refused: a line for each difference, settings by name, the rest by its path in the spec."""
    named = {PREFIX + "JOB_ID": ""}  # that their names differ tells nothing
    changes = differences(settings_of(live.raw) | named, settings_of(wanted.raw) | named)
    changes += [_without_credential(line) for line in differences(_flatten(live.spec), _flatten(wanted.spec))]
    more = [f"and {len(changes) - MAX_CHANGES_SHOWN} more"] if len(changes) > MAX_CHANGES_SHOWN else []
    lines = "\n".join(f"  {line}" for line in changes[:MAX_CHANGES_SHOWN] + more)
    advice = f"`sunspot stop {again}` saves and ends it; then submit again, and the run goes on from there"
    return (
        f"the run is live as {live.name}, with another specification:\n{lines or '  (only its generation)'}\n{advice}"
    )


def _without_credential(change: str) -> str:
    """Return a line of a diff, without the values of a variable that holds a secret."""
    variable = re.match(r"\S*\benv\[([^\]]+)\]\.value: ", change)
    secret = variable and is_credential(variable[1], change[variable.end() :])
    return f"{variable[0]}{HIDDEN} -> {HIDDEN}" if variable and secret else change


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    """List every leaf of a spec but settings, by its path; items of a list by their names, if they have any."""
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        named = [item.get("name") or item.get("groupName") if isinstance(item, dict) else None for item in value]
        items = [(f"{path}[{named[position] or position}]", item) for position, item in enumerate(value)]
    else:
        return {path: str(value)}
    leaves: dict[str, str] = {}
    for key, item in items:
        if f"[{PREFIX}" not in key and not key.endswith("].name"):
            leaves |= _flatten(item, key)
    return leaves
