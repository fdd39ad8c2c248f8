"""Derives a run's state and the reason for it from its RayJob, its pods and its status in storage.

These sources can contradict each other. KubeRay gives a RayJob two states, its pods have states of their own, and the
run's processes write a further state to storage (`sunspot.run.status`). Three rules decide:

1. The driver's final status takes precedence.
2. Only `jobDeploymentStatus` shows whether the operator will continue. `jobStatus` can describe the previous attempt.
3. A stored status counts for a RayJob only if that RayJob wrote it. If a later owner wrote it, that owner has taken
   the run over.
"""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sunspot.formatting import plural
from sunspot.run.overview import HALF_DELETED, describe_silence, describe_work
from sunspot.run.owner import Owner
from sunspot.run.requests import narrowed
from sunspot.run.seen import RunSeen
from sunspot.run.status import SILENT_AFTER_S, RunState, Status, is_alive
from sunspot.settings import PREFIX, Settings, WorkerRange, parse_workers
from sunspot.submitter.cluster.pod_problems import HEAD, find_problems
from sunspot.submitter.cluster.views import JobView, Nodes, Pods, PodView, WarningEvent, Warnings
from sunspot.submitter.manifest.render import JOB_ID, MOVES_FROM, settings_of

NUM_WORKERS = PREFIX + "NUM_WORKERS"

OPERATOR_OVERDUE_S = 30
"""Seconds after which a new RayJob counts as ignored. A running operator handles it within seconds."""

WARNING_FRESH_S = 600
"""Age in seconds above which warnings are ignored."""

CLOCK_SKEW_S = 60
"""Largest expected difference in seconds between the clocks of nodes and of the API server."""

STORAGE_TIMEOUT = "STORAGE_TIMEOUT_S"

HEAD_GIVEN_UP = "JobStatusCheckTimeoutExceeded"
"""The operator's reason for a failure if the head has not answered for too long. `backoffLimit` does not apply."""

NO_ANSWER = "the head did not answer the operator for too long"

FAILURES = {
    "DeadlineExceeded": "it was not finished within activeDeadlineSeconds ({active} s); raise the deadline, or submit "
    "again to continue from the last checkpoint",
    "PreRunningDeadlineExceeded": "its pods were not all ready within preRunningDeadlineSeconds ({start} s)",
    HEAD_GIVEN_UP: f"{NO_ANSWER}; submit again to continue from the last checkpoint",
    "JobDeploymentStatusTransitionGracePeriodExceeded": "the Ray job ended, but its submitter did not",
    "SubmissionFailed": "the job could not be submitted to the head",
    "AppFailed": "the program failed",
}
"""Explanations of the operator's failure reasons, keyed by reason."""


@dataclass(frozen=True)
class GoneJob:
    """A deleted RayJob that was the last one to train a run."""

    name: str
    namespace: str
    began: bool
    "True if its driver had started."
    alive: bool
    "True if the run's processes still send heartbeats."
    saved_step: int | None
    "Step of the run's newest checkpoint, or None without a checkpoint."

    def judge(self, stop_wanted: bool) -> tuple[RunState, str]:
        """Return the run's state and the reason."""
        gone = f"its RayJob {self.name} is gone from namespace {self.namespace}"
        saved = "nothing is saved" if self.saved_step is None else f"saved at step {self.saved_step}"
        if not self.began:
            return RunState.LOST, f"{gone}, and its driver never began; {saved}; submit it again"
        if self.alive:
            return RunState.STOPPING, f"{gone}; its processes are still alive, and save before they end; {saved}"
        if stop_wanted:
            return RunState.STOPPED, f"told to stop; {gone}; {saved}"
        again = "submit it again" if self.saved_step is None else "submit it again to continue from there"
        return RunState.LOST, f"{gone}, so nothing is training it; {saved}; {again}"


