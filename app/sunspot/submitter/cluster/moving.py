"""Moves a live run to another place of its profile.

1. `move_run` renders and applies a RayJob in the new place (`placing`). The run keeps training in the old place.
2. When the new workers are ready, they ask the old driver to save and stop, and then claim the run (`run.handover`).
3. `move_run` deletes the old RayJob. If the new driver does not start in time, `move_run` deletes the new RayJob
   instead.

`mover.Mover` moves runs automatically.
"""

from __future__ import annotations

import time
from dataclasses import replace

from sunspot.errors import ClusterError, ConflictError, GaveUpError, SettingsError, SunspotError
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, attempts_with_start, read_attempts
from sunspot.run.handover import HANDED_OVER_WITHIN_S, clear_handover, left_for_move, read_handover
from sunspot.run.owner import Owner
from sunspot.run.requests import withdraw_submission
from sunspot.run.status import RunState, Status, is_alive, read_status
from sunspot.submitter.cluster.applied import applied_manifest
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.cluster.placing import RunJob, find_job_in_place, render_in_place, submit_in_place
from sunspot.submitter.cluster.start import Submission, resume_run, submit
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, delete_jobs
from sunspot.submitter.manifest.pods import set_variable
from sunspot.submitter.manifest.render import MOVES_FROM, SEARCH, JobRequest
from sunspot.submitter.printing import progress_note, warn

POLL_EVERY_S = 1.0

ENDED = (RunState.SUCCEEDED, RunState.STOPPED)
"""States in which the run does not need the new place. After a failure, the new workers can try again."""

NOTICED_WITHIN_S = 15.0
"""Seconds within which a driver acts on a request, because it reads requests every few seconds."""


def move_run(request: JobRequest, context: str | None, timeout: float) -> Submission:
    """Move a run to the request's place, and return the new RayJob.

    If the run is not alive, it is only submitted in the new place. Raises `GaveUpError` if the new RayJob does not
    claim the run within `timeout` seconds. In this case, the run stays in its old place. Raises `ConflictError` if the
    run is training outside the profile's places, and `SettingsError` if it is a search.
    """
    rendered, cluster = render_in_place(request, context)
    run = open_run(rendered.settings.storage_path, rendered.settings.run_name)
    before = read_status(run)
    if not before or not is_alive(before, time.time()):
        return submit_in_place(cluster, rendered)
    if rendered.manifest["spec"]["entrypoint"] == SEARCH:
        raise SettingsError(
            f"{run.name} is a search, whose trials cannot be moved together; stop it, and submit it with --place "
            f"{request.place}"
        )
    old = Owner.parse(before.owner)
    if old.place == request.place:
        return Submission(RunAccess(run, cluster), old.job, "attached", "the run is already there", False, old.place)
    if not old.place:
        raise ConflictError(
            f"{run.name} is being trained by {old.describe()}, which is not in any of the profile's places; stop the "
            f"run, and submit it with --place {request.place}"
        )
    left = find_job_in_place(request, run, old.place, old.job)
    set_variable(rendered.manifest, MOVES_FROM, before.owner)
    submission = submit(cluster, rendered, take_over=True)
    try:
        claimed = _wait_for_claim(submission, before, timeout) or _undo(submission, before, left)
        if not claimed:
            reason = f"the run has ended in {old.place}"
            return Submission(RunAccess(run, left.cluster), old.job, "finished", reason, False, old.place)
    except GaveUpError:
        claimed = _undo(submission, before, left)
        if not claimed:
            raise
    except (SunspotError, KeyboardInterrupt):
        warn(f"the move of {run.name} continues; run the same command to follow it again")
        raise
    left.delete()
    return replace(submission, action="moved", reason=f"from {old.place} at step {claimed.step}")


