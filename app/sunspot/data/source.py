"""Defines `Source`, through which loaders read rows, and `ModelData`, which describes a model's training data."""

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
"""Name of the only column of `RowNumbers`, uint8 [n]. Its value is 1 for held-out rows."""

SAMPLED_ROWS = 64
"""Number of evenly spaced rows that the fingerprint of a PyTorch or Hugging Face dataset covers."""


class Source(Protocol):
    """Rows of a dataset, usually images with labels. The rows are divided into groups, and `read` reads from one group.

    A source must be picklable, because Ray tasks get a copy. It can have three more attributes: `class_names` (indexed
    by label), `scales` (True if images are scaled to `shape`) and `notes` (lines that a run prints before its first
    step).

    A task's own `find_sources` can return sources with any columns. `build_model` gets the source, so that it can use
    `shape` and `classes`.
    """

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The number of rows in each group. Row IDs count from 0 across all groups."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The channels, height and width of an image. If rows are not images, the task defines the shape's meaning."""

    @property
    def classes(self) -> int:
        """The number of classes. Labels are 0 .. classes - 1."""

    @property
    def fingerprint(self) -> str:
        """The digest of the files, row groups and shape, followed by '-' and the digest of samples of the content.

        Older versions recorded only the first digest.
        """

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the columns of a row group: `image`, uint8 [n, C, H, W], and `label`, int64 [n], if there are labels.

        `rows` are positions in the group. If they are given, only these rows are decoded and returned, in this order.
        This method is thread-safe, and the arrays can be read-only views. Raises `DataError` or `StorageError`.
        """

    def where(self, group: int, row: int) -> str:
        """Return a row's name for messages, such as its file and its position in the file."""


@dataclass(frozen=True)
class RowNumbers:
    """A `Source` of row IDs for libraries and tasks that read the rows themselves."""

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
"""Largest valid number of values in a row, or of classes, in a checkpoint's record.

An RGB image of 6000 x 6000 pixels has fewer values.
"""


@dataclass(frozen=True)
class ModelData:
    """Facts about a model's training data, as recorded in its checkpoints.

    Prediction uses these facts to read rows in the same way as the training rows.
    """

    shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...] = ()
    scales: bool = False
    "True if images of any size were scaled to `shape`."

    @classmethod
    def of(cls, source: Source) -> ModelData:
        """Return the facts about a source of training rows."""
        names = getattr(source, "class_names", ())
        return cls(tuple(source.shape), source.classes, tuple(names), getattr(source, "scales", False))

    def record(self) -> dict[str, Any]:
        """Return this object as JSON values, to be stored in a checkpoint's record."""
        return asdict(self) | {"shape": list(self.shape), "class_names": list(self.class_names)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ModelData:
        """Create the object from the JSON values in a checkpoint's record.

        Raises `KeyError`, `TypeError` or `ValueError` if the record is invalid.
        """
        listed = {"shape": tuple(record["shape"]), "class_names": tuple(record.get("class_names", ()))}
        data = cls(**{**record, **listed})
        are_counts = all(type(count) is int and 0 <= count <= MAX_VALUES for count in (*data.shape, data.classes))
        are_names = all(isinstance(name, str) for name in data.class_names)
        if not (are_counts and are_names and math.prod(data.shape) <= MAX_VALUES):
            raise ValueError(
                f"the shape {data.shape}, the number of classes ({data.classes}) or the class names are invalid"
            )
        return data

    def name(self, label: int) -> str:
        """Return a class's name, or its number if it has no name."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


@dataclass(frozen=True)
class EmptySource(ModelData):
    """A `Source` without rows, used to build a model without a dataset."""

    row_groups: tuple[int, ...] = ()
    fingerprint: str = ""

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        raise DataError("the model is built from its checkpoint without a dataset, so there are no rows to read")

    def where(self, group: int, row: int) -> str:
        return "no dataset"


class PredictionSettings(Settings):
    """Settings for opening the rows of a prediction. These rows can lack labels or have classes unknown to the model.

    A task's `find_sources` takes only settings, so these settings carry the model's data to `open_table`.
    """

    predicting_model: ModelData

    @classmethod
    def of(cls, settings: Settings, model: ModelData) -> PredictionSettings:
        """Return a run's settings, extended by the facts about its model's training data."""
        return cls.model_construct(settings.model_fields_set, **dict(settings), predicting_model=model)


def predicting_model(settings: Settings) -> ModelData | None:
    """Return the `ModelData` of the model that makes the predictions, or None if the rows are for training."""
    return settings.predicting_model if isinstance(settings, PredictionSettings) else None


@dataclass(frozen=True)
class DataPlan:
    """A run's training and held-out rows, and its optimizer steps."""

    train: Source
    test: Source | None
    steps: Steps
    seed: int


Column = TypeVar("Column")


def model_inputs(rows: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns from which a model predicts, which are all except `row` and `label`."""
    return {name: column for name, column in rows.items() if name not in ("row", "label")}


def rows_in(source: Source) -> int:
    """Return the number of rows in all groups."""
    return sum(source.row_groups)


def notes_on(*sources: Source | None) -> list[str]:
    """Return the sources' notes for the user, for example about files that are not read."""
    return [note for source in sources for note in getattr(source, "notes", ())]


def read_rows(source: Source, first: int, last: int) -> dict[str, np.ndarray]:
    """Read the rows with IDs `first` .. `last` - 1, and add the IDs as column `row`, int64 [n].

    Raises the same errors as `Source.read`.
    """
    starts = np.cumsum([0, *source.row_groups])
    parts = [
        source.read(group, np.arange(max(first, start), min(last, end)) - start)
        for group, (start, end) in enumerate(itertools.pairwise(starts))
        if max(first, start) < min(last, end)
    ]
    return {"row": np.arange(first, last), **{name: np.concatenate([p[name] for p in parts]) for name in parts[0]}}


def number_rows(dataset: Any, held_out: bool = False) -> RowNumbers:
    """Return a source of row numbers for a dataset with `__len__` and `__getitem__`.

    The result's `shape` contains the number of columns, or 1 if the rows are not dicts.
    """
    count = len(dataset)
    chosen = [dataset[number] for number in spread_evenly(count, SAMPLED_ROWS)]
    rows = [dict(row) if isinstance(row, Mapping) else row for row in chosen]
    columns = sorted(rows[0]) if rows and isinstance(rows[0], dict) else []
    layout = digest(repr((count, columns)).encode())
    content = digest(*map(pickle.dumps, rows))
    return RowNumbers((count,), (len(columns) or 1,), f"{layout}-{content}", held_out)


def check_labels_match(train: Source, test: Source) -> None:
    """Raise `DataError` if `test` has a different shape from `train`, or labels that `train` does not have."""
    if train.shape != test.shape:
        raise DataError(
            f"{test.where(0, 0)}: the image has the shape {test.shape} (channels, height, width), but "
            f"{train.where(0, 0)} has {train.shape}; both must have the same shape"
        )
    if test.classes <= train.classes:
        return
    for group in range(len(test.row_groups)):
        labels = test.read(group)["label"]
        outside = np.flatnonzero(labels >= train.classes)
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"{test.where(group, row)}: label is {labels[row]}, but the training rows only have labels 0 to "
                f"{train.classes - 1}; use the same class numbers in the training and held-out rows"
            )


Batch: TypeAlias = "dict[str, torch.Tensor]"
"""A mapping from column names to the values of B rows.

`row` contains row IDs, int64 [B]. The other columns are those of the source, such as `image`, uint8 [B, C, H, W], and
`label`, int64 [B], or `text`, uint8 [B, T].
"""
