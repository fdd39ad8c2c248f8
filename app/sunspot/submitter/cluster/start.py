"""Starts a run's RayJob, unless the run is live, has succeeded or conflicts with another owner."""

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sunspot.code_archive import code_in
from sunspot.credentials import is_credential
from sunspot.errors import (
    HIDDEN,
    ClusterError,
    ConflictError,
    GaveUpError,
    NotFoundError,
    SettingsError,
    StorageError,
)
from sunspot.formatting import in_words, money
from sunspot.run import Run, open_run
from sunspot.run.forecast import find_spent
from sunspot.run.owner import Owner
from sunspot.run.requests import SubmissionRecord, clear_stop, newest_submission, read_submissions, record_submission
from sunspot.run.status import SILENT_AFTER_S, RunState, is_alive, read_status
from sunspot.settings import PREFIX, Settings, differences
from sunspot.settings.goal import parse_budget, parse_deadline
from sunspot.submitter.cluster.api import Cluster, connect
from sunspot.submitter.cluster.applied import applied_manifest, as_submission, with_request, without_copy
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot, require_answers, stored_arguments
from sunspot.submitter.cluster.preflight import check, check_identity
from sunspot.submitter.cluster.state import owns, was_written_by
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, POLL_EVERY_S, delete_jobs
from sunspot.submitter.cluster.views import JobView, job_view
from sunspot.submitter.code_files import CodeArchive, pack
from sunspot.submitter.manifest.absent_code import find_absent
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import (
    JOB_ID,
    MOVES_FROM,
    JobRequest,
    Rendered,
    choose_profile,
    render,
    settings_of,
)
from sunspot.submitter.printing import progress_note, warn

STOPPED_WITHIN_S = 180.0
"""Seconds within which a run that is being stopped must save and end."""

MAX_CHANGES_SHOWN = 20


@dataclass(frozen=True)
class PreparedJob:
    """A RayJob that is ready to be started."""

    manifest: Mapping[str, Any]
    arguments: Sequence[str] = ()
    "The `sunspot submit` arguments for the same job, recorded in storage for people to read."
    expected: JobView | None = None
    "The RayJob with the API server's defaults, or None if the API server was not asked."
    archive: CodeArchive | None = None
    "The user's code, which is uploaded first."


@dataclass(frozen=True)
class Submission:
    """The result of starting a RayJob, or of a dry run."""

    access: RunAccess
    job: str
    action: str
    """One of created, replaced (the old RayJob had ended), attached (the RayJob is live) or finished.

    If it is finished, the run has succeeded."""
    reason: str
    dry_run: bool
    place: str = ""
    "The name of the place in the profile, or an empty string if the profile has no places."


def render_for_cluster(request: JobRequest, context: str | None) -> tuple[Rendered, Cluster]:
    """Render a request and connect to its cluster. The namespace defaults to the context's.

    Raises `ClusterError` if no cluster is configured.
    """
    rendered = render_with_code(request)
    cluster = connect(context, rendered.chosen_namespace)
    if cluster.namespace != rendered.namespace:
        rendered = render(replace(request, namespace=cluster.namespace), rendered.archive)
    return rendered, cluster


def render_with_code(request: JobRequest) -> Rendered:
    """Render a request. If its code is a folder, the folder is packed first."""
    code = choose_profile(request).code
    return render(request, pack(Path(code).expanduser().resolve()) if code and not code_in(code) else None)


def submit(cluster: Cluster, rendered: Rendered, dry_run: bool = False, take_over: bool = False) -> Submission:
    """Check the job and start it.

    If a check fails, raises `ClusterError`, `StorageError` or `ConflictError` and starts nothing. A run that is alive
    elsewhere is a conflict unless `take_over` is True.
    """
    settings = rendered.settings
    access = RunAccess(open_run(settings.storage_path, settings.run_name), cluster)
    archive = rendered.archive
    if archive:
        warn(f"code: {archive}")
    with progress_note("checking the cluster and the storage"):
        expected, warnings = check(cluster, access.run, rendered.manifest)
    for text in [*warnings, *find_absent(rendered)]:
        warn(f"warning: {text}")
    check_identity(access.run, settings_of(rendered.manifest))
    if settings.deadline or settings.budget:
        _refuse_missed_goal(access.run, settings)
    arguments = (*rendered.request.arguments(), *cluster.options.split())
    return start_job(
        access, PreparedJob(as_submission(with_request(rendered)), arguments, expected, archive), dry_run, take_over
    )


