"""A finished run's results in the report: predictions for held-out rows, and the output of the task's `show`."""

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from sunspot.run import Run, to_json
from sunspot.run.objects import CheckpointName, Count, FiniteFloat, adapter, read, read_if_usable

MAX_MISTAKES = 48
"""Largest number of images of wrong predictions. These limits keep the report far below 2 MB."""

MAX_RIGHT = 24
"""Largest number of images of correct predictions."""

MAX_SAMPLES = 24
"""Largest number of images of sample rows."""

MAX_PIXELS = 64
"""Largest width and height of an image in pixels, enough to recognize its content."""

MAX_PARTS = 20
"""Largest number of parts in the output of a task's `show`."""

MAX_ROWS = 50
"""Largest number of rows in a table that `show` returns."""

MAX_CHARACTERS = 2000
"""Largest number of characters in a text or a table cell that `show` returns."""

MAX_IMAGES = 48
"""Largest total number of images that `show` returns."""

AS_BASE64 = {"val_json_bytes": "base64", "ser_json_bytes": "base64"}


@dataclass(frozen=True)
class Example:
    """A row with its image, its label and its prediction. Training rows have no prediction."""

    __pydantic_config__: ClassVar = AS_BASE64

    row: Count
    "The row's id in its source."
    label: Count
    predicted: Count | None
    probability: FiniteFloat | None
    "The probability of the predicted class."
    image: bytes
    "A PNG, at most MAX_PIXELS wide and high."


@dataclass(frozen=True)
class Predictions:
    """A summary of a checkpoint's predictions for held-out rows."""

    checkpoint: CheckpointName
    step: Count
    rows: Count
    "The number of held-out rows that were predicted, starting with the first."
    accuracy: FiniteFloat
    "The fraction of correct predictions, 0 to 1."
    classes: Count
    confusion: list[list[Count]]
    "The number of rows for each label (first index) and predicted class (second index)."
    mistakes: list[Example] = field(default_factory=list)
    "Wrong predictions, most confident first."
    right: list[Example] = field(default_factory=list)
    "Correct predictions, spread over the classes."
    samples: list[Example] = field(default_factory=list)
    "Training rows without predictions."
    names: list[str] = field(default_factory=list)
    "The names of the classes, or an empty list if the classes have no names."

    def __post_init__(self) -> None:
        if len(self.confusion) != self.classes or any(len(row) != self.classes for row in self.confusion):
            raise ValueError(f"the confusion matrix does not have {self.classes} rows and columns")

    def name(self, label: int) -> str:
        """Return the name of a class, or its number if it has no name."""
        return self.names[label] if label < len(self.names) else str(label)


@dataclass(frozen=True)
class Exhibit:
    """Text, a table or images, returned by a task's `show`."""

    __pydantic_config__: ClassVar = AS_BASE64

    title: str
    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str | FiniteFloat | None]] = field(default_factory=list)
    "The table's rows, with one cell for each column."
    images: list[bytes] = field(default_factory=list)
    "PNG images."


@dataclass(frozen=True)
class TaskExhibit:
    """Everything that the task's `show` returned for a checkpoint's model."""

    checkpoint: CheckpointName
    step: Count
    parts: list[Exhibit]


FILES: dict[type, str] = {Predictions: "predictions.json", TaskExhibit: "shown.json"}

Shown = TypeVar("Shown", Predictions, TaskExhibit)


def write_shown(run: Run, shown: Predictions | TaskExhibit) -> None:
    """Write predictions or the output of `show` to the run, replacing earlier ones. Raises `StorageError`."""
    schema = type(shown)
    run.storage.write(run.key(FILES[schema]), to_json(adapter(schema).dump_python(shown, mode="json", warnings=False)))


def read_shown(run: Run, schema: type[Shown]) -> Shown | None:
    """Return the run's predictions or the output of `show`, or None if the object is missing or damaged.

    Raises `StorageError` if storage fails.
    """
    return read_if_usable(lambda: load_shown(run, schema))


def load_shown(run: Run, schema: type[Shown]) -> Shown:
    """Return the predictions or the output of `show`. Raises `NotFoundError`, `DamageError` or `StorageError`."""
    return read(run, schema, FILES[schema])
