"""The predictions of held-out rows that the report shows: `predictions.json`."""

import base64
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from sunspot.errors import DamageError
from sunspot.run import Run, to_json
from sunspot.run.objects import CheckpointName, Count, Measure, read, read_if_usable

FILE = "predictions.json"

EXAMPLES = ("mistakes", "right", "samples")

MAX_MISTAKES, MAX_RIGHT, MAX_SAMPLES = 48, 24, 24
"""Images kept of each kind; with them the report stays far below 2 MB."""

MAX_PIXELS = 64
"""Largest width and height of a kept image: enough to see what it shows."""


@dataclass(frozen=True)
class Example:
    """One row and, unless it is a sample, its prediction."""

    __pydantic_config__: ClassVar = {"val_json_bytes": "base64"}

    row: Count
    "The row's id in its source."
    label: Count
    predicted: Count | None
    probability: Measure | None
    "Of the predicted class."
    image: bytes
    "A PNG of at most MAX_PIXELS each way."


@dataclass(frozen=True)
class Predictions:
    """A summary of a checkpoint's predictions of held-out rows."""

    checkpoint: CheckpointName
    step: Count
    rows: Count
    "Number of held-out rows predicted, from the first."
    accuracy: Measure
    "Share of right predictions, 0 to 1."
    classes: Count
    confusion: list[list[Count]]
    "Rows by label, then by predicted class."
    mistakes: list[Example] = field(default_factory=list)
    "By the model's certainty, the most certain first."
    right: list[Example] = field(default_factory=list)
    "Spread over the classes."
    samples: list[Example] = field(default_factory=list)
    "Training rows, not predicted."
    names: list[str] = field(default_factory=list)
    "Of the classes, where they have any."

    def name(self, label: int) -> str:
        """Name a class."""
        return self.names[label] if label < len(self.names) else str(label)


def write_predictions(run: Run, predictions: Predictions) -> None:
    """Replace the run's predictions. Raises `StorageError`."""
    record = asdict(predictions)
    for kind in EXAMPLES:
        for example in record[kind]:
            example["image"] = base64.b64encode(example["image"]).decode()
    run.storage.write(run.key(FILE), to_json(record))


def read_predictions(run: Run) -> Predictions | None:
    """Return the run's predictions; None when there are none, or they are damaged. Raises `StorageError`."""
    return read_if_usable(lambda: load_predictions(run))


def load_predictions(run: Run) -> Predictions:
    """Return the run's predictions; raises `NotFoundError`, `DamageError` or `StorageError`."""
    found = read(run, Predictions, FILE)
    if [len(row) for row in found.confusion] != [found.classes] * found.classes:
        place = run.storage.locate(run.key(FILE))
        raise DamageError(f"{place} cannot be used: the confusion matrix is none of {found.classes} classes")
    return found