@dataclass(frozen=True)
class ClusterSeen:
    """A run as seen in the cluster. Values that could not be read are old or missing."""

    jobs: tuple[JobView, ...] = ()
    "The run's RayJobs, newest first."
    pods: Pods = ()
    "The pods of all its RayJobs. Those on lost nodes are marked (`mark_lost_pods`) if the nodes were read."
    warnings: Warnings = ()
    "The warnings about the newest RayJob and its pods."
    nodes: Nodes = ()
    "All nodes of the cluster, or empty if they were not needed or this user cannot list them."
    unseen_pods: str = ""
    "The reason why the pods are unknown, or an empty string if they are known."
    hidden: Mapping[str, str] = field(default_factory=dict)
    "The API server's messages for the kinds of objects (pods, events, nodes) that this user cannot list."
    gone: GoneJob | None = None
    "A RayJob that was deleted before the run had ended."
    trouble: str = ""
    "The error that prevented the last read, or an empty string if the values are current."
    time: float = field(default_factory=time.time)
    "The time at which cluster and storage were last read, even if one did not answer, in seconds since the epoch."

    @property
    def job(self) -> JobView | None:
        """The newest RayJob."""
        return self.jobs[0] if self.jobs else None

    @property
    def own_pods(self) -> list[PodView]:
        """The pods in the newest RayJob's RayCluster, except those that are being deleted."""
        return [pod for pod in self.pods if self.job and pod.cluster == self.job.cluster and not pod.deleting]

    @property
    def fresh_warnings(self) -> list[WarningEvent]:
        """The warnings from the last WARNING_FRESH_S seconds."""
        return [event for event in self.warnings if self.time - event.time < WARNING_FRESH_S]


def judge(seen: ClusterSeen, stored: RunSeen) -> tuple[RunState, str]:
    """Return a run's state and the reason for it, based on both the cluster and storage."""
    if stored.summary.deleting:
        return RunState.DELETING, HALF_DELETED
    coming = find_next_job(seen, stored)
    if coming:
        state, reason = judge(without_next_job(seen, stored), stored)
        return state, f"{reason}; {_describe_move(seen, coming)}"
    if seen.job:
        return _judge_job(seen, seen.job, stored)
    if seen.gone:
        return seen.gone.judge(stored.summary.stop_requested)
    state, reason = stored.judge()
    if not stored.exists:
        reason = f"{'it has no RayJob' if stored.trouble else 'its RayJob is gone'}, and {reason}"
    return state, reason


def find_next_job(seen: ClusterSeen, stored: RunSeen) -> JobView | None:
    """Return the newest RayJob if a move started it and the driver in the old place is still alive, or None.

    The old driver counts as alive if its status is recent. However, if the run has already ended in the old place and
    the newest RayJob is live, this returns None, because the newest RayJob continues the run.
    """
    job, status = seen.job, stored.status
    if not job or not status or not is_alive(status, seen.time):
        return None
    if settings_of(job.raw).get(MOVES_FROM) != status.owner:
        return None
    old_state, _ = judge(replace(seen, jobs=seen.jobs[1:]), stored)
    return None if job.live and old_state.terminal else job


def without_next_job(seen: ClusterSeen, stored: RunSeen) -> ClusterSeen:
    """Return `seen` without the RayJob that `find_next_job` returns, if there is one.

    The newest remaining RayJob is then the one that is training the run.
    """
    return replace(seen, jobs=seen.jobs[1:]) if find_next_job(seen, stored) else seen


def _describe_move(seen: ClusterSeen, job: JobView) -> str:
    """Describe the progress of a move. `job` is the RayJob in the new place."""
    place = Owner.parse(settings_of(job.raw).get(JOB_ID, "")).place
    if not job.live:
        return f"its move to {place} has failed" + (f": {job.message}" if job.message else "")
    progress = "its workers are starting" if job.job_status == "RUNNING" else explain_pods(seen, job)
    return f"its next place, {place}, is being warmed up: {progress}"


def _judge_job(seen: ClusterSeen, job: JobView, stored: RunSeen) -> tuple[RunState, str]:
    """Return the state of a run with a RayJob, and the reason for it."""
    status = stored.status
    own = status if was_written_by(stored, job) else None
    if status and not own and _took_over(status, job):
        silence = _silence(status, seen.time)
        detail = silence or status.reason
        taken_by = Owner.parse(status.owner).describe()
        reason = f"{taken_by} has taken the run over from {job.name}" + (f": {detail}" if detail else "")
        return RunState.SILENT if silence else status.state, reason
    if own and _ended_for_good(own, job, stored.summary.stop_requested):
        stopped = "stopped " if own.state is RunState.STOPPED else ""
        return own.state, own.reason or f"{stopped}at step {own.step}"
    state, reason = _judge_try(seen, job, own, stored)
    if state.terminal or not (stored.summary.stop_requested or job.deleting):
        return state, reason
    if job.deleting:
        return RunState.STOPPING, "its RayJob is being deleted"
    if state is RunState.SILENT:
        return RunState.STOPPING, f"told to stop; {reason}"
    return RunState.STOPPING, f"told to stop; {'it saves and ends' if own else 'it ends when its driver begins'}"


