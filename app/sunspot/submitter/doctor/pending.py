"""Why a run's pods do not all run, or its RayJob does not start, from what Kubernetes reports. Pure."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from sunspot.formatting import in_words
from sunspot.run.status import RunState
from sunspot.submitter.cluster.state import (
    FAILURES,
    OPERATOR_OVERDUE_S,
    WARNING_FRESH_S,
    JobInCluster,
    count_workers,
    explain_pods,
    pod_problem,
    refused_pod,
)
from sunspot.submitter.cluster.views import (
    CREATE_MISSING,
    PUSH_IMAGE,
    JobView,
    PodProblem,
    WarningEvent,
    Warnings,
)
from sunspot.submitter.findings import Diagnosis, Finding, Severity
from sunspot.submitter.manifest.pods import pod_groups

NOT_BEGUN = (RunState.PENDING, RunState.STARTING, RunState.RETRYING, RunState.FAILED)
"""States in which missing pods keep the whole run from training."""

CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
"""Taints of nodes that are not for runs at all."""

STATE_OF_NODE = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "ToBeDeletedByClusterAutoscaler")
"""Prefixes of taints that describe a node's state; no toleration helps."""

DEADLINES = {
    "PreRunningDeadlineExceeded": ("preRunningDeadlineSeconds", "pre_running_deadline_s"),
    "DeadlineExceeded": ("activeDeadlineSeconds", "active_deadline_s"),
}
"""The operator's reasons that are time limits, each with its field in a RayJob and its key in a profile."""


class Refusal(NamedTuple):
    """Why some nodes do not take a pod."""

    kind: Diagnosis
    nodes: int
    what: str
    "The resource, the taint, or the scheduler's words."


def find_pending(seen: JobInCluster, state: RunState) -> list[Finding]:
    """Find what keeps a run's newest RayJob from having all its pods; empty when it has them or needs none."""
    job = seen.job
    if job.deployment_status == "ValidationFailed":
        evidence = f"the operator refuses the manifest of {job.name}: {job.message}"
        advice = "correct what it names, and submit again"
        return [Finding(Diagnosis.REFUSED, Severity.ERROR, evidence, advice, {"job": job.name})]
    late = job.failure if job.deployment_status == "Failed" else ""
    if job.terminal and late not in DEADLINES:
        return []
    severity = Severity.ERROR if state in NOT_BEGUN else Severity.WARNING
    found = [_deadline(job, late)] if late in DEADLINES else []
    if late != "DeadlineExceeded":
        found += _explain_job(job, seen.now)
        # Of pods that are gone, the last warnings say what was wrong.
        recent = [event for event in seen.warnings if late or seen.now - event.time < WARNING_FRESH_S]
        found += _explain_pods(seen, recent, severity)
    if not found and state in (RunState.PENDING, RunState.RETRYING):
        found.append(_starting(seen))
    return found


def parse_refusals(message: str) -> list[Refusal]:
    """Parse why nodes do not take a pod from the scheduler's message, the most useful reason first.

    The scheduler checks a node's taints, then its labels, then its free resources, and names the first that fails:
    nodes short of resources match otherwise, so they come first. Control planes count when there is nothing else.
    """
    text = message.partition(" are available: ")[2].partition(". ")[0].rstrip(".) ")
    found: list[Refusal] = []
    for part in re.split(r", (?=\d+ )", text):
        number, _, words = part.partition(" ")
        if not number.isdigit():
            continue
        found += [Refusal(kind, int(number), what) for kind, what in _read_reason(words)]
    others = [refusal for refusal in found if refusal.what not in CONTROL_PLANE]
    order = (Diagnosis.RESOURCES, Diagnosis.TAINT, Diagnosis.NO_NODE, Diagnosis.NODES)
    return sorted(others or found, key=lambda refusal: order.index(refusal.kind))


def _read_reason(words: str) -> Iterator[tuple[Diagnosis, str]]:
    words = words.removeprefix("node(s) ")
    if words.startswith("Insufficient "):
        yield Diagnosis.RESOURCES, words.removeprefix("Insufficient ")
    elif words.lower().startswith("too many pods"):
        yield Diagnosis.RESOURCES, "pods"
    elif "taint" in words:
        for taint in re.findall(r"\{([^}]*)\}", words) or [""]:  # Kubernetes 1.34 no longer names them
            key, _, value = (part.strip() for part in taint.partition(":"))
            kind = Diagnosis.NODES if key.startswith(STATE_OF_NODE) else Diagnosis.TAINT
            yield kind, f"{key}={value}" if value else key
    elif "unschedulable" in words:
        yield Diagnosis.NODES, "cordoned"
    else:
        yield Diagnosis.NO_NODE, words


