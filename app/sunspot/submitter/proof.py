"""Audits which rows each epoch of a run consumed, and finds damaged checkpoints and missing receipts.

The audit covers the recorded steps that led to the newest intact checkpoint. Every attempt that took a step must have a
receipt, which is the record of the attempt's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, TypeAlias

from sunspot.background import map_parallel
from sunspot.errors import DamageError, NotFoundError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import Attempt, Span, attempt_of, attempts_with_start, lineage, read_attempts, step_of
from sunspot.run.audit import read_audit
from sunspot.run.checkpoints import MANIFEST, classify, list_directories, verify
from sunspot.run.epochs import EpochLayout, find_layout
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

Pass: TypeAlias = tuple[int, int]
"""The number of a source, and of a pass through it, counted from 1. A single dataset has the number 0."""

COLUMNS = ("epoch", "rows", "missing", "repeated")


@dataclass(frozen=True)
class Epoch:
    """The row counts of one epoch. In a mixture, an epoch is a pass through one source."""

    epoch: int
    rows: int
    missing: int
    "Number of rows that the epoch did not consume, or 0 if it is unfinished."
    repeated: int
    "Number of rows that the epoch consumed more than once."
    finished: bool
    source: str = ""
    "The source of a mixture, or an empty string for a single dataset."

    def record(self) -> dict[str, int | str]:
        """Return the JSON record of this epoch."""
        record = {name: getattr(self, name) for name in COLUMNS}
        return {"source": self.source, **record} if self.source else record


@dataclass(frozen=True)
class Proof:
    """The result of an audit up to the newest intact checkpoint."""

    step: int
    "The step of the newest intact checkpoint."
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
        """A one-line summary of all faults, or an empty string if there are none."""
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
    """Return the numbers of the attempts that took a step, according to the metric history or a checkpoint.

    A record of the step that an attempt starts from is ignored, because it only contains an evaluation.
    """
    segments = list_journal(run, "metrics")
    starts = {attempt.number: attempt.step for attempt in attempts}
    newest = map_parallel(lambda number: newest_record(run, [Span(number, starts[number], None)], segments), starts)
    saved = {attempt_of(name) for name in committed if step_of(name) > starts.get(attempt_of(name), MAX_NUMBER)}
    return saved | {record["attempt"] for record in newest if record}


# ---------------------------------------------------------------------------------------------------------------- rows


def prove_rows(run: Run, spans: list[Span], end: int) -> tuple[list[Epoch], list[str]]:
    """Count the rows that each epoch consumed up to step `end`. Return the counts and a list of faults.

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
    layout = find_layout(read_identity(run))
    if layout is None:
        place = run.storage.locate(run.key("run.json"))
        raise DamageError(f"{place} cannot be used: it lacks the number of rows per step or the steps per epoch")
    return layout


def count_rows(tables: list[pyarrow.Table], layout: EpochLayout, end: int) -> Iterator[Epoch]:
    """Yield the row counts of each epoch up to step `end`. In a mixture, each pass through a source is an epoch."""
    import pyarrow
    import pyarrow.compute as pc

    # Count one epoch at a time, because one epoch's rows fit into the cache. Counting all epochs at once takes ten
    # times as long.
    last = max(layout.begun(end))
    if last > MAX_EPOCHS:
        raise DamageError(
            f"the newest checkpoint (step {end:,}) is in epoch {last:,}, but an audit checks at most {MAX_EPOCHS:,} "
            "epochs"
        )
    consumed: dict[Pass, list[pyarrow.Array]] = {
        (source, epoch): [] for source, begun in enumerate(layout.begun(end)) for epoch in range(1, begun + 1)
    }
    for table in tables:
        for each, rows in _split_by_pass(table, layout) if layout.sources else _split_by_epoch(table, layout):
            if len(rows):
                consumed.setdefault(each, []).extend(rows.chunks)
    taken = layout.count(end)
    for (source, epoch), chunks in consumed.items():
        rows = pyarrow.chunked_array(chunks, pyarrow.int64())
        first, after = layout.bounds[source]
        known = rows.filter(_between(rows, first, after))
        distinct = pc.count_distinct(known).as_py()
        finished = epoch * (after - first) <= taken[source]
        missing = after - first - distinct if finished else 0
        name = layout.sources[source].name if layout.sources else ""
        yield Epoch(epoch, len(rows), missing, len(known) - distinct, finished, name)


