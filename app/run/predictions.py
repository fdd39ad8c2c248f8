"""The predictions of held-out rows that the report shows: `predictions.json`."""

import base64
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import DamageError, NotFoundError, shorten
from app.run import Run, to_json

FILE = "predictions.json"

EXAMPLES = ("mistakes", "right", "samples")

MOST_MISTAKES, MOST_RIGHT, MOST_SAMPLES = 48, 24, 24
"""Images kept of each kind; with them the report stays far below 2 MB."""

MOST_PIXELS = 64
"""Largest width and height of a kept image: enough to see what it shows."""


@dataclass(frozen=True)
class Example:
    """One row and, unless it is a sample, its prediction."""

    row: int
    "The row's id in its source."
    label: int
    predicted: int | None
    probability: float | None
    "Of the predicted class."
    image: bytes
    "A PNG of at most MOST_PIXELS each way."


@dataclass(frozen=True)
class Predictions:
    """A summary of a checkpoint's predictions of held-out rows."""

    checkpoint: str
    step: int
    rows: int
    "Number of held-out rows predicted, from the first."
    accuracy: float
    "Share of right predictions, 0 to 1."
    classes: int
    confusion: list[list[int]]
    "Rows by label, then by predicted class."
    mistakes: list[Example] = field(default_factory=list)
    "By the model's certainty, the most certain first."
    right: list[Example] = field(default_factory=list)
    "Spread over the classes."
    samples: list[Example] = field(default_factory=list)
    "Training rows, not predicted."


def write_predictions(run: Run, predictions: Predictions) -> None:
    """Replace the run's predictions. Raises `StorageError`."""
    record = asdict(predictions)
    for kind in EXAMPLES:
        for example in record[kind]:
            example["image"] = base64.b64encode(example["image"]).decode()
    run.storage.write(run.key(FILE), to_json(record))


def read_predictions(run: Run) -> Predictions | None:
    """The run's predictions, if any. Raises `StorageError`, or `DamageError` when they are unusable."""
    try:
        record = run.read_json(FILE)
        for kind in EXAMPLES:
            record[kind] = [_example(example) for example in record[kind]]
        return Predictions(**record)
    except NotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamageError(f"{run.storage.locate(run.key(FILE))}: cannot be used: {shorten(error)}") from error


def _example(record: dict[str, Any]) -> Example:
    return Example(**{**record, "image": base64.b64decode(record["image"], validate=True)})
