"""What Kubernetes says of a run's RayJobs and pods, reduced to what a verb decides by. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from submitter.findings import Diagnosis

TERMINAL = ("Complete", "Failed", "ValidationFailed")
"""The values of `jobDeploymentStatus` after which the operator does no more than clean up."""

FIXES = {
    "ErrImagePull": "push the image, or correct --image and the pull secret",
    "InvalidImageName": "correct --image",
    "ErrImageNeverPull": "load the image onto the nodes, or let it be pulled",
    "CreateContainerConfigError": "create what is missing, in the namespace of the run",
    "RunContainerError": "correct the image or the container's settings",
    "CreateContainerError": "correct the image or the container's settings",
    "CrashLoopBackOff": "`kubectl logs --previous` of this pod says why",
}
"""What to do about a container that cannot start, by the reason that the kubelet gives."""

LONGEST_MESSAGE = 600
"""Characters of the operator's message: of a failed driver it quotes up to 20,000, and the end says why."""

KINDS = {
    "InvalidImageName": Diagnosis.IMAGE,
    "ErrImageNeverPull": Diagnosis.IMAGE,
    "CreateContainerConfigError": Diagnosis.MISSING,
}
"""What that means, where it is not the container itself that fails."""

PULLING = ("ErrImagePull", "ImagePullBackOff")

NOISE = ("FailedScheduling", "Unhealthy", "BackOff", "Failed", "NodeNotReady", "ExceededGracePeriod")
"""Warnings of pods that say nothing the pod's own status does not say better."""


@dataclass(frozen=True)
class JobView:
    """One RayJob."""

    raw: dict[str, Any]
    "The object as the API server gave it."

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"].get("uid", ""))

    @property
    def version(self) -> str:
        """Another one after every change."""
        return str(self.raw["metadata"].get("resourceVersion", ""))

    @property
    def created(self) -> float:
        """Seconds since the epoch."""
        return parse_time(self.raw["metadata"].get("creationTimestamp")) or 0.0

    @property
    def try_began(self) -> float:
        """When the current try began, in seconds since the epoch."""
        return parse_time(self.status.get("startTime")) or self.created

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.raw["metadata"]

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.raw.get("spec") or {})

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.raw.get("status") or {})

    @property
    def job_status(self) -> str:
        return str(self.status.get("jobStatus", ""))

    @property
    def deployment_status(self) -> str:
        return str(self.status.get("jobDeploymentStatus", ""))

    @property
    def terminal(self) -> bool:
        return self.deployment_status in TERMINAL

    @property
    def live(self) -> bool:
        """Whether the operator still works at it."""
        return not self.terminal and not self.deleting

    @property
    def failure(self) -> str:
        """The operator's word for why it failed, e.g. AppFailed."""
        return str(self.status.get("reason", ""))

    @property
    def message(self) -> str:
        """What the operator says: of a driver's output, which it may quote at length, the error at the end."""
        text = str(self.status.get("message", ""))
        _, _, error = text.rpartition("\nerror: ")
        return " ".join(error.split())[-LONGEST_MESSAGE:]

    @property
    def failed(self) -> int:
        """Tries that failed."""
        return int(self.status.get("failed") or 0)

    @property
    def tries(self) -> int:
        """Tries it has in all."""
        return int(self.spec.get("backoffLimit") or 0) + 1

    @property
    def cluster(self) -> str:
        """The RayCluster of the current try; empty before there is one."""
        return str(self.status.get("rayClusterName", ""))

    @property
    def queue(self) -> str:
        """The Kueue queue that admits it; empty: none."""
        return str(self.raw["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", ""))

    @property
    def least_workers(self) -> int:
        """Worker pods of the training group that it begins with."""
        groups = self.spec.get("rayClusterSpec", {}).get("workerGroupSpecs") or [{}]
        return int(groups[0].get("replicas", 0)) * int(groups[0].get("numOfHosts") or 1)

    @property
    def training_group(self) -> str:
        groups = self.spec.get("rayClusterSpec", {}).get("workerGroupSpecs") or [{}]
        return str(groups[0].get("groupName", ""))


