"""Changes the number of workers of a live run, and removes the pods of workers that have left.

The request is an object in storage, which the run's driver reads. Surplus workers leave between two steps. Then their
pods are removed from the RayCluster, and the RayCluster's maximum number of pods is lowered. Without the lower maximum,
Ray's autoscaler would replace the pods, because Ray Train still reserves resources for the workers that it started.
"""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.errors import ClusterError, ConflictError, GaveUpError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import Attempt, newest_number, read_attempts, recorded_multiple, recorded_setting
from sunspot.run.owner import Owner
from sunspot.run.requests import ScaleRequest, clear_scale, describe_requester, narrowed, request_scale
from sunspot.run.status import RunState
from sunspot.settings import PREFIX, WorkerRange, parse_workers
from sunspot.submitter.cluster.api import Cluster, RefusedError
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.state import owns
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.shape import SLOT
from sunspot.submitter.printing import progress_note

POLL_EVERY_S = 1.0
"""Seconds between two checks of whether workers have left."""

PATCH_TRIES = 5
"""Number of attempts to change a RayCluster that Ray's autoscaler changes at the same time."""

NUM_WORKERS = f"{PREFIX}NUM_WORKERS"


@dataclass(frozen=True)
class Scaled:
    """A request to change a run's number of workers, and its result."""

    wanted: WorkerRange
    given: WorkerRange
    "The setting NUM_WORKERS, which `sunspot scale` restores if it is given this range."
    training: int
    "Number of workers that are training now."
    pods: tuple[str, ...] = ()
    "Names of the pods that were removed."


def scale_run(access: RunAccess, wanted: WorkerRange, timeout: float) -> Scaled:
    """Change a live run's number of workers, and wait until the surplus workers have left.

    Raises `NotFoundError` if the run does not exist, `ConflictError` if it is not live or cannot have this number of
    workers while it trains, `ClusterError` if its pods cannot be removed, and `GaveUpError` after `timeout` seconds.
    """
    run = access.run
    snapshot = access.observe_existing()
    given = _require_scalable(access, snapshot, wanted)
    pods = _find_pods(access, snapshot)
    attempt = read_attempts(run)[-1]
    if pods:
        more = wanted.most >= narrowed(given, snapshot.storage.scale).most
        pods.resize(wanted.most, dry_run=not more)  # a dry run shows whether this user may do it later
    if wanted == given:
        clear_scale(run)
    else:
        request_scale(run, ScaleRequest(str(wanted), str(given), describe_requester(), time.time()))
    with progress_note("waiting for workers to leave after their step"):
        attempt = _wait_for_size(access, attempt, wanted, timeout)
    removed = pods.resize(wanted.most, attempt.metadata.nodes.values()) if pods else ()
    return Scaled(wanted, given, attempt.metadata.world_size, tuple(removed))


def _require_scalable(access: RunAccess, snapshot: RunSnapshot, wanted: WorkerRange) -> WorkerRange:
    """Return the run's NUM_WORKERS. Raises `ConflictError` if the run cannot train with `wanted` workers."""
    run, status = access.run, snapshot.storage.status
    state, reason = snapshot.state()
    if status is None or state is not RunState.RUNNING:
        raise ConflictError(
            f"{run.name} is {state}: {reason}. Only a run that is training can be scaled; before it starts, "
            f"{NUM_WORKERS} sets the number of workers"
        )
    again = f"`sunspot stop {access.arguments}` saves and stops the run; then start it with {NUM_WORKERS}={wanted}, "
    again += "and it continues from there"
    attempts = read_attempts(run)
    setting = recorded_setting(attempts, "num_workers")
    if not status.scalable:
        why = "its workers cannot leave or join while others train (docs/elastic.md says which runs can)"
        if ".." not in setting:
            why = f"its number of workers is fixed ({NUM_WORKERS}={setting})"
        raise ConflictError(f"{run.name} cannot be scaled: {why}. {again}")
    given = parse_workers(status.scalable)
    if not (given.least <= wanted.least and wanted.most <= given.most):
        raise ConflictError(f"{run.name} cannot have {wanted} workers, because {NUM_WORKERS}={given}. {again}")
    multiple = recorded_multiple(attempts)
    nearest = wanted.in_multiples_of(multiple)
    if str(nearest) != str(wanted):
        each = f"each replica of its model needs {multiple}"
        raise ConflictError(
            f"{run.name} cannot have {wanted} workers, because {each}; use multiples of {multiple}, such as {nearest}"
        )
    return given


