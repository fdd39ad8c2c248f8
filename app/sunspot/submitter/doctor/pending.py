"""Explains why a run's RayJob does not start, or why its pods are not running."""

from collections.abc import Iterator

from sunspot.formatting import in_words
from sunspot.run.status import RunState
from sunspot.submitter.cluster.pod_problems import (
    CREATE_MISSING,
    HEAD,
    PodProblem,
    find_past_problems,
    find_problems,
)
from sunspot.submitter.cluster.state import (
    CLOCK_SKEW_S,
    FAILURES,
    OPERATOR_OVERDUE_S,
    WARNING_FRESH_S,
    ClusterSeen,
    explain_pods,
)
from sunspot.submitter.cluster.views import JobView, Pods, Warnings
from sunspot.submitter.doctor.unschedulable import UnplacedPods, explain_unplaced, name_pods
from sunspot.submitter.findings import Diagnosis, Finding, Severity
from sunspot.submitter.manifest.pods import pod_groups
from sunspot.submitter.manifest.quotas import ASK_FOR_LESS, parse_exceeded
from sunspot.submitter.manifest.requirements import pod_templates

NOT_BEGUN = (RunState.PENDING, RunState.STARTING, RunState.RETRYING, RunState.FAILED)
"""States in which missing pods mean that a run is not training at all."""

DEADLINES = {
    "PreRunningDeadlineExceeded": ("preRunningDeadlineSeconds", "pre_running_deadline_s"),
    "DeadlineExceeded": ("activeDeadlineSeconds", "active_deadline_s"),
}
"""The RayJob field and the profile key of each time limit, keyed by the operator's failure reason."""


def find_pending(seen: ClusterSeen, job: JobView, state: RunState) -> list[Finding]:
    """Find the reasons why the newest RayJob does not start or its pods are not running.

    Examines only the RayJob if this user cannot list pods.
    """
    if job.deployment_status == "ValidationFailed":
        evidence = f"the operator rejects the manifest of {job.name}: {job.message}"
        advice = "fix the problem that the message describes, and submit again"
        return [Finding(Diagnosis.REFUSED, Severity.ERROR, evidence, advice, {"job": job.name})]
    late = job.failure if job.deployment_status == "Failed" else ""
    if job.terminal and late not in DEADLINES:
        return []
    severity = Severity.ERROR if state in NOT_BEGUN else Severity.WARNING
    found = [_deadline(job, late)] if late in DEADLINES else []
    if late != "DeadlineExceeded":
        found += _explain_job(job, seen.time)
        # Deleted pods can only be explained by their last warnings. Warnings from earlier attempts are ignored.
        since = max(seen.time - WARNING_FRESH_S, job.try_began - CLOCK_SKEW_S)
        recent = [event for event in seen.warnings if late or event.time > since]
        found += [] if seen.unseen_pods else _explain_pods(seen, job, recent, severity)
    if not found and not seen.unseen_pods and state in (RunState.PENDING, RunState.RETRYING) and not job.failed:
        found.append(_starting(seen, job))
    return found


def _explain_job(job: JobView, now: float) -> Iterator[Finding]:
    if not job.deployment_status and not job.terminal and now - job.created > OPERATOR_OVERDUE_S:
        evidence = f"no operator has handled {job.name} for {in_words(now - job.created)}"
        shows = "kubectl get pods -A -l app.kubernetes.io/name=kuberay-operator"
        advice = f"check that the KubeRay operator is running and watches this namespace ({shows})"
        yield Finding(Diagnosis.NO_OPERATOR, Severity.ERROR, evidence, advice, {"job": job.name})
    if job.deployment_status in ("Suspending", "Suspended"):
        evidence = f"the spec of {job.name} has suspend: true"
        advice = "ask the person or tool that set it to unset it"
        if job.queue:
            evidence = f"{job.name} is suspended, because queue {job.queue} has not admitted it"
            less = "lower SUNSPOT_NUM_WORKERS, end other runs of the queue, or ask for a larger quota"
            advice = f"kubectl describe workload shows what it waits for; {less}"
        yield Finding(Diagnosis.QUEUE, Severity.ERROR, evidence, advice, {"queue": job.queue or None})


def _explain_pods(seen: ClusterSeen, job: JobView, warnings: Warnings, severity: Severity) -> Iterator[Finding]:
    pods = seen.own_pods
    yield from _find_restarts(job, pods)
    yield from _find_mixed_images(pods)
    problems = find_problems(job, pods, warnings) or ([] if pods else find_past_problems(job, warnings))
    alike: dict[tuple[str, Diagnosis, str, str], list[PodProblem]] = {}
    unplaced: dict[str, list[PodProblem]] = {}
    for problem in problems:
        if problem.prevents_creation:
            yield _explain_refusal(job, problem, severity)
        elif problem.kind is Diagnosis.NO_NODE:
            unplaced.setdefault(problem.group, []).append(problem)
        else:
            alike.setdefault((problem.group, problem.kind, problem.evidence, problem.fix), []).append(problem)
    for (group, kind, evidence, fix), same in alike.items():
        names = [problem.pod for problem in same]
        advice = fix or "kubectl describe pod shows more"
        yield Finding(kind, severity, f"{name_pods(names)}: {evidence}", advice, {"group": group, "pods": names})
    templates = pod_templates(job.raw)
    for group, found in unplaced.items():
        pod = next((pod for pod in pods if pod.name == found[0].pod), None)
        spec = pod.spec if pod and pod.spec.get("containers") else templates.get(group, {}).get("spec", {})
        yield from explain_unplaced(UnplacedPods(group, found, spec), seen.nodes, severity)


