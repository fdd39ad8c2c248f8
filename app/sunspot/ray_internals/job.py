"""Ends the Ray job of this driver so that KubeRay does not retry it in vain.

KubeRay (1.7, `checkBackoffLimitAndUpdateStatusIfNeeded`) starts a RayJob again in a new cluster if its Ray job is
FAILED and `backoffLimit` allows it, whatever the exit code was. It does not if the Ray job is STOPPED. It copies the
Ray job's message into the RayJob's status, where the message of the last try stays.

ray.dashboard.modules.job.common.JobInfoStorageClient   writes status and message of a Ray job. The public
                                                        JobSubmissionClient can only stop one, without a message
ray._raylet.GcsClient                                   the connection that this client needs
RAY_JOB_CONFIG_JSON_ENV_VAR                             names the Ray job of a driver: the public API knows it only
                                                        after `ray.init`, which a wrong setting never reaches
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable

from sunspot.errors import FAILED_FOR_GOOD, SunspotError, shorten

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10
"""How long the head may take to record how the job ended. If it takes longer, the operator starts the job again."""


def end_for_good(program: Callable[[], int]) -> Callable[[], int]:
    """Wrap `program` so that its final errors (`SunspotError.final`) end the RayJob without another try."""

    def run() -> int:
        try:
            return program()
        except SunspotError as error:
            try:
                job = find_own_job() if error.final else ""
                if job:
                    _mark_stopped(job, error)
            except Exception as trouble:  # another Ray may raise anything
                log.warning(f"the operator may start this job again, although that is of no use: {shorten(trouble)}")
            raise

    return run


def find_own_job() -> str:
    """Return the id of this driver's Ray job if KubeRay made its cluster for it; empty if not.

    KubeRay calls both the cluster and the Ray job by the RayJob's name and five letters. A RayJob without a cluster of
    its own has no other tries.
    """
    cluster, config = os.environ.get("RAY_CLUSTER_NAME", ""), os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    if not cluster or not config:
        return ""
    job = str(json.loads(config).get("metadata", {}).get("job_submission_id", ""))
    return job if job.rpartition("-")[0] == cluster.rpartition("-")[0] else ""


def _mark_stopped(job: str, error: SunspotError) -> None:
    """Record that the Ray job is STOPPED, with the error as its message. Ray never changes a terminal status."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.dashboard.modules.job.common import JobInfoStorageClient
    from ray.job_submission import JobStatus

    message = f"{FAILED_FOR_GOOD} with exit code {error.exit_code}, so it is not tried again\nerror: {error}"
    jobs = JobInfoStorageClient(GcsClient(address=os.environ["RAY_ADDRESS"]))
    asyncio.run(jobs.put_status(job, JobStatus.STOPPED, message, error.exit_code, timeout=WRITE_TIMEOUT_S))