def _ended_for_good(own: Status, job: JobView, stop_wanted: bool) -> bool:
    """Return True if the run has ended, regardless of what the operator reports.

    A driver that stops on SIGTERM, for example because its node is reclaimed, has not ended the run: the operator
    starts the driver again.
    """
    concluded = job.deployment_status == "Complete" and not job.failed_for_good
    stopped = own.state is RunState.STOPPED and (stop_wanted or concluded)
    return own.state is RunState.SUCCEEDED or stopped


def was_written_by(stored: RunSeen, job: JobView) -> bool:
    """Return True if the stored status is from a process of this RayJob, not of a deleted one with the same name."""
    status = stored.status
    return status is not None and owns(job, status.owner) and status.time >= job.created - CLOCK_SKEW_S


def owns(job: JobView, owner: str) -> bool:
    """Return True if an owner recorded in storage is this RayJob.

    The namespaces and clusters are compared only if they are known.
    """
    found, own = Owner.parse(owner), Owner.parse(settings_of(job.raw).get(JOB_ID) or job.name)
    same_submission = found.submission == own.submission
    same_namespace = found.namespace in ("", job.raw["metadata"].get("namespace"))
    same_cluster = not (found.cluster and job.kubernetes) or found.cluster == job.kubernetes
    return bool(found.job == job.name and same_submission and same_namespace and same_cluster)


def _judge_try(seen: ClusterSeen, job: JobView, last: Status | None, stored: RunSeen) -> tuple[RunState, str]:
    """Return the state according to the operator and the run's processes.

    `last` is the last stored status, which can be from an earlier attempt.
    """
    deployment, ray = job.deployment_status, job.job_status
    own = last if last and last.time >= job.try_began else None
    if deployment == "ValidationFailed":
        return RunState.FAILED, f"the operator rejects the manifest: {job.message}"
    if deployment == "Failed":
        return RunState.FAILED, _failure(seen, job, own)
    if deployment == "Complete":
        return _completed(job, own, stored)
    if deployment in ("Suspending", "Suspended"):
        queue = f"the queue {job.queue} has not admitted it" if job.queue else "suspend is true in its spec"
        return RunState.PENDING, f"suspended: {queue}"
    if deployment == "Retrying":
        return RunState.RETRYING, f"{describe_failed_tries(job, stored)}; a new cluster follows"
    if deployment in ("", "Initializing", "Waiting"):
        why = explain_pods(seen, job)
        if job.failed:
            return RunState.RETRYING, f"{describe_failed_tries(job, stored)}; {why}"
        if not deployment and seen.time - job.created > OPERATOR_OVERDUE_S:
            check = "check that the KubeRay operator is running and watches this namespace"
            why = f"no operator has handled its RayJob; {check}"
        return RunState.PENDING, why
    if ray == "FAILED" or job.failed_for_good or (own and own.state is RunState.FAILED):
        return _failed_or_retrying(job, own)
    if ray in ("", "PENDING"):
        return _starting(seen, job, own)
    if own and own.state is RunState.STOPPED:
        return RunState.STOPPING, "its driver was asked to end and has saved; the operator has not concluded yet"
    if ray == "STOPPED":
        return RunState.STOPPING, "its Ray job was stopped; the operator has not concluded yet"
    if ray == "SUCCEEDED":
        return RunState.FINISHING, "its Ray job has succeeded; the operator has not concluded yet"
    return _running(seen, job, own, stored)


def _starting(seen: ClusterSeen, job: JobView, own: Status | None) -> tuple[RunState, str]:
    """Return the state of a job whose driver is about to start, for the first time or after the head was lost."""
    if own is None:
        return RunState.STARTING, "its pods are ready; the driver is about to start"
    if not own.state.terminal and not _silence(own, seen.time):  # the operator has not noticed the restart yet
        return own.state, own.reason or describe_work(own)
    return RunState.RETRYING, f"its head was lost, and the job starts again; {explain_pods(seen, job)}"


