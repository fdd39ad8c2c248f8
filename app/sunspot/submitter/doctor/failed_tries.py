"""Finds failed attempts that storage does not record, and storage that cannot be read."""

from collections.abc import Iterator

from sunspot.run.status import RunState
from sunspot.submitter.cluster.observation import RunSnapshot
from sunspot.submitter.cluster.state import describe_failed_tries, explain_trouble
from sunspot.submitter.findings import Diagnosis, Finding, Severity


def find_failed_tries(snapshot: RunSnapshot, state: RunState) -> Iterator[Finding]:
    """Yield a finding if attempts of a live RayJob have failed and the next attempt is not training yet."""
    job = snapshot.job
    if not job or not job.failed or state is not RunState.RETRYING:
        return
    evidence = describe_failed_tries(job, snapshot.storage)
    details = {"failed": job.failed, "tries": job.tries, "message": job.message or None}
    advice = "fix the problem that the message describes, and submit again; the next attempt would fail in the same way"
    cost = 1.0
    if ": " not in evidence:
        cost = 0.0  # the current pods' problems explain more
        watch = f"kubectl get rayjob {job.name} --watch -o jsonpath='{{.status.message}}'"
        advice = (
            f"the operator no longer knows why the attempt failed; if the next one fails, too, {watch} prints the "
            "reason. Before a driver writes anything, it reads its settings and connects to storage, which `sunspot "
            "doctor --from-pods` tests"
        )
    yield Finding(Diagnosis.FAILED, Severity.ERROR, evidence, advice, details, cost)


def find_unrecorded_end(state: RunState, reason: str) -> Iterator[Finding]:
    """Yield a finding if the cluster reports that the run has ended, but storage has no record of its end."""
    if state is RunState.FAILED:
        yield Finding(
            Diagnosis.FAILED,
            Severity.ERROR,
            reason,
            "fix the problem that the message describes, and submit again",
            cost=1.0,
        )
    elif state is RunState.LOST:
        yield Finding(Diagnosis.LOST, Severity.ERROR, reason, "submit it again", cost=0.9)
    elif state is RunState.STOPPED:
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, reason, "submit it again to continue")


def find_storage_trouble(snapshot: RunSnapshot) -> Finding:
    """Return a finding about storage that cannot be read."""
    job, stored = snapshot.job, snapshot.storage
    severity, advice = Severity.ERROR, "check the storage server and the network, then ask again"
    if stored.refused:
        advice = "give this user read access, or run the command as a user who has it; only storage shows progress"
    elif job and job.live and job.job_status == "RUNNING":
        severity = Severity.WARNING
        advice = f"{explain_trouble(job, stored)}; check the storage server and the network"
    return Finding(Diagnosis.STORAGE, severity, stored.trouble, advice, cost=1.0)
