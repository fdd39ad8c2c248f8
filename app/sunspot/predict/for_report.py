"""Stores results of the newest checkpoint's model for the report, at the end of training.

The results are predictions of held-out rows, and the output of the task's `show` function.
"""

import io
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from sunspot.data.source import ModelData, Source, read_rows, rows_in
from sunspot.errors import SettingsError, SunspotError, shorten
from sunspot.formatting import plural
from sunspot.plan import Plan
from sunspot.predict.actor import call_in_task
from sunspot.predict.classifier import Classifier, choose_device, open_checkpoint, restore_model
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.predictions import (
    MAX_CHARACTERS,
    MAX_IMAGES,
    MAX_MISTAKES,
    MAX_PARTS,
    MAX_PIXELS,
    MAX_RIGHT,
    MAX_ROWS,
    MAX_SAMPLES,
    Example,
    Exhibit,
    Predictions,
    TaskExhibit,
    read_shown,
    write_shown,
)
from sunspot.run.status import find_own_status
from sunspot.tasks import load_predict, load_task

log = logging.getLogger(__name__)

LIMIT_S = 120
"""Time limit in seconds for loading the model and predicting rows. Predictions made within the limit are stored."""

READ_ROWS = 1024
"""Largest number of rows that are predicted at a time."""

READ_BYTES = 16 << 20
"""Largest size in bytes of the rows that are predicted at a time."""

MAX_CLASSES = 1000
"""Maximum number of classes for which predictions are stored. Larger confusion matrices would take megabytes."""

SAMPLE_RANGES = 4
"""Number of evenly spaced positions from which samples are taken, because rows might be sorted by label."""

SHOWN_ROWS = 256
"""Maximum number of held-out rows passed to a task's `show`, or of training rows if nothing is held out."""


def save_predictions(plan: Plan, run: Run, checkpoint: Checkpoint, driver: str = "") -> None:
    """Predict the first PREDICT_ROWS held-out rows at the end of a run. Failures are only logged.

    Nothing is stored if the predictions exist already, or if another driver has taken over the run from `driver`.
    """
    rows = min(plan.settings.predict_rows, rows_in(plan.test)) if plan.test else 0
    if not rows or not checkpoint.finished:
        return
    try:
        load_predict(plan.settings)
    except SettingsError as error:
        if not load_task(plan.settings).show:  # otherwise, the report shows the result of `show`
            print(f"  the report has no predictions: {error}", flush=True)
        return
    try:
        kept = read_shown(run, Predictions)
        if not plan.source.classes or (kept and kept.checkpoint == checkpoint.name):
            return
        if plan.source.classes > MAX_CLASSES:
            raise SunspotError(
                f"there are {plan.source.classes} classes, but predictions are stored for at most {MAX_CLASSES}"
            )
        print(f"  predicting {plural(rows, 'held-out row')} for the report", flush=True)
        predictions = call_in_task(predict_held_out, plan, run.name, checkpoint.name, 2 * LIMIT_S)
        if predictions.rows < rows:
            print(f"  {predictions.rows} of {rows} held-out rows predicted in {LIMIT_S} s", flush=True)
        if find_own_status(run, driver):
            write_shown(run, predictions)
    except Exception as error:
        log.warning(f"the report has no predictions: {shorten(error)}")


