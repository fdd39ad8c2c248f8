"""Explains why a run is training with fewer workers than requested."""

from collections.abc import Iterator

from sunspot.formatting import as_time, in_words, plural
from sunspot.run.attempts import recorded_multiple
from sunspot.run.requests import narrowed
from sunspot.run.status import RunState
from sunspot.submitter.cluster.pod_problems import find_problem, find_refusal
from sunspot.submitter.cluster.state import ClusterSeen, read_workers
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.doctor.training.costs import summarize_figures
from sunspot.submitter.findings import Diagnosis, Finding, Severity
from sunspot.submitter.manifest.requirements import pod_sets

MAX_NAMED = 3
"""Maximum number of causes in a finding."""


def find_fewer_workers(case: Case, seen: ClusterSeen) -> Iterator[Finding]:
    """Yield a finding if a run is training with fewer workers than requested."""
    status = case.seen.status
    given = read_workers(case.setting("num_workers"))
    requested = narrowed(given, case.seen.scale) if given else None
    if case.state is not RunState.RUNNING or not (status and requested and 0 < status.world_size < requested.most):
        return
    since = _find_beginning(case, requested.most)
    unseen = "room on this machine" if case.local else "not known, because no cluster shows its pods"
    waits_for = _find_missing(seen, seen.job) if seen.job and not seen.unseen_pods else unseen
    figures, details = summarize_figures(case)
    multiple = recorded_multiple(case.seen.attempts)
    replicas = f" ({status.world_size // multiple} of {requested.in_multiples_of(multiple).replicas} replicas)"
    trains = f"{status.world_size} of {requested} workers{replicas if multiple > 1 else ''} train"
    when = f" since {as_time(since)}, for {in_words(case.now - since)}" if since else ""
    evidence = f"{trains}{when}; waiting for: {waits_for}; {figures}"
    advice = "do nothing, unless you need all workers now; the others join as soon as they can"
    details |= {"workers": status.world_size, "workers_wanted": str(requested), "since": since, "waits_for": waits_for}
    yield Finding(Diagnosis.FEWER_WORKERS, Severity.NOTE, evidence, advice, details)


def _find_beginning(case: Case, wanted: int) -> float | None:
    """Return the Unix time when the run dropped below `wanted` workers, or None if it is unknown."""
    since = None
    for attempt in reversed(case.seen.attempts):
        if attempt.metadata.world_size >= wanted:
            break
        since = attempt.time
    return since


def _find_missing(seen: ClusterSeen, job: JobView) -> str:
    """Describe the pods that the missing workers wait for."""
    workers = [pod for pod in seen.own_pods if not pod.head and pod.group in job.training_groups]
    causes = []
    for pod in workers:
        problem = find_problem(pod, seen.fresh_warnings)
        if problem or not pod.ready:
            causes.append(f"pod {pod.name} ({problem.evidence if problem else 'it is starting'})")
    wanted = pod_sets(job.raw)["workers"].most if not job.borrows_cluster else 0
    if len(workers) < wanted:
        refusal = find_refusal(job, seen.fresh_warnings, job.training_groups[0])
        why_not = refusal.evidence if refusal else "the cluster was not asked for them, or has not created them yet"
        causes.append(f"{plural(wanted - len(workers), 'more worker pod')} ({why_not})")
    if not causes:
        return "the workers in running pods, which have not joined yet"
    more = f" and {len(causes) - MAX_NAMED} more" if len(causes) > MAX_NAMED else ""
    return ", ".join(causes[:MAX_NAMED]) + more
