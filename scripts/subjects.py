"""What faults are injected into: a run of ours, the usual loop under the defaults of Ray and KubeRay, or TorchFT."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from scripts.cluster import kubectl, kubectl_json, pods, until
from sunspot.errors import GaveUpError, SettingsError, SunspotError
from sunspot.run import Run, open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.history import read_journal
from sunspot.run.incidents import Receipt, read_receipts
from sunspot.settings import PREFIX
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.cluster.progress_lines import print_submission
from sunspot.submitter.cluster.start import submit
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, delete_jobs, stop_run
from sunspot.submitter.manifest.merge import merge_pod
from sunspot.submitter.manifest.profile import load_profile
from sunspot.submitter.manifest.render import JobRequest, render

SCRIPTS = Path(__file__).parent
STOCK, LOOPS = SCRIPTS / "stock.yaml", SCRIPTS / "bench" / "loops.py"

START_S = 900
"""For all workers to train: pods have to start, a lost one to be replaced, and the image may have to be pulled."""

SETTLE_S = 20
"""Training before the next fault: time for a snapshot, and to get over the last fault."""


@dataclass(frozen=True)
class Group:
    """A worker group that has taken a step."""

    number: int
    world_size: int
    first_step: float
    "When its first step was done, in seconds since the epoch."
    replayed: int
    "Steps that the previous group had taken already."
    receipt: Receipt | None = None


class Ours:
    """A run of ours, watched through its storage."""

    title = "Sunspot"

    def __init__(self, request: JobRequest) -> None:
        self._rendered = render(request)
        self._cluster = connect(os.environ.get("KUBE_CONTEXT"), self._rendered.namespace)
        chosen = self._rendered.settings
        self.job, self.namespace, self.workers = self._rendered.name, self._rendered.namespace, chosen.num_workers.most
        self.run: Run = open_run(chosen.storage_path, chosen.run_name)
        self._access = RunAccess(self.run, self._cluster)

    def submit(self) -> None:
        """Through the submitter, as a user does; a run of this name that is there goes on."""
        print_submission(submit(self._cluster, self._rendered), as_json=False)

    def groups(self) -> list[Group]:
        """Its worker groups that have taken a step, oldest first, by the receipts; raises `SunspotError` once it is
        over.
        """
        if over := self.over():
            raise SunspotError(f"nothing is left to interrupt: {self.run.name} {over}")
        return [
            Group(receipt.attempt, receipt.world_after, receipt.first_step, receipt.replayed, receipt)
            for receipt in self.receipts()
        ]

    def replayed(self) -> int:
        """Steps that have been taken again, by the receipts, too."""
        return sum(receipt.replayed for receipt in self.receipts())

    def receipts(self) -> list[Receipt]:
        """Those of all its starts of workers so far, oldest first."""
        return read_receipts(read_journal(self.run, "events"))

    def timeline(self) -> list[tuple[float, int]]:
        """When which steps had been taken, by the metric history, attempts that were superseded included."""
        return sorted((record["time"], record["step"]) for record in read_journal(self.run, "metrics"))

    def over(self) -> str:
        """How it has ended, by cluster and storage; empty while it may go on."""
        snapshot = self._access.observe()
        state, reason = snapshot.state()
        known = state.terminal and not snapshot.cluster.trouble and not snapshot.storage.trouble
        return f"{state}, {reason}" if known else ""

    def rank0(self) -> str:
        """The pod of rank 0, as the newest attempt recorded it; empty if unknown."""
        return read_attempts(self.run)[-1].metadata.nodes.get("0", "")

    def end(self) -> None:
        """Stop it, so that it commits, and wait for its pods to go, also when it has finished; its storage stays."""
        stop_run(self._access, timeout=300)
        if not delete_jobs(self._cluster, self._access.observe().cluster.jobs, GONE_WITHIN_S):
            raise GaveUpError(f"the pods of {self.job} are still there after {GONE_WITHIN_S:.0f} s")


class Stock:
    """The usual loop, watched through its driver's log."""

    name, title = "stock", "the loop of Ray's guides"

    def __init__(self, request: JobRequest) -> None:
        given = {name.removeprefix(PREFIX): value for name, value in os.environ.items() if name.startswith(PREFIX)}
        settings = {**given, **request.settings}
        self.job, self.namespace = f"{settings['RUN_NAME']}-{self.name}", request.namespace or "sunspot"
        self.storage_path = settings.get("STORAGE_PATH", "runs")
        self.workers = int(settings["NUM_WORKERS"].rpartition("..")[2])
        self._lines: dict[str, None] = {}
        self._read: dict[tuple[str, str], int] = {}
        manifest = json.loads(json.dumps(yaml.safe_load(STOCK.read_text())))  # each pod its own, where YAML shares
        manifest["metadata"] = {"name": self.job, "namespace": self.namespace}
        manifest["spec"]["entrypoint"] += f" {self.name}"
        cluster = manifest["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            (container,) = group["template"]["spec"]["containers"]
            container["image"] = request.image or container["image"]
            container["env"] = [{"name": PREFIX + name, "value": value} for name, value in settings.items()]
        (workers,) = cluster["workerGroupSpecs"]
        workers |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), self.workers)
        profile = load_profile(request.profile, {})
        if spot := profile.spot:
            toleration = {"key": spot.label, "operator": "Exists"}
            workers["template"]["spec"] |= {"nodeSelector": {spot.label: spot.value}, "tolerations": [toleration]}
        pod = profile.worker.pod if profile.worker else None
        if problems := merge_pod(workers["template"], pod or {}, "worker.pod"):
            raise SettingsError("; ".join(problems))
        code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "stock", "namespace": self.namespace}}
        self._objects = [{**code, "data": {LOOPS.name: LOOPS.read_text()}}, manifest]

    def submit(self) -> None:
        """Apply its code and its RayJob."""
        kubectl("apply", "-f", "-", namespace=self.namespace, text=yaml.safe_dump_all(self._objects))

    def groups(self) -> list[Group]:
        """Its worker groups, by the driver's output; what it printed between the last read and the loss of its head is
        unknown.
        """
        if over := self.over():
            raise SunspotError(f"{self.job} has ended: {over}")
        return self.read_groups()

    def read_groups(self) -> list[Group]:
        """As its starts tell."""
        return read_groups(self._lines)

    def timeline(self) -> list[tuple[float, int]]:
        """As read by `over`; a step that several workers tell of counts once."""
        told = [(record["time"], record["step"]) for record in read_records(self._lines) if "step" in record]
        return [now for before, now in pairwise([(0.0, 0), *told]) if now[1] != before[1]]

    def replayed(self) -> int:
        """As the groups begin anew."""
        return sum(group.replayed for group in self.read_groups())

    def over(self) -> str:
        """Also reads what the driver has printed."""
        job = kubectl_json("get", "rayjob", self.job, namespace=self.namespace).get("status", {})
        heads = [pod.name for pod in pods(self.job, self.namespace) if pod.head]
        if heads and job.get("jobId"):
            self._read_log(heads[0], f"/tmp/ray/session_latest/logs/job-driver-{job['jobId']}.log")
        ended = job.get("jobDeploymentStatus", "")
        return f"{ended} {job.get('message', '')[-2000:]}" if ended in ("Complete", "Failed") else ""

    def _read_log(self, head: str, log: str) -> None:
        """Take in the lines that it has had since; the last one may be half written, and is read again."""
        known = self._read.get((head, log), 0)
        text = kubectl("exec", head, "--", "tail", "-n", f"+{known + 1}", log, namespace=self.namespace)
        *lines, _ = text.split("\n")
        self._lines |= dict.fromkeys(lines)
        self._read[head, log] = known + len(lines)

    def rank0(self) -> str:
        """By the address that Ray puts before the newest start's line."""
        starts = [ip for line in self._lines if '"start"' in line for ip in re.findall(r"ip=([\d.]+)", line)]
        return next((pod.name for pod in pods(self.job, self.namespace) if pod.ip in starts[-1:]), "")

    def end(self) -> None:
        """Delete it, and wait for its pods to go; what it kept in storage stays."""
        wait = ("--cascade=foreground", "--ignore-not-found", "--timeout=300s")
        kubectl("delete", *wait, "-f", "-", namespace=self.namespace, text=yaml.safe_dump_all(self._objects))


