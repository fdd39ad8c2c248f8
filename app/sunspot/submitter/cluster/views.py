"""What Kubernetes says of RayJobs and pods, reduced to what verbs need. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from sunspot.errors import FAILED_FOR_GOOD
from sunspot.formatting import as_time
from sunspot.submitter.manifest.shape import SLOT

TERMINAL = ("Complete", "Failed", "ValidationFailed")
"""Values of `jobDeploymentStatus` after which the operator only cleans up."""

KEEPERS = {
    "argocd-controller": "Argo CD",
    "argocd-application-controller": "Argo CD",
    "kustomize-controller": "Flux",
}
"""What keeps objects as a repository has them (GitOps), by the name under which it manages their fields."""

MAX_MESSAGE = 600
"""Characters of the operator's message. It quotes up to 20,000 of a failed driver; the end says why."""


@dataclass(frozen=True)
class JobView:
    """One RayJob. Times are in seconds since the epoch."""

    raw: dict[str, Any]
    "The object as the API server gave it."
    name: str
    uid: str
    version: str
    "Changes with every change of the object; empty in a dry run of its creation."
    created: float
    try_began: float
    deleting: bool
    spec: dict[str, Any]
    job_status: str
    deployment_status: str
    failure: str
    "The operator's word for why it failed, such as AppFailed."
    message: str
    "The operator's; of a driver's output that it quotes, the error at the end."
    failed: int
    "Tries that failed."
    tries: int
    "Tries in all."
    cluster: str
    "The RayCluster of the current try; empty before there is one."
    queue: str
    "The Kueue queue that admits it, if any."
    training_groups: tuple[str, ...]
    "Names of the groups of training pods, first choice first."
    least_workers: int
    "Training pods that it starts with."
    kubernetes: str = ""
    "Identity of the Kubernetes cluster that it is in (`owner.cluster_identity`); empty if not known."

    @property
    def borrows_cluster(self) -> bool:
        """Whether it runs in a RayCluster that is not its own."""
        return bool(self.spec.get("clusterSelector"))

    @property
    def terminal(self) -> bool:
        return self.deployment_status in TERMINAL

    @property
    def failed_for_good(self) -> bool:
        """Return True if the driver ended the job for good, because no other try can succeed (`SunspotError.final`)."""
        said = (self.raw.get("status") or {}).get("message", "")
        return self.job_status == "STOPPED" and said.startswith(FAILED_FOR_GOOD)

    @property
    def live(self) -> bool:
        """Whether the operator still works on it."""
        return not self.terminal and not self.deleting

    @property
    def kept_by(self) -> str:
        """What puts it back when it is deleted: Argo CD or Flux; empty: nothing."""
        managers = [entry.get("manager") for entry in self.raw["metadata"].get("managedFields") or ()]
        return next((KEEPERS[manager] for manager in managers if manager in KEEPERS), "")


OVERDUE_S = 30
"""A pod that is still there so long after its grace period is on a node that does not answer."""


@dataclass(frozen=True)
class PodView:
    """One pod of a run."""

    name: str
    uid: str
    head: bool
    group: str
    cluster: str
    "The RayCluster it belongs to."
    node: str
    ready: bool
    deleted_by: float
    "When its grace period ends, in seconds since the epoch; 0: nobody deletes it."
    restarts: int
    out_of_memory: bool
    "Whether one of its containers last ended for that; it may run again."
    images: frozenset[tuple[str, str]] = frozenset()
    "Each image of a container that has been pulled, as named in the pod's spec, and the digest that the node pulled."
    spec: Mapping[str, Any] = field(default_factory=dict)
    "The spec in the API server, with the additions of admission controllers."
    status: dict[str, Any] = field(default_factory=dict)
    "The status in the API server."
    lost: str = ""
    "What happened to the pod's node, if that is gone or not ready (`mark_lost_pods`)."

    @property
    def deleting(self) -> bool:
        """Whether it was told to go."""
        return bool(self.deleted_by)

    def overdue(self, now: float) -> bool:
        """Whether it should have gone: it stays until its node comes back or is removed."""
        return self.deleting and now > self.deleted_by + OVERDUE_S


class WarningEvent(NamedTuple):
    """An event of type Warning."""

    object: str
    "Name of the pod, RayCluster or RayJob it is about."
    reason: str
    message: str
    time: float
    "When it was last seen, in seconds since the epoch."


Pods = Sequence[PodView]

Nodes = Sequence[Mapping[str, Any]]
"""Nodes in the form of the API server."""

