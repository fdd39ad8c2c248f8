"""Examines a run that is pending, slow, stuck or failed, and suggests fixes."""

from dataclasses import dataclass
from typing import Any

from sunspot.errors import DivergedError, StorageError
from sunspot.run.attempts import lineage
from sunspot.run.failures import Failure, read_failures
from sunspot.run.history import newest_rank_records
from sunspot.run.incidents import Cause
from sunspot.run.owner import Owner
from sunspot.run.requests import list_submissions
from sunspot.run.seen import RunDetails
from sunspot.run.status import RunState
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.pod_problems import find_problems
from sunspot.submitter.cluster.records import read_run
from sunspot.submitter.cluster.state import ClusterSeen
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.doctor.failed_tries import find_failed_tries, find_storage_trouble, find_unrecorded_end
from sunspot.submitter.doctor.fewer_workers import find_fewer_workers
from sunspot.submitter.doctor.pending import find_pending
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.doctor.training.costs import find_losses, find_memory_growth, find_slow, summarize_figures
from sunspot.submitter.doctor.training.diverged import find_not_finite
from sunspot.submitter.doctor.training.goals import find_missed_goals
from sunspot.submitter.doctor.training.halted import find_end, find_hung, find_late_end, find_stall
from sunspot.submitter.doctor.training.memory_losses import find_out_of_memory
from sunspot.submitter.doctor.training.saving import find_storage
from sunspot.submitter.findings import Diagnosis, Finding, Severity, by_severity

CHECKS = (
    find_not_finite,
    find_out_of_memory,
    find_end,
    find_hung,
    find_stall,
    find_late_end,
    find_slow,
    find_memory_growth,
    find_storage,
    find_losses,
    find_missed_goals,
)
"""The checks of a run that has started. A check yields no findings if nothing is wrong."""

EXPLAINED_BY_PODS = (RunState.PENDING, RunState.STARTING, RunState.SILENT)
"""States that storage alone cannot explain."""


@dataclass(frozen=True)
class Examination:
    """A run's state and the findings about it."""

    state: RunState
    reason: str
    findings: list[Finding]
    unseen: list[str]
    "The parts that could not be examined, with the reasons."
    cluster_trouble: str = ""
    "The cluster's error, if only the cluster can explain the state; otherwise empty."

    def record(self) -> dict[str, Any]:
        """Return the JSON document as a dict."""
        findings = [finding.record() for finding in self.findings]
        return {"state": self.state.value, "reason": self.reason, "findings": findings, "unseen": self.unseen}


def examine(access: RunAccess) -> Examination:
    """Examine a run in the cluster and in storage. If one of them does not answer, examine only the other.

    Raises the same errors as `read_run`.
    """
    snapshot, details = read_run(access)
    if snapshot.job and _waits_for_node(snapshot.cluster, snapshot.job):
        snapshot = access.with_nodes(snapshot)
    state, reason = snapshot.state()
    findings: list[Finding] = []
    unseen = _list_unseen(access, snapshot)
    cluster_trouble = snapshot.cluster.trouble
    if cluster_trouble and not _needs_cluster(access, snapshot, state):
        cluster_trouble = ""
    if cluster_trouble:
        advice = "renew the credentials, or reach the API server, and ask again; the other findings are from storage"
        findings.append(Finding(Diagnosis.UNSEEN, Severity.ERROR, cluster_trouble, advice, cost=1.0))
    if snapshot.job:
        findings += find_pending(snapshot.cluster, snapshot.job, state)
    if snapshot.cluster.gone and state is RunState.STOPPING:
        advice = "if this was not intended, submit the run again after its processes have ended; it continues from the "
        advice += "last checkpoint"
        findings.append(Finding(Diagnosis.LOST, Severity.ERROR, reason, advice, cost=0.9))
    if details:
        findings = _examine_training(_make_case(access, snapshot, details, unseen), snapshot, findings)
    else:
        findings += [end for end in find_unrecorded_end(state, reason) if not _is_explained(end, findings)]
        findings += [find_storage_trouble(snapshot)] if snapshot.storage.trouble else []
    if not any(finding.finding is Diagnosis.FAILED for finding in findings):
        findings += find_failed_tries(snapshot, state)
    if not findings:
        kind = Diagnosis.STOPPED if state is RunState.STOPPING else Diagnosis.STARTING
        findings.append(Finding(kind, Severity.NOTE, reason, "wait, and ask again"))
    return Examination(state, reason, by_severity(findings), unseen, cluster_trouble)


