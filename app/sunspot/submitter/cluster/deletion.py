"""Deletes a run from the cluster and from storage.

A marker is written first and removed last (`sunspot.run.requests`). If the command is interrupted in between, no
process can train the run, and repeating the command completes the deletion. Objects that a surviving process writes
in the meantime are also deleted, or reported.
"""

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import (
    ClusterError,
    ConflictError,
    DamageError,
    GaveUpError,
    NotFoundError,
    StorageError,
    SunspotError,
)
from sunspot.formatting import as_bytes, in_words, plural
from sunspot.run import FOLDERS, RECORDS, Run, is_name_of_run, node_memory_directory
from sunspot.run.checkpoints import MANIFEST
from sunspot.run.identity import read_identity
from sunspot.run.objects import CHECKPOINT
from sunspot.run.overview import holds_run
from sunspot.run.requests import (
    DELETION,
    clear_deletion,
    deletion_begun,
    describe_requester,
    mark_deletion,
    submitted_job,
)
from sunspot.run.search import read_results
from sunspot.settings import PREFIX
from sunspot.storage.base import Entry, UnfinishedWrite
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, delete_jobs
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.render import STORAGE_PATH, settings_of
from sunspot.submitter.printing import progress_note, warn
from sunspot.submitter.runs import list_unfinished

MAX_ROUNDS = 3
"""Maximum number of times that the run's objects are listed and deleted. If objects remain, a process is still writing
them."""

MAX_NAMED = 3
"""Maximum number of objects in a message."""

REUSED = ("attempts", *RECORDS)
"""Parts of a run with keys that the next run of the same name reuses. Checkpoint names are unique, because they contain
an attempt's nonce."""


@dataclass(frozen=True)
class RunContents:
    """Everything that belongs to a run in the cluster, in storage and in this machine's memory."""

    run: Run
    snapshot: RunSnapshot
    entries: tuple[Entry, ...]
    "The run's objects in storage, except the marker."
    foreign: tuple[Entry, ...]
    "Objects in the run's folder that no run would write. They are not deleted."
    unfinished: tuple[UnfinishedWrite, ...]
    copies: tuple[Path, ...] = ()
    "Files in this machine's shared memory that a failed run left for its next start."
    dataset: str = ""
    "Path of the run's dataset, or empty if the dataset is not a path."
    trials: tuple[str, ...] = ()
    "Names of the trials' runs if the run is a search."

    @property
    def not_submitted(self) -> list[str]:
        """The names of RayJobs that `sunspot submit` did not apply."""
        submitted = {submitted_job(entry.key) for entry in self.entries}
        return [job.name for job in self.snapshot.cluster.jobs if job.name not in submitted]

    def name_foreign(self) -> str:
        """Describe the files in the run's folder that do not belong to the run, such as `photos, notes.txt: 12 files`.

        Returns an empty string if there are no such files.
        """
        tops = [*dict.fromkeys(_top(self.run, entry.key) for entry in self.foreign)]
        more = f" and {len(tops) - MAX_NAMED} more" if len(tops) > MAX_NAMED else ""
        return f"{', '.join(tops[:MAX_NAMED])}{more}: {plural(len(self.foreign), 'file')}" if tops else ""

    @property
    def objects(self) -> list[dict[str, str]]:
        """The run's RayJobs and the Kubernetes objects that are deleted with them, except shared RayClusters."""
        jobs = self.snapshot.cluster.jobs
        own = {job.cluster for job in jobs if not job.borrows_cluster}
        pods = [pod for pod in self.snapshot.cluster.pods if pod.cluster in own]
        names = {
            "RayJob": [job.name for job in jobs],
            "RayCluster": dict.fromkeys(pod.cluster for pod in pods),  # with Services, and the Secret of its token
            "Pod": [pod.name for pod in pods],
        }
        return [{"kind": kind, "name": name} for kind, found in names.items() for name in found]

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """The number and size of files in storage and in memory.

        There is one record for each top-level folder, for unfinished uploads, and for copies in memory."""
        sizes: dict[str, list[int]] = {}
        checkpoints: set[str] = set()
        for entry in self.entries:
            top, *below = entry.key.removeprefix(self.run.key("")).split("/")
            sizes.setdefault(top if below else "records", []).append(entry.size)
            if top == "checkpoints" and len(below) > 1 and CHECKPOINT.fullmatch(below[0]):
                checkpoints.add(below[0])
        beside = {
            "unfinished uploads": [upload.size for upload in self.unfinished],
            "copies in this machine's memory": [path.stat().st_size for path in self.copies if path.exists()],
        }
        more = {"checkpoints": {"checkpoints": len(checkpoints)}}
        return [
            {"kind": kind, "files": len(each), "bytes": sum(each), **more.get(kind, {})}
            for kind, each in [*sorted(sizes.items()), *beside.items()]
            if each
        ]

    @property
    def bytes(self) -> int:
        """The total size in storage and in this machine's memory, in bytes."""
        return sum(kind["bytes"] for kind in self.kinds)

    def __str__(self) -> str:
        """Return a summary such as `1 RayJob with 3 pods; 12 files, 3.4 MB`."""
        kinds = [thing["kind"] for thing in self.objects]
        jobs, pods = kinds.count("RayJob"), kinds.count("Pod")
        parts = [plural(jobs, "RayJob") + (f" with {plural(pods, 'pod')}" if pods else "")] if jobs else []
        return "; ".join([*parts, f"{plural(len(self.entries), 'file')}, {as_bytes(self.bytes)}"])


