"""Finds RayJobs that were deleted before their runs had ended. Storage alone does not show such a deletion.

A RayJob counts as deleted only if it is missing from the cluster and namespace recorded in the run
(docs/decisions/0009). If the user cannot read RayJobs or the cluster's identity, no RayJob counts as deleted.
"""

import time
from collections.abc import Collection

from sunspot.errors import ClusterError, StorageError
from sunspot.run.attempts import attempt_of, step_of
from sunspot.run.checkpoints import MANIFEST, list_directories
from sunspot.run.owner import Owner
from sunspot.run.requests import newest_submission
from sunspot.run.seen import RunSeen
from sunspot.run.status import RunState, is_alive
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.state import GoneJob


def find_gone_job(cluster: Cluster, seen: RunSeen, known: Collection[str] = ()) -> GoneJob | None:
    """Return the RayJob that last trained a run if it was deleted from this namespace.

    Returns None if the run has ended, if the RayJob still exists, or if the cluster or storage does not answer. `known`
    contains the names of RayJobs that are known to exist.
    """
    state = seen.state
    if state.terminal and state is not RunState.LOST:
        return None
    try:
        job = _last_job(cluster, seen)
        # A search trains several runs with one RayJob, which has only the search's label.
        if not job or job in known or cluster.find("job", job):
            return None
        committed = [name for name, files in list_directories(seen.run).items() if MANIFEST in files]
    except (ClusterError, StorageError):
        return None
    newest = max(committed, key=lambda name: (attempt_of(name), step_of(name)), default=None)
    began = state is not RunState.PENDING
    alive = began and seen.status is not None and is_alive(seen.status, time.time())
    return GoneJob(job, cluster.namespace, began, alive, step_of(newest) if newest else None)


def _last_job(cluster: Cluster, seen: RunSeen) -> str:
    """Return the RayJob that last trained the run, or an empty string if it was not in this namespace and cluster."""
    if seen.state is RunState.PENDING:
        record = newest_submission(seen.run)
        if not record:
            return ""
        same = record.cluster == cluster.identity if record.cluster and cluster.identity else None
        here = (record.server == cluster.server if same is None else same) and record.namespace == cluster.namespace
        return record.job if here or not record.namespace else ""  # earlier versions did not record the namespace
    owner = Owner.parse(seen.status.owner) if seen.status else Owner("")
    here = bool(owner.cluster) and (owner.cluster, owner.namespace) == (cluster.identity, cluster.namespace)
    return owner.job if here else ""
