"""Finds out why a run's pods are not running.

`sunspot status` prints the head's problem or the workers' most common problem. `sunspot doctor` prints every problem
and its fix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sunspot.submitter.cluster.views import JobView, Pods, PodView, WarningEvent, Warnings, one_line
from sunspot.submitter.findings import Diagnosis

HEAD = "head"
"""Group of the head pod in a `PodProblem`."""

ADD_NODE = (
    "unless an autoscaler brings one, add such a node, or correct the profile's selectors, tolerations and resources"
)

PUSH_IMAGE = "push the image, or correct --image and the pull secret"

CREATE_MISSING = "create what is missing, in the namespace of the run"

CANNOT_START = {
    "InvalidImageName": (Diagnosis.IMAGE, "correct --image"),
    "ErrImageNeverPull": (Diagnosis.IMAGE, "load the image onto the nodes, or allow pulling it"),
    "CreateContainerConfigError": (Diagnosis.MISSING, CREATE_MISSING),
    "RunContainerError": (Diagnosis.CONTAINER, "correct the image or the container's settings"),
    "CreateContainerError": (Diagnosis.CONTAINER, "correct the image or the container's settings"),
    "CrashLoopBackOff": (Diagnosis.CONTAINER, "`kubectl logs --previous` of this pod says why"),
}
"""The kind and the fix of each problem, keyed by the kubelet's reason why a container cannot start."""

EXPLAINED_BY_STATUS = ("FailedScheduling", "Unhealthy", "BackOff", "Failed", "NodeNotReady", "ExceededGracePeriod")
"""Reasons of warnings that the pod's own status explains better."""


@dataclass(frozen=True)
class PodProblem:
    """A reason why a pod is not running."""

    kind: Diagnosis
    pod: str
    "The pod's name, or empty if the pod cannot be created."
    group: str
    "The pod's worker group, or HEAD."
    evidence: str
    fix: str = ""

    @property
    def prevents_creation(self) -> bool:
        return not self.pod

    def __str__(self) -> str:
        return f"{self.evidence}; {self.fix}" if self.fix else self.evidence


def find_problems(job: JobView, pods: Pods, warnings: Warnings) -> list[PodProblem]:
    """Find the reasons why a RayJob's pods are not running, in the order of `pods`.

    If pods are missing and a warning says why they cannot be created, that reason comes last. `pods` belong to the
    RayJob's current cluster, and `warnings` are sorted from newest to oldest.
    """
    problems = [problem for pod in pods if (problem := find_problem(pod, warnings))]
    has_head = any(pod.head for pod in pods)
    workers = [pod for pod in pods if pod.group in job.training_groups and not pod.head]
    if not has_head or len(workers) < job.least_workers:
        refusal = find_refusal(job, warnings, next(iter(job.training_groups), "") if has_head else HEAD)
        problems += [refusal] if refusal else []
    return problems


def find_problem(pod: PodView, warnings: Warnings = ()) -> PodProblem | None:
    """Return the reason why a pod is not running, or None if neither its status nor a warning shows a reason."""
    group = HEAD if pod.head else pod.group
    if pod.lost:
        fix = "another pod replaces it when a node has room"
        return PodProblem(Diagnosis.NODES, pod.name, group, pod.lost, fix)
    if pod.ready:
        return None
    for kind, evidence, fix in _read_status(pod.status):
        return PodProblem(kind, pod.name, group, evidence, fix)
    for event in warnings:
        if event.object == pod.name and event.reason not in EXPLAINED_BY_STATUS:
            kind = Diagnosis.MISSING if "not found" in event.message else Diagnosis.POD
            return PodProblem(kind, pod.name, group, f"{event.reason}: {event.message}")
    return None


def find_refusal(job: JobView, warnings: Warnings, group: str) -> PodProblem | None:
    """Return the newest reason why a RayJob's pods cannot be created, such as a quota.

    Returns None if no warning gives such a reason. `group` is the name to use for the pods' group.
    """
    for event in warnings:
        if event.object in (job.cluster, job.name) and event.reason.startswith("FailedToCreate"):
            return PodProblem(Diagnosis.REFUSED, "", group, event.message)
    return None


def find_past_problems(job: JobView, warnings: Warnings) -> list[PodProblem]:
    """Find why deleted pods could not run. Returns the newest problem of each kind for each pod."""
    problems: dict[tuple[str, Diagnosis], PodProblem] = {}
    for event in warnings:
        problem = _read_warning(event, HEAD if "-head" in event.object else next(iter(job.training_groups), ""))
        if problem:
            problems.setdefault((problem.pod, problem.kind), problem)
    return list(problems.values())


def _read_warning(event: WarningEvent, group: str) -> PodProblem | None:
    if event.reason == "FailedScheduling":
        return PodProblem(Diagnosis.NO_NODE, event.object, group, event.message)
    if event.reason == "Failed" and "pull" in event.message:
        return PodProblem(Diagnosis.IMAGE, event.object, group, event.message, PUSH_IMAGE)
    if event.reason in ("FailedMount", "Failed") and "not found" in event.message:
        return PodProblem(Diagnosis.MISSING, event.object, group, event.message, CREATE_MISSING)
    return None


def _read_status(status: dict[str, Any]) -> Iterator[tuple[Diagnosis, str, str]]:
    """Yield the kind, evidence and fix of each problem in a pod's status, starting with the most basic one."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = one_line(condition.get("message", ""))
            if condition.get("reason") == "SchedulingGated":
                yield Diagnosis.QUEUE, f"held back by its queue ({message})", ""
            else:
                message = message.partition(". ")[0]  # the rest is about preemption
                yield Diagnosis.NO_NODE, f"no node takes it ({message})", ADD_NODE
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        yield from _read_container(container)
    if status.get("phase") == "Failed":
        yield Diagnosis.POD, f"{status.get('reason', 'Failed')}: {one_line(status.get('message', ''))}", ""


def _read_container(container: dict[str, Any]) -> Iterator[tuple[Diagnosis, str, str]]:
    name = container["name"]
    state = container.get("state", {})
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    reason = waiting.get("reason", "")
    if ended.get("reason") == "OOMKilled":
        yield (
            Diagnosis.OUT_OF_MEMORY,
            f"container {name} ran out of memory (OOMKilled)",
            "raise its memory in the profile",
        )
    elif reason in ("ErrImagePull", "ImagePullBackOff"):
        # The kubelet alternates between the failure and the back-off. Extract the part that both messages contain.
        why = one_line(waiting.get("message", "")).rpartition("ErrImagePull: ")[2]
        yield Diagnosis.IMAGE, f"image {container.get('image', '')} cannot be pulled: {why}", PUSH_IMAGE
    elif reason in CANNOT_START:
        kind, fix = CANNOT_START[reason]
        yield kind, f"{reason}: {one_line(waiting.get('message', ''))}", fix
    elif state.get("terminated", {}).get("exitCode"):
        why = one_line(ended.get("message", ""))
        yield Diagnosis.CONTAINER, f"container {name} ended with {ended['exitCode']}: {why}", ""
