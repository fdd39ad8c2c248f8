"""Tries of a RayJob that failed before the present one, and storage that cannot be read."""

from collections.abc import Iterator

from sunspot.run.status import RunState
from sunspot.submitter.cluster.observation import RunSnapshot
from sunspot.submitter.cluster.state import describe_failed_tries, explain_trouble
from sunspot.submitter.findings import Diagnosis, Finding, Severity


def find_failed_tries(snapshot: RunSnapshot, state: RunState) -> Iterator[Finding]:
    """Find tries of a live RayJob that failed, as long as the next one has not begun to train."""
    job = snapshot.job
    if not job or not job.failed or state is not RunState.RETRYING:
        return
    evidence = describe_failed_tries(job, snapshot.storage)
    details = {"failed": job.failed, "tries": job.tries, "message": job.message or None}
    advice = "mend what it names, and submit again; the next try would meet it, too"
    if ": " not in evidence:
        seen = f"kubectl get rayjob {job.name} --watch -o jsonpath='{{.status.message}}'"
        advice = (
            f"the operator forgets why a try failed once the next one begins; {seen} prints it when that fails. Before "
            "it can write, a driver reads its settings and reaches its storage: `sunspot doctor --from-pods` tries that"
        )
    yield Finding(Diagnosis.FAILED, Severity.ERROR, evidence, advice, details, cost=1.0)


def find_storage_trouble(snapshot: RunSnapshot) -> Finding:
    """Say what it means for the run that this user cannot read its storage."""
    job, stored = snapshot.job, snapshot.storage
    severity, advice = Severity.ERROR, "look after the server of the storage, and its network; then ask again"
    if stored.refused:
        advice = "let this user read it, or look from where it can be read: without it, nothing can be said of the run"
    elif job and job.live and job.job_status == "RUNNING":
        severity = Severity.WARNING
        advice = f"{explain_trouble(job, stored)}; look after the server of the storage, and its network"
    return Finding(Diagnosis.STORAGE, severity, stored.trouble, advice, cost=1.0)