def _running(seen: ClusterSeen, job: JobView, own: Status | None, stored: RunSeen) -> tuple[RunState, str]:
    why = summarize_pod_problems(seen, job)
    and_why = f"; {why}" if why else ""
    if own is None and stored.trouble:
        return RunState.RUNNING, f"its Ray job is running; {explain_trouble(job, stored)}{and_why}"
    if own is None:
        waits = f"driver is running, but has not written its status to storage yet{and_why}"
        if job.failed:
            return RunState.RETRYING, f"{describe_failed_tries(job, stored)}; the next attempt's {waits}"
        return RunState.STARTING, f"its {waits}"
    state = RunState.STARTING if own.state is RunState.LOST else own.state
    silence = _silence(own, seen.time)
    if silence and stored.trouble:
        return state, f"its Ray job is running; {explain_trouble(job, stored)}{and_why}"
    if silence:
        return RunState.SILENT, f"{silence}, but its Ray job is running; it might be frozen, cut off or gone{and_why}"
    several_groups = len(job.training_groups) > 1  # one group can wait for pods while another one trains
    default = (
        describe_work(own, find_unmet_request(job, stored))
        if state is RunState.RUNNING and (several_groups or not why)
        else ""
    )
    detail = own.reason or default
    return state, f"{detail}{and_why}" if detail else why or str(state)


def _completed(job: JobView, own: Status | None, stored: RunSeen) -> tuple[RunState, str]:
    ray = job.job_status
    if own and own.state is RunState.FAILED:
        return RunState.FAILED, own.reason or "its driver failed"
    if job.failed_for_good:
        return RunState.FAILED, job.message
    if ray == "SUCCEEDED" and stored.trouble:
        return RunState.SUCCEEDED, "its Ray job succeeded; storage cannot be read, so its last status is not known"
    if ray == "SUCCEEDED":
        return RunState.SUCCEEDED, "its Ray job succeeded; its driver wrote no final status to storage"
    if ray == "STOPPED":
        return RunState.STOPPED, "its Ray job was stopped through Ray or its RayJob; submit again to continue"
    if ray == "FAILED":
        return RunState.FAILED, _last_words(own) or "its Ray job failed"
    return (
        RunState.LOST,
        "the operator reports it as complete, although its Ray job never ended; submit again to continue",
    )


def _failed_or_retrying(job: JobView, own: Status | None) -> tuple[RunState, str]:
    """Return the state after a failed attempt, before the operator has decided whether to start another."""
    reason = _last_words(own) or job.message or "its Ray job failed"
    if job.failed + 1 < job.tries and not job.failed_for_good:
        return RunState.RETRYING, f"attempt {job.failed + 1} of {job.tries} failed: {reason}; the next one follows"
    return RunState.FAILED, reason


def _failure(seen: ClusterSeen, job: JobView, own: Status | None) -> str:
    active, start = (job.spec.get(f"{limit}DeadlineSeconds", "?") for limit in ("active", "preRunning"))
    meaning = FAILURES.get(job.failure, job.failure or "it failed").format(active=active, start=start)
    detail = _last_words(own)
    if job.failure == "PreRunningDeadlineExceeded":
        detail = summarize_pod_problems(seen, job)
    elif job.failure not in ("DeadlineExceeded", HEAD_GIVEN_UP):
        detail = detail or job.message
    if detail and job.failure in ("AppFailed", ""):
        return detail
    return f"{meaning}: {detail}" if detail else meaning


def _took_over(status: Status, job: JobView) -> bool:
    """Return True if another owner took the run over after `job` was created."""
    later = not owns(job, status.owner) and status.began > job.created
    return later and not (job.live and status.state.terminal)


# ----------------------------------------------------------------------------------------------------------------- pods


def explain_pods(seen: ClusterSeen, job: JobView) -> str:
    """Return why the newest RayJob's driver has not started yet, according to its pods."""
    problem = summarize_pod_problems(seen, job)
    if problem:
        return problem
    if seen.unseen_pods:
        return seen.unseen_pods
    pods = seen.own_pods
    if not any(pod.head for pod in pods):
        return "its pods are about to be created"
    if not any(pod.head and pod.ready for pod in pods):
        return "the head pod is starting"
    wanted, ready = count_workers(seen, job)
    if ready < wanted:
        return f"{plural(wanted, 'worker pod')} wanted, {ready} running; the others are starting"
    return "its pods are ready; the driver is about to start"


