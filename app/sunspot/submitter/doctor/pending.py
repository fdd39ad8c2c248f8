"""Why a run's pods do not all run, or its RayJob does not start, from what Kubernetes reports. Pure."""

from collections.abc import Iterator

from sunspot.formatting import in_words
from sunspot.run.status import RunState
from sunspot.submitter.cluster.state import (
    CLOCK_SKEW_S,
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
from sunspot.submitter.doctor.unschedulable import UnplacedPods, explain_unplaced, name_pods
from sunspot.submitter.findings import Diagnosis, Finding, Severity
from sunspot.submitter.manifest.pods import pod_groups
from sunspot.submitter.manifest.quotas import ASK_FOR_LESS, parse_exceeded
from sunspot.submitter.manifest.requirements import pod_templates

NOT_BEGUN = (RunState.PENDING, RunState.STARTING, RunState.RETRYING, RunState.FAILED)
"""States in which missing pods keep the whole run from training."""

DEADLINES = {
    "PreRunningDeadlineExceeded": ("preRunningDeadlineSeconds", "pre_running_deadline_s"),
    "DeadlineExceeded": ("activeDeadlineSeconds", "active_deadline_s"),
}
"""The operator's reasons that are time limits, each with its field in a RayJob and its key in a profile."""


def find_pending(seen: JobInCluster, state: RunState) -> list[Finding]:
    """Find what keeps a run's newest RayJob from having all its pods; empty when it has them or needs none.

    Pods that are not known are left out.
    """
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
        # For pods that are gone, the last warnings say what was wrong. Warnings of earlier tries do not count.
        since = max(seen.now - WARNING_FRESH_S, job.try_began - CLOCK_SKEW_S)
        recent = [event for event in seen.warnings if late or event.time > since]
        found += [] if seen.unseen_pods else _explain_pods(seen, recent, severity)
    if not found and not seen.unseen_pods and state in (RunState.PENDING, RunState.RETRYING) and not job.failed:
        found.append(_starting(seen))
    return found


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
            less = "lower SUNSPOT_NUM_WORKERS, end other runs of the queue, or have its quota raised"
            advice = f"kubectl describe workload says what it waits for; {less}"
        yield Finding(Diagnosis.QUEUE, Severity.ERROR, evidence, advice, {"queue": job.queue or None})


def _explain_pods(seen: JobInCluster, warnings: Warnings, severity: Severity) -> Iterator[Finding]:
    job, mine = seen.job, seen.own_pods
    wanted, _ = count_workers(seen)
    has_head = any(pod.head for pod in mine)
    for pod in mine:
        if pod.ready and pod.out_of_memory:
            limit = _memory_limit(job, "head" if pod.head else pod.group)
            evidence = f"a container of pod {pod.name} ran out of memory (OOMKilled{limit}), and was started again"
            advice = f"give it more: {'head' if pod.head else 'worker'}.memory in the profile"
            details = {"group": "head" if pod.head else pod.group, "pods": [pod.name], "restarts": pod.restarts}
            yield Finding(Diagnosis.OUT_OF_MEMORY, Severity.WARNING, evidence, advice, details, cost=1.0)
    missing = not has_head or sum(pod.group in job.training_groups for pod in mine) < wanted
    refused = refused_pod(job, warnings) if missing else None
    if refused:
        yield _refused(job, refused, "worker" if has_head else "head", severity)
    problems: dict[tuple[str, PodProblem], list[str]] = {}
    for pod in mine:
        if why := pod_problem(pod, warnings):
            problems.setdefault(("head" if pod.head else pod.group, why), []).append(pod.name)
    if not mine and not refused:
        told: set[tuple[str, Diagnosis]] = set()
        for event in warnings:  # newest first
            why = _last_problem(event)
            if why and (event.object, why.kind) not in told:
                told.add((event.object, why.kind))
                group = "head" if "-head" in event.object else next(iter(job.training_groups), "")
                problems.setdefault((group, why), []).append(event.object)
    unplaced: dict[str, dict[PodProblem, list[str]]] = {}
    for (group, why), names in problems.items():
        if why.kind is Diagnosis.NO_NODE:
            unplaced.setdefault(group, {})[why] = names
        else:
            advice = why.fix or "kubectl describe pod says more"
            details = {"group": group, "pods": names}
            yield Finding(why.kind, severity, f"{name_pods(names)}: {why.said}", advice, details)
    templates = pod_templates(job.raw)
    for group, said in unplaced.items():
        one = next((pod for pod in mine if pod.name in next(iter(said.values()))), None)
        spec = one.spec if one and one.spec.get("containers") else templates.get(group, {}).get("spec", {})
        yield from explain_unplaced(UnplacedPods(group, said, spec), seen.nodes, severity)


def _memory_limit(job: JobView, group: str) -> str:
    """Return `, limit 3Gi` for the pods of a group; empty if they have no limit."""
    spec = pod_groups(job.spec).get(group, {}).get("template", {}).get("spec", {})
    containers = spec.get("containers") or [{}]
    limit = containers[0].get("resources", {}).get("limits", {}).get("memory")
    return f", limit {limit}" if limit else ""


def _last_problem(event: WarningEvent) -> PodProblem | None:
    """Find the problem of a pod that is gone, from a warning about it."""
    if event.reason == "FailedScheduling":
        return PodProblem(Diagnosis.NO_NODE, event.message)
    if event.reason == "Failed" and "pull" in event.message:
        return PodProblem(Diagnosis.IMAGE, event.message, PUSH_IMAGE)
    if event.reason in ("FailedMount", "Failed") and "not found" in event.message:
        return PodProblem(Diagnosis.MISSING, event.message, CREATE_MISSING)
    return None


def _refused(job: JobView, event: WarningEvent, which: str, severity: Severity) -> Finding:
    evidence = f"a {which} pod cannot be made: {event.message}"
    exceeded = parse_exceeded(event.message)
    if exceeded:
        raised = f"have the ResourceQuota {exceeded.name} raised"
        advice = f"end other runs of the namespace (`sunspot list`), {ASK_FOR_LESS}, or {raised}"
        if exceeded.never_fits(job.raw):
            evidence += "; the run alone needs more than that quota allows"
            advice = f"{ASK_FOR_LESS}, or {raised}; ending other runs is not enough"
        names = {"requested": exceeded.requested, "used": exceeded.used, "limited": exceeded.limited}
        details = {"quota": exceeded.name, **names}
        return Finding(Diagnosis.QUOTA, severity, evidence, advice, details)
    if "not found" in event.message:
        return Finding(Diagnosis.MISSING, severity, evidence, CREATE_MISSING)
    advice = "a policy of the namespace refuses it; correct what it names, or have the policy changed"
    return Finding(Diagnosis.REFUSED, severity, evidence, advice)


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