def _wait_for_claim(submission: Submission, before: Status, timeout: float) -> Attempt | None:
    """Return the attempt that the workers in the new place claimed, or None if the run ended before that.

    `before` is the status of the old driver. Raises `GaveUpError` if the new RayJob does not claim the run.
    """
    run, place = submission.access.run, submission.place
    deadline = time.monotonic() + timeout
    with progress_note(f"waiting for nodes in {place}; the run keeps training meanwhile"):
        while True:
            claimed = _find_claim(submission, before)
            status = read_status(run)
            if claimed or (status and status.state in ENDED and not left_for_move(status)):
                return claimed
            stays = "it stays where it was"
            failure = _describe_failure(submission)
            if failure:
                raise GaveUpError(f"{run.name} has not moved to {place}, because {failure}; {stays}")
            late_s = time.monotonic() - deadline
            if late_s > (HANDED_OVER_WITHIN_S if read_handover(run) else 0):
                doctor = f"`sunspot doctor {submission.access.arguments}` explains why its pods are not running"
                raise GaveUpError(f"{run.name} got no nodes in {place} within {timeout:.0f} s; {stays}; {doctor}")
            time.sleep(POLL_EVERY_S)


def _describe_failure(submission: Submission) -> str:
    """Return why the new RayJob has ended or is gone.

    Returns an empty string if the RayJob is still live or its cluster does not answer.
    """
    try:
        jobs = submission.access.require_cluster().list_jobs(submission.access.run.name)
    except ClusterError:
        return ""
    job = next((job for job in jobs if job.name == submission.job), None)
    if job is None:
        return f"its RayJob {submission.job} was deleted"
    return f"its RayJob {job.name} has ended: {job.message or job.deployment_status}" if job.terminal else ""


def _find_claims(submission: Submission, before: Status) -> list[Attempt]:
    """Return the attempts that the submission's workers have claimed, oldest first."""
    attempts = read_attempts(submission.access.run)
    newer = [(attempt, Owner.parse(attempt.owner)) for attempt in attempts if attempt.number > before.attempt]
    return [each for each, by in newer if (by.job, by.place) == (submission.job, submission.place)]


def _find_claim(submission: Submission, before: Status) -> Attempt | None:
    """Return the submission's attempt, or None until its workers have claimed the run and chosen a starting point."""
    return next(iter(attempts_with_start(_find_claims(submission, before))), None)


def _undo(submission: Submission, before: Status, left: RunJob) -> Attempt | None:
    """Withdraw and delete the new RayJob. If the old driver has already ended, start the old RayJob again.

    If the new workers have already claimed the run, keeps the new RayJob and returns their attempt. Otherwise, returns
    None.
    """
    run, cluster = submission.access.run, submission.access.require_cluster()
    withdraw_submission(run, submission.job, submission.place)  # from now on, the new workers cannot claim the run
    claimed = _find_claim(submission, before)
    if claimed:
        withdraw_submission(run, submission.job, submission.place, undo=True)
        return claimed
    try:
        found = [job for job in cluster.list_jobs(run.name) if job.name == submission.job]
        delete_jobs(cluster, found, GONE_WITHIN_S)
    except ClusterError as error:
        warn(f"warning: RayJob {submission.job} in {submission.place} could not be deleted: {error}; delete it there")
    deadline = time.monotonic() + (NOTICED_WITHIN_S if read_handover(run) else 0)
    clear_handover(run)
    while True:
        status = read_status(run)
        ended = status and status.owner == before.owner and left_for_move(status)
        if ended or _find_claims(submission, before):  # even workers without a start have superseded the old ones
            _start_again(RunAccess(run, left.cluster), left)
            return None
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_EVERY_S)


def _start_again(access: RunAccess, left: RunJob) -> None:
    """Replace the old RayJob, whose driver has ended or is superseded, with a new one that owns the run.

    If this fails, raises `ClusterError` with the command that starts the run later.
    """
    try:
        snapshot = access.observe(lambda job: job.name == left.name)  # the withdrawn RayJob might still be there
        if snapshot.job:
            applied_manifest(snapshot.job, access.run.name)  # a RayJob that cannot be applied again is not deleted
            left.delete()
        resume_run(access, snapshot, take_over=True)  # the new workers may have lived a moment ago
    except SunspotError as error:
        raise ClusterError(
            f"{access.run.name} was stopped for the move, but could not be started again in {left.place}: {error}; "
            f"run `sunspot resume {access.arguments}` to start it there"
        ) from error
