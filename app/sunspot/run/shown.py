"""What a task shows of its trained model in the report: `shown.json`."""

import base64
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from sunspot.run import Run, to_json
from sunspot.run.objects import CheckpointName, Count, Measure, read, read_if_usable

FILE = "shown.json"

MAX_PARTS, MAX_ROWS, MAX_CHARACTERS, MAX_IMAGES = 20, 50, 2000, 48
"""Parts, rows of a table, characters of a text or a cell, and all images: so the report stays far below 2 MB."""


@dataclass(frozen=True)
class Exhibit:
    """A text, a table, or images."""

    __pydantic_config__: ClassVar = {"val_json_bytes": "base64"}

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


def write_exhibit(run: Run, shown: TaskExhibit) -> None:
    """Replace what the run shows. Raises `StorageError`."""
    record = asdict(shown)
    for part in record["parts"]:
        part["images"] = [base64.b64encode(image).decode() for image in part["images"]]
    run.storage.write(run.key(FILE), to_json(record))


def read_exhibit(run: Run) -> TaskExhibit | None:
    """Return what the run shows; None without it, or when it is damaged. Raises `StorageError`."""
    return read_if_usable(lambda: load_exhibit(run))


def load_exhibit(run: Run) -> TaskExhibit:
    """Return what the run shows; raises `NotFoundError`, `DamageError` or `StorageError`."""
    shown: TaskExhibit = read(run, TaskExhibit, FILE)
    return shown