class Notice(Stock):
    """The usual loop with what Ray's guide to preemption adds: it saves once a node is to go."""

    name, title = "notice", "the same, saving on notice"


class Torchft(Stock):
    """The same task under TorchFT, through Ray's `TorchftConfig`; `torchft` is in the image."""

    name, title = "torchft", "TorchFT under Ray"

    def __init__(self, request: JobRequest) -> None:
        own = {"CPU": 1, **json.loads(request.settings.get("RESOURCES_PER_WORKER") or "{}"), "worker": 1}
        super().__init__(replace(request, settings={**request.settings, "RESOURCES_PER_WORKER": json.dumps(own)}))
        cluster = self._objects[1]["spec"]["rayClusterSpec"]
        head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        # Ray's lighthouse wants a processor of the head, which is kept from the workers by what only their nodes have.
        head["rayStartParams"] = {"num-cpus": "1"}
        workers["rayStartParams"]["resources"] = json.dumps(json.dumps({"worker": 1}))
        # All workers tell of each step, in lines that Ray would take for one, and show every 5 s.
        head["template"]["spec"]["containers"][0]["env"].append({"name": "RAY_DEDUP_LOGS", "value": "0"})

    def read_groups(self) -> list[Group]:
        """As the number of replicas changes that take part in a step."""
        steps = [record for record in read_records(self._lines) if "step" in record]
        firsts = [next(alike) for _, alike in groupby(steps, lambda step: step["world"])]
        return [Group(number, step["world"], step["time"], 0) for number, step in enumerate(firsts, 1)]

    def replayed(self) -> int:
        """As the steps fall back, which they do when no replica is left."""
        again = reached = 0
        for _, step in self.timeline():
            if begins_anew(step, reached):
                again, reached = again + reached - step + 1, step
            reached = max(reached, step)
        return again


