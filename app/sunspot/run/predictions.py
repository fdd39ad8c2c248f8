"""The model of a finished run, as the report shows it: predictions of held-out rows, and exhibits of the task."""

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from sunspot.run import Run, to_json
from sunspot.run.objects import CheckpointName, Count, FiniteFloat, adapter, read, read_if_usable

MAX_MISTAKES = 48
"""Largest number of images of mistakes. With these limits the report stays far below 2 MB."""

MAX_RIGHT = 24
"""Largest number of images of right predictions."""

MAX_SAMPLES = 24
"""Largest number of images of sample rows."""

MAX_PIXELS = 64
"""Largest width and height of a kept image, enough to see what it shows."""

MAX_PARTS = 20
"""Largest number of a task's exhibits."""

MAX_ROWS = 50
"""Largest number of rows in an exhibited table."""

MAX_CHARACTERS = 2000
"""Largest number of characters in an exhibited text or cell."""

MAX_IMAGES = 48
"""Largest number of exhibited images, of all exhibits together."""

AS_BASE64 = {"val_json_bytes": "base64", "ser_json_bytes": "base64"}


@dataclass(frozen=True)
class Example:
    """A row with its image and, unless it is a sample, its prediction."""

    __pydantic_config__: ClassVar = AS_BASE64

    row: Count
    "Id of the row in its source."
    label: Count
    predicted: Count | None
    probability: FiniteFloat | None
    "Probability of the predicted class."
    image: bytes
    "PNG of at most MAX_PIXELS in width and height."


@dataclass(frozen=True)
class Predictions:
    """A summary of a checkpoint's predictions of held-out rows."""

    checkpoint: CheckpointName
    step: Count
    rows: Count
    "Number of held-out rows predicted, from the first."
    accuracy: FiniteFloat
    "Fraction of right predictions, 0 to 1."
    classes: Count
    confusion: list[list[Count]]
    "Number of rows by label, then by predicted class."
    mistakes: list[Example] = field(default_factory=list)
    "Wrong predictions, the most certain first."
    right: list[Example] = field(default_factory=list)
    "Right predictions, spread over the classes."
    samples: list[Example] = field(default_factory=list)
    "Training rows without predictions."
    names: list[str] = field(default_factory=list)
    "Names of the classes, if they have names."

    def __post_init__(self) -> None:
        if len(self.confusion) != self.classes or any(len(row) != self.classes for row in self.confusion):
            raise ValueError(f"the confusion matrix does not have {self.classes} rows and columns")

    def name(self, label: int) -> str:
        """Return the name of a class, or its number if it has no name."""
        return self.names[label] if label < len(self.names) else str(label)


@dataclass(frozen=True)
class Exhibit:
    """A text, a table, or images."""

    __pydantic_config__: ClassVar = AS_BASE64

    title: str
    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str | FiniteFloat | None]] = field(default_factory=list)
    "Rows with one cell for each column."
    images: list[bytes] = field(default_factory=list)
    "Images as PNGs."


@dataclass(frozen=True)
class TaskExhibit:
    """All exhibits of a checkpoint's model."""

    checkpoint: CheckpointName
    step: Count
    parts: list[Exhibit]


FILES: dict[type, str] = {Predictions: "predictions.json", TaskExhibit: "shown.json"}

Shown = TypeVar("Shown", Predictions, TaskExhibit)


def write_shown(run: Run, shown: Predictions | TaskExhibit) -> None:
    """Write the run's predictions or its task's exhibits in place of earlier ones. Raises `StorageError`."""
    schema = type(shown)
    run.storage.write(run.key(FILES[schema]), to_json(adapter(schema).dump_python(shown, mode="json", warnings=False)))


def read_shown(run: Run, schema: type[Shown]) -> Shown | None:
    """Return the run's `Predictions` or `TaskExhibit`, or None if there are none or they are damaged.

    Raises `StorageError`.
    """
    return read_if_usable(lambda: load_shown(run, schema))


def load_shown(run: Run, schema: type[Shown]) -> Shown:
    """Return the run's `Predictions` or `TaskExhibit`. Raises `NotFoundError`, `DamageError` or `StorageError`."""
    return read(run, schema, FILES[schema])