def _find_restarts(job: JobView, pods: Pods) -> Iterator[Finding]:
    """Find pods that were restarted after running out of memory."""
    for pod in pods:
        if pod.ready and pod.out_of_memory:
            group = HEAD if pod.head else pod.group
            limit = _memory_limit(job, group)
            evidence = f"a container of pod {pod.name} ran out of memory (OOMKilled{limit}) and was restarted"
            advice = f"raise {'head' if pod.head else 'worker'}.memory in the profile"
            details = {"group": group, "pods": [pod.name], "restarts": pod.restarts}
            yield Finding(Diagnosis.OUT_OF_MEMORY, Severity.WARNING, evidence, advice, details, cost=1.0)


def _find_mixed_images(pods: Pods) -> Iterator[Finding]:
    """Find each image tag for which pods pulled different images.

    This happens if a tag is pushed again during the run.
    """
    digests: dict[str, dict[str, list[str]]] = {}
    for pod in pods:
        for image, digest in sorted(pod.images):
            digests.setdefault(image, {}).setdefault(digest, []).append(pod.name)
    for image, pulled in digests.items():
        if len(pulled) > 1:
            of_each = ", ".join(f"{digest} in {name_pods(names)}" for digest, names in pulled.items())
            evidence = f"the pods pulled different images as {image}: {of_each}"
            advice = "stop the run, give each image its own tag or pass its digest (--image), and submit again"
            yield Finding(Diagnosis.IMAGE, Severity.WARNING, evidence, advice, {"image": image, "digests": pulled})


def _memory_limit(job: JobView, group: str) -> str:
    """Return text such as `, limit 3Gi` for a group's pods, or an empty string if they have no limit."""
    spec = pod_groups(job.spec).get(group, {}).get("template", {}).get("spec", {})
    containers = spec.get("containers") or [{}]
    limit = containers[0].get("resources", {}).get("limits", {}).get("memory")
    return f", limit {limit}" if limit else ""


def _explain_refusal(job: JobView, problem: PodProblem, severity: Severity) -> Finding:
    evidence = f"a {'head' if problem.group == HEAD else 'worker'} pod cannot be created: {problem.evidence}"
    exceeded = parse_exceeded(problem.evidence)
    if exceeded:
        raised = f"ask for a larger ResourceQuota {exceeded.name}"
        advice = f"end other runs in the namespace (`sunspot list`), {ASK_FOR_LESS}, or {raised}"
        if exceeded.never_fits(job.raw):
            evidence += "; the run alone needs more than that quota allows"
            advice = f"{ASK_FOR_LESS}, or {raised}; ending other runs is not enough"
        names = {"requested": exceeded.requested, "used": exceeded.used, "limited": exceeded.limited}
        details = {"quota": exceeded.name, **names}
        return Finding(Diagnosis.QUOTA, severity, evidence, advice, details)
    if "not found" in problem.evidence:
        return Finding(Diagnosis.MISSING, severity, evidence, CREATE_MISSING)
    advice = (
        "a policy of the namespace rejects it; correct what the policy complains about, or ask for a different policy"
    )
    return Finding(problem.kind, severity, evidence, advice)


def _deadline(job: JobView, reason: str) -> Finding:
    field, key = DEADLINES[reason]
    limit = job.spec.get(field, "?")
    evidence = FAILURES[reason].format(active=limit, start=limit).partition(";")[0]
    advice = f"raise {key} in the profile, and submit again to continue from the last checkpoint"
    if reason == "PreRunningDeadlineExceeded":
        advice = f"fix what kept its pods from running, or raise {key} in the profile; then submit again"
    return Finding(Diagnosis.DEADLINE, Severity.ERROR, evidence, advice, {"limit_s": limit, "job": job.name}, cost=1.0)


def _starting(seen: ClusterSeen, job: JobView) -> Finding:
    waited = seen.time - job.try_began
    evidence = f"{explain_pods(seen, job)}; nothing is wrong so far (after {in_words(waited)})"
    limit = job.spec.get("preRunningDeadlineSeconds")
    advice = "wait" + (f"; the operator gives up in {in_words(limit - waited)}" if limit else "")
    return Finding(Diagnosis.STARTING, Severity.NOTE, evidence, advice, {"waited_s": round(waited)})