def summarize_pod_problems(seen: ClusterSeen, job: JobView) -> str:
    """Return the head's problem or the workers' most common problem, with its fix, or an empty string."""
    problems = find_problems(job, seen.own_pods, seen.fresh_warnings)
    head_problems = [problem for problem in problems if problem.group == HEAD]
    ending = next((pod for pod in seen.pods if pod.cluster == job.cluster and pod.head and pod.deleting), None)
    if ending and not any(pod.head for pod in seen.own_pods):
        silent = ", which does not answer" if ending.overdue(seen.time) else ""
        return f"the head pod is being deleted, and is replaced once it has left node {ending.node}{silent}"
    if head_problems:
        problem = head_problems[0]
        if problem.prevents_creation:
            return f"the head pod cannot be created: {problem}"
        return f"the head pod cannot start: {problem}"
    if not problems or not any(pod.head for pod in seen.own_pods):
        return ""
    reasons = Counter(str(problem) for problem in problems if not problem.prevents_creation)
    [(reason, _)] = reasons.most_common(1) or [(f"a pod cannot be created: {problems[0]}", 1)]
    wanted, ready = count_workers(seen, job)
    if len(job.training_groups) > 1:
        return f"{plural(wanted - ready, 'more worker pod')} requested: {reason}"
    return f"{plural(wanted, 'worker pod')} wanted, {ready} running: {reason}"


def read_workers(text: str) -> WorkerRange | None:
    """Parse the setting NUM_WORKERS. Returns None if it is not a number or a range, for example in a search."""
    with suppress(ValueError):
        return parse_workers(text)
    return None


def wanted_workers(job: JobView, stored: RunSeen) -> WorkerRange | None:
    """Return the number of workers that a run should have now, according to NUM_WORKERS and `sunspot scale`."""
    given = read_workers(settings_of(job.raw).get(NUM_WORKERS, ""))
    return narrowed(given, stored.scale) if given else None


def find_unmet_request(job: JobView, stored: RunSeen) -> WorkerRange | None:
    """Return the requested number of workers if fewer workers are training.

    Returns None if enough workers are training, or if no worker is training yet.
    """
    own, requested = stored.status, wanted_workers(job, stored)
    if own is None:
        return None
    return requested if requested and 0 < own.world_size < requested.most else None


def count_workers(seen: ClusterSeen, job: JobView) -> tuple[int, int]:
    """Return the number of training pods that the job needs now, and the number that are ready."""
    workers = [pod for pod in seen.own_pods if not pod.head and pod.group in job.training_groups]
    return max(job.least_workers, len(workers)), sum(pod.ready for pod in workers)


# ------------------------------------------------------------------------------------------------------------ sentences


def describe_failed_tries(job: JobView, stored: RunSeen) -> str:
    """Return a sentence with the number of failed attempts and, if known, the reason."""
    status, failed = stored.status, max(job.failed, 1)
    if status and was_written_by(stored, job):
        return f"attempt {failed} of {job.tries} failed{_because(status, job)}"
    have = "have" if failed > 1 else "has"
    unwritten = "" if stored.trouble else " before they could write" if failed > 1 else " before it could write"
    to_storage = " to storage" if unwritten else ""
    return f"{failed} of {job.tries} attempts {have} failed{unwritten}{to_storage}{_because(None, job)}"


def explain_trouble(job: JobView, stored: RunSeen) -> str:
    """Return an explanation of what unreadable storage means for a live run."""
    if stored.refused:
        return "this user has no access to its storage, so its progress is unknown"
    limit_s = storage_timeout_s(job)
    return (
        "storage does not answer, so its progress is unknown; if the run's own processes are cut off as well, "
        f"they keep training for up to {limit_s:g} s ({STORAGE_TIMEOUT})"
    )


def storage_timeout_s(job: JobView) -> float:
    """Return the number of seconds for which a run keeps training while storage is unavailable."""
    given = settings_of(job.raw).get(PREFIX + STORAGE_TIMEOUT)
    return float(given or Settings.model_fields["storage_timeout_s"].default)


def _because(own: Status | None, job: JobView) -> str:
    detail = _last_words(own) or job.message or FAILURES.get(job.failure, "").partition(";")[0].partition(" (")[0]
    return f": {detail}" if detail else ""


def _last_words(own: Status | None) -> str:
    return own.reason if own and own.state in (RunState.FAILED, RunState.LOST) else ""


def _silence(status: Status, now: float) -> str:
    """Describe how long a run has been silent. Returns an empty string if it is not silent or has ended."""
    if status.state.terminal or now - status.seen <= SILENT_AFTER_S:
        return ""
    return describe_silence(status.seen, now)