def start_job(access: RunAccess, prepared: PreparedJob, dry_run: bool = False, take_over: bool = False) -> Submission:
    """Start a RayJob unless it is live or has succeeded.

    Raises `ClusterError` if no cluster is configured, and `GaveUpError` if an old RayJob does not stop in time. Raises
    `ConflictError` if another RayJob of the run is live, or if the run is alive elsewhere and `take_over` is False.
    """
    run = access.run
    name = str(prepared.manifest["metadata"]["name"])
    cluster = access.require_cluster()

    def submission(action: str, reason: str) -> Submission:
        return Submission(access, name, action, reason, dry_run, place_of(prepared.manifest))

    # Reject the job if another owner is training the run, or if another run has the job's name.
    snapshot, job = _observe_job(access, name)
    if snapshot.storage.summary.deleting:
        raise ConflictError(f"{run.name} is {RunState.DELETING}: {snapshot.state()[1]}; submit again once it is gone")
    moves_from = settings_of(prepared.manifest).get(MOVES_FROM, "")  # this RayJob ends for the new one
    others = [
        other
        for other in snapshot.cluster.jobs
        if other.live and other.name != name and not (moves_from and owns(other, moves_from))
    ]
    others = _without_withdrawn(run, others) if others else []
    if others:
        wanted = prepared.expected or job_view(dict(prepared.manifest))
        raise ConflictError(_explain_conflict(others[0], wanted, access.arguments))
    elsewhere = "" if job and job.live else describe_owner_elsewhere(access, snapshot)
    if elsewhere and not take_over:
        raise ConflictError(elsewhere)
    if not job:
        _refuse_name_of_another_run(cluster, name, run.name)

    # Wait for a RayJob that is shutting down.
    deadline = time.monotonic() + STOPPED_WITHIN_S
    with progress_note(f"waiting for {name} to save and end"):
        while job and _is_ending(snapshot, job) and not dry_run:
            if time.monotonic() > deadline:
                why = snapshot.state()[1]
                raise GaveUpError(f"{name} is still shutting down: {why}; submit again after it has ended")
            time.sleep(POLL_EVERY_S)
            snapshot, job = _observe_job(access, name)

    # Return early if the job is live or the run has succeeded.
    state, reason = snapshot.state() if snapshot.known else (RunState.LOST, "")
    status = snapshot.storage.status
    stop_wanted = snapshot.storage.summary.stop_requested
    # During a move, attach only to a live RayJob that asks the driver that is training now to save and end.
    moves_too = job is not None and job.live and settings_of(job.raw).get(MOVES_FROM) == moves_from
    if job and (moves_too or not moves_from) and not state.terminal and not elsewhere:
        if stop_wanted and not dry_run:
            clear_stop(run)
        return submission("attached", "the stop marker is cleared" if stop_wanted else f"{state}: {reason}")
    if status and state is RunState.SUCCEEDED and (job or Owner.parse(status.owner).job == name):
        return submission("finished", reason)

    # Replace the RayJobs that have ended.
    ended = [other for other in snapshot.cluster.jobs if other.terminal or other is job]
    was = f"the run was {state}: {reason}" if snapshot.known else "a new run"
    if status and not state.terminal:
        was = f"it takes the run over from {Owner.parse(status.owner).describe()}: {reason}"
    if not dry_run:
        if prepared.archive:  # uploaded even if it exists, because that copy might be damaged or about to be deleted
            with progress_note("uploading the code"), run.storage.writer(run.key(prepared.archive.name)) as file:
                file.write(prepared.archive.content)
        clear_stop(run)
        with progress_note("waiting for the old cluster to be deleted"):
            gone = delete_jobs(cluster, ended, GONE_WITHIN_S)
        if not gone:
            raise GaveUpError(f"{ended[0].name} and its pods still exist after {GONE_WITHIN_S:.0f} s; submit again")
        with progress_note(f"applying {name}"):
            record = _make_record(cluster, prepared)  # can fail, so this comes before the change
            cluster.apply(dict(prepared.manifest))
            _keep_record(run, record)
    return submission("replaced" if ended else "created", was)


