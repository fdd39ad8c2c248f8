"""`sunspot delete`: shows what there is of a run, asks, and removes it from the cluster and from storage.

A marker is written first and removed last (`sunspot.run.status`): interrupted in between, the run is shown as being
deleted, nothing trains it, and the same command goes on. What a surviving process writes meanwhile is removed too, or
reported.
"""

import argparse
import contextlib
import getpass
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sunspot.errors import (
    ClusterError,
    ConflictError,
    DamageError,
    GaveUpError,
    NotFoundError,
    SettingsError,
    StorageError,
    SunspotError,
)
from sunspot.formatting import as_bytes, in_words, plural
from sunspot.run import Run, node_memory_directory
from sunspot.run.checkpoints import MANIFEST
from sunspot.run.identity import read_identity
from sunspot.run.objects import CHECKPOINT
from sunspot.run.requests import DELETION, clear_deletion, mark_deletion
from sunspot.run.search import read_results
from sunspot.settings import PREFIX
from sunspot.storage.base import Entry, Unfinished
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.snapshot import STORAGE_PATH, RunAccess, RunSnapshot, reach_run
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, delete_jobs
from sunspot.submitter.cluster.views import JobView, PodView
from sunspot.submitter.commands.arguments import add_run, run_target
from sunspot.submitter.manifest.render import settings_of
from sunspot.submitter.output import doing, print_json, print_table, print_text, warn
from sunspot.submitter.runs import list_unfinished

MAX_ROUNDS = 3
"""How often what was written meanwhile is removed too: a writer that outlasts this is no straggler."""

MAX_NAMED = 3
"""Objects named when some came back."""

RECORDS = ("run.json", "status", "submissions")
"""What identifies a run: removed last."""


@dataclass(frozen=True)
class Remains:
    """All there is of a run."""

    run: Run
    snapshot: RunSnapshot
    entries: tuple[Entry, ...]
    "Its objects in storage, without the marker."
    unfinished: tuple[Unfinished, ...]
    copies: tuple[Path, ...]
    "Files in this machine's shared memory, left by a failed run for its next start."
    dataset: str
    "Where its rows come from; empty if that is not a path of the user."
    trials: tuple[str, ...] = ()
    "The runs that are the trials of a search."

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.snapshot.jobs

    @property
    def pods(self) -> list[PodView]:
        """Those that go with the RayJobs; a borrowed cluster stays."""
        own = {job.cluster for job in self.jobs if not job.borrows_cluster}
        return [pod for pod in self.snapshot.pods if pod.cluster in own]

    @property
    def not_submitted(self) -> list[str]:
        """RayJobs that `sunspot submit` did not apply."""
        manifests = {entry.key.rpartition("/")[2].partition("-")[2] for entry in self.entries}
        return [job.name for job in self.jobs if f"{job.name}.yaml" not in manifests]

    @property
    def bytes(self) -> int:
        """In storage and in this machine's memory."""
        stored = sum(entry.size for entry in self.entries) + sum(upload.size for upload in self.unfinished)
        return stored + sum(path.stat().st_size for path in self.copies if path.exists())

    @property
    def takes_dataset(self) -> bool:
        """Whether the dataset lies in the run's own folder."""
        return bool(self.dataset) and f"{self.dataset}/".startswith(f"{self.run.location}/")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--yes", action="store_true", help="remove it without asking")


def run(args: argparse.Namespace) -> None:
    """Print all there is of the run and, with `--yes` or the consent of the user at the terminal, remove it.

    Raises `SettingsError` when there is nobody to ask, `NotFoundError` when nothing is there, `ConflictError` when the
    run is live or something goes on writing it, `GaveUpError` when its pods do not go, `ClusterError` and
    `StorageError`, and then says on stderr what is left.
    """
    access = reach_run(run_target(args))
    cluster, run = access.cluster, access.run
    remains = find_remains(access)
    if not args.json:
        _print(cluster, remains)
    if kept := remains.not_submitted:
        warn(
            f"{', '.join(kept)} did not come by `sunspot submit`: if a repository keeps it (GitOps), take it out there "
            "first, or it is made again, and the run begins anew"
        )
    if not args.yes:
        if args.json:
            _conclude(remains, remains, False, True)
        if args.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            nobody = "--json asks nobody" if args.json else "there is no terminal to ask at"
            raise SettingsError(f"nothing was removed, as {nobody}: {_sum_up(remains)}; --yes removes it")
        if not _ask(run):
            _conclude(remains, remains, False, False)
            return
        remains = find_remains(access)  # the answer may have taken an hour
    try:
        _remove(cluster, remains)
    except (SunspotError, KeyboardInterrupt):
        left = _find_left(access)
        if args.json:
            _conclude(remains, left, False, True)
        what = _sum_up(left) if left else "what cannot be listed now"
        warn(f"{run.name} is half-deleted; left: {what}. `sunspot delete {access.arguments}` goes on")
        raise
    _conclude(remains, None, True, args.json)
    if run.storage.keeps_versions():
        warn("the bucket keeps versions of what is deleted: their space is freed when its lifecycle rules expire them")


