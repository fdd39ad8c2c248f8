"""The subjects of the fault scripts: a run of Sunspot, the loop from Ray's guides with Ray's defaults, or TorchFT."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
"""Seconds until all workers train. Pods must start or be replaced, and the image may have to be pulled."""

SETTLE_S = 20
"""Seconds of training before the next fault, which allow a snapshot and a recovery from the last fault."""


@dataclass(frozen=True)
class Group:
    """A worker group that has taken a step."""

    number: int
    world_size: int
    first_step: float
    "The time at which its first step was complete, in seconds since the epoch."
    replayed: int
    "The number of steps that it repeated after the previous group."
    receipt: Receipt | None = None


class SunspotRun:
    """A run of Sunspot, observed through its storage."""

    title = "Sunspot"

    def __init__(self, request: JobRequest) -> None:
        self.rendered = render(request)
        self._cluster = connect(os.environ.get("KUBE_CONTEXT"), self.rendered.namespace)
        chosen = self.rendered.settings
        self.job = self.rendered.name
        self.namespace = self.rendered.namespace
        self.workers = chosen.num_workers.most
        self.run: Run = open_run(chosen.storage_path, chosen.run_name)
        self._access = RunAccess(self.run, self._cluster)

    def submit(self) -> None:
        """Submit the run like a user. An existing run with this name continues."""
        print_submission(submit(self._cluster, self.rendered), as_json=False)

    def groups(self) -> list[Group]:
        """Return the worker groups that have taken a step, oldest first, from the receipts.

        Raises `SunspotError` if the run is over.
        """
        over = self.over()
        if over:
            raise SunspotError(f"cannot inject another fault: {self.run.name} {over}")
        return [
            Group(receipt.attempt, receipt.world_after, receipt.first_step, receipt.replayed, receipt)
            for receipt in self.receipts()
        ]

    def replayed(self) -> int:
        """Return the number of repeated steps, from the receipts."""
        return sum(receipt.replayed for receipt in self.receipts())

    def receipts(self) -> list[Receipt]:
        """Return the receipts of all starts of its workers so far, oldest first."""
        return read_receipts(read_journal(self.run, "events"))

    def timeline(self) -> list[tuple[float, int]]:
        """Return times and the steps reached by then, from the metric history, including superseded attempts."""
        return sorted((record["time"], record["step"]) for record in read_journal(self.run, "metrics"))

    def over(self) -> str:
        """Return how the run ended, according to the cluster and storage, or an empty text if it can still continue."""
        snapshot = self._access.observe()
        state, reason = snapshot.state()
        known = state.terminal and not snapshot.cluster.trouble and not snapshot.storage.trouble
        return f"{state}, {reason}" if known else ""

    def rank0(self) -> str:
        """Return the pod of rank 0 as recorded by the newest attempt, or an empty text if unknown."""
        return read_attempts(self.run)[-1].metadata.nodes.get("0", "")

    def end(self) -> None:
        """Stop the run so that it commits, and wait until its pods are gone. Its files in storage are kept."""
        stop_run(self._access, timeout=300)
        if not delete_jobs(self._cluster, self._access.observe().cluster.jobs, GONE_WITHIN_S):
            raise GaveUpError(f"the pods of {self.job} still exist after {GONE_WITHIN_S:.0f} s")


class Stock:
    """The loop from Ray's guides, observed through its driver's log."""

    name, title = "stock", "the loop of Ray's guides"

    def __init__(self, request: JobRequest) -> None:
        given = {name.removeprefix(PREFIX): value for name, value in os.environ.items() if name.startswith(PREFIX)}
        settings = {**given, **request.settings}
        self.job, self.namespace = f"{settings['RUN_NAME']}-{self.name}", request.namespace or "sunspot"
        self.storage_path = settings.get("STORAGE_PATH", "runs")
        self.workers = int(settings["NUM_WORKERS"].rpartition("..")[2])
        self.lines: dict[str, None] = {}
        "Lines of the drivers' logs, in order."
        self._read: dict[tuple[str, str], int] = {}
        manifest = json.loads(json.dumps(yaml.safe_load(STOCK.read_text())))  # copies objects that YAML aliases share
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
        spot = profile.spot
        if spot:
            toleration = {"key": spot.label, "operator": "Exists"}
            workers["template"]["spec"] |= {"nodeSelector": {spot.label: spot.value}, "tolerations": [toleration]}
        pod = profile.worker.pod if profile.worker else None
        problems = merge_pod(workers["template"], pod or {}, "worker.pod")
        if problems:
            raise SettingsError("; ".join(problems))
        code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "stock", "namespace": self.namespace}}
        self.objects = [{**code, "data": {LOOPS.name: LOOPS.read_text()}}, manifest]

    def submit(self) -> None:
        """Apply the loop's code and its RayJob."""
        kubectl("apply", "-f", "-", namespace=self.namespace, text=yaml.safe_dump_all(self.objects))

    def groups(self) -> list[Group]:
        """Return the worker groups, from the driver's output.

        If the head is lost, its output since the last read is unknown. Raises `SunspotError` if the job has ended.
        """
        over = self.over()
        if over:
            raise SunspotError(f"{self.job} has ended: {over}")
        return self.read_groups()

    def read_groups(self) -> list[Group]:
        """Return the worker groups in the output read so far."""
        return read_groups(self.lines)

    def timeline(self) -> list[tuple[float, int]]:
        """Return times and the steps reached by then, each step once, from the output that `over` has read."""
        steps = [(record["time"], record["step"]) for record in read_records(self.lines) if "step" in record]
        return [now for before, now in pairwise([(0.0, 0), *steps]) if now[1] != before[1]]

    def replayed(self) -> int:
        """Return the number of steps that worker groups repeated."""
        return sum(group.replayed for group in self.read_groups())

    def over(self) -> str:
        """Return how the job ended, or an empty text if it has not ended. Also reads the driver's new output."""
        job = kubectl_json("get", "rayjob", self.job, namespace=self.namespace).get("status", {})
        heads = [pod.name for pod in pods(self.job, self.namespace) if pod.head]
        if heads and job.get("jobId"):
            self.read_log(heads[0], f"/tmp/ray/session_latest/logs/job-driver-{job['jobId']}.log")
        ended = job.get("jobDeploymentStatus", "")
        return f"{ended} {job.get('message', '')[-2000:]}" if ended in ("Complete", "Failed") else ""

    def read_log(self, head: str, log: str) -> None:
        """Add new lines of a log. The last line may be incomplete, so it is read again later."""
        known = self._read.get((head, log), 0)
        text = kubectl("exec", head, "--", "tail", "-n", f"+{known + 1}", log, namespace=self.namespace)
        *lines, _ = text.split("\n")
        self.lines |= dict.fromkeys(lines)
        self._read[head, log] = known + len(lines)

    def rank0(self) -> str:
        """Return the pod of rank 0, by the address that Ray puts before the line of the newest start."""
        starts = [ip for line in self.lines if '"start"' in line for ip in re.findall(r"ip=([\d.]+)", line)]
        return next((pod.name for pod in pods(self.job, self.namespace) if pod.ip in starts[-1:]), "")

    def end(self) -> None:
        """Delete the job and wait until its pods are gone. Its files in storage are kept."""
        wait = ("--cascade=foreground", "--ignore-not-found", "--timeout=300s")
        kubectl("delete", *wait, "-f", "-", namespace=self.namespace, text=yaml.safe_dump_all(self.objects))


