"""The division of a run's rows into steps, epochs and, in a mixture, passes through each source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from sunspot.run.identity import Identity, SourceRows

MAX_DIGITS = 16
"""Number of digits at which a batch size is certainly invalid."""


@dataclass(frozen=True)
class SourceProgress:
    """A run's progress through one source of its mixture."""

    source: str
    share: float
    "The fraction of the run's rows that come from this source."
    rows: int
    epochs: float
    "The number of passes through the source so far."


@dataclass(frozen=True)
class EpochLayout:
    """The division of an epoch into optimizer steps, from `run.json`."""

    rows: int
    steps_per_epoch: int
    batch: int
    sources: tuple[SourceRows, ...] = ()
    "The sources of a mixture, or empty for a single dataset."

    def position(self, step: int) -> int:
        """Return the number of rows that the run has consumed after a step.

        An epoch's last step consumes the remaining rows. It can have fewer rows than the other steps, or one row more.
        """
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.rows + steps * self.batch

    def rows_of(self, step: int) -> int:
        """Return the number of rows that a step consumes."""
        return self.position(step) - self.position(step - 1)

    def count(self, step: int) -> list[int]:
        """Return the number of rows that the run has consumed from each source after a step."""
        from sunspot.settings.mixture import (
            count_by_source,
        )  # pydantic is slow to import, and most verbs do not need it

        return count_by_source([source.weight for source in self.sources] or [1], self.position(step))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first row ID of each source, and the first ID after its rows."""
        sizes = [source.rows for source in self.sources] or [self.rows]
        return list(pairwise(accumulate(sizes, initial=0)))

    def begun(self, step: int) -> list[int]:
        """Return how many passes through each source have begun by the end of a step."""
        counts = zip(self.count(step), self.bounds, strict=True)
        return [-(-taken // (after - first)) for taken, (first, after) in counts]

    def progress(self, step: int) -> list[SourceProgress]:
        """Return the progress through each source of a mixture after a step, or an empty list for a single dataset."""
        total = sum(source.weight for source in self.sources)
        return [
            SourceProgress(source.name, source.weight / total, source.rows, taken / source.rows)
            for source, taken in zip(self.sources, self.count(step), strict=False)
        ]


def find_layout(identity: Identity) -> EpochLayout | None:
    """Return the layout of a run's epochs, or None if its identity lacks the rows or the batch size."""
    rows = identity.rows
    batch = identity.settings.get("SUNSPOT_GLOBAL_BATCH_SIZE", "")
    if not (rows and rows.steps_per_epoch and batch.isdecimal() and len(batch) < MAX_DIGITS and int(batch)):
        return None
    if not (rows.rows and all(source.rows and source.weight for source in rows.sources)):
        return None
    return EpochLayout(rows.rows, rows.steps_per_epoch, int(batch), rows.sources)
