"""Tests of docs/notebook.ipynb: all cells run, with a loop in this process as the cluster's driver and workers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from sunspot.checkpoint import CheckpointManager, SavedObjects
from sunspot.data.source import read_rows
from sunspot.plan import make_plan
from sunspot.run import open_run
from sunspot.run.logs import LogWriter, driver_stream
from sunspot.run.status import RunState
from sunspot.settings import load_settings
from sunspot.tasks import load_task
from tests.harness import REPOSITORY
from tests.harness.kubernetes import FakeCluster
from tests.harness.notebook import execute, kinds
from tests.harness.runs import begin, report, set_status, start
from tests.harness.s3 import plain_client
from tests.harness.waiting import wait_until

NOTEBOOK = REPOSITORY / "docs/notebook.ipynb"

WRITE = "WRITE_NOTEBOOK" in os.environ
"""True to train like the page says and keep its outputs. Otherwise, two steps are enough."""

TEST_ROWS = 256


def train(job: str, variables: dict[str, str]) -> None:
    """Train like the job's pods would, as far as the page shows it."""
    settings = load_settings({name: value for name, value in variables.items() if name.startswith("SUNSPOT_")})
    run = open_run(settings.storage_path, settings.run_name)
    task = load_task(settings)
    plan = make_plan(settings, task)
    attempt = start(begin(run, plan.steps.rows, plan.steps.batch, plan.steps.per_epoch), settings.job.job_id)
    torch.manual_seed(settings.seed)
    model = task.build_model(settings, plan.source)
    optimizer = task.build_optimizer(model, settings)
    checkpoints = CheckpointManager(run, attempt, plan, SavedObjects(model, optimizer))
    assert plan.test
    log = LogWriter(run, driver_stream())
    rows = read_rows(plan.source, 0, plan.steps.rows)
    records = []
    order = torch.randperm(plan.steps.rows)
    for step in range(1, (plan.total_steps if WRITE else 2) + 1):
        chosen = order[(step - 1) * plan.steps.batch : step * plan.steps.batch].numpy()
        batch = {name: torch.from_numpy(column[chosen]) for name, column in rows.items()}
        losses, metrics = task.loss(model, batch)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        record = {"step": step, "steps": 1, "epoch": 1, "time": time.time(), "loss": losses.mean().item()}
        records.append(record | {"accuracy": metrics["accuracy"].float().mean().item()})
        log.append(f"step {step}  loss {record['loss']:.4f}\n".encode())
    model.eval()
    with torch.inference_mode():
        held_out = {name: torch.from_numpy(values) for name, values in read_rows(plan.test, 0, TEST_ROWS).items()}
        records[-1]["test_accuracy"] = task.loss(model, held_out)[1]["accuracy"].float().mean().item()
    checkpoints.save(step, records[-1])
    checkpoints.close(finished=True)
    report(run, attempt, *records)
    log.flush()
    set_status(run, RunState.SUCCEEDED, step=step, total_steps=step, owner=attempt.owner, attempt=1)


@pytest.fixture
def operated(cluster: FakeCluster) -> Iterator[None]:
    """Train the first RayJob with the settings in its manifest."""
    ended = threading.Event()

    def operate() -> None:
        wait_until(lambda: cluster.jobs or ended.is_set())
        for name, job in list(cluster.jobs.items()):
            head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
            cluster.set_status(name, "Running", "RUNNING", rayClusterName=f"{name}-x")
            train(name, {each["name"]: each.get("value", "") for each in head["env"]})
            cluster.set_status(name, "Complete", "SUCCEEDED")

    operator = threading.Thread(target=operate)
    operator.start()
    yield
    ended.set()
    operator.join()


def test_every_notebook_cell_runs(operated: None, s3_bucket: str) -> None:
    plain_client().create_bucket(Bucket="models")
    kept = json.loads(NOTEBOOK.read_text())
    notebook = execute(NOTEBOOK)
    outputs = ["".join(str(output) for output in cell.get("outputs", ())) for cell in notebook["cells"]]
    assert "'succeeded'" in outputs[3]
    assert "did you mean SUNSPOT_EPOCHS?" in outputs[-1]
    if WRITE:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")
    else:
        assert [kinds(cell) for cell in notebook["cells"]] == [kinds(cell) for cell in kept["cells"]]