def find_contents(access: RunAccess) -> RunContents:
    """Find everything that belongs to a run.

    Raises `NotFoundError` if the run does not exist, `ConflictError` if the run is live or its folder does not look
    like a run's folder, and `ClusterError` or `StorageError` if the cluster or storage is unreachable.
    """
    run = access.run
    folder = Path(run.location)
    if not run.storage.is_bucket and folder.is_symlink():  # its target lies outside this storage
        target = folder.resolve()
        storage = f" (--storage {target.parent})" if target.name == run.name else ""
        raise ConflictError(
            f"{folder} is a symbolic link to {target}, so nothing was removed; delete the run there{storage}, and "
            "then remove the link"
        )
    with progress_note("looking for the run's objects"):
        snapshot = access.observe(lambda job: is_kept_in(job, run))
    if snapshot.storage.trouble:
        raise StorageError(snapshot.storage.trouble)
    if access.cluster and snapshot.cluster.trouble:
        advice = "if that cluster no longer exists, set KUBECONFIG=/dev/null to delete the run from storage"
        raise ClusterError(f"{snapshot.cluster.trouble}. The run may therefore still be training; {advice}")
    access.require_known(snapshot)
    state, reason = snapshot.state()
    going = bool(snapshot.job and snapshot.job.deleting)
    if any(job.live for job in snapshot.cluster.jobs) or not (state.terminal or going):
        unseen = f" (the cluster was not searched: {snapshot.cluster.trouble})" if snapshot.cluster.trouble else ""
        advice = f"`sunspot stop {access.arguments}` makes it save and stop; then delete it"
        raise ConflictError(f"{run.name} is still live ({state}: {reason}), so nothing was removed{unseen}; {advice}")
    own, foreign = _list(run)
    if (own or foreign) and not snapshot.storage.summary.deleting and not holds_run(run.name, own):
        jobs = " ".join(job.name for job in snapshot.cluster.jobs)
        raise ConflictError(
            f"{run.location} contains {plural(len(own) + len(foreign), 'file')}, but none that identifies a run, such "
            "as run.json or status/attempt-*.json, so it is not a run's folder, and nothing was removed. Check "
            f"--storage. `kubectl delete rayjob {jobs}` removes the RayJobs from the cluster"
        )
    copies = tuple(path for path in node_memory_directory(run.location).rglob("*") if path.is_file())
    results = read_results(run)
    trials = tuple(trial.run for trial in results.trials) if results else ()
    return RunContents(run, snapshot, tuple(own), tuple(foreign), _unfinished(run), copies, _find_dataset(run), trials)


def find_left(access: RunAccess) -> RunContents | None:
    """Find what remains of a run after its deletion failed. Returns None if the cluster or storage is unreachable."""
    run = access.run
    with contextlib.suppress(SunspotError):
        snapshot = access.observe(lambda job: is_kept_in(job, run))
        own, foreign = _list(run, with_mark=True)
        return RunContents(run, snapshot, tuple(own), tuple(foreign), _unfinished(run))
    return None


def is_kept_in(job: JobView, run: Run) -> bool:
    """Return True if a RayJob belongs to this run, and not to a run of the same name in another bucket or folder."""
    path = settings_of(job.raw).get(STORAGE_PATH)
    return path is None or path.rstrip("/") == run.storage.locate("").rstrip("/")