def _refuse_missed_goal(run: Run, settings: Settings) -> None:
    """Raise `SettingsError` if a run that is neither alive nor done has missed its deadline or spent its budget."""
    status = read_status(run)
    now = time.time()
    if status and (status.state is RunState.SUCCEEDED or is_alive(status, now)):
        return
    deadline = parse_deadline(settings.deadline)
    if deadline is not None and deadline <= now:
        late = f"{PREFIX}DEADLINE={settings.deadline} passed {in_words(now - deadline)} ago"
        raise SettingsError(f"{late}; set a later deadline, or omit it")
    budget = parse_budget(settings.budget)
    spent = find_spent(run) if budget is not None else 0.0
    if budget is not None and spent >= budget:
        spent_budget = f"{PREFIX}BUDGET={settings.budget} is spent, because the run has cost {money(spent)}"
        raise SettingsError(f"{spent_budget}; set a larger budget, or omit it")


def place_of(manifest: Mapping[str, Any]) -> str:
    """Return the name of a RayJob's place, or an empty string if its profile has no places."""
    return Owner.parse(settings_of(manifest).get(JOB_ID, "")).place


def resume_run(access: RunAccess, snapshot: RunSnapshot, take_over: bool = False) -> Submission | None:
    """Clear the stop marker, and apply the run's RayJob again as `sunspot submit` applied it.

    Ignores a RayJob that was started for a move if the run has stayed in its old place.

    Returns None if the run was not started by `sunspot submit` and must be restarted by other means. Raises
    `ConflictError` if the run is alive elsewhere and `take_over` is False, `NotFoundError` if the submitted RayJob is
    not in this namespace, and `ClusterError` if the cluster does not answer.
    """
    job = next(iter(_without_withdrawn(access.run, snapshot.cluster.jobs)), None)
    submitted = newest_submission(access.run)
    if submitted and snapshot.cluster.trouble:
        raise ClusterError(snapshot.cluster.trouble)
    manifest = applied_manifest(job, access.run.name) if job and not job.gitops_tool else None
    if manifest:
        arguments = submitted.arguments if submitted else ()
        return start_job(access, PreparedJob(as_submission(manifest), arguments), take_over=take_over)
    if submitted and (not job or (submitted.job == job.name and not job.gitops_tool)):
        raise NotFoundError(_explain_absence(access, submitted))
    clear_stop(access.run)
    return None


def _without_withdrawn(run: Run, jobs: Sequence[JobView]) -> list[JobView]:
    """Return the RayJobs whose workers can still claim the run."""
    newest = {(record.job, record.place): record for record in read_submissions(run)}
    withdrawn = [submitted for submitted, record in newest.items() if record.withdrawn]
    return [job for job in jobs if (job.name, place_of(job.raw)) not in withdrawn]


def _explain_absence(access: RunAccess, submitted: SubmissionRecord) -> str:
    """Return a message that says where the missing RayJob was submitted, and how to submit it again."""
    run, cluster = access.run.name, access.require_cluster()
    here = f"namespace {cluster.namespace} of {cluster.server}"
    there = f"namespace {submitted.namespace} of {submitted.server}" if submitted.namespace else "a namespace"
    again = f"submit {run} again, and it continues from its newest checkpoint"
    if submitted.arguments:
        words = shlex.join(("sunspot", "submit", *submitted.arguments))
        again += f"; according to storage, this command submitted it last (read it before you repeat it):\n  {words}"
    if there != here and submitted.namespace:
        elsewhere = (
            f"{submitted.job} was submitted to {there}; to resume it there, choose that place with --context and "
            "--namespace"
        )
        return f"{run} has no RayJob in {here} to start again; {elsewhere}. To train it here, {again}"
    return f"{submitted.job} is no longer in {here} as `sunspot submit` applied it; {again}"


def _observe_job(access: RunAccess, name: str) -> tuple[RunSnapshot, JobView | None]:
    """Return a snapshot of the run, and the RayJob called `name` or None if it does not exist.

    The snapshot treats this RayJob as the newest, even if another RayJob is newer.
    """
    snapshot = access.observe()
    require_answers(snapshot)
    job = next((job for job in snapshot.cluster.jobs if job.name == name), None)
    if job and job is not snapshot.job:
        others = tuple(other for other in snapshot.cluster.jobs if other is not job)
        cluster = replace(snapshot.cluster, jobs=(job, *others))
        snapshot = replace(snapshot, cluster=cluster)
    return snapshot, job


