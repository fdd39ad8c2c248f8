"""Audits which rows each epoch of a run consumed, and finds damaged checkpoints and missing receipts.

The audit covers the recorded steps that led to the newest intact checkpoint. Every attempt that took a step must have a
receipt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from sunspot.background import map_parallel
from sunspot.errors import DamageError, NotFoundError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import Attempt, Span, attempt_of, attempts_with_start, lineage, read_attempts, step_of
from sunspot.run.audit import read_audit
from sunspot.run.checkpoints import MANIFEST, classify, list_directories, verify
from sunspot.run.history import list_journal, newest_record, read_journal
from sunspot.run.identity import read_identity
from sunspot.run.incidents import find_gaps, read_receipts
from sunspot.run.objects import MAX_NUMBER
from sunspot.run.size_limits import MAX_EPOCHS
from sunspot.submitter.printing import progress_note, warn

if TYPE_CHECKING:
    import pyarrow

NO_ROWS = "no audit was recorded; start a run with another name and SUNSPOT_AUDIT=true, which records each step's rows"

MAX_NAMED = 5
"""Maximum number of listed faults of one kind. Other faults are only counted."""

COLUMNS = ("epoch", "rows", "missing", "repeated")

MAX_DIGITS = 16
"""Number of digits at which a batch size is certainly wrong."""


@dataclass(frozen=True)
class EpochLayout:
    """The division of an epoch into optimizer steps, from `run.json`."""

    rows: int
    steps_per_epoch: int
    batch: int

    def rows_of(self, step: int) -> int:
        """Return the number of rows that a step consumes.

        An epoch's last step consumes all remaining rows. It has at most one row more than any other step.
        """
        before = (step - 1) % self.steps_per_epoch
        return self.rows - before * self.batch if before == self.steps_per_epoch - 1 else self.batch


@dataclass(frozen=True)
class Epoch:
    """The rows that one epoch consumed."""

    epoch: int
    rows: int
    missing: int
    "Number of rows that the epoch did not consume, or 0 if it is unfinished."
    repeated: int
    "Number of rows that the epoch consumed more than once."
    finished: bool

    def record(self) -> dict[str, int]:
        """Return the JSON record of this epoch."""
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True)
class Proof:
    """The result of an audit up to the newest intact checkpoint."""

    step: int
    "The step of that checkpoint."
    epochs: list[Epoch]
    "The epochs up to that step, or empty if the run's rows were not recorded."
    wrong_rows: list[str]
    "A line for each invalid record of rows."
    damaged: list[str]
    "A line for each damaged checkpoint."
    gaps: list[str]
    "A line for each missing receipt."

    @property
    def faults(self) -> list[str]:
        """All faults except missing and repeated rows."""
        return [*self.wrong_rows, *self.damaged, *self.gaps]

    @property
    def summary(self) -> str:
        """A one-line summary of all faults, or an empty string."""
        missing = sum(epoch.missing for epoch in self.epochs)
        repeated = sum(epoch.repeated for epoch in self.epochs)
        parts = []
        if missing or repeated or self.wrong_rows:
            parts.append(f"{plural(missing, 'row')} missing, {repeated} repeated, up to step {self.step}")
        if self.damaged:
            parts.append(f"{plural(len(self.damaged), 'checkpoint')} damaged")
        if self.gaps:
            parts.append(f"{plural(len(self.gaps), 'receipt')} missing")
        return "; ".join(parts)


def prove(run: Run) -> Proof:
    """Check a run's rows, its receipts and every byte of its checkpoints.

    Raises `NotFoundError` if there is no checkpoint, and `DamageError` if all checkpoints are damaged or the records
    cannot be read.
    """
    # List checkpoints before reading the attempts, so that the attempt of every checkpoint is known.
    directories = list_directories(run)
    attempts = attempts_with_start(read_attempts(run))
    spans = lineage(attempts)
    counted, _, _ = classify(directories, spans)
    with progress_note("reading every byte of the checkpoints"):
        checked = verify(run, counted)
    damaged = [f"{checkpoint.name}: damaged, {'; '.join(faults)}" for checkpoint, faults in checked if faults]
    whole = [checkpoint for checkpoint, faults in checked if not faults]
    if not whole:
        for text in damaged:
            warn(text)
        error = DamageError if damaged else NotFoundError
        raise error(f"{run.location} has no intact checkpoint, so there are no rows to check")

    step = whole[-1].step
    spans = [s._replace(upto=step if s.upto is None else min(s.upto, step)) for s in spans if s.after < step]
    epochs, wrong_rows = prove_rows(run, spans, step)
    committed = [name for name, files in directories.items() if MANIFEST in files]
    stepped = find_attempts_with_steps(run, attempts, committed)
    gaps = find_gaps(read_receipts(read_journal(run, "events")), stepped)
    return Proof(step, epochs, wrong_rows, damaged, gaps)


def conclude(run: Run, proof: Proof) -> None:
    """Print all faults to stderr, and raise `DamageError` if there are any."""
    for text in proof.faults:
        warn(text)
    if proof.summary:
        raise DamageError(f"{run.location}: {proof.summary}")


def find_attempts_with_steps(run: Run, attempts: list[Attempt], committed: list[str]) -> set[int]:
    """Return the attempt numbers for which the metric history or a checkpoint shows that a step was taken.

    A record of the step that an attempt starts from is ignored, because it only contains an evaluation.
    """
    segments = list_journal(run, "metrics")
    starts = {attempt.number: attempt.step for attempt in attempts}
    newest = map_parallel(lambda number: newest_record(run, [Span(number, starts[number], None)], segments), starts)
    saved = {attempt_of(name) for name in committed if step_of(name) > starts.get(attempt_of(name), MAX_NUMBER)}
    return saved | {record["attempt"] for record in newest if record}


# ---------------------------------------------------------------------------------------------------------------- rows


def prove_rows(run: Run, spans: list[Span], end: int) -> tuple[list[Epoch], list[str]]:
    """Return the rows that each epoch consumed up to step `end`, and a list of faults.

    Raises `DamageError` if a record is damaged.
    """
    tables = [table for table in read_audit(run, spans) if len(table)]
    if not tables:
        return [], []
    layout = read_epoch_layout(run)
    wrong = [*find_foreign_rows(tables, layout), *find_wrong_steps(tables, layout, end)]
    return list(count_rows(tables, layout, end)), wrong


def read_epoch_layout(run: Run) -> EpochLayout:
    """Read the run's epoch layout. Raises `DamageError` if `run.json` lacks it."""
    begun = read_identity(run)
    batch = begun.settings.get("SUNSPOT_GLOBAL_BATCH_SIZE", "")
    rows = begun.rows
    if not (rows and rows.steps_per_epoch and batch.isdecimal() and len(batch) < MAX_DIGITS and int(batch)):
        place = run.storage.locate(run.key("run.json"))
        raise DamageError(f"{place} cannot be used: it lacks the rows per step or the steps per epoch")
    return EpochLayout(rows.rows, rows.steps_per_epoch, int(batch))


