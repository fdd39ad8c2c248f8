"""`Source`, through which both loaders read rows, and the record of a model's data in its checkpoints."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from sunspot.data.fingerprint import digest, spread_evenly
from sunspot.data.order import Steps
from sunspot.errors import DataError
from sunspot.settings import Settings

if TYPE_CHECKING:
    import torch

HELD_OUT = "held_out"
"""Name of the only column of `RowNumbers`: uint8 [n], 1 for held-out rows."""

SAMPLED_ROWS = 64
"""Number of rows, spread evenly over all, whose content is part of the fingerprint of `RowNumbers`."""


class Source(Protocol):
    """Rows, usually images with labels, in row groups. A source must be picklable, because Ray's tasks get a copy.

    A row group is the unit of reading. A source may also have `class_names`, the name of each class by its label;
    `scales`, which is True if pictures were scaled to `shape`; and `notes`, lines that a run prints before its first
    step.

    A task with its own `find_sources` chooses the columns of its rows: only predictions need images or labels.
    `build_model` gets the source for its `shape` and `classes`.
    """

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Number of rows in each group. Row ids count through all groups, from 0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of every image; for other rows, whatever their task needs."""

    @property
    def classes(self) -> int:
        """Number of classes. Labels are 0 .. classes - 1."""

    @property
    def fingerprint(self) -> str:
        """Digest that changes with the rows: their files, row groups and shape, and samples of their content.

        The part before the first '-' does not depend on the content. Older versions recorded only that part.
        """

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Read `image` (uint8 [n, C, H, W]) and, if the rows have labels, `label` (int64 [n]) of one row group.

        `rows` are positions in the group, in any order. Only these rows are decoded, and they are returned in that
        order. The method is thread-safe, and the arrays may be read-only views. Raises `DataError`, which names the
        file and the row, or `StorageError`.
        """

    def where(self, group: int, row: int) -> str:
        """Return a name for a row in messages: its file and its position there."""


@dataclass(frozen=True)
class RowNumbers:
    """A `Source` of row ids, for a library or task that reads the rows itself."""

    row_groups: tuple[int, ...]
    shape: tuple[int, ...]
    fingerprint: str
    held_out: bool = False
    classes: int = 0

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        count = self.row_groups[group] if rows is None else len(rows)
        return {HELD_OUT: np.full(count, self.held_out, np.uint8)}

    def where(self, group: int, row: int) -> str:
        return f"row {row} of the {'held-out' if self.held_out else 'training'} rows"


MAX_VALUES = 1 << 27
"""Largest number of values in a row, and of classes, that a checkpoint's record may state. An RGB image of 6000 by 6000
pixels has fewer."""


@dataclass(frozen=True)
class ModelData:
    """Record of a model's training data in its checkpoints, so that rows to predict are read in the same way."""

    shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...] = ()
    scales: bool = False
    "True if pictures of any size were scaled to `shape`."

    @classmethod
    def of(cls, source: Source) -> ModelData:
        """Return the record for training rows."""
        names = getattr(source, "class_names", ())
        return cls(tuple(source.shape), source.classes, tuple(names), getattr(source, "scales", False))

    def record(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self) | {"shape": list(self.shape), "class_names": list(self.class_names)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ModelData:
        """Return the data that a checkpoint records.

        Raises `KeyError`, `TypeError` or `ValueError` for a record that this class did not make.
        """
        listed = {"shape": tuple(record["shape"]), "class_names": tuple(record.get("class_names", ()))}
        data = cls(**{**record, **listed})
        are_counts = all(type(count) is int and 0 <= count <= MAX_VALUES for count in (*data.shape, data.classes))
        are_names = all(isinstance(name, str) for name in data.class_names)
        if not (are_counts and are_names and math.prod(data.shape) <= MAX_VALUES):
            raise ValueError(
                f"the shape {data.shape}, {data.classes} classes and their names do not describe a model's rows"
            )
        return data

    def name(self, label: int) -> str:
        """Return the name of a class, or its number if classes have no names."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


@dataclass(frozen=True)
class EmptySource(ModelData):
    """A `Source` without rows, for building a model when there is no dataset."""

    row_groups: tuple[int, ...] = ()
    fingerprint: str = ""

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        raise DataError("a model is being built from its checkpoint alone: there are no rows to read")

    def where(self, group: int, row: int) -> str:
        return "no dataset"


class PredictionSettings(Settings):
    """Settings for opening rows that a run's model predicts. Such rows may lack labels or have other classes.

    A task's `find_sources` takes nothing but settings, so these settings carry the model's data to `open_table`.
    """

    predicting_model: ModelData

    @classmethod
    def of(cls, settings: Settings, model: ModelData) -> PredictionSettings:
        """Return a run's settings together with the data of its model."""
        return cls.model_construct(settings.model_fields_set, **dict(settings), predicting_model=model)


def predicting_model(settings: Settings) -> ModelData | None:
    """Return the data of the model that predicts the rows, or None if the rows are for training."""
    return settings.predicting_model if isinstance(settings, PredictionSettings) else None


@dataclass(frozen=True)
class DataPlan:
    """Training rows and held-out rows of a run, and the steps that go through them."""

    train: Source
    test: Source | None
    steps: Steps
    seed: int


Column = TypeVar("Column")


def model_inputs(rows: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns that a model predicts from: all but `row` and `label`."""
    return {name: column for name, column in rows.items() if name not in ("row", "label")}


def rows_in(source: Source) -> int:
    """Return the number of rows in all groups."""
    return sum(source.row_groups)


def notes_on(*sources: Source | None) -> list[str]:
    """Return notes for the user on these sources, such as which files are not read."""
    return [note for source in sources for note in getattr(source, "notes", ())]


def read_rows(source: Source, first: int, last: int) -> dict[str, np.ndarray]:
    """Read the rows with the ids `first` .. `last` - 1, and their ids as `row` (int64 [n]).

    Raises the errors of `Source.read`.
    """
    starts = np.cumsum([0, *source.row_groups])
    parts = [
        source.read(group, np.arange(max(first, start), min(last, end)) - start)
        for group, (start, end) in enumerate(itertools.pairwise(starts))
        if max(first, start) < min(last, end)
    ]
    return {"row": np.arange(first, last), **{name: np.concatenate([p[name] for p in parts]) for name in parts[0]}}


def number_rows(dataset: Any, held_out: bool = False) -> RowNumbers:
    """Return the row numbers of a dataset that has a length and returns rows by number.

    The `shape` of the result is the number of columns.
    """
    count = len(dataset)
    chosen = [dataset[number] for number in spread_evenly(count, SAMPLED_ROWS)]
    rows = [dict(row) if isinstance(row, Mapping) else row for row in chosen]
    columns = sorted(rows[0]) if rows and isinstance(rows[0], dict) else []
    layout = digest(repr((count, columns)).encode())
    content = digest(*map(pickle.dumps, rows))
    return RowNumbers((count,), (len(columns) or 1,), f"{layout}-{content}", held_out)


def check_labels_match(train: Source, test: Source) -> None:
    """Raise `DataError` if a model for the training rows cannot evaluate the held-out rows."""
    if train.shape != test.shape:
        raise DataError(
            f"{test.where(0, 0)}: images of shape {test.shape} (channels, height, width), but {train.where(0, 0)} has "
            f"{train.shape}; both must have the same shape"
        )
    if test.classes <= train.classes:
        return
    for group in range(len(test.row_groups)):
        labels = test.read(group)["label"]
        outside = np.flatnonzero(labels >= train.classes)
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"{test.where(group, row)}: label {labels[row]}, but the training rows have only 0 to "
                f"{train.classes - 1}; number the classes in the same way in both"
            )


Batch: TypeAlias = "dict[str, torch.Tensor]"
"""Columns of some rows: `row` int64 [B] (row ids) and the columns of their source, such as `image` uint8 [B, C, H, W]
and `label` int64 [B], or `text` uint8 [B, T]."""
