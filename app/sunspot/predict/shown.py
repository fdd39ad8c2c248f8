"""What a task shows of its trained model: its `show`, called once when training has ended, stored for the report."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from sunspot.data.source import read_rows, rows_in
from sunspot.errors import SettingsError, shorten
from sunspot.plan import Plan, choose_resources
from sunspot.predict.actor import get_result
from sunspot.predict.classifier import choose_device, open_checkpoint, restore_model
from sunspot.predict.held_out import to_png
from sunspot.ray_session import enter_folder, ray_session
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.predictions import (
    MAX_CHARACTERS,
    MAX_IMAGES,
    MAX_PARTS,
    MAX_ROWS,
    Exhibit,
    TaskExhibit,
    read_shown,
    write_shown,
)
from sunspot.run.status import own_status
from sunspot.tasks import load_task

log = logging.getLogger(__name__)

ROWS = 256
"""Most held-out rows (training rows without any) that a task is given to show."""

LIMIT_S = 120


def save_exhibit(plan: Plan, run: Run, checkpoint: Checkpoint, driver: str = "") -> None:
    """Store what the task shows of a finished run, once; a failure is only a warning.

    Nothing is stored when this start of a `driver` has lost the run meanwhile.
    """
    if not checkpoint.finished or not plan.settings.predict_rows or not hasattr(load_task(plan.settings), "show"):
        return
    try:
        kept = read_shown(run, TaskExhibit)
        if kept and kept.checkpoint == checkpoint.name:
            return
        with ray_session():
            nodes = sum(node["Alive"] for node in ray.nodes())
            wanted = dict(choose_resources(plan.settings, ray.cluster_resources(), nodes).per_worker)
            cpus, gpus = wanted.pop("CPU", 0.0), wanted.pop("GPU", 0.0)
            task = ray.remote(show).options(num_cpus=cpus, num_gpus=gpus, resources=wanted)
            parts = get_result(
                task.remote(plan, run.name, checkpoint.name, os.getcwd()), LIMIT_S, "what the task shows"
            )
        if own_status(run, driver):
            write_shown(run, TaskExhibit(checkpoint.name, checkpoint.step, parts))
    except Exception as error:
        log.warning(f"the task shows nothing in the report: {shorten(error)}")


def show(plan: Plan, run: str, checkpoint: str, folder: str) -> list[Exhibit]:
    """Return what the task shows of a checkpoint's model; runs in a task of Ray's."""
    enter_folder(folder)
    settings = plan.settings
    device = choose_device("auto")
    model = restore_model(open_checkpoint(run, checkpoint, settings.storage_path)).to(device).eval()
    source = plan.test or plan.source
    rows = read_rows(source, 0, min(ROWS, settings.predict_rows, rows_in(source)))
    task: Any = load_task(settings)
    with torch.inference_mode():
        return to_parts(task.show(model, {name: torch.from_numpy(column).to(device) for name, column in rows.items()}))


def to_parts(found: Any) -> list[Exhibit]:
    """Return the parts of what a task's `show` returned, cut to the limits; raises `SettingsError` if it has none."""
    if not isinstance(found, Mapping):
        raise SettingsError(
            f"show returned a {type(found).__name__}; return a dict of texts, numbers, tables and images by title"
        )
    parts: list[Exhibit] = []
    for title, value in list(found.items())[:MAX_PARTS]:
        room = MAX_IMAGES - sum(len(part.images) for part in parts)
        parts.append(_to_part(str(title)[:MAX_CHARACTERS], value, room))
    return parts


def _to_part(title: str, value: Any, room: int) -> Exhibit:
    if isinstance(value, str | int | float):
        return Exhibit(title, text=value[:MAX_CHARACTERS] if isinstance(value, str) else f"{value:.4g}")
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 4 and value.shape[1] in (1, 3):
        images: np.ndarray = value[:room].cpu().numpy()
        return Exhibit(title, images=[to_png(image) for image in images])
    rows = list(value)[:MAX_ROWS] if isinstance(value, Sequence) else [value]
    if not all(isinstance(row, Mapping) for row in rows):
        raise SettingsError(
            f"show returned {title!r} as {type(value).__name__}; "
            "give a text, a number, a list of dicts, or images: a uint8 tensor [N, C, H, W] of 1 or 3 channels"
        )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Exhibit(
        title, columns=[str(name) for name in columns], rows=[[_to_cell(row.get(n)) for n in columns] for row in rows]
    )


def _to_cell(value: Any) -> str | float | None:
    if value is None or isinstance(value, str):
        return value and value[:MAX_CHARACTERS]
    number = float(value)  # tensors, too
    return number if math.isfinite(number) else str(number)