def _wait_for_size(access: RunAccess, attempt: Attempt, wanted: WorkerRange, timeout: float) -> Attempt:
    """Wait until at most `wanted.most` workers are training, and return the run's newest attempt."""
    run: Run = access.run
    deadline = time.monotonic() + timeout
    while attempt.metadata.world_size > wanted.most:
        if time.monotonic() > deadline:
            raise GaveUpError(
                f"after {timeout:.0f} s, {plural(attempt.metadata.world_size, 'worker')} are still training, but the "
                f"requested number is {wanted}; the surplus workers leave after their current step. Run the same "
                "command again to keep waiting"
            )
        time.sleep(POLL_EVERY_S)
        if newest_number(run) > attempt.number:
            attempt = read_attempts(run)[-1]
    return attempt


@dataclass(frozen=True)
class WorkerPods:
    """The training pods of a live RayJob. Ray's autoscaler chooses their number, up to a limit in the RayCluster."""

    cluster: Cluster
    job: JobView

    def resize(self, workers: int, hosts: Collection[str] = (), dry_run: bool = False) -> list[str]:
        """Limit the number of pods to what `workers` workers need, and remove pods beyond this limit.

        `hosts` contains the names of the pods that have workers. These pods are not removed. If `hosts` is empty, no
        pods are removed. Returns the names of the removed pods. With `dry_run`, the API server only checks the change.
        Raises `ClusterError` if the RayCluster is gone or cannot be changed.
        """
        for _ in range(PATCH_TRIES):
            found = self.cluster.find("RayCluster", self.job.cluster)
            if found is None:
                raise ClusterError(f"the RayCluster {self.job.cluster} of {self.job.name} no longer exists; try again")
            operations, removed = self._plan(found, workers, hosts)
            try:
                self.cluster.change_ray_cluster(self.job.cluster, operations, dry_run)
            except RefusedError as error:
                if error.status not in (409, 422):  # changed in the meantime
                    raise
            else:
                return removed
        raise ClusterError(f"RayCluster {self.job.cluster} kept changing, so {PATCH_TRIES} updates failed; try again")

    def _plan(
        self, found: Mapping[str, Any], workers: int, hosts: Collection[str]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the operations of a JSON patch, and the names of the pods that it removes."""
        groups = found["spec"]["workerGroupSpecs"]
        index = next(i for i, group in enumerate(groups) if group["groupName"] in self.job.training_groups)
        group = groups[index]
        most = math.ceil(workers / int(group.get("resources", {}).get(SLOT, 1)))
        pods = [pod for pod in self.cluster.list_pods([self.job]) if pod.group == group["groupName"]]
        pods = [pod for pod in pods if not pod.head and not pod.deleting]
        surplus = max(0, len(pods) - most) if hosts else 0
        removed = [pod.name for pod in pods if pod.name not in hosts][:surplus]
        path = f"/spec/workerGroupSpecs/{index}"
        operations = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": found["metadata"]["resourceVersion"]},
            {"op": "replace", "path": f"{path}/maxReplicas", "value": most},
        ]
        if removed:
            marked = (group.get("scaleStrategy") or {}).get("workersToDelete") or []
            replicas = max(int(group.get("minReplicas") or 0), int(group["replicas"]) - len(removed))
            strategy = {"workersToDelete": [*marked, *removed]}
            operations.append({"op": "replace", "path": f"{path}/replicas", "value": replicas})
            operations.append({"op": "add", "path": f"{path}/scaleStrategy", "value": strategy})
        return operations, removed


def _find_pods(access: RunAccess, snapshot: RunSnapshot) -> WorkerPods | None:
    """Return the run's training pods, or None if the run is not training in its own RayCluster.

    Raises `ClusterError` if the cluster does not answer, and `ConflictError` if another cluster is training the run.
    """
    status, job = snapshot.storage.status, snapshot.training_job
    if job and access.cluster and status and owns(job, status.owner):
        return None if job.borrows_cluster else WorkerPods(access.cluster, job)
    if snapshot.storage.outside_clusters or not status:
        return None
    access.require_cluster()
    if snapshot.cluster.trouble:
        raise ClusterError(snapshot.cluster.trouble)
    owner = Owner.parse(status.owner).describe()
    raise ConflictError(f"{owner} is training {access.run.name}; pass the --context and --namespace of its cluster")
