"""Proves which rows each epoch of a run consumed, and finds damaged checkpoints and missing receipts.

The rows are proved from the recorded steps that led to the newest whole checkpoint. Every attempt that took a step must
have a receipt, superseded or not.
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
from sunspot.run.attempts import Attempt, Span, attempt_of, lineage, read_attempts, step_of
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

NO_ROWS = (
    "no audit was recorded; begin a run of another name with SUNSPOT_AUDIT=true, which records the rows of each step"
)

MAX_NAMED = 5
"""Faults of one kind that are named; the others are counted."""

COLUMNS = ("epoch", "rows", "missing", "repeated")

MAX_DIGITS = 16
"""Of a number of rows."""


@dataclass(frozen=True)
class Data:
    """How an epoch is divided into optimizer steps, from `run.json`."""

    rows: int
    steps_per_epoch: int
    batch: int

    def rows_of(self, step: int) -> int:
        """Return how many rows a step consumes: the last of an epoch takes the rest, which is less, or one row more."""
        before = (step - 1) % self.steps_per_epoch
        return self.rows - before * self.batch if before == self.steps_per_epoch - 1 else self.batch


@dataclass(frozen=True)
class Epoch:
    """What one epoch consumed."""

    epoch: int
    rows: int
    missing: int
    "Rows of the data it did not consume; 0 while it is unfinished."
    repeated: int
    "Rows it consumed again."
    finished: bool

    def record(self) -> dict[str, int]:
        """Return it as one of the JSON document."""
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True)
class Proof:
    """What a run's records prove up to its newest whole checkpoint."""

    step: int
    "Of that checkpoint."
    epochs: list[Epoch]
    "Empty: its rows were not recorded."
    wrong_rows: list[str]
    "A line for each impossible record of rows."
    damaged: list[str]
    "A line for each damaged checkpoint."
    gaps: list[str]
    "A line for each missing receipt."

    @property
    def faults(self) -> list[str]:
        """Everything wrong but missing and repeated rows."""
        return [*self.wrong_rows, *self.damaged, *self.gaps]

    @property
    def summary(self) -> str:
        """What is wrong, in a sentence; empty if nothing is."""
        missing, repeated = sum(e.missing for e in self.epochs), sum(e.repeated for e in self.epochs)
        parts = []
        if missing or repeated or self.wrong_rows:
            parts.append(f"{plural(missing, 'row')} missing, {repeated} repeated, up to step {self.step}")
        if self.damaged:
            parts.append(f"{plural(len(self.damaged), 'checkpoint')} damaged")
        if self.gaps:
            parts.append(f"{plural(len(self.gaps), 'receipt')} missing")
        return "; ".join(parts)


def prove(run: Run) -> Proof:
    """Check a run's rows, receipts and checkpoints, reading every byte of the latter.

    Raises `NotFoundError` when there is no whole checkpoint, `DamageError` when records cannot be read.
    """
    # In this order: the attempt that committed a listed checkpoint began before, so it is among the attempts.
    directories = list_directories(run)
    attempts = [attempt for attempt in read_attempts(run) if attempt.chosen]
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
        raise error(f"{run.location}: no whole checkpoint, so there is no model whose rows could be proved")

    step = whole[-1].step
    spans = [s._replace(upto=step if s.upto is None else min(s.upto, step)) for s in spans if s.after < step]
    epochs, wrong_rows = prove_rows(run, spans, step)
    stepped = find_stepped(run, attempts, [name for name, files in directories.items() if MANIFEST in files])
    gaps = find_gaps(read_receipts(read_journal(run, "events")), stepped)
    return Proof(step, epochs, wrong_rows, damaged, gaps)


def conclude(run: Run, proof: Proof) -> None:
    """Print everything wrong on stderr, and raise `DamageError` for it."""
    for text in proof.faults:
        warn(text)
    if proof.summary:
        raise DamageError(f"{run.location}: {proof.summary}")


def find_stepped(run: Run, attempts: list[Attempt], committed: list[str]) -> set[int]:
    """Find the attempts known to have taken a step, by the metric history and by checkpoints.

    What an attempt writes about the step it starts from is only an evaluation.
    """
    segments = list_journal(run, "metrics")
    starts = {attempt.number: attempt.step for attempt in attempts}
    newest = map_parallel(lambda number: newest_record(run, [Span(number, starts[number], None)], segments), starts)
    saved = {attempt_of(name) for name in committed if step_of(name) > starts.get(attempt_of(name), MAX_NUMBER)}
    return saved | {record["attempt"] for record in newest if record}


# ---------------------------------------------------------------------------------------------------------------- rows