def count_rows(tables: list[pyarrow.Table], layout: EpochLayout, end: int) -> Iterator[Epoch]:
    """Count the rows that each epoch consumed up to step `end`."""
    import pyarrow
    import pyarrow.compute as pc

    # Count one epoch at a time, because one epoch's rows fit into the cache. Counting all epochs at once takes ten
    # times as long.
    last = (end - 1) // layout.steps_per_epoch + 1
    if last > MAX_EPOCHS:
        raise DamageError(
            f"the newest checkpoint (step {end:,}) is in epoch {last:,}, but an audit checks at most {MAX_EPOCHS:,} "
            "epochs"
        )
    consumed: dict[int, list[pyarrow.Array]] = {epoch: [] for epoch in range(1, last + 1)}
    for table in tables:
        for epoch, rows in _split_by_epoch(table, layout):
            consumed[epoch] += rows.chunks
    for epoch, chunks in consumed.items():
        rows = pyarrow.chunked_array(chunks, pyarrow.int64())
        known = rows.filter(_in_data(rows, layout))
        distinct = pc.count_distinct(known).as_py()
        finished = epoch * layout.steps_per_epoch <= end
        yield Epoch(epoch, len(rows), layout.rows - distinct if finished else 0, len(known) - distinct, finished)


def _split_by_epoch(table: pyarrow.Table, layout: EpochLayout) -> Iterator[tuple[int, pyarrow.ChunkedArray]]:
    """Yield each epoch and the rows that it consumed. The running time does not depend on the number of epochs."""
    import pyarrow.compute as pc

    epochs = pc.add(pc.divide(pc.subtract(table["step"], 1), layout.steps_per_epoch), 1)
    order = pc.sort_indices(epochs)
    rows = table["row"].take(order)
    begin = 0
    for counted in pc.value_counts(epochs.take(order)).to_pylist():
        yield counted["values"], rows.slice(begin, counted["counts"])
        begin += counted["counts"]


def find_foreign_rows(tables: list[pyarrow.Table], layout: EpochLayout) -> list[str]:
    """Return a line for each row that is not in the data."""
    import pyarrow
    import pyarrow.compute as pc

    foreign = pyarrow.concat_tables([table.filter(pc.invert(_in_data(table["row"], layout))) for table in tables])
    named = foreign.slice(0, MAX_NAMED).to_pylist()
    lines = (f"step {each['step']}: row {each['row']} is not one of 0..{layout.rows - 1}" for each in named)
    return _shorten(lines, len(foreign))


def find_wrong_steps(tables: list[pyarrow.Table], layout: EpochLayout, end: int) -> list[str]:
    """Return a line for each step up to `end` that was not recorded or consumed the wrong number of rows."""
    import pyarrow

    counted = pyarrow.concat_tables(tables).group_by("step").aggregate([([], "count_all")])
    found = dict(zip(counted["step"].to_pylist(), counted["count_all"].to_pylist(), strict=True))
    known = sorted(step for step in found if 1 <= step <= end)
    gaps = [(before + 1, step - 1) for before, step in pairwise([0, *known, end + 1]) if step > before + 1]
    wrong = [step for step in sorted(found) if found[step] != layout.rows_of(step)]
    return [
        *_shorten((f"steps {first}..{last}: not recorded" for first, last in gaps), len(gaps)),
        *_shorten((f"step {step}: {found[step]} rows instead of {layout.rows_of(step)}" for step in wrong), len(wrong)),
    ]


def _in_data(rows: pyarrow.ChunkedArray, layout: EpochLayout) -> pyarrow.ChunkedArray:
    import pyarrow.compute as pc

    return pc.and_(pc.greater_equal(rows, 0), pc.less(rows, layout.rows))


def _shorten(lines: Iterable[str], total: int) -> list[str]:
    """Return the first MAX_NAMED of `total` lines, and a line with the number of omitted lines."""
    named = [*islice(lines, MAX_NAMED)]
    more = total - len(named)
    return [*named, f"and {more} more like it"] if more else named
