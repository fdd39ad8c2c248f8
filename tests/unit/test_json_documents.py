"""Tests of the complete JSON documents of `sunspot status` and `sunspot list`, including the order of their keys.

After an intended change, write the golden file again and read the diff:
WRITE_GOLDEN=1 python -m pytest tests/unit/test_json_documents.py -k golden
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from typing import Any

from sunspot.run import Run
from sunspot.run.incidents import Cause
from sunspot.run.requests import SubmissionRecord, record_submission, request_stop
from sunspot.run.status import RunState, Status, write_status
from tests.harness import GOLDEN
from tests.harness.commands import Command
from tests.harness.kubernetes import FakeCluster, pod, rayjob
from tests.harness.runs import age, begin, commit, report, start, write_receipt

VARYING = ("bytes", "checkpoint_age_s", "checkpoint_time", "cost", "goodput", "modified")
"""Keys of values that differ between two runs of the test. The golden file has their types."""

RUNNING = Status(RunState.RUNNING, "job", attempt=1, world_size=2, step=4, epoch=1, total_steps=100)


def settle(value: Any, key: str = "") -> Any:
    """Return a document without values that differ between two runs of the test."""
    if key in VARYING and value is not None:
        return {name: type(each).__name__ for name, each in value.items()} if type(value) is dict else "a number"
    if isinstance(value, dict):
        return {name: settle(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [settle(each) for each in value]
    if isinstance(value, str):
        text = re.sub(r"(step-\d+-attempt-\d+)-[0-9a-f]{8}", r"\1", value)
        return re.sub(r"\d+ s ago", "a moment ago", re.sub(r"\d{4}-\d\d-\d\d [\d:]+ UTC", "TIME", text))
    return value


def make_live(run: Run, cluster: FakeCluster) -> None:
    """Write a live run with two attempts. Its RayJob has one of two worker pods."""
    begin(run)
    first = start(run, "run-1", tier="beginning", world_size=2, at=time.time() - 100)
    write_receipt(run, first, 0, Cause.BEGIN)
    report(run, first, {"step": 4, "epoch": 1, "seconds": 5.0, "time": time.time() - 50, "loss": 1.0})
    origin = commit(run, first, 4, test_accuracy=0.5)
    second = start(run, "run-1", origin.name, tier="storage", world_size=2)
    write_receipt(run, second, 1, last_step=5)
    figures = {"rows_per_s": 9.5, "step_time_s": 2.0, "save_s": 1.5, "notice_s": 30.0, "memory_every": 7}
    found = {"loss": 0.5, "test_loss": 0.7, "nan_since": 5, "warning": "a save takes long", "checkpoint": origin.name}
    status = replace(RUNNING, owner="run-1", attempt=2, driver=f"{2:08x}", step=5, checkpoint_time=time.time(), **found)
    write_status(run, replace(status, **figures))
    job = rayjob("run-1", created=time.time() - 200)
    environment = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    environment.append({"name": "SUNSPOT_STORAGE_PATH", "value": run.storage.locate("").rstrip("/")})
    job["status"] = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "rayClusterName": "run-1-x"}
    new = {**job, "metadata": {**job["metadata"], "name": "new-1", "labels": {"sunspot/run": "new"}}, "status": {}}
    cluster.jobs |= {"run-1": job, "new-1": new}
    cluster.pods += [pod("run-1-x-head", "run-1-x", head=True), pod("run-1-x-worker-1", "run-1-x")]


def test_the_json_output_of_status_and_list_matches_the_golden_file(
    cluster: FakeCluster, run: Run, sunspot: Command
) -> None:
    """Show a run in the cluster, a RayJob without files, a submitted run, a stopped run and a lost run."""
    make_live(run, cluster)
    stopped, submitted, lost = (Run(run.storage, name) for name in ("stopped", "submitted", "lost"))
    for ended in (stopped, lost):
        kept = commit(ended, start(begin(ended), "job", world_size=2), 6)
        state = RunState.STOPPED if ended is stopped else RunState.RUNNING
        write_status(ended, replace(RUNNING, state=state, driver=f"{1:08x}", checkpoint=kept.name))
    request_stop(stopped, "me")
    record_submission(submitted, SubmissionRecord("submitted-1234"))
    age(lost, 3600)

    documents: dict[str, Any] = {}
    for name in ("run", "new", "stopped", "submitted", "lost"):
        assert sunspot("status", name, "--json") == 0, sunspot.err
        documents[f"status {name}"] = settle(sunspot.json)
    assert sunspot("list", "--json") == 0, sunspot.err
    documents["list"] = sorted(settle(sunspot.json), key=lambda each: str(each["run"]))
    text = json.dumps(documents, indent=1).replace(run.storage.locate("").rstrip("/"), "STORAGE") + "\n"
    path = GOLDEN / "documents.json"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
