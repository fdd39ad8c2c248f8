"""Parses RayJobs, pods and events from the API server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from sunspot.errors import FAILED_FOR_GOOD
from sunspot.formatting import as_time
from sunspot.submitter.manifest.shape import SLOT

TERMINAL = ("Complete", "Failed", "ValidationFailed")
"""Values of `jobDeploymentStatus` after which the operator only cleans up."""

GITOPS_TOOLS = {
    "argocd-controller": "Argo CD",
    "argocd-application-controller": "Argo CD",
    "kustomize-controller": "Flux",
}
"""GitOps tools, keyed by the field manager with which they apply objects."""

MAX_MESSAGE = 600
"""Maximum number of characters to keep of the operator's message. The message contains up to 20,000 characters of a
failed driver's output, with the error at the end."""


@dataclass(frozen=True)
class JobView:
    """A RayJob. Times are in seconds since the epoch."""

    raw: dict[str, Any]
    "The object as returned by the API server."
    name: str
    uid: str
    version: str
    "The resource version, or empty for the result of a dry run that would create the object."
    created: float
    try_began: float
    deleting: bool
    spec: dict[str, Any]
    job_status: str
    deployment_status: str
    failure: str
    "The operator's reason for a failure, such as AppFailed."
    message: str
    "The operator's message, or only the error if the message contains a driver's output."
    failed: int
    "Number of failed attempts."
    tries: int
    "Maximum number of attempts."
    cluster: str
    "Name of the current attempt's RayCluster, or empty before it exists."
    queue: str
    "Name of the Kueue queue that admits the RayJob, or empty without a queue."
    training_groups: tuple[str, ...]
    "Names of the training worker groups, in order of preference."
    least_workers: int
    "Number of training pods at the start."
    kubernetes: str = ""
    "Identity of the Kubernetes cluster (`owner.cluster_identity`), or empty if unknown."

    @property
    def borrows_cluster(self) -> bool:
        """True if the RayJob runs in a RayCluster that it did not create."""
        return bool(self.spec.get("clusterSelector"))

    @property
    def terminal(self) -> bool:
        return self.deployment_status in TERMINAL

    @property
    def failed_for_good(self) -> bool:
        """True if the driver ended the job because no further attempt can succeed (`SunspotError.final`)."""
        message = (self.raw.get("status") or {}).get("message", "")
        return self.job_status == "STOPPED" and message.startswith(FAILED_FOR_GOOD)

    @property
    def live(self) -> bool:
        """True if the operator is still managing the RayJob."""
        return not self.terminal and not self.deleting

    @property
    def gitops_tool(self) -> str:
        """The tool that would recreate the RayJob after a deletion, such as Argo CD, or an empty string."""
        managers = [entry.get("manager") for entry in self.raw["metadata"].get("managedFields") or ()]
        return next((GITOPS_TOOLS[manager] for manager in managers if manager in GITOPS_TOOLS), "")


OVERDUE_S = 30
"""Seconds after its grace period when a pod's node counts as unresponsive."""


@dataclass(frozen=True)
class PodView:
    """A pod of a run."""

    name: str
    uid: str
    head: bool
    group: str
    cluster: str
    "The name of the pod's RayCluster."
    node: str
    ready: bool
    deleted_by: float
    "End of the grace period in seconds since the epoch, or 0 if the pod is not being deleted."
    restarts: int
    out_of_memory: bool
    "True if a container's last termination was out of memory. The container can be running again."
    images: frozenset[tuple[str, str]] = frozenset()
    "The pulled images, as pairs of the name in the spec and the digest."
    spec: Mapping[str, Any] = field(default_factory=dict)
    "The spec from the API server, including changes by admission controllers."
    status: dict[str, Any] = field(default_factory=dict)
    "The status from the API server."
    lost: str = ""
    "A description of the fault if the pod's node is gone or not ready (`mark_lost_pods`), or empty."

    @property
    def deleting(self) -> bool:
        """True if the pod is being deleted."""
        return bool(self.deleted_by)

    def overdue(self, now: float) -> bool:
        """Return True if the pod's deletion is overdue. Such a pod remains until its node recovers or is removed."""
        return self.deleting and now > self.deleted_by + OVERDUE_S


class WarningEvent(NamedTuple):
    """A Kubernetes event of the type Warning."""

    object: str
    "Name of the pod, RayCluster or RayJob that the event is about."
    reason: str
    message: str
    time: float
    "Time of the last occurrence, in seconds since the epoch."


Pods = Sequence[PodView]

Nodes = Sequence[Mapping[str, Any]]
"""Node objects from the API server."""

Warnings = Sequence[WarningEvent]


def job_view(raw: dict[str, Any], kubernetes: str = "") -> JobView:
    """Parse a RayJob from the API server. `kubernetes` is the Kubernetes cluster's identity."""
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
    """Parse a pod from the API server."""
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
    named = {each.get("name"): each.get("image", "") for each in raw.get("spec", {}).get("containers", ())}
    for container in (raw.get("status") or {}).get("containerStatuses") or ():
        digest = container.get("imageID", "").rpartition("@")[2]
        if digest and container["name"] in named:
            yield named[container["name"]], digest


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return True if the node is ready."""
    return _ready_condition(node).get("status") == "True"


def mark_lost_pods(pods: Pods, nodes: Nodes) -> tuple[PodView, ...]:
    """Mark pods as not ready if their nodes are gone or not ready. Kubernetes still reports these pods as Running.

    `nodes` are all nodes of the cluster. If `nodes` is empty, no pods are marked.
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
    """Parse an event from the API server."""
    seen = (raw.get("series") or {}).get("lastObservedTime") or raw.get("lastTimestamp") or raw.get("eventTime")
    return WarningEvent(
        raw.get("involvedObject", {}).get("name", ""),
        raw.get("reason", ""),
        one_line(raw.get("message", "")),
        parse_time(seen or raw["metadata"].get("creationTimestamp")) or 0.0,
    )


def parse_time(text: str | None) -> float | None:
    """Convert an RFC 3339 time to seconds since the epoch. Returns None for None or an empty string."""
    return datetime.fromisoformat(text).timestamp() if text else None


def one_line(text: str, ends: str = ".:; ") -> str:
    """Join the lines of a text, and strip the characters in `ends` from the end of the result."""
    return " ".join(text.split()).rstrip(ends)
