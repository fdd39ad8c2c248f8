"""What a task shows of its trained model: its `show`, called once when training has ended, stored for the report."""

from typing import Any

import ray
import torch

from app.data.source import read_rows, rows_in
from app.errors import shorten
from app.plan import Plan, choose_resources
from app.predict.actor import get_result
from app.predict.classifier import choose_device, open_checkpoint, restore_model
from app.ray_session import ray_session
from app.run import Run
from app.run.checkpoints import Checkpoint
from app.run.shown import Part, Shown, read_shown, to_parts, write_shown
from app.run.status import own_status
from app.tasks import load_task

ROWS = 256
"""Most held-out rows (training rows without any) that a task is given to show."""

LIMIT_S = 120


def keep_shown(plan: Plan, run: Run, checkpoint: Checkpoint, driver: str = "") -> None:
    """Store what the task shows of a finished run, once; a failure is only a warning.

    Nothing is stored when this start of a `driver` has lost the run meanwhile.
    """
    finished = checkpoint.evaluated and checkpoint.step >= plan.total_steps
    if not finished or not plan.settings.predict_rows or not hasattr(load_task(plan.settings), "show"):
        return
    try:
        kept = read_shown(run)
        if kept and kept.checkpoint == checkpoint.name:
            return
        with ray_session():
            nodes = sum(node["Alive"] for node in ray.nodes())
            wanted = dict(choose_resources(plan.settings, ray.cluster_resources(), nodes).per_worker)
            cpus, gpus = wanted.pop("CPU", 0.0), wanted.pop("GPU", 0.0)
            task = ray.remote(show).options(num_cpus=cpus, num_gpus=gpus, resources=wanted)
            parts = get_result(task.remote(plan, run.name, checkpoint.name), LIMIT_S, "what the task shows")
        if own_status(run, driver):
            write_shown(run, Shown(checkpoint.name, checkpoint.step, parts))
    except Exception as error:
        print(f"warning: the task shows nothing in the report: {shorten(error)}", flush=True)


def show(plan: Plan, run: str, checkpoint: str) -> list[Part]:
    """What the task shows of a checkpoint's model; runs in a task of Ray's."""
    settings = plan.settings
    device = choose_device("auto")
    model = restore_model(open_checkpoint(run, checkpoint, settings.storage_path)).to(device).eval()
    source = plan.test or plan.source
    rows = read_rows(source, 0, min(ROWS, settings.predict_rows, rows_in(source)))
    task: Any = load_task(settings)
    with torch.inference_mode():
        return to_parts(task.show(model, {name: torch.from_numpy(column).to(device) for name, column in rows.items()}))