def begins_anew(step: int, reached: int) -> bool:
    """Whether replicas that had reached a step have begun anew: one may tell of a step after another of the next."""
    return step < reached - 1


Subject: TypeAlias = Ours | Stock
"""A job on the cluster that loses nodes."""

SUBJECTS: dict[str, type[Subject]] = {"sunspot": Ours, "stock": Stock, "notice": Notice, "torchft": Torchft}


@contextmanager
def running(subject: Subject) -> Iterator[None]:
    """Submit the subject, wait until all its workers train, and take it off the cluster at the end in any case."""
    began = time.time()
    subject.submit()
    try:
        wait_until_complete(subject, began)
        yield
    finally:
        subject.end()


def wait_until_complete(subject: Subject, since: float) -> Group:
    """The newest group, once it has begun after `since`, has all workers, and has trained for SETTLE_S."""

    def newest() -> Group | None:
        group = next(reversed(subject.groups()), None)
        if group is None or group.world_size < subject.workers or group.first_step <= since:
            return None
        return group if time.time() - group.first_step > SETTLE_S else None

    found: Group = until(f"{subject.workers} workers that train", START_S, newest)
    return found


def read_groups(lines: Iterable[str]) -> list[Group]:
    """The worker groups in a driver's log: a start, then steps. A start without a step counts with the next one."""
    groups: list[Group] = []
    start: dict[str, Any] | None = None
    reached = 0
    for record in read_records(lines):
        if record.get("event") == "start":
            start = record
        elif start:
            again = max(0, reached - start["from_step"])
            groups.append(Group(len(groups) + 1, record["world"], record["time"], again))
            start = None
        reached = record.get("step", reached)
    return groups


def read_records(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The loop's JSON objects in a log, by time, whatever Ray has written around them."""
    found = []
    for line in lines:
        if match := re.search(r'\{.*"time".*\}', line):
            try:
                found.append(json.loads(match[0]))
            except ValueError:  # somebody else's braces
                continue
    return sorted(found, key=lambda record: record["time"])