Warnings = Sequence[WarningEvent]


def job_view(raw: dict[str, Any], kubernetes: str = "") -> JobView:
    """Parse a RayJob from the API server. `kubernetes` is the identity of its cluster."""
    metadata = raw["metadata"]
    spec = raw.get("spec") or {}
    status = raw.get("status") or {}
    groups = spec.get("rayClusterSpec", {}).get("workerGroupSpecs") or []
    training = [group for group in groups if SLOT in group.get("resources", {})] or groups[:1]
    created = parse_time(metadata.get("creationTimestamp")) or 0.0
    return JobView(
        raw=raw,
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        created=created,
        try_began=parse_time(status.get("startTime")) or created,
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        job_status=status.get("jobStatus", ""),
        deployment_status=status.get("jobDeploymentStatus", ""),
        failure=status.get("reason", ""),
        message=one_line(status.get("message", "").rpartition("\nerror: ")[2], ends="")[-MAX_MESSAGE:],
        failed=int(status.get("failed") or 0),
        tries=int(spec.get("backoffLimit") or 0) + 1,
        cluster=status.get("rayClusterName", ""),
        queue=metadata.get("labels", {}).get("kueue.x-k8s.io/queue-name", ""),
        training_groups=tuple(group.get("groupName", "") for group in training),
        least_workers=sum(int(group.get("replicas", 0)) * int(group.get("numOfHosts") or 1) for group in training),
        kubernetes=kubernetes,
    )


def pod_view(raw: dict[str, Any]) -> PodView:
    """Read a pod as the API server gives it."""
    metadata = raw["metadata"]
    status = raw.get("status") or {}
    labels = metadata.get("labels", {})
    containers = status.get("containerStatuses") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        head=labels.get("ray.io/node-type") == "head",
        group=labels.get("ray.io/group", ""),
        cluster=labels.get("ray.io/cluster", ""),
        node=(raw.get("spec") or {}).get("nodeName", ""),
        ready=ready and status.get("phase") == "Running",
        deleted_by=parse_time(metadata.get("deletionTimestamp")) or 0.0,
        restarts=sum(container.get("restartCount", 0) for container in containers),
        out_of_memory="OOMKilled" in [c.get("lastState", {}).get("terminated", {}).get("reason") for c in containers],
        images=frozenset(_pulled_images(raw)),
        spec=raw.get("spec") or {},
        status=status,
    )


def _pulled_images(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    named = {container["name"]: container.get("image", "") for container in raw.get("spec", {}).get("containers", ())}
    for container in (raw.get("status") or {}).get("containerStatuses") or ():
        digest = container.get("imageID", "").rpartition("@")[2]
        if digest and container["name"] in named:
            yield named[container["name"]], digest


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return True if the node's kubelet reports, and reports that the node is ready."""
    return _ready_condition(node).get("status") == "True"


def mark_lost_pods(pods: Pods, nodes: Nodes) -> tuple[PodView, ...]:
    """Mark pods as not ready if their nodes are gone or not ready, because Kubernetes calls them Running for a while.

    `nodes` are all nodes of the cluster, or none if they are not known.
    """
    by_name = {node["metadata"]["name"]: node for node in nodes}

    def mark(pod: PodView) -> PodView:
        node = by_name.get(pod.node)
        if not nodes or not pod.node or pod.deleting or (node and is_ready(node)):
            return pod
        lost = f"its node {pod.node} no longer exists"
        if node:
            changed = parse_time(_ready_condition(node).get("lastTransitionTime"))
            lost = f"its node {pod.node} is not ready" + (f" since {as_time(changed)}" if changed else "")
        return replace(pod, ready=False, lost=lost)

    return tuple(map(mark, pods))


def _ready_condition(node: Mapping[str, Any]) -> Mapping[str, Any]:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == "Ready"), {})


def warning_event(raw: dict[str, Any]) -> WarningEvent:
    """Read an event as the API server gives it."""
    seen = (raw.get("series") or {}).get("lastObservedTime") or raw.get("lastTimestamp") or raw.get("eventTime")
    return WarningEvent(
        raw.get("involvedObject", {}).get("name", ""),
        raw.get("reason", ""),
        one_line(raw.get("message", "")),
        parse_time(seen or raw["metadata"].get("creationTimestamp")) or 0.0,
    )


def parse_time(text: str | None) -> float | None:
    """Kubernetes' RFC 3339 as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp() if text else None


def one_line(text: str, ends: str = ".:; ") -> str:
    return " ".join(text.split()).rstrip(ends)