def _make_case(access: RunAccess, snapshot: RunSnapshot, details: RunDetails, unseen: list[str]) -> Case:
    """Collect the inputs of the checks. Adds a message to `unseen` if the recorded errors cannot be read."""
    failures: list[Failure] = []
    try:
        failures = read_failures(access.run)
    except StorageError as error:
        unseen.append(f"the errors of its processes: {error}")
    state, reason = snapshot.state()
    windows = newest_rank_records(access.run, lineage(details.attempts))
    local = snapshot.storage.outside_clusters and not snapshot.job
    return Case(details, state, reason, windows, failures, snapshot.cluster.pods, snapshot.cluster.time, local)


def _examine_training(case: Case, snapshot: RunSnapshot, findings: list[Finding]) -> list[Finding]:
    """Add the findings about training, and drop each finding that another finding explains."""
    findings = findings + [finding for check in CHECKS for finding in check(case)]
    findings = [finding for finding in findings if not _is_explained(finding, findings)]
    fewer = list(find_fewer_workers(case, snapshot.cluster))
    findings += fewer
    good = not fewer and all(finding.severity is Severity.NOTE for finding in findings)
    if good and case.state in (RunState.RUNNING, RunState.FINISHING, RunState.SUCCEEDED):
        evidence, details = summarize_figures(case)
        findings.append(Finding(Diagnosis.HEALTHY, Severity.NOTE, evidence, "nothing", details))
    return findings


def _waits_for_node(seen: ClusterSeen, job: JobView) -> bool:
    problems = find_problems(job, seen.own_pods, ())
    return any(problem.kind is Diagnosis.NO_NODE for problem in problems)


def _needs_cluster(access: RunAccess, snapshot: RunSnapshot, state: RunState) -> bool:
    """Return True if only the cluster can explain the run's state.

    Always returns False if the run was not submitted as a RayJob. If no cluster is configured, also returns False for a
    run that is training, because its files in storage are enough to explain it.
    """
    status = snapshot.storage.status
    in_cluster = Owner.parse(status.owner).namespace if status else list_submissions(access.run)
    lives = not state.terminal or state is RunState.LOST
    return bool(in_cluster) and (lives if access.cluster else state in EXPLAINED_BY_PODS)


def _list_unseen(access: RunAccess, snapshot: RunSnapshot) -> list[str]:
    """Return a line for each source of information that could not be examined, with the reason."""
    texts = []
    if snapshot.cluster.trouble:
        texts.append(f"the cluster: {snapshot.cluster.trouble}")
    elif not snapshot.job and not snapshot.storage.outside_clusters:
        asked = f" in namespace {access.cluster.namespace} of {access.cluster.server}" if access.cluster else ""
        owner = Owner.parse(snapshot.storage.status.owner) if snapshot.storage.status else Owner("")
        last = f"; it was last trained by {owner.describe()}" if owner.namespace else ""
        texts.append(f"pods and their events: the run has no RayJob{asked}{last}")
    texts += [f"its {what}: {refusal}" for what, refusal in snapshot.cluster.hidden.items()]
    if snapshot.storage.trouble:
        texts.append(f"the run's files in storage: {snapshot.storage.trouble}")
    return texts


def _is_explained(finding: Finding, findings: list[Finding]) -> bool:
    """Return True if a finding is a failure whose cause another finding already explains."""
    if finding.finding is not Diagnosis.FAILED:
        return False
    found = {other.finding for other in findings}
    if Diagnosis.NOT_FINITE in found and finding.details.get("type") == DivergedError.__name__:
        return True
    if Diagnosis.OUT_OF_MEMORY in found and f"{Cause.OUT_OF_MEMORY}: " in finding.evidence:
        return True
    return not finding.traces and not found.isdisjoint((Diagnosis.DEADLINE, Diagnosis.REFUSED))
