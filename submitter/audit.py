"""`sunspot audit`: proves which rows each epoch consumed, from the record of the steps that made the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from app.errors import DamageError, NotFoundError
from app.layout import Run
from app.layout.attempts import Span, lineage, read_attempts
from app.layout.checkpoints import find_newest_good
from app.layout.history import read_audit
from submitter.output import print_json, print_table, warn

if TYPE_CHECKING:
    import pyarrow

MOST_NAMED = 5
"""Faults of one kind that are named one by one; the others are counted."""


@dataclass(frozen=True)
class Data:
    """How an epoch is cut into optimizer steps, as `run.json` has it."""

    rows: int
    steps_per_epoch: int
    batch: int

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, both from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def rows_of(self, step: int) -> int:
        """How many rows a step consumes: the last of an epoch takes what is left, be it less or one more."""
        before = (step - 1) % self.steps_per_epoch
        return self.rows - before * self.batch if before == self.steps_per_epoch - 1 else self.batch


@dataclass(frozen=True)
class Epoch:
    """What one epoch consumed."""

    epoch: int
    rows: int
    missing: int
    "Rows of the data that it did not consume; 0 while it is unfinished."
    repeated: int
    "Rows that it consumed again."


def audit(run: Run, as_json: bool) -> None:
    """Print what each epoch consumed up to the newest whole checkpoint; raises `DamageError` for any fault."""
    attempts = read_attempts(run)
    checkpoint, skipped = find_newest_good(run, attempts)
    for text in skipped:
        warn(f"skipped {text}")
    if not checkpoint:
        raise NotFoundError(f"{run.location}: no whole checkpoint, so there is no model whose rows could be proved")
    tables = [table for table in read_audit(run, _cut(lineage(attempts), checkpoint.step)) if len(table)]
    if not tables:
        raise NotFoundError(f"{run.location}: no audit was recorded; set SUNSPOT_AUDIT=true from the start of a run")

    record = run.read_json("run.json")
    data = Data(record["rows"], record["steps_per_epoch"], int(record["settings"]["SUNSPOT_GLOBAL_BATCH_SIZE"]))
    epochs = list(count_rows(tables, data, checkpoint.step))
    if as_json:
        print_json([asdict(epoch) for epoch in epochs])
    else:
        print_table(
            ["epoch", "rows", "missing", "repeated"], [[e.epoch, e.rows, e.missing, e.repeated] for e in epochs]
        )
    faults = [*find_strangers(tables, data), *find_wrong_steps(tables, data, checkpoint.step)]
    for text in faults:
        warn(text)
    missing, repeated = sum(epoch.missing for epoch in epochs), sum(epoch.repeated for epoch in epochs)
    if faults or missing or repeated:
        raise DamageError(f"{run.location}: {missing} rows missing, {repeated} repeated, up to step {checkpoint.step}")


def count_rows(tables: list[pyarrow.Table], data: Data, end: int) -> Iterator[Epoch]:
    """Count the rows of every epoch up to step `end`."""
    import pyarrow
    import pyarrow.compute as pc

    # Epoch by epoch: a set of one epoch's rows stays in the cache, one of all (epoch, row) takes ten times as long.
    consumed: dict[int, list[pyarrow.Array]] = {epoch: [] for epoch in range(1, data.epoch_of(end) + 1)}
    for table in tables:
        of_row = pc.add(pc.divide(pc.subtract(table["step"], 1), data.steps_per_epoch), 1)
        for epoch in pc.unique(of_row).to_pylist():
            consumed[epoch] += table["row"].filter(pc.equal(of_row, epoch)).chunks
    for epoch, chunks in consumed.items():
        rows = pyarrow.chunked_array(chunks, pyarrow.int64())
        known = rows.filter(_in_data(rows, data))
        distinct = pc.count_distinct(known).as_py()
        finished = epoch * data.steps_per_epoch <= end
        yield Epoch(epoch, len(rows), data.rows - distinct if finished else 0, len(known) - distinct)


def find_strangers(tables: list[pyarrow.Table], data: Data) -> list[str]:
    """A line for each row that is not in the data."""
    import pyarrow.compute as pc

    strangers: list[tuple[int, int]] = []
    for table in tables:
        found = table.filter(pc.invert(_in_data(table["row"], data)))
        strangers += zip(found["step"].to_pylist(), found["row"].to_pylist(), strict=True)
    return _shorten(f"step {step}: row {row} is not one of 0..{data.rows - 1}" for step, row in strangers)


def find_wrong_steps(tables: list[pyarrow.Table], data: Data, end: int) -> list[str]:
    """A line for each step up to `end` that consumed another number of rows than it had to."""
    import pyarrow

    counted = pyarrow.concat_tables(tables).group_by("step").aggregate([([], "count_all")])
    found = dict(zip(counted["step"].to_pylist(), counted["count_all"].to_pylist(), strict=True))
    unrecorded = [step for step in range(1, end + 1) if step not in found]
    wrong = [step for step in sorted(found) if found[step] != data.rows_of(step)]
    return [
        *_shorten(f"steps {first}..{last}: not recorded" for first, last in _ranges(unrecorded)),
        *_shorten(f"step {step}: {found[step]} rows instead of {data.rows_of(step)}" for step in wrong),
    ]


def _cut(spans: list[Span], end: int) -> list[Span]:
    """The spans up to step `end`."""
    return [span._replace(upto=end if span.upto is None else min(span.upto, end)) for span in spans if span.after < end]


def _in_data(rows: pyarrow.ChunkedArray, data: Data) -> pyarrow.ChunkedArray:
    import pyarrow.compute as pc

    return pc.and_(pc.greater_equal(rows, 0), pc.less(rows, data.rows))


def _ranges(steps: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each stretch of consecutive steps."""
    firsts = [step for step, before in zip(steps, [None, *steps], strict=False) if before != step - 1]
    lasts = [step for step, behind in zip(steps, [*steps[1:], None], strict=False) if behind != step + 1]
    return zip(firsts, lasts, strict=True)


def _shorten(lines: Iterable[str]) -> list[str]:
    named = list(lines)
    more = len(named) - MOST_NAMED
    return named if more <= 0 else [*named[:MOST_NAMED], f"and {more} more like it"]
