"""What a task shows of its trained model in the report: `shown.json`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import NotFoundError, SettingsError
from app.run import Run, to_json
from app.run.objects import CheckpointName, Count, Measure, news, read, warn_once

FILE = "shown.json"

MOST_PARTS, MOST_ROWS, MOST_CHARACTERS = 20, 50, 2000
"""Parts, rows of a table, and characters of a text or a cell: with them the report stays far below 2 MB."""


@dataclass(frozen=True)
class Part:
    """A text, or a table."""

    title: str
    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str | Measure | None]] = field(default_factory=list)
    "Cells, one for each column."


@dataclass(frozen=True)
class Shown:
    """What the task showed of a checkpoint's model."""

    checkpoint: CheckpointName
    step: Count
    parts: list[Part]


def to_parts(found: Any) -> list[Part]:
    """The parts of what a task's `show` has returned, cut to the limits; raises `SettingsError` for anything else."""
    if not isinstance(found, Mapping):
        raise SettingsError(
            f"show returned a {type(found).__name__}; return a dict of texts, numbers and tables by title"
        )
    return [_to_part(str(title)[:MOST_CHARACTERS], value) for title, value in list(found.items())[:MOST_PARTS]]


def _to_part(title: str, value: Any) -> Part:
    if isinstance(value, str | int | float):
        return Part(title, text=value[:MOST_CHARACTERS] if isinstance(value, str) else f"{value:.4g}")
    rows = list(value)[:MOST_ROWS] if isinstance(value, Sequence) else [value]
    if not all(isinstance(row, Mapping) for row in rows):
        raise SettingsError(
            f"show returned {title!r} as {type(value).__name__}; give a text, a number, or a list of dicts"
        )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Part(
        title, columns=[str(name) for name in columns], rows=[[_to_cell(row.get(n)) for n in columns] for row in rows]
    )


def _to_cell(value: Any) -> str | float | None:
    if value is None or isinstance(value, str):
        return value and value[:MOST_CHARACTERS]
    number = float(value)  # tensors, too
    return number if math.isfinite(number) else str(number)


def write_shown(run: Run, shown: Shown) -> None:
    """Replace what the run shows. Raises `StorageError`."""
    run.storage.write(run.key(FILE), to_json(asdict(shown)))


def read_shown(run: Run, warn: Callable[[str], Any] = warn_once) -> Shown | None:
    """What the run shows; None without it, or when it is damaged, of which `warn` hears. Raises `StorageError`."""
    try:
        return news(lambda: read(run, Shown, FILE), None, warn)
    except NotFoundError:
        return None