class Trouble(NamedTuple):
    """What keeps a pod from running."""

    kind: Diagnosis
    said: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.said}; {self.fix}" if self.fix else self.said


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
    deleting: bool
    restarts: int
    trouble: Trouble | None
    "Why it cannot run; None when it runs, or may start by itself."
    out_of_memory: bool
    "Whether a container of it was ended for that the last time; it may run again."


class WarningEvent(NamedTuple):
    """A warning event."""

    object: str
    "Name of the pod, the RayCluster or the RayJob it is about."
    reason: str
    message: str
    time: float
    "When it was last seen, in seconds since the epoch."


def pod_view(raw: dict[str, Any]) -> PodView:
    """Read a pod as the API server gives it."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels", {})
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        head=labels.get("ray.io/node-type") == "head",
        group=labels.get("ray.io/group", ""),
        cluster=labels.get("ray.io/cluster", ""),
        node=(raw.get("spec") or {}).get("nodeName", ""),
        ready=ready and status.get("phase") == "Running",
        deleting="deletionTimestamp" in metadata,
        restarts=sum(container.get("restartCount", 0) for container in status.get("containerStatuses") or ()),
        trouble=None if ready else next(_troubles(raw), None),
        out_of_memory=any(
            container.get("lastState", {}).get("terminated", {}).get("reason") == "OOMKilled"
            for container in status.get("containerStatuses") or ()
        ),
    )


def _troubles(raw: dict[str, Any]) -> Iterator[Trouble]:
    status = raw.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = _line(condition.get("message", ""))
            if condition.get("reason") == "SchedulingGated":
                yield Trouble(Diagnosis.QUEUE, f"held back by its queue ({said})")
            else:
                said = said.partition(". ")[0]  # what follows is about preemption
                yield Trouble(
                    Diagnosis.NO_NODE,
                    f"no node takes it ({said})",
                    "unless an autoscaler brings one, add such a node, or correct the profile's selectors, tolerations "
                    "and resources",
                )
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        name = container["name"]
        waiting = container.get("state", {}).get("waiting") or {}
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
        reason = waiting.get("reason", "")
        if ended.get("reason") == "OOMKilled":
            said = f"container {name} ran out of memory (OOMKilled)"
            yield Trouble(Diagnosis.OUT_OF_MEMORY, said, "give it more in the profile")
        elif reason in PULLING:
            # The kubelet says in turn that it failed and that it waits: one sentence for both.
            said = _line(waiting.get("message", "")).rpartition("ErrImagePull: ")[2]
            said = f"image {container.get('image', '')} cannot be pulled: {said}"
            yield Trouble(Diagnosis.IMAGE, said, FIXES["ErrImagePull"])
        elif reason in FIXES:
            said = f"{reason}: {_line(waiting.get('message', ''))}"
            yield Trouble(KINDS.get(reason, Diagnosis.CONTAINER), said, FIXES[reason])
        elif container.get("state", {}).get("terminated", {}).get("exitCode"):
            said = f"container {name} ended with {ended['exitCode']}: {_line(ended.get('message', ''))}"
            yield Trouble(Diagnosis.CONTAINER, said)
    if status.get("phase") == "Failed":
        yield Trouble(Diagnosis.POD, f"{status.get('reason', 'Failed')}: {_line(status.get('message', ''))}")


def warning_event(raw: dict[str, Any]) -> WarningEvent:
    """Read an event as the API server gives it."""
    seen = (raw.get("series") or {}).get("lastObservedTime") or raw.get("lastTimestamp") or raw.get("eventTime")
    about = raw.get("involvedObject", {})
    return WarningEvent(
        about.get("name", ""),
        raw.get("reason", ""),
        _line(raw.get("message", "")),
        parse_time(seen or raw["metadata"].get("creationTimestamp")) or 0.0,
    )


def parse_time(text: str | None) -> float | None:
    """Kubernetes' RFC 3339 as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp() if text else None


def _line(text: str) -> str:
    return " ".join(text.split()).rstrip(".:; ")