class Notice(Stock):
    """The loop from Ray's guides with the addition from the guide to preemption. It saves when it receives a notice."""

    name, title = "notice", "the same, saving on notice"


class Torchft(Stock):
    """The same task under TorchFT, through Ray's `TorchftConfig`. The image must contain `torchft`."""

    name, title = "torchft", "TorchFT under Ray"

    def __init__(self, request: JobRequest) -> None:
        own = {"CPU": 1, **json.loads(request.settings.get("RESOURCES_PER_WORKER") or "{}"), "worker": 1}
        super().__init__(replace(request, settings={**request.settings, "RESOURCES_PER_WORKER": json.dumps(own)}))
        cluster = self.objects[1]["spec"]["rayClusterSpec"]
        head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        # Ray's lighthouse needs a CPU of the head. A resource that only the workers' nodes have keeps workers off it.
        head["rayStartParams"] = {"num-cpus": "1"}
        workers["rayStartParams"]["resources"] = json.dumps(json.dumps({"worker": 1}))
        # All workers print each step. Ray would merge these lines, and print them every 5 s.
        head["template"]["spec"]["containers"][0]["env"].append({"name": "RAY_DEDUP_LOGS", "value": "0"})

    def read_groups(self) -> list[Group]:
        """Return a group for each change of the number of replicas that take part in a step."""
        steps = [record for record in read_records(self.lines) if "step" in record]
        firsts = [next(alike) for _, alike in groupby(steps, lambda step: step["world"])]
        return [Group(number, step["world"], step["time"], 0) for number, step in enumerate(firsts, 1)]

    def replayed(self) -> int:
        """Return the number of repeated steps. Steps are repeated after all replicas were lost."""
        again = reached = 0
        for _, step in self.timeline():
            if starts_over(step, reached):
                again, reached = again + reached - step + 1, step
            reached = max(reached, step)
        return again


def starts_over(step: int, reached: int) -> bool:
    """Return True if replicas that had reached a step have started over.

    A replica may print a step after another one has printed the next step, which is not a new start.
    """
    return step < reached - 1


Subject: TypeAlias = SunspotRun | Stock
"""A job on the cluster that loses nodes."""

SUBJECTS: dict[str, type[Subject]] = {"sunspot": SunspotRun, "stock": Stock, "notice": Notice, "torchft": Torchft}


@contextmanager
def running(subject: Subject) -> Iterator[None]:
    """Submit the subject, wait until all its workers train, and always remove it from the cluster at the end."""
    began = time.time()
    subject.submit()
    try:
        wait_until_complete(subject, began)
        yield
    finally:
        subject.end()


def wait_until_complete(subject: Subject, since: float) -> Group:
    """Wait for a group with all workers that began after `since` and has trained for SETTLE_S, and return it."""

    def newest() -> Group | None:
        group = next(reversed(subject.groups()), None)
        if group is None or group.world_size < subject.workers or group.first_step <= since:
            return None
        return group if time.time() - group.first_step > SETTLE_S else None

    found: Group = until(f"{subject.workers} workers that train", START_S, newest)
    return found


def read_groups(lines: Iterable[str]) -> list[Group]:
    """Return the worker groups in a driver's log. A start without steps belongs to the next start."""
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
    """Return the loop's JSON objects in a log, sorted by time, without the text that Ray added to the lines."""
    found = []
    for line in lines:
        match = re.search(r'\{.*"time".*\}', line)
        if match:
            with suppress(ValueError):  # the braces belong to another text
                found.append(json.loads(match[0]))
    return sorted(found, key=lambda record: record["time"])
