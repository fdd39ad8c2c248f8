"""`sunspot wait --all`: a reconciler of the runs of a namespace, whoever applied their RayJobs.

It starts a run again whose head the operator has given up, and annotates each RayJob with where its run stands, for
Argo CD, dashboards and kubectl. It keeps nothing that a new start of it would miss.
"""

import threading
import time
from collections.abc import Callable

from sunspot.background import map_parallel
from sunspot.errors import StorageError, SunspotError
from sunspot.run.attempts import step_of
from sunspot.run.status import RunState, Status
from sunspot.submitter.cluster.api import Cluster, UnreachableError
from sunspot.submitter.cluster.completion import STARTED_AGAIN, HeadRestarts, Restart, start_again
from sunspot.submitter.cluster.follow import OutageReporter
from sunspot.submitter.cluster.observation import ClusterPart, RunAccess, RunSnapshot, read_storage
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import warn
from sunspot.submitter.runs import named_run

LOOK_EVERY_S = 60.0
"""Between two looks at the RayJobs: before it gives up a head, the operator itself waits for minutes."""


class Reconciler:
    """Looks after the newest RayJob of each run of a namespace.

    `show` is called with the name of a run, its state, and the reason for an end, whenever that changes.
    """

    def __init__(self, cluster: Cluster, storage_path: str | None, show: Callable[[str, RunState, str], None]) -> None:
        self._cluster, self._storage_path, self._show = cluster, storage_path, show
        self._outage = OutageReporter()
        self._runs: dict[tuple[str, str | None], tuple[RunAccess, HeadRestarts]] = {}
        self._states: dict[str, tuple[RunState, str]] = {}
        self._troubles: dict[str, str] = {}
        self._done: set[str] = set()
        "The uids of RayJobs that have ended, or are being started again."

    def reconcile(self) -> None:
        """Look at every run once. Raises `ClusterError` when the API server refuses to list RayJobs."""
        try:
            jobs = self._cluster.list_jobs()
        except UnreachableError as error:
            self._outage.note(RunSnapshot(ClusterPart(trouble=str(error))))
            return
        self._outage.note(RunSnapshot())
        newest = {job.raw["metadata"]["labels"][RUN_LABEL]: job for job in reversed(jobs)}
        map_parallel(lambda each: self._attend(*each), newest.items())

    def _attend(self, name: str, job: JobView) -> None:
        """Look at one run. What is wrong with it or its storage is said once, and keeps no other from its turn."""
        if job.uid in self._done:
            return
        try:
            access, restarts = self._reach(name, job)
            snapshot = RunSnapshot(ClusterPart((job,)), read_storage(access.run, job))
            if snapshot.storage.trouble:
                raise StorageError(snapshot.storage.trouble)
            state, reason = snapshot.state()
            if restart := restarts.next(snapshot):
                self._done.add(job.uid)
                self._say(name, RunState.RETRYING, STARTED_AGAIN)
                # In a thread: Argo CD or Flux may take minutes, for which no other run waits.
                threading.Thread(target=self._start_again, args=(access, restart), daemon=True).start()
                return
            self._say(name, state, reason if state.terminal else "")
            notes = annotations(state, snapshot.storage.status)
            if not notes.items() <= (job.raw["metadata"].get("annotations") or {}).items():
                self._cluster.annotate(job, notes)
            if job.terminal:
                self._done.add(job.uid)
            self._troubles.pop(name, None)
        except SunspotError as error:
            if self._troubles.get(name) != str(error):
                self._troubles[name] = str(error)
                warn(f"{name}: {error}")

    def _reach(self, name: str, job: JobView) -> tuple[RunAccess, HeadRestarts]:
        path = self._storage_path or settings_of(job.raw).get(STORAGE_PATH)
        if (name, path) not in self._runs:
            access = RunAccess(named_run(name, path), self._cluster)
            self._runs[name, path] = access, HeadRestarts(access.run)
        return self._runs[name, path]

    def _say(self, name: str, state: RunState, reason: str) -> None:
        if self._states.get(name) != (state, reason):
            self._states[name] = (state, reason)
            self._show(name, state, reason)

    def _start_again(self, access: RunAccess, restart: Restart) -> None:
        try:
            start_again(access, restart)
        except SunspotError as error:
            warn(f"{access.run.name}: {error}")
            if isinstance(error, UnreachableError):
                self._done.discard(restart.job.uid)  # the next look tries it again


def annotations(state: RunState, status: Status | None) -> dict[str, str]:
    """Return what a RayJob is annotated with; of its checkpoint the time, as an age grows while nobody writes it."""
    notes = {"state": str(state)}
    if status:
        notes |= {"step": str(status.step), "total-steps": str(status.total_steps)}
    if status and status.checkpoint and status.checkpoint_time is not None:
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.checkpoint_time))
        notes |= {"checkpoint": str(step_of(status.checkpoint)), "checkpoint-time": made}
    return {f"sunspot/{name}": text for name, text in notes.items()}
