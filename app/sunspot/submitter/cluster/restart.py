"""Starts a run again as it was submitted last, after the operator has given up its head.

KubeRay replaces a head whose pod has gone. If no head answers for too long, as its node is frozen or a new one finds no
node, the RayJob is Failed, and `backoffLimit` does not apply. Nothing is wrong with the run then.
"""

import time
from typing import Any

from sunspot.errors import ClusterError, DamageError, GaveUpError, SunspotError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.requests import clear_stop
from sunspot.run.status import RunState
from sunspot.run.submissions import newest_submission
from sunspot.settings import PREFIX, Settings
from sunspot.submitter.cluster.api import Cluster, UnreachableError
from sunspot.submitter.cluster.follow import MAX_OUTAGE_S, TICK_S
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.start import PreparedJob, Submission, start_job
from sunspot.submitter.cluster.state import HEAD_GIVEN_UP
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.manifest.yaml_files import parse_yaml
from sunspot.submitter.printing import progress_note, warn

MAX_STARTS = PREFIX + "MAX_DRIVER_STARTS"


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


def head_given_up(snapshot: RunSnapshot) -> bool:
    """Whether the run has failed only because the operator gave up its head."""
    return bool(snapshot.job and snapshot.job.failure == HEAD_GIVEN_UP and snapshot.state()[0] is RunState.FAILED)


class HeadRestarts:
    """Counts the restarts of a run whose head was given up.

    The operator's own limit lies between two of them. The driver counts them too, as it is the same job that starts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checkpoint: str | None = None
        self._count = 0
        "Restarts since that checkpoint was new."

    def next(self, snapshot: RunSnapshot) -> dict[str, Any] | None:
        """Return the manifest to start again; None when the run ended otherwise, was stopped, or is not ours to start.

        What was not submitted by `sunspot` (GitOps) is started by whoever applied it. Raises `SunspotError` after as
        many restarts in a row without a new checkpoint as a job may have starts of its driver.
        """
        job = snapshot.job
        if not job or not head_given_up(snapshot) or snapshot.storage.stop_wanted or snapshot.storage.trouble:
            return None
        name, text = newest_submission(self._run) or ("", "")
        if name != job.name:
            return None
        checkpoint = snapshot.storage.status.checkpoint if snapshot.storage.status else None
        if checkpoint != self._checkpoint:
            self._checkpoint, self._count = checkpoint, 0
        most = settings_of(job.raw).get(MAX_STARTS) or Settings.model_fields["max_driver_starts"].default
        if self._count >= int(most):
            raise SunspotError(
                f"{self._run.name} failed: its head was given up again after {plural(self._count, 'restart')} without "
                f"a new checkpoint; look at the nodes it was on. {MAX_STARTS} allows more"
            )
        self._count += 1
        return parse_submission(self._run, name, text)


def start_again(access: RunAccess, job: JobView, manifest: dict[str, Any]) -> None:
    """Replace a failed RayJob by a new one of the same name, and so of the same owner in storage.

    Its old pods may take their time: one on a frozen node goes when the node comes back, and what it still does then
    changes nothing of the run (run/attempts.py). Raises `ClusterError` or `GaveUpError` when the API server is out
    of reach, or keeps the old one, for MAX_OUTAGE_S.
    """
    cluster = access.require_cluster()
    deadline = time.monotonic() + MAX_OUTAGE_S
    try:
        with progress_note(f"starting {job.name} again"):
            while trouble := _replace(cluster, job, manifest):
                if time.monotonic() > deadline:
                    raise trouble
                time.sleep(TICK_S)
    except KeyboardInterrupt:
        warn(f"\n{job.name} may be gone; `sunspot resume {access.arguments}` starts it again")
        raise


def _replace(cluster: Cluster, job: JobView, manifest: dict[str, Any]) -> SunspotError | None:
    """Delete and create the RayJob; returns what is in the way, if anything. Harmless to repeat."""
    try:
        cluster.delete_job(job)
        if cluster.has_job(job):
            return GaveUpError(f"{job.name} is deleted and still there; does the operator run? Submit again then")
        cluster.apply(manifest)
    except UnreachableError as error:
        return error
    return None