def prove_rows(run: Run, spans: list[Span], end: int) -> tuple[list[Epoch], list[str]]:
    """Count what epochs consumed up to step `end`, and list what is impossible; raises `DamageError` for damage."""
    tables = [table for table in read_audit(run, spans) if len(table)]
    if not tables:
        return [], []
    data = read_data(run)
    wrong = [*find_foreign_rows(tables, data), *find_wrong_steps(tables, data, end)]
    return list(count_rows(tables, data, end)), wrong


def read_data(run: Run) -> Data:
    """Read how the run's epochs are divided; raises `DamageError` when `run.json` does not say."""
    begun = read_identity(run)
    batch = begun.settings.get("SUNSPOT_GLOBAL_BATCH_SIZE", "")
    rows = begun.rows
    if not (rows and rows.steps_per_epoch and batch.isdecimal() and len(batch) < MAX_DIGITS and int(batch)):
        place = run.storage.locate(run.key("run.json"))
        raise DamageError(f"{place} cannot be used: it does not say how many rows a step takes, or steps an epoch")
    return Data(rows.rows, rows.steps_per_epoch, int(batch))


def count_rows(tables: list[pyarrow.Table], data: Data, end: int) -> Iterator[Epoch]:
    """Count the rows of every epoch up to step `end`."""
    import pyarrow
    import pyarrow.compute as pc

    # One epoch at a time: its set of rows stays in the cache; a set of all (epoch, row) takes ten times as long.
    last = (end - 1) // data.steps_per_epoch + 1
    if last > MAX_EPOCHS:
        raise DamageError(
            f"the newest checkpoint is of step {end:,}, in epoch {last:,}: at most {MAX_EPOCHS:,} epochs can be proved"
        )
    consumed: dict[int, list[pyarrow.Array]] = {epoch: [] for epoch in range(1, last + 1)}
    for table in tables:
        for epoch, rows in _split_by_epoch(table, data):
            consumed[epoch] += rows.chunks
    for epoch, chunks in consumed.items():
        rows = pyarrow.chunked_array(chunks, pyarrow.int64())
        known = rows.filter(_in_data(rows, data))
        distinct = pc.count_distinct(known).as_py()
        finished = epoch * data.steps_per_epoch <= end
        yield Epoch(epoch, len(rows), data.rows - distinct if finished else 0, len(known) - distinct, finished)


def _split_by_epoch(table: pyarrow.Table, data: Data) -> Iterator[tuple[int, pyarrow.ChunkedArray]]:
    """Yield each epoch with the rows that it consumed. The time does not grow with the number of epochs."""
    import pyarrow.compute as pc

    epochs = pc.add(pc.divide(pc.subtract(table["step"], 1), data.steps_per_epoch), 1)
    order = pc.sort_indices(epochs)
    rows = table["row"].take(order)
    begin = 0
    for counted in pc.value_counts(epochs.take(order)).to_pylist():
        yield counted["values"], rows.slice(begin, counted["counts"])
        begin += counted["counts"]


def find_foreign_rows(tables: list[pyarrow.Table], data: Data) -> list[str]:
    """Write a line for each row that is not in the data."""
    import pyarrow
    import pyarrow.compute as pc

    foreign = pyarrow.concat_tables([table.filter(pc.invert(_in_data(table["row"], data))) for table in tables])
    named = foreign.slice(0, MAX_NAMED).to_pylist()
    lines = (f"step {each['step']}: row {each['row']} is not one of 0..{data.rows - 1}" for each in named)
    return _shorten(lines, len(foreign))


def find_wrong_steps(tables: list[pyarrow.Table], data: Data, end: int) -> list[str]:
    """Write a line for each step up to `end` that consumed the wrong number of rows."""
    import pyarrow

    counted = pyarrow.concat_tables(tables).group_by("step").aggregate([([], "count_all")])
    found = dict(zip(counted["step"].to_pylist(), counted["count_all"].to_pylist(), strict=True))
    known = sorted(step for step in found if 1 <= step <= end)
    gaps = [(before + 1, step - 1) for before, step in pairwise([0, *known, end + 1]) if step > before + 1]
    wrong = [step for step in sorted(found) if found[step] != data.rows_of(step)]
    return [
        *_shorten((f"steps {first}..{last}: not recorded" for first, last in gaps), len(gaps)),
        *_shorten((f"step {step}: {found[step]} rows instead of {data.rows_of(step)}" for step in wrong), len(wrong)),
    ]


def _in_data(rows: pyarrow.ChunkedArray, data: Data) -> pyarrow.ChunkedArray:
    import pyarrow.compute as pc

    return pc.and_(pc.greater_equal(rows, 0), pc.less(rows, data.rows))


def _shorten(lines: Iterable[str], total: int) -> list[str]:
    """Return the first lines of `total`, of which no more than those are made."""
    named = [*islice(lines, MAX_NAMED)]
    more = total - len(named)
    return [*named, f"and {more} more like it"] if more else named