def _explain_job(job: JobView, now: float) -> Iterator[Finding]:
    if not job.deployment_status and not job.terminal and now - job.created > OPERATOR_OVERDUE_S:
        evidence = f"no operator has looked at {job.name} for {in_words(now - job.created)}"
        shows = "kubectl get pods -A -l app.kubernetes.io/name=kuberay-operator"
        advice = f"check that the KubeRay operator runs and watches this namespace: {shows}"
        yield Finding(Diagnosis.NO_OPERATOR, Severity.ERROR, evidence, advice, {"job": job.name})
    if job.deployment_status in ("Suspending", "Suspended"):
        evidence = f"suspend is true in the spec of {job.name}"
        advice = "whoever set it has to take it back"
        if job.queue:
            evidence = f"{job.name} is suspended: the queue {job.queue} has not admitted it"
            less = "lower NUM_WORKERS, end other runs of the queue, or have its quota raised"
            advice = f"kubectl describe workload says what it waits for; {less}"
        yield Finding(Diagnosis.QUEUE, Severity.ERROR, evidence, advice, {"queue": job.queue or None})


def _explain_pods(seen: JobInCluster, warnings: Warnings, severity: Severity) -> Iterator[Finding]:
    job, mine = seen.job, seen.own_pods
    wanted, _ = count_workers(seen)
    has_head = any(pod.head for pod in mine)
    for pod in mine:
        if pod.ready and pod.out_of_memory:
            evidence = f"a container of pod {pod.name} ran out of memory (OOMKilled), and was started again"
            advice = f"give it more: {'head' if pod.head else 'worker'}.memory in the profile"
            details = {"group": "head" if pod.head else pod.group, "pods": [pod.name], "restarts": pod.restarts}
            yield Finding(Diagnosis.OUT_OF_MEMORY, Severity.WARNING, evidence, advice, details)
    missing = not has_head or sum(pod.group in job.training_groups for pod in mine) < wanted
    if missing and (refused := refused_pod(job, warnings)):
        yield _refused(refused, "worker" if has_head else "head", severity)
    problems: dict[tuple[str, PodProblem], list[str]] = {}
    for pod in mine:
        if why := pod_problem(pod, warnings):
            problems.setdefault(("head" if pod.head else pod.group, why), []).append(pod.name)
    if not mine:
        for event in warnings:
            if why := _last_problem(event):
                group = "head" if "-head" in event.object else next(iter(job.training_groups), "")
                names = problems.setdefault((group, why), [])
                names += [event.object] if event.object not in names else []
    for (group, why), names in problems.items():
        said = f"{_pods(names)}: {why.said}"
        if why.kind is Diagnosis.NO_NODE and (refusals := parse_refusals(why.said)):
            for refusal in refusals:
                yield _unschedulable(job, group, names, refusal, severity)
        else:
            advice = why.fix or "kubectl describe pod says more"
            yield Finding(why.kind, severity, said, advice, {"group": group, "pods": names})


def _last_problem(event: WarningEvent) -> PodProblem | None:
    """Find the problem of a pod that is gone, from a warning about it."""
    if event.reason == "FailedScheduling":
        return PodProblem(Diagnosis.NO_NODE, event.message)
    if event.reason == "Failed" and "pull" in event.message:
        return PodProblem(Diagnosis.IMAGE, event.message, PUSH_IMAGE)
    if event.reason in ("FailedMount", "Failed") and "not found" in event.message:
        return PodProblem(Diagnosis.MISSING, event.message, CREATE_MISSING)
    return None


def _refused(event: WarningEvent, which: str, severity: Severity) -> Finding:
    evidence = f"a {which} pod cannot be made: {event.message}"
    quota = re.search(r"exceeded quota: ([^,]+), requested: (.+?), used: (.+?), limited: ([^;]+)", event.message)
    if quota:
        name, requested, used, limited = (part.strip() for part in quota.groups())
        less = "ask for less (NUM_WORKERS, or cpu and memory in the profile)"
        advice = f"end other runs of the namespace (`sunspot list`), {less}, or have the ResourceQuota {name} raised"
        details = {"quota": name, "requested": requested, "used": used, "limited": limited}
        return Finding(Diagnosis.QUOTA, severity, evidence, advice, details)
    if "not found" in event.message:
        return Finding(Diagnosis.MISSING, severity, evidence, CREATE_MISSING)
    advice = "a policy of the namespace refuses it; correct what it names, or have the policy changed"
    return Finding(Diagnosis.REFUSED, severity, evidence, advice)


