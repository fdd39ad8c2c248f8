"""What a run's newest checkpoint makes of held-out rows, as its report shows it: `predictions.json`."""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import DamageError, NotFoundError, shorten
from app.run import Run, to_json

FILE = "predictions.json"

EXAMPLES = ("mistakes", "right", "samples")

MOST_MISTAKES, MOST_RIGHT, MOST_SAMPLES = 48, 24, 24
"""Images of each kind that are kept: with the report around them they stay far below 2 MB."""

MOST_PIXELS = 64
"""Width and height of a kept image, at most: enough to see what it shows."""


@dataclass(frozen=True)
class Example:
    """One row and, unless it is only shown, what the model says of it."""

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
    """A checkpoint's predictions of held-out rows, summed up."""

    checkpoint: str
    step: int
    rows: int
    "Held-out rows that were predicted: the first so many."
    accuracy: float
    "Right ones among them, 0 to 1."
    classes: int
    confusion: list[list[int]]
    "Rows by label, then by predicted class."
    mistakes: list[Example] = field(default_factory=list)
    "From the one that the model was most certain of."
    right: list[Example] = field(default_factory=list)
    "Spread over the classes."
    samples: list[Example] = field(default_factory=list)
    "Training rows, not predicted."


def write_predictions(run: Run, predictions: Predictions) -> None:
    """Keep them in the run, in place of those that were there. Raises `StorageError`."""
    record = asdict(predictions)
    for kind in EXAMPLES:
        for example in record[kind]:
            example["image"] = base64.b64encode(example["image"]).decode()
    run.storage.write(run.key(FILE), to_json(record))


def read_predictions(run: Run) -> Predictions | None:
    """What was kept, or None when nothing was. Raises `StorageError`, or `DamageError` when it cannot be used."""
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