def _make_record(cluster: Cluster, prepared: PreparedJob) -> SubmissionRecord:
    """Return the record of a job that is about to be applied."""
    return SubmissionRecord(
        job=str(prepared.manifest["metadata"]["name"]),
        namespace=cluster.namespace,
        cluster=cluster.identity,
        server=cluster.server,
        place=place_of(prepared.manifest),
        arguments=tuple(prepared.arguments),
        manifest=without_copy(prepared.manifest),
        time=time.time(),
    )


def _keep_record(run: Run, record: SubmissionRecord) -> None:
    """Write the record to storage. Only warns on failure, because the RayJob has already been applied."""
    try:
        record_submission(run, record)
    except StorageError as error:
        warn(f"warning: {record.job} was applied, but storage has no record of it: {error}")


def describe_owner_elsewhere(access: RunAccess, snapshot: RunSnapshot) -> str:
    """Return a message if the run is alive and its owner is not in this namespace.

    Returns an empty string otherwise, and also if the owner's RayJob has just been deleted from this namespace.
    """
    status, cluster = snapshot.storage.status, access.require_cluster()
    if not status or not is_alive(status, snapshot.cluster.time):
        return ""
    owner = Owner.parse(status.owner)
    deleted_here = owner.cluster and (owner.cluster, owner.namespace) == (cluster.identity, cluster.namespace)
    if deleted_here or any(owns(job, status.owner) for job in snapshot.cluster.jobs):
        return ""
    ago = in_words(snapshot.cluster.time - status.seen)
    return (
        f"{access.run.name} is alive elsewhere: {owner.describe()} is training it, at step {status.step}, and was "
        f"last heard of {ago} ago. `sunspot stop {stored_arguments(access.run)}` makes it save and end; then submit "
        "again. To take the run over while it is training, submit it with --take-over, and it continues from its "
        f"newest checkpoint. Once its owner has been silent for {SILENT_AFTER_S:.0f} s, the option is not needed"
    )


def _refuse_name_of_another_run(cluster: Cluster, name: str, run: str) -> None:
    """Raise `ConflictError` if a RayJob of another run has this name, because it would be overwritten."""
    found = cluster.find("job", name)
    if found and found["metadata"].get("labels", {}).get(RUN_LABEL) != run:
        raise ConflictError(
            f"RayJob {name} in namespace {cluster.namespace} belongs to another run (its label {RUN_LABEL} is not "
            f"{run}); delete the RayJob, or choose another SUNSPOT_RUN_NAME"
        )


def _is_ending(snapshot: RunSnapshot, job: JobView) -> bool:
    """Return True if the RayJob is being deleted, or if its driver is stopping the run."""
    return job.deleting or (snapshot.state()[0] is RunState.STOPPING and was_written_by(snapshot.storage, job))


def _explain_conflict(live: JobView, wanted: JobView, again: str) -> str:
    """Return an error message with a line for each difference between the live and the requested RayJob.

    Settings are listed by name, and other differences by their path in the spec.
    """
    named = {JOB_ID: "", MOVES_FROM: ""}  # these always differ
    changes = differences(settings_of(live.raw) | named, settings_of(wanted.raw) | named)
    changes += [_without_credential(line) for line in differences(_flatten(live.spec), _flatten(wanted.spec))]
    more = [f"and {len(changes) - MAX_CHANGES_SHOWN} more"] if len(changes) > MAX_CHANGES_SHOWN else []
    lines = "\n".join(f"  {line}" for line in changes[:MAX_CHANGES_SHOWN] + more)
    advice = f"`sunspot stop {again}` saves and ends it; then submit again, and the run continues from there"
    return (
        f"the run is live as {live.name}, with a different specification:\n"
        f"{lines or '  (only its generation)'}\n{advice}"
    )


def _without_credential(change: str) -> str:
    """Return `change`, a line of a diff, with its values hidden if the line shows a variable that contains a secret."""
    variable = re.match(r"\S*\benv\[([^\]]+)\]\.value: ", change)
    secret = variable and is_credential(variable[1], change[variable.end() :])
    return f"{variable[0]}{HIDDEN} -> {HIDDEN}" if variable and secret else change


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    """Return the values in a nested spec, keyed by path. Settings are omitted.

    In a path, a list item is identified by its name, or by its position if it has no name.
    """
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
