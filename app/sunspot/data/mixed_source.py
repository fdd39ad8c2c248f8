"""Opens the sources of a mixture (DATASET=a:0.7,b:0.3) and joins them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sunspot.data.fingerprint import digest
from sunspot.data.order import RunOrder, mixed_order, run_order
from sunspot.data.source import ModelData, Source, notes_on, predicting_model
from sunspot.errors import DataError
from sunspot.settings import PREFIX, Settings
from sunspot.settings.mixture import WeightedSource

OpenRows = Callable[[Settings], tuple[Source, Source | None]]
"""A function that opens the training rows of a single dataset, and its held-out rows, if any."""


@dataclass(frozen=True)
class MixedSource(ModelData):
    """A `Source` that combines the rows of several sources. Row IDs follow the order of the sources."""

    sources: tuple[Source, ...] = ()
    mixture: tuple[WeightedSource, ...] = ()
    "The weights of training rows, or empty for held-out rows, which are all used."

    @classmethod
    def join(cls, sources: Sequence[Source], mixture: tuple[WeightedSource, ...] = ()) -> MixedSource:
        """Return the joined rows of sources that have the same shapes and class names."""
        data = [ModelData.of(source) for source in sources]
        classes, scales = max(each.classes for each in data), any(each.scales for each in data)
        return cls(data[0].shape, classes, data[0].class_names, scales, tuple(sources), mixture)

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(rows for source in self.sources for rows in source.row_groups)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(notes_on(*self.sources))

    @property
    def fingerprint(self) -> str:
        layouts, contents = zip(*(source.fingerprint.partition("-")[::2] for source in self.sources), strict=True)
        weights = [str(each.weight) for each in self.mixture]
        return f"{digest(*map(str.encode, (*layouts, *weights)))}-{digest(*map(str.encode, contents))}"

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        source = self._source_of(group)
        return self.sources[source].read(group - self._first_groups[source], rows)

    def where(self, group: int, row: int) -> str:
        source = self._source_of(group)
        return self.sources[source].where(group - self._first_groups[source], row)

    @cached_property
    def _first_groups(self) -> list[int]:
        return [0, *itertools.accumulate(len(source.row_groups) for source in self.sources)]

    def _source_of(self, group: int) -> int:
        return bisect_right(self._first_groups, group) - 1


def order_of(source: Source, loader: str, seed: int) -> RunOrder:
    """Return the order in which a run with this LOADER and SEED visits its training rows."""
    if not isinstance(source, MixedSource):
        return run_order(loader, source.row_groups, seed)
    groups = [each.row_groups for each in source.sources]
    return mixed_order(loader, groups, tuple(each.weight for each in source.mixture), seed)


def open_mixture(
    settings: Settings, mixture: tuple[WeightedSource, ...], open_rows: OpenRows
) -> tuple[Source, Source | None]:
    """Open each source of a mixture as a dataset of its own, and join their training rows and their held-out rows.

    TEST_DATASET replaces the held-out rows of all sources. Raises `DataError` if the sources do not fit together.
    """
    opened: list[tuple[Source, Source | None]] = []
    for each in mixture:
        alone: dict[str, Any] = {"dataset": each.location}
        if settings.test_dataset and opened:
            alone |= {"test_dataset": "", "test_share": 0}
        opened.append(open_rows(settings.model_copy(update=alone)))
    trains = [train for train, _ in opened]
    tests = [test for _, test in (opened[:1] if settings.test_dataset else opened) if test]
    if predicting_model(settings) is None:
        _refuse_mismatch(mixture, trains)
    return MixedSource.join(trains, mixture), MixedSource.join(tests) if tests else None


def _refuse_mismatch(mixture: tuple[WeightedSource, ...], sources: Sequence[Source]) -> None:
    """Raise `DataError` if the sources differ in columns or class names, or if two of them have the same rows."""
    seen: dict[str, str] = {}
    for each, source in zip(mixture, sources, strict=True):
        twin = seen.setdefault(source.fingerprint, each.location)
        if twin != each.location:
            raise DataError(
                f"{PREFIX}DATASET: the sources {twin} and {each.location} have the same rows; list only one of "
                f"them, with the sum of the two weights. A task that ignores {PREFIX}DATASET cannot use a mixture, "
                "because all sources would have the same rows"
            )
        found, expected = map(_describe_rows, (source, sources[0]))
        if found != expected:
            raise DataError(
                f"{PREFIX}DATASET: {each.location} has {found}, but {mixture[0].location} has {expected}; a mixture "
                "needs the same columns and class names in all its sources"
            )


def _describe_rows(source: Source) -> str:
    """Describe the columns of a source, based on its first row, and the class names."""
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    read = source.read(group, np.zeros(1, np.int64))
    columns = ", ".join(f"{name} {values.dtype}{list(values.shape[1:])}" for name, values in sorted(read.items()))
    return f"the columns {columns} and the class names {', '.join(ModelData.of(source).class_names) or '(none)'}"
