"""What the report shows of a finished run's model: its predictions of held-out rows, and what the task shows of it."""

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from sunspot.run import Run, to_json
from sunspot.run.objects import CheckpointName, Count, Measure, adapter, read, read_if_usable

MAX_MISTAKES, MAX_RIGHT, MAX_SAMPLES = 48, 24, 24
"""Images kept of each kind of prediction; with them the report stays far below 2 MB."""

MAX_PIXELS = 64
"""Largest width and height of a kept image: enough to see what it shows."""

MAX_PARTS, MAX_ROWS, MAX_CHARACTERS, MAX_IMAGES = 20, 50, 2000, 48
"""Of what a task shows: parts, rows of a table, characters of a text or a cell, and all images."""

AS_BASE64 = {"val_json_bytes": "base64", "ser_json_bytes": "base64"}


@dataclass(frozen=True)
class Example:
    """One row and, unless it is a sample, its prediction."""

    __pydantic_config__: ClassVar = AS_BASE64

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

    def __post_init__(self) -> None:
        if len(self.confusion) != self.classes or any(len(row) != self.classes for row in self.confusion):
            raise ValueError(f"the confusion matrix is none of {self.classes} classes")

    def name(self, label: int) -> str:
        """Name a class."""
        return self.names[label] if label < len(self.names) else str(label)


@dataclass(frozen=True)
class Exhibit:
    """A text, a table, or images."""

    __pydantic_config__: ClassVar = AS_BASE64

    title: str
    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str | Measure | None]] = field(default_factory=list)
    "Cells, one for each column."
    images: list[bytes] = field(default_factory=list)
    "PNGs."


@dataclass(frozen=True)
class TaskExhibit:
    """What the task showed of a checkpoint's model."""

    checkpoint: CheckpointName
    step: Count
    parts: list[Exhibit]


FILES: dict[type, str] = {Predictions: "predictions.json", TaskExhibit: "shown.json"}

Shown = TypeVar("Shown", Predictions, TaskExhibit)


def write_shown(run: Run, shown: Predictions | TaskExhibit) -> None:
    """Replace the run's predictions, or what its task shows. Raises `StorageError`."""
    form = type(shown)
    run.storage.write(run.key(FILES[form]), to_json(adapter(form).dump_python(shown, mode="json", warnings=False)))


def read_shown(run: Run, form: type[Shown]) -> Shown | None:
    """Return what is shown in this form; None when there is none, or it is damaged. Raises `StorageError`."""
    return read_if_usable(lambda: load_shown(run, form))


def load_shown(run: Run, form: type[Shown]) -> Shown:
    """Return what is shown in this form; raises `NotFoundError`, `DamageError` or `StorageError`."""
    return read(run, form, FILES[form])