def _unschedulable(job: JobView, group: str, names: list[str], refusal: Refusal, severity: Severity) -> Finding:
    section = "head" if group == "head" else "data_workers" if group == "data" else "worker"
    spec = pod_groups(job.spec).get(group, {}).get("template", {}).get("spec", {})
    container = (spec.get("containers") or [{}])[0]
    asks = container.get("resources", {}).get("requests", {})
    nodes = f"{refusal.nodes} node{'s' * (refusal.nodes != 1)}"
    details: dict[str, Any] = {"group": group, "pods": names, "nodes": refusal.nodes}
    if refusal.kind is Diagnosis.RESOURCES:
        asked = f" ({refusal.what} {asks[refusal.what]})" if refusal.what in asks else ""
        key = {"cpu": "cpu", "memory": "memory", "ephemeral-storage": "ephemeral_storage"}.get(refusal.what, "gpus")
        evidence = f"{nodes} that would do otherwise: too little {refusal.what} left for {_pods(names)}{asked}"
        advice = f"lower {section}.{key} in the profile, end what else runs there, or add nodes with more"
        details |= {"resource": refusal.what, "asked": asks.get(refusal.what)}
        if refusal.what == "pods":
            advice = "end what else runs there, or add nodes: these have as many pods as they may"
    elif refusal.kind is Diagnosis.TAINT:
        key, _, value = refusal.what.partition("=")
        named = f"the taint {refusal.what}" if key else "a taint that is not tolerated"
        evidence = f"{nodes} with {named}, which keeps {_pods(names)} away"
        toleration = f"{section}.tolerations: [{{key: {key or 'KEY'}, operator: Exists}}]"
        advice = f"if it may run there, tolerate it in the profile ({toleration}); or add nodes without the taint"
        if not key:
            advice += "; kubectl describe nodes shows the taints"
        details |= {"taint": key or None, "value": value or None}
    elif refusal.kind is Diagnosis.NODES:
        evidence = f"{nodes} that take no pods now ({refusal.what}), and no other for {_pods(names)}"
        advice = "kubectl get nodes shows them; bring them back (kubectl uncordon), or add nodes"
    else:
        selector = spec.get("nodeSelector") or {}
        wants = ", ".join(f"{name}={value}" for name, value in selector.items()) or _affinity(spec)
        evidence = f"no node has what {_pods(names)} selects ({wants or 'see its spec'}): {nodes} {refusal.what}"
        keys = f"{section}.node_selector" + (", worker.gpu_selector and spot" if section == "worker" else " and spot")
        advice = f"correct {keys} in the profile, or label nodes so (kubectl get nodes --show-labels)"
        details |= {"selector": selector}
    return Finding(refusal.kind, severity, evidence, advice, details)


def _affinity(spec: dict[str, Any]) -> str:
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [e for term in required.get("nodeSelectorTerms", ()) for e in term.get("matchExpressions", ())]
    return ", ".join(f"{e['key']} {e['operator']} {'|'.join(e.get('values', ()))}".strip() for e in terms)


def _deadline(job: JobView, reason: str) -> Finding:
    field, key = DEADLINES[reason]
    limit = job.spec.get(field, "?")
    evidence = FAILURES[reason].format(active=limit, start=limit).partition(";")[0]
    advice = f"raise {key} in the profile, and submit again to go on from the last checkpoint"
    if reason == "PreRunningDeadlineExceeded":
        advice = f"mend what kept its pods from running, or raise {key} in the profile; then submit again"
    return Finding(Diagnosis.DEADLINE, Severity.ERROR, evidence, advice, {"limit_s": limit, "job": job.name}, cost=1.0)


def _starting(seen: JobInCluster) -> Finding:
    job = seen.job
    waited = seen.now - job.try_began
    evidence = f"{explain_pods(seen)}; nothing is wrong after {in_words(waited)}"
    limit = job.spec.get("preRunningDeadlineSeconds")
    advice = "wait" + (f": the operator gives up {in_words(limit - waited)} from now" if limit else "")
    return Finding(Diagnosis.STARTING, Severity.NOTE, evidence, advice, {"waited_s": round(waited)})


def _pods(names: list[str]) -> str:
    return f"pod {names[0]}" if len(names) == 1 else f"{len(names)} pods ({', '.join(names)})"
