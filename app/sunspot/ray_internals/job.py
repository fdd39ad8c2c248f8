"""Ends this driver's Ray job so that KubeRay does not retry a job that cannot succeed.

KubeRay (1.7, `checkBackoffLimitAndUpdateStatusIfNeeded`) starts a RayJob again in a new cluster if its Ray job is
FAILED and `backoffLimit` allows it, regardless of the exit code. If the Ray job is STOPPED, KubeRay does not start the
RayJob again. KubeRay also copies the Ray job's message to the RayJob's status, which keeps the last attempt's message.

ray.dashboard.modules.job.common.JobInfoStorageClient   writes the status and message of a Ray job. The public
                                                        JobSubmissionClient only stops a job, without a message.
ray._raylet.GcsClient                                   is the connection that JobInfoStorageClient needs
RAY_JOB_CONFIG_JSON_ENV_VAR                             contains the ID of a driver's Ray job. The public API
                                                        provides it only after `ray.init`, which is never called if
                                                        a setting is invalid.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable

from sunspot.errors import FAILED_FOR_GOOD, SunspotError, shorten

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10
"""Seconds within which the head must record how the job ended. Otherwise, the operator starts the job again."""


def end_for_good(
    program: Callable[[], int], mark: Callable[[str, SunspotError], None] | None = None
) -> Callable[[], int]:
    """Wrap `program` so that its final errors (`SunspotError.final`) end the RayJob without another attempt.

    `mark` records that the Ray job has ended. The default is `mark_stopped`.
    """

    def run() -> int:
        try:
            return program()
        except SunspotError as error:
            try:
                job = find_own_job() if error.final else ""
                if job:
                    (mark or mark_stopped)(job, error)
            except Exception as trouble:  # other versions of Ray can raise anything
                log.warning(
                    f"the operator might start this job again, although the job cannot succeed: {shorten(trouble)}"
                )
            raise

    return run


def find_own_job() -> str:
    """Return the ID of this driver's Ray job, or an empty string if KubeRay did not create the cluster for this job.

    KubeRay never retries a job in an existing cluster. For other jobs, it names the cluster and the Ray job after the
    RayJob, and appends five random letters to each name.
    """
    cluster = os.environ.get("RAY_CLUSTER_NAME", "")
    config = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    if not cluster or not config:
        return ""
    job = str(json.loads(config).get("metadata", {}).get("job_submission_id", ""))
    return job if job.rpartition("-")[0] == cluster.rpartition("-")[0] else ""


def mark_stopped(job: str, error: SunspotError) -> None:
    """Record that the Ray job is STOPPED, with the error as its message. Ray never changes a terminal status."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.dashboard.modules.job.common import JobInfoStorageClient
    from ray.job_submission import JobStatus

    message = f"{FAILED_FOR_GOOD} with exit code {error.exit_code}, so it is not tried again\nerror: {error}"
    jobs = JobInfoStorageClient(GcsClient(address=os.environ["RAY_ADDRESS"]))
    asyncio.run(jobs.put_status(job, JobStatus.STOPPED, message, error.exit_code, timeout=WRITE_TIMEOUT_S))