def _split_by_epoch(table: pyarrow.Table, layout: EpochLayout) -> Iterator[tuple[Pass, pyarrow.ChunkedArray]]:
    """Yield each epoch and the rows that it consumed.

    The table is sorted once, rather than filtered once for each epoch.
    """
    import pyarrow.compute as pc

    epochs = pc.add(pc.divide(pc.subtract(table["step"], 1), layout.steps_per_epoch), 1)
    order = pc.sort_indices(epochs)
    rows = table["row"].take(order)
    begin = 0
    for counted in pc.value_counts(epochs.take(order)).to_pylist():
        yield (0, counted["values"]), rows.slice(begin, counted["counts"])
        begin += counted["counts"]


def _split_by_pass(table: pyarrow.Table, layout: EpochLayout) -> Iterator[tuple[Pass, pyarrow.ChunkedArray]]:
    """Yield each pass through a mixture's sources and the rows that it consumed.

    A pass can begin and end within a step. The ranks take the rows of a step one after the other, and record them in
    order, so the position of a record in its step determines the pass.
    """
    ordered = table.sort_by([("step", "ascending"), ("rank", "ascending")])  # keeps the order of equal ranks
    for source, (first, after) in enumerate(layout.bounds):
        mine = ordered.filter(_between(ordered["row"], first, after))
        begin = end = 0
        newest = 0
        for counted in mine["step"].value_counts().to_pylist():
            position = layout.count(counted["values"] - 1)[source]
            left = counted["counts"]
            while left:
                passed, within = divmod(position, after - first)
                if passed + 1 != newest:
                    yield (source, newest), mine["row"].slice(begin, end - begin)
                    newest = passed + 1
                    begin = end
                some = min(left, after - first - within)
                end += some
                left -= some
                position += some
        yield (source, newest), mine["row"].slice(begin)


def find_foreign_rows(tables: list[pyarrow.Table], layout: EpochLayout) -> list[str]:
    """Return a line for each recorded row that is not in the data."""
    import pyarrow
    import pyarrow.compute as pc

    foreign = pyarrow.concat_tables(
        [table.filter(pc.invert(_between(table["row"], 0, layout.rows))) for table in tables]
    )
    named = foreign.slice(0, MAX_NAMED).to_pylist()
    lines = (f"step {each['step']}: row {each['row']} is not one of 0..{layout.rows - 1}" for each in named)
    return _shorten(lines, len(foreign))


def find_wrong_steps(tables: list[pyarrow.Table], layout: EpochLayout, end: int) -> list[str]:
    """Return lines that name the missing steps up to `end`, and the steps that consumed the wrong number of rows.

    In a mixture, the rows of each source are also checked. Long lists are shortened.
    """
    found = _count_by_step(tables)
    known = sorted(step for step in found if 1 <= step <= end)
    gaps = [(before + 1, step - 1) for before, step in pairwise([0, *known, end + 1]) if step > before + 1]
    wrong = [step for step in sorted(found) if found[step] != layout.rows_of(step)]
    lines = [
        *_shorten((f"steps {first}..{last}: not recorded" for first, last in gaps), len(gaps)),
        *_shorten((f"step {step}: {found[step]} rows instead of {layout.rows_of(step)}" for step in wrong), len(wrong)),
    ]
    for number, (source, bounds) in enumerate(zip(layout.sources, layout.bounds, strict=False)):
        given = _count_by_step([table.filter(_between(table["row"], *bounds)) for table in tables])
        differ = []
        for step in sorted(found):
            wanted = layout.count(step)[number] - layout.count(step - 1)[number]
            if given.get(step, 0) != wanted:
                differ.append(f"step {step}: {given.get(step, 0)} rows of {source.name} instead of {wanted}")
        lines += _shorten(differ, len(differ))
    return lines


def _count_by_step(tables: list[pyarrow.Table]) -> dict[int, int]:
    """Return the number of rows that each step consumed."""
    import pyarrow

    counted = pyarrow.concat_tables(tables).group_by("step").aggregate([([], "count_all")])
    return dict(zip(counted["step"].to_pylist(), counted["count_all"].to_pylist(), strict=True))


def _between(rows: pyarrow.ChunkedArray, first: int, after: int) -> pyarrow.ChunkedArray:
    import pyarrow.compute as pc

    return pc.and_(pc.greater_equal(rows, first), pc.less(rows, after))


def _shorten(lines: Iterable[str], total: int) -> list[str]:
    """Return the first MAX_NAMED of `total` lines, followed by a line with the number of omitted lines, if any."""
    named = [*islice(lines, MAX_NAMED)]
    more = total - len(named)
    return [*named, f"and {more} more like it"] if more else named