def predict_held_out(plan: Plan, run: str, checkpoint: str, use_gpu: str) -> Predictions:
    """Predict the first PREDICT_ROWS held-out rows, or as many as LIMIT_S allows. Runs in a Ray task."""
    assert plan.test
    deadline = time.monotonic() + LIMIT_S
    model = Classifier(run, checkpoint, plan.settings.storage_path, use_gpu, task=plan.settings.task)
    summary = PredictionSummary(model.data)
    rows = min(plan.settings.predict_rows, rows_in(plan.test))
    each = max(1, min(READ_ROWS, READ_BYTES // math.prod(plan.test.shape)))
    for first in range(0, rows, each):
        part = read_rows(plan.test, first, min(first + each, rows))
        summary.add(part, *model.predict_rows(part))
        if time.monotonic() >= deadline:
            break
    return summary.result(model.name, model.step, sample_rows(plan.source))


class PredictionSummary:
    """Collects predictions, and the images of the few rows that the report shows."""

    def __init__(self, data: ModelData) -> None:
        self._data = data
        self._confusion = np.zeros((data.classes, data.classes), np.int64)
        self._mistakes: list[Example] = []
        "The mistakes, in descending order of probability."
        self._right: dict[int, list[Example]] = {}

    def add(self, part: dict[str, np.ndarray], predictions: np.ndarray, probabilities: np.ndarray) -> None:
        """Add rows with their predicted classes, [B], and probabilities, [B, classes].

        The columns of `part` are `row`, `label` and possibly `image`.
        """
        labels = part["label"]
        certainty = probabilities.max(axis=1)
        np.add.at(self._confusion, (labels, predictions), 1)
        if not has_pictures(part):
            return

        def example(index: np.intp) -> Example:
            return Example(
                row=int(part["row"][index]),
                label=int(labels[index]),
                predicted=int(predictions[index]),
                probability=float(certainty[index]),
                image=to_png(part["image"][index]),
            )

        wrong = np.flatnonzero(labels != predictions)
        surest = wrong[np.argsort(-certainty[wrong], kind="stable")][:MAX_MISTAKES]
        mistakes = [*self._mistakes, *map(example, surest)]
        self._mistakes = sorted(mistakes, key=lambda one: one.probability or 0.0, reverse=True)[:MAX_MISTAKES]
        most = math.ceil(MAX_RIGHT / self._data.classes)
        for index in np.flatnonzero(labels == predictions):
            kept = self._right.setdefault(int(labels[index]), [])
            if len(kept) < most:
                kept.append(example(index))

    def result(self, checkpoint: str, step: int, samples: list[Example]) -> Predictions:
        """Return the predictions to store."""
        by_class = itertools.zip_longest(*(self._right[label] for label in sorted(self._right)))
        right = [example for examples in by_class for example in examples if example]
        rows = int(self._confusion.sum())
        return Predictions(
            checkpoint=checkpoint,
            step=step,
            rows=rows,
            accuracy=int(self._confusion.trace()) / rows,
            classes=self._data.classes,
            confusion=self._confusion.tolist(),
            mistakes=self._mistakes,
            right=right[:MAX_RIGHT],
            samples=samples,
            names=list(self._data.class_names),
        )


def sample_rows(source: Source) -> list[Example]:
    """Return sample images from SAMPLE_RANGES evenly spaced positions in the training data."""
    rows = rows_in(source)
    each = min(MAX_SAMPLES // SAMPLE_RANGES, max(1, rows // SAMPLE_RANGES))
    firsts = {int(first) for first in np.linspace(0, max(0, rows - each), SAMPLE_RANGES)}
    parts = [read_rows(source, first, min(first + each, rows)) for first in sorted(firsts)]
    return [
        Example(int(row), int(label), None, None, to_png(image))
        for part in parts
        if has_pictures(part)
        for row, label, image in zip(part["row"], part["label"], part["image"], strict=True)
    ]


def has_pictures(rows: Mapping[str, np.ndarray]) -> bool:
    """Return True if the column `image` exists and contains 8-bit images."""
    images = rows.get("image")
    return images is not None and images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] in (1, 3)


def to_png(image: np.ndarray) -> bytes:
    """Encode an image, uint8 [C, H, W], as PNG. Images are shrunk to at most MAX_PIXELS pixels per side."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    picture.thumbnail((MAX_PIXELS, MAX_PIXELS))
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return content.getvalue()


def save_exhibit(plan: Plan, run: Run, checkpoint: Checkpoint, driver: str = "") -> None:
    """Store the result of the task's `show` at the end of a run. Failures are only logged.

    Nothing is stored if the result exists already, or if another driver has taken over the run from `driver`.
    """
    if not checkpoint.finished or not plan.settings.predict_rows or not load_task(plan.settings).show:
        return
    try:
        kept = read_shown(run, TaskExhibit)
        if kept and kept.checkpoint == checkpoint.name:
            return
        parts = call_in_task(show, plan, run.name, checkpoint.name, LIMIT_S)
        if find_own_status(run, driver):
            write_shown(run, TaskExhibit(checkpoint.name, checkpoint.step, parts))
    except Exception as error:
        log.warning(f"the report does not include the output of the task's show function: {shorten(error)}")


def show(plan: Plan, run: str, checkpoint: str, use_gpu: str) -> list[Exhibit]:
    """Return the result of the task's `show` for a checkpoint's model. Runs in a Ray task."""
    settings = plan.settings
    device = choose_device(use_gpu)
    model = restore_model(open_checkpoint(run, checkpoint, settings.storage_path, settings.task)).to(device).eval()
    source = plan.test or plan.source
    rows = read_rows(source, 0, min(SHOWN_ROWS, settings.predict_rows, rows_in(source)))
    task: Any = load_task(settings)
    with torch.inference_mode():
        return to_parts(task.show(model, {name: torch.from_numpy(column).to(device) for name, column in rows.items()}))


def to_parts(found: Any) -> list[Exhibit]:
    """Convert the result of a task's `show` to parts of the report. Long results are truncated.

    Raises `SettingsError` if the result is invalid.
    """
    if not isinstance(found, Mapping):
        raise SettingsError(
            f"show returned a value of type {type(found).__name__}; "
            "return a dict that maps titles to strings, numbers, tables or images"
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
            f"show returned a value of type {type(value).__name__} for {title!r}; return a string, a number, "
            "a list of dicts, or images as a uint8 tensor [N, C, H, W] with 1 or 3 channels"
        )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Exhibit(
        title, columns=[str(name) for name in columns], rows=[[_to_cell(row.get(n)) for n in columns] for row in rows]
    )


def _to_cell(value: Any) -> str | float | None:
    if value is None or isinstance(value, str):
        return value and value[:MAX_CHARACTERS]
    number = float(value)  # also converts tensors
    return number if math.isfinite(number) else str(number)