def find_remains(access: RunAccess) -> Remains:
    """All there is of a run that may be deleted.

    Raises `NotFoundError` when there is nothing, `ConflictError` when the run is live, `ClusterError` and
    `StorageError` when that cannot be seen.
    """
    run, cluster = access.run, access.cluster
    with doing("looking for what there is of the run"):
        snapshot = access.observe(lambda job: keeps_in(job, run))
    if snapshot.storage_trouble:
        raise StorageError(snapshot.storage_trouble)
    if cluster and snapshot.cluster_trouble:
        raise ClusterError(
            f"{snapshot.cluster_trouble}. Whether the run still trains cannot be seen; if that cluster is no more, "
            "KUBECONFIG=/dev/null deletes what is in storage"
        )
    access.require_known(snapshot)
    state, reason = snapshot.state()
    going = bool(snapshot.job and snapshot.job.deleting)
    if any(job.live for job in snapshot.jobs) or not (state.terminal or going):
        unseen = f" (the cluster was not asked: {snapshot.cluster_trouble})" if snapshot.cluster_trouble else ""
        raise ConflictError(
            f"{run.name} is live, and nothing was removed: {state}, {reason}{unseen}; "
            f"`sunspot stop {access.arguments}` saves and ends it, then delete it"
        )
    _refuse_link(run)
    entries = tuple(_list(run))
    copies = tuple(path for path in node_memory_directory(run.location).rglob("*") if path.is_file())
    results = read_results(run)
    trials = tuple(trial.run for trial in results.trials) if results else ()
    return Remains(run, snapshot, entries, tuple(list_unfinished(run)), copies, _find_dataset(run, entries), trials)


def keeps_in(job: JobView, run: Run) -> bool:
    """Whether a RayJob is of this run, and not of one with the same name in another storage."""
    path = settings_of(job.raw).get(STORAGE_PATH)
    return path is None or path.rstrip("/") == run.storage.locate("").rstrip("/")


def in_order(run: Run, keys: Sequence[str]) -> list[list[str]]:
    """Keys of a run's objects, in groups that are removed one after the other.

    Attempts first, so that a surviving process commits nothing any more; then manifests, without which checkpoints do
    not count; what identifies the run last.
    """
    groups: list[list[str]] = [[], [], [], []]
    for key in keys:
        top = key.removeprefix(run.key("")).partition("/")[0]
        place = 0 if top == "attempts" else 3 if top in RECORDS else 1 if key.endswith(f"/{MANIFEST}") else 2
        groups[place].append(key)
    return [group for group in groups if group]


# ------------------------------------------------------------------------------------------------------------- removing


def _remove(cluster: Cluster | None, remains: Remains) -> None:
    run = remains.run
    mark_deletion(run, f"{getpass.getuser()}@{socket.gethostname()}")
    if cluster and remains.jobs:
        warn(f"waiting until {plural(len(remains.jobs), 'RayJob')} and the pods are gone")
        if not delete_jobs(cluster, remains.jobs, GONE_WITHIN_S, frozen=True):
            raise GaveUpError(
                f"{remains.jobs[0].name} or its pods are still there after {in_words(GONE_WITHIN_S)}; nothing was "
                "removed from storage, which they may still write"
            )
    with doing("removing it from storage"):
        _empty(run)
    shutil.rmtree(node_memory_directory(run.location), ignore_errors=True)
    clear_deletion(run)
    run.storage.delete_folders(run.name)
    _refuse_if_back(run, run.storage.list(run.name))


def _empty(run: Run) -> None:
    """Remove every object of the run but the marker, and what is written meanwhile."""
    left = _list(run)
    for _ in range(MAX_ROUNDS):
        for upload in list_unfinished(run):
            run.storage.discard(upload)
        for group in in_order(run, [entry.key for entry in left]):
            run.storage.delete_many(group)
        left = _list(run)
        if not left:
            return
    _refuse_if_back(run, left)


def _refuse_if_back(run: Run, entries: Sequence[Entry]) -> None:
    if entries:
        names = ", ".join(entry.key.removeprefix(run.key("")) for entry in entries[:MAX_NAMED])
        raise ConflictError(
            f"{run.location}: something goes on writing it ({names}); a process of the run still lives somewhere. It "
            "can commit no checkpoint any more; end it, and delete again"
        )


def _refuse_link(run: Run) -> None:
    """Raise `ConflictError` for a run whose folder is a link: what it leads to is not this storage's to delete."""
    folder = Path(run.location)
    if not run.storage.is_bucket and folder.is_symlink():
        place = folder.resolve()
        raise ConflictError(
            f"{folder} is a link to {place}, and nothing was removed: delete it there, with --storage {place.parent} "
            "if its folder is called like the run, and then remove the link"
        )


def _list(run: Run) -> list[Entry]:
    return [entry for entry in run.storage.list(run.name) if entry.key != run.key(DELETION)]


