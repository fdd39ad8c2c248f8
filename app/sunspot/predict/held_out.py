"""Predictions of held-out rows by the newest checkpoint, stored in the run for its report when training has ended."""

import heapq
import io
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from PIL import Image

from sunspot.data.source import ModelData, Source, read_rows, rows_in
from sunspot.errors import GaveUpError, SettingsError, SunspotError, shorten
from sunspot.formatting import plural
from sunspot.plan import Plan, choose_resources
from sunspot.predict.actor import get_result, model_worker
from sunspot.ray_session import ray_session
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.predictions import (
    MAX_MISTAKES,
    MAX_PIXELS,
    MAX_RIGHT,
    MAX_SAMPLES,
    Example,
    Predictions,
    read_shown,
    write_shown,
)
from sunspot.run.status import own_status
from sunspot.tasks import load_predict, load_task

log = logging.getLogger(__name__)

LIMIT_S = 120
"""For all rows: after that, the predictions so far are stored."""

READ_ROWS, READ_BYTES, PARTS_AT_ONCE = 1024, 16 << 20, 2
"""Most rows and bytes sent to the model at a time, and how many such parts are in flight."""

MAX_CLASSES = 1000
"""With more classes, nothing is stored: the confusion matrix alone would be megabytes."""

SAMPLE_PLACES = 4
"""Samples come from so many places spread over the training rows, which may be sorted by label."""


def save_predictions(plan: Plan, run: Run, checkpoint: Checkpoint, driver: str = "") -> None:
    """Predict the first PREDICT_ROWS held-out rows at the end of a run, once; a failure is only a warning.

    Nothing is stored when this start of a `driver` has lost the run meanwhile.
    """
    rows = min(plan.settings.predict_rows, rows_in(plan.test)) if plan.test else 0
    if not rows or not checkpoint.finished:
        return
    try:
        load_predict(plan.settings)
    except SettingsError as error:
        if not hasattr(load_task(plan.settings), "show"):  # the report has that in their place
            print(f"  no predictions for the report: {error}", flush=True)
        return
    try:
        kept = read_shown(run, Predictions)
        if not plan.source.classes or (kept and kept.checkpoint == checkpoint.name):
            return
        if plan.source.classes > MAX_CLASSES:
            raise SunspotError(f"{plan.source.classes} classes; predictions are kept of at most {MAX_CLASSES}")
        print(f"  predicting {plural(rows, 'held-out row')}, for the report", flush=True)
        predictions = predict_held_out(plan, run, checkpoint, rows)
        if own_status(run, driver):
            write_shown(run, predictions)
    except Exception as error:
        log.warning(f"no predictions for the report: {shorten(error)}")


def predict_held_out(plan: Plan, run: Run, checkpoint: Checkpoint, rows: int) -> Predictions:
    """Predict the first `rows` held-out rows, or as many as LIMIT_S allows."""
    import ray

    assert plan.test
    deadline = time.monotonic() + LIMIT_S
    data = ModelData.of(plan.source)
    summary = Summary(data)
    with ray_session():
        nodes = sum(node["Alive"] for node in ray.nodes())
        # A training worker's resources fit on a node.
        resources = choose_resources(plan.settings, ray.cluster_resources(), nodes).per_worker
        with model_worker(
            run.name, checkpoint.name, plan.settings.storage_path, resources=resources, limit_s=LIMIT_S
        ) as worker:
            sent = ((part, worker.predict_rows.remote(part)) for part in read_parts(plan.test, rows))
            in_flight = deque(itertools.islice(sent, PARTS_AT_ONCE))
            try:
                while in_flight:
                    part, reference = in_flight.popleft()
                    limit_s = max(0.0, deadline - time.monotonic())
                    summary.add(part, *get_result(reference, limit_s, "predictions"))
                    in_flight.extend(itertools.islice(sent, 1))
            except GaveUpError:
                if not summary.rows:
                    raise
                print(f"  {summary.rows} of {rows} held-out rows predicted in {LIMIT_S} s, for the report", flush=True)
    return summary.result(checkpoint, sample_rows(plan.source))


def read_parts(source: Source, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first rows, in parts."""
    each = max(1, min(READ_ROWS, READ_BYTES // math.prod(source.shape)))
    for first in range(0, rows, each):
        yield read_rows(source, first, min(first + each, rows))


class Summary:
    """Accumulates predictions, with the images of the few examples that the report shows, if rows have images."""

    def __init__(self, data: ModelData) -> None:
        self.rows = 0
        self._data = data
        self._confusion = np.zeros((data.classes, data.classes), np.int64)
        self._mistakes: list[tuple[float, int, Example]] = []
        "A heap of (probability, -row, example), the least certain first."
        self._right: dict[int, list[Example]] = {}

    def add(self, part: dict[str, np.ndarray], predictions: np.ndarray, probabilities: np.ndarray) -> None:
        """Add rows (`row`, `label`, maybe `image`), their predicted classes, [B], and probabilities, [B, classes]."""
        labels, certainty = part["label"], probabilities.max(axis=1)
        self.rows += len(labels)
        np.add.at(self._confusion, (labels, predictions), 1)
        if "image" not in part:
            return

        def example(index: np.intp) -> Example:
            return Example(
                row=int(part["row"][index]),
                label=int(labels[index]),
                predicted=int(predictions[index]),
                probability=float(certainty[index]),
                image=to_png(part["image"][index]),
            )

        for index in np.flatnonzero(labels != predictions):
            rank = (float(certainty[index]), -int(part["row"][index]))
            if len(self._mistakes) < MAX_MISTAKES:
                heapq.heappush(self._mistakes, (*rank, example(index)))
            elif rank > self._mistakes[0][:2]:
                heapq.heapreplace(self._mistakes, (*rank, example(index)))
        most = math.ceil(MAX_RIGHT / self._data.classes)
        for index in np.flatnonzero(labels == predictions):
            kept = self._right.setdefault(int(labels[index]), [])
            if len(kept) < most:
                kept.append(example(index))

    def result(self, checkpoint: Checkpoint, samples: list[Example]) -> Predictions:
        by_class = itertools.zip_longest(*(self._right[label] for label in sorted(self._right)))
        right = [example for examples in by_class for example in examples if example]
        return Predictions(
            checkpoint=checkpoint.name,
            step=checkpoint.step,
            rows=self.rows,
            accuracy=int(self._confusion.trace()) / self.rows,
            classes=self._data.classes,
            confusion=self._confusion.tolist(),
            mistakes=[example for _, _, example in sorted(self._mistakes, key=lambda one: one[:2], reverse=True)],
            right=right[:MAX_RIGHT],
            samples=samples,
            names=list(self._data.class_names),
        )


def sample_rows(source: Source) -> list[Example]:
    """Read training rows from SAMPLE_PLACES places."""
    rows = rows_in(source)
    each = min(MAX_SAMPLES // SAMPLE_PLACES, max(1, rows // SAMPLE_PLACES))
    firsts = {int(first) for first in np.linspace(0, max(0, rows - each), SAMPLE_PLACES)}
    parts = [read_rows(source, first, min(first + each, rows)) for first in sorted(firsts)]
    return [
        Example(int(row), int(label), None, None, to_png(image))
        for part in parts
        if "image" in part
        for row, label, image in zip(part["row"], part["label"], part["image"], strict=True)
    ]


def to_png(image: np.ndarray) -> bytes:
    """Encode uint8 [C, H, W] as PNG, shrunk to MAX_PIXELS if larger."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    picture.thumbnail((MAX_PIXELS, MAX_PIXELS))
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return content.getvalue()