def delete_run(run: Run, jobs: Sequence[JobView] = (), cluster: Cluster | None = None) -> None:
    """Delete RayJobs with their pods, then the run's objects in storage and in this machine's memory.

    Raises `GaveUpError` if the pods still exist after GONE_WITHIN_S, and `ConflictError` if a process keeps writing the
    run's objects.
    """
    mark_deletion(run, describe_requester())
    if cluster and jobs:
        warn(f"waiting until {plural(len(jobs), 'RayJob')} and all pods are gone")
        if not delete_jobs(cluster, jobs, GONE_WITHIN_S, frozen=True):
            fault = f"{jobs[0].name} or its pods still exist after {in_words(GONE_WITHIN_S)}"
            raise GaveUpError(f"{fault}; nothing was removed from storage, because the pods may still write there")
    with progress_note("removing it from storage"):
        _empty(run)
    shutil.rmtree(node_memory_directory(run.location), ignore_errors=True)
    clear_deletion(run)
    left, foreign = _list(run, with_mark=True)
    for folder in [run.key(name) for name in (*RECORDS, *FOLDERS)] if foreign else [run.name]:
        run.storage.delete_folders(folder)
    _refuse_if_written(run, left)


def deletion_order(run: Run, keys: Iterable[str]) -> list[list[str]]:
    """Return the run's keys in groups, sorted by the order in which the groups must be deleted.

    Attempts come first, so that a surviving process can no longer commit a checkpoint. Manifests follow, because a
    checkpoint without a manifest is ignored. The objects that identify the run come last.
    """
    groups: list[list[str]] = [[], [], [], []]
    for key in keys:
        top = _top(run, key)
        position = 0 if top == "attempts" else 3 if top in RECORDS else 1 if key.endswith(f"/{MANIFEST}") else 2
        groups[position].append(key)
    return [group for group in groups if group]


def _path(run: Run, key: str) -> str:
    return key.removeprefix(run.key(""))


def _top(run: Run, key: str) -> str:
    return _path(run, key).partition("/")[0]


def _empty(run: Run) -> None:
    """Delete all of the run's objects except the marker, including objects written during the deletion.

    If another process completes the deletion in the meantime, a new run of the same name can start, and its objects
    must be kept. For this reason, each listing is followed by a check that the marker still exists. Objects in REUSED,
    whose keys a new run can use again, are deleted only if they have not changed since they were listed.
    """
    left, _ = _list(run)
    for _ in range(MAX_ROUNDS):
        if left and not deletion_begun(run):
            raise ConflictError(
                f"{run.location}: the deletion marker is gone, so another process has finished deleting this run. The "
                "remaining objects might belong to a new run and were kept; check them before you delete the run again"
            )
        for upload in _unfinished(run):
            run.storage.discard(upload)
        listed = {entry.key: entry.version for entry in left}
        for group in deletion_order(run, listed):
            if _top(run, group[0]) in REUSED:
                map_parallel(lambda entry: run.storage.delete(*entry), [(key, listed[key]) for key in group])
            else:
                run.storage.delete_many(group)
        left, _ = _list(run)
        if not left:
            return
    _refuse_if_written(run, left)


def _refuse_if_written(run: Run, entries: Sequence[Entry]) -> None:
    if entries:
        names = ", ".join(entry.key.removeprefix(run.key("")) for entry in entries[:MAX_NAMED])
        alive = "so one of the run's processes is still alive. It can no longer commit a checkpoint; stop the process"
        raise ConflictError(f"{run.location}: objects keep appearing ({names}), {alive}, and delete the run again")


def _list(run: Run, with_mark: bool = False) -> tuple[list[Entry], list[Entry]]:
    """Return the run's objects, and the foreign objects in its folder."""
    own: list[Entry] = []
    foreign: list[Entry] = []
    for entry in run.storage.list(run.name):
        if with_mark or entry.key != run.key(DELETION):
            (own if is_name_of_run(_path(run, entry.key)) else foreign).append(entry)
    return own, foreign


def _unfinished(run: Run) -> tuple[UnfinishedWrite, ...]:
    return tuple(upload for upload in list_unfinished(run) if is_name_of_run(_path(run, upload.key)))


def _find_dataset(run: Run) -> str:
    with contextlib.suppress(NotFoundError, DamageError, ConflictError):
        dataset = read_identity(run).settings.get(PREFIX + "DATASET", "")
        return dataset.rstrip("/") if "/" in dataset else ""
    return ""