def _find_dataset(run: Run, entries: Sequence[Entry]) -> str:
    if run.key("run.json") not in {entry.key for entry in entries}:
        return ""
    with contextlib.suppress(NotFoundError, DamageError, ConflictError):
        dataset = read_identity(run).settings.get(PREFIX + "DATASET", "")
        return dataset.rstrip("/") if "/" in dataset else ""
    return ""


def _find_left(access: RunAccess) -> Remains | None:
    """What is left of a run that could not be removed; None if that cannot be seen."""
    run = access.run
    with contextlib.suppress(SunspotError):
        snapshot = access.observe(lambda job: keeps_in(job, run))
        entries = tuple(run.storage.list(run.name))
        return Remains(run, snapshot, entries, tuple(list_unfinished(run)), (), "")
    return None


# -------------------------------------------------------------------------------------------------------------- showing


def _ask(run: Run) -> bool:
    """Whether the user at the terminal agrees."""
    warn(f"remove all of it, for ever? y or {run.name}: ", end="")
    return sys.stdin.readline().strip() in ("y", "yes", run.name)


def _print(cluster: Cluster | None, remains: Remains) -> None:
    run, (state, reason) = remains.run, remains.snapshot.state()
    print_text(f"{run.name}: {state}, {reason}")
    objects = [[thing["kind"], thing["name"], ""] for thing in _objects(remains)]
    stored = []
    for kind in _kinds(remains):
        which = f"{kind['checkpoints']}, in " if "checkpoints" in kind else ""
        stored.append([kind["kind"], which + plural(kind["files"], "file"), as_bytes(kind["bytes"])])
    print_table(["what", "which", "size"], objects + stored)
    in_cluster = f"in namespace {cluster.namespace} of {cluster.server}, and " if cluster and objects else ""
    print_text(f"{in_cluster}in {run.location}")
    if remains.snapshot.cluster_trouble:
        warn(f"only what is in storage: {remains.snapshot.cluster_trouble}")
    if remains.takes_dataset:
        print_text(f"the dataset {remains.dataset} lies in the run, and goes with it")
    elif remains.dataset:
        print_text(f"the dataset {remains.dataset} is not touched: no run makes its dataset")
    if trials := remains.trials:
        print_text(f"its {plural(len(trials), 'trial')}, {trials[0]} to {trials[-1]}, are runs of their own, and stay")


def _conclude(remains: Remains, left: Remains | None, removed: bool, as_json: bool) -> None:
    """Print the outcome; `left` is what is there now."""
    if as_json:
        print_json(
            {
                "run": remains.run.name,
                "removed": removed,
                "storage": remains.run.location,
                "objects": _objects(remains),
                "files": len(remains.entries),
                "bytes": remains.bytes,
                "kinds": _kinds(remains),
                "dataset": remains.dataset or None,
                "dataset_removed": removed and remains.takes_dataset,
                "trials_kept": list(remains.trials),
                "left": {"objects": _objects(left), "files": len(left.entries), "bytes": left.bytes} if left else None,
            }
        )
    elif removed:
        print_text(f"removed: {_sum_up(remains)}")
    else:
        print_text(f"nothing was removed: {_sum_up(remains)}; --yes removes it")


def _sum_up(remains: Remains) -> str:
    jobs, pods = len(remains.jobs), len(remains.pods)
    parts = [plural(jobs, "RayJob") + (f" with {plural(pods, 'pod')}" if pods else "")] if jobs else []
    parts.append(f"{plural(len(remains.entries), 'file')}, {as_bytes(remains.bytes)}")
    return "; ".join(parts)


def _objects(remains: Remains) -> list[dict[str, str]]:
    """The run's RayJobs, and the Kubernetes objects that go with them."""
    found = [{"kind": "RayJob", "name": job.name} for job in remains.jobs]
    clusters = dict.fromkeys(pod.cluster for pod in remains.pods)  # with their Services and the Secret of their token
    found += [{"kind": "RayCluster", "name": name} for name in clusters]
    return found + [{"kind": "Pod", "name": pod.name} for pod in remains.pods]


def _kinds(remains: Remains) -> list[dict[str, Any]]:
    """What is in storage and in memory, by kind: the run's folders, and what is beside them."""
    run = remains.run
    groups: dict[str, list[Entry]] = {}
    for entry in remains.entries:
        top, slash, _ = entry.key.removeprefix(run.key("")).partition("/")
        groups.setdefault(top if slash else "records", []).append(entry)
    found = [
        {"kind": kind, "files": len(entries), "bytes": sum(entry.size for entry in entries)}
        for kind, entries in sorted(groups.items())
    ]
    for kind in found:
        if kind["kind"] == "checkpoints":
            names = {entry.key.split("/")[2] for entry in groups["checkpoints"] if entry.key.count("/") > 2}
            kind["checkpoints"] = sum(bool(CHECKPOINT.fullmatch(name)) for name in names)
    for name, sizes in (
        ("unfinished uploads", [upload.size for upload in remains.unfinished]),
        ("copies in this machine's memory", [path.stat().st_size for path in remains.copies if path.exists()]),
    ):
        if sizes:
            found.append({"kind": name, "files": len(sizes), "bytes": sum(sizes)})
    return found
