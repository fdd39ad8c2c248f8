"""Reads the states of all runs with few requests, and the curves, incidents and costs of the runs shown.

A refresh lists the names of the runs, a thousand per request. It then reads every live run with two or three small
requests, and a few ended runs in turn. An ended run changes only if it is submitted again.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from sunspot.background import map_parallel
from sunspot.errors import DamageError, NotFoundError, StorageError, TooLargeError
from sunspot.metric_names import HELD_OUT
from sunspot.report.charts import Point
from sunspot.report.history import can_draw
from sunspot.run import Run
from sunspot.run.attempts import attempts_with_start, read_attempts
from sunspot.run.cost import Spending
from sunspot.run.history import read_journal
from sunspot.run.incidents import read_receipts
from sunspot.run.objects import RUN, is_count
from sunspot.run.overview import state_from_storage, summarize_run, with_newest_checkpoint
from sunspot.run.requests import DELETION, STOP
from sunspot.run.seen import RunDetails
from sunspot.run.size_limits import budget
from sunspot.run.status import FOLDER, SILENT_AFTER_S, RunState, Status, load_usable_status, newest_status
from sunspot.run.streams import Segment, list_segments
from sunspot.storage.base import Entry, Storage
from sunspot.storage.limits import refuse_if_given_up

MAX_ENDED = 10
"""Largest number of ended runs that a refresh reads."""

CURVE_EVERY_S = 30.0
"""Seconds between two reads of a live run's history."""

PLACES = 24
"""Number of positions at which a curve samples a long history."""

WINDOW = 16 << 10
"""Number of bytes that a curve reads at each position."""

MAX_LISTED_BYTES = 8 << 20
"""Largest size in bytes of the attempts and events that the list reads for a run, enough for 20,000 events. The run's
own page has no such limit."""

MAX_POINTS = 400
"""Largest number of points of a curve."""


@dataclass(frozen=True)
class RunRow:
    """A run in the list, as last read."""

    name: str
    state: RunState | None = None
    "The run's state, or None if it cannot be read."
    reason: str = ""
    status: Status | None = None
    last_active: float = 0.0
    "The time of the last sign of life or submission, in seconds since the epoch."
    incidents: int | None = None
    "The number of incidents, or None if they have not been read."
    spending: Spending | None = None
    "The run's cost, or None if it has not been read."
    curve: Sequence[Point] = ()
    "The loss over steps."
    held_out: tuple[str, float] | None = None
    "The name and value of the newest result on held-out rows."

    @property
    def is_live(self) -> bool:
        """True if the run can change without user action."""
        return self.state is None or not self.state.terminal


class AllRuns:
    """All runs in a storage location."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.rows: dict[str, RunRow | None] = {}
        "The row of each folder, keyed by name, or None if the folder is not a run."
        self.total = 0
        "The number of folders, including unread ones."
        self._curves: dict[str, Curve] = {}

    @property
    def known(self) -> list[RunRow]:
        """The rows of all runs that have been read."""
        return [row for row in list(self.rows.values()) if row]

    def refresh(self) -> "AllRuns":
        """Read the runs that can have changed, and return this object. Raises `StorageError`."""
        names = dict.fromkeys(name for name in self._storage.list_folders() if RUN.fullmatch(name))
        known = {name: row for name, row in self.rows.items() if name in names}
        live = [name for name, row in known.items() if row and row.is_live]
        in_turn = [name for name, row in known.items() if not (row and row.is_live)][:MAX_ENDED]
        for name in in_turn:
            known[name] = known.pop(name)  # to the end of the queue
        self.rows = known
        self.total = len(names)
        map_parallel(self._read_row, [*live, *(name for name in names if name not in known), *in_turn])
        return self

    def _read_row(self, name: str) -> None:
        before = self.rows.get(name) or RunRow(name)
        try:
            row = read_row(Run(self._storage, name))
            if row:
                row = replace(row, incidents=before.incidents, spending=before.spending)
                row = replace(row, curve=before.curve, held_out=before.held_out)
        except NotFoundError:  # a newer attempt replaced the status since it was listed
            row = before
        except StorageError as error:
            refuse_if_given_up(name)
            row = replace(before, state=None, reason=f"cannot be read: {error}")
        self.rows[name] = row

    def read_curves(self, names: Sequence[str]) -> bool:
        """Read the curves, incidents and costs of these runs if they can have changed. Raises `StorageError`."""
        self._curves = {name: curve for name, curve in self._curves.items() if name in self.rows}
        map_parallel(self._read_curve, [row for name in names if (row := self.rows.get(name))])
        return True

    def _read_curve(self, row: RunRow) -> None:
        curve = self._curves.setdefault(row.name, Curve(Run(self._storage, row.name)))
        try:
            if row.state and curve.is_due(row):
                with budget(MAX_LISTED_BYTES, row.name):
                    view = curve.refresh(row, row.state)
                found = replace(row, incidents=len(view.incidents), spending=view.spending)
                self.rows[row.name] = replace(found, curve=curve.points(), held_out=curve.held_out)
        except (StorageError, DamageError, TooLargeError):
            refuse_if_given_up(row.name)  # the next refresh tries again


class Curve:
    """A run's loss over its steps, sampled from the history and later continued at its end."""

    def __init__(self, run: Run) -> None:
        self.held_out: tuple[str, float] | None = None
        self._run = run
        self._losses: dict[tuple[int, int], float] = {}
        "Losses, keyed by attempt and step."
        self._lines: dict[str, int] = {}
        "The number of the last line read from each stream."
        self._active = -1.0
        "The run's last sign of life at the time of the last read."
        self._read = 0.0
        "The time of the last read on the monotonic clock, or 0 before the first read."

    def points(self) -> list[Point]:
        """Return the points without superseded steps. An attempt supersedes earlier attempts' later steps."""
        points: list[Point] = []
        for (_, step), loss in sorted(self._losses.items()):
            while points and points[-1].x >= step:
                points.pop()
            points.append(Point(step, loss))
        return points

    def is_due(self, row: RunRow) -> bool:
        """Return True if there can be new records and it is time to read them."""
        waits = row.is_live and self._read and time.monotonic() - self._read < CURVE_EVERY_S
        return row.last_active != self._active and not waits

    def refresh(self, row: RunRow, state: RunState) -> RunDetails:
        """Read the new part of the curve, and return the run. Raises `StorageError` and `DamageError`."""
        segments = list_segments(self._run.storage, self._run.key("metrics"))
        new = [segment for segment in segments if segment.last > self._lines.get(segment.stream, -1)]
        for lines in map_parallel(lambda place: _read_lines(self._run.storage, *place), _choose_places(new)):
            for line in lines:
                self._add(line)
        self._lines = {segment.stream: segment.last for segment in segments}
        while len(self._losses) > MAX_POINTS:
            self._losses = dict(sorted(self._losses.items())[::-2])
        attempts = read_attempts(self._run)
        events = read_journal(self._run, "events")
        self._active = row.last_active
        self._read = time.monotonic()
        return RunDetails(
            run=self._run,
            state=state,
            reason=row.reason,
            time=time.time(),
            status=row.status,
            identity=None,
            attempts=attempts_with_start(attempts),
            events=events,
            receipts=read_receipts(events),
            checkpoint=None,
            last_active=row.last_active,
        )

    def _add(self, line: bytes) -> None:
        try:
            record = from_json(line)
            place = record["attempt"], record["step"]
        except (ValueError, KeyError, TypeError):
            return  # the run's own page reports damage
        if all(map(is_count, place)):
            if _is_drawn(record.get("loss")):
                self._losses[place] = float(record["loss"])
            results = [name for name, value in record.items() if name.startswith(HELD_OUT) and _is_drawn(value)]
            if results:
                name = f"{HELD_OUT}accuracy" if f"{HELD_OUT}accuracy" in results else min(results)
                self.held_out = name, record[name]


def _is_drawn(value: Any) -> bool:
    return type(value) in (int, float) and can_draw(value)


def _choose_places(segments: Sequence[Segment]) -> list[tuple[Entry, int]]:
    """Return evenly spaced windows and the last window, each as an object and an offset."""
    total = sum(segment.entry.size for segment in segments)
    wanted = [total * number // PLACES for number in range(PLACES)] + [total - 1]
    chosen: dict[tuple[Entry, int], None] = {}
    begin = 0
    for segment in segments:
        inside = [place - begin for place in wanted if 0 <= place - begin < segment.entry.size]
        chosen |= dict.fromkeys((segment.entry, place // WINDOW * WINDOW) for place in inside)
        begin += segment.entry.size
    return list(chosen)


def _read_lines(storage: Storage, entry: Entry, begin: int) -> list[bytes]:
    """Return the complete lines in a window."""
    with storage.open(entry.key, max(0, begin - 1)) as stream:  # including the previous newline
        lines = stream.read(WINDOW + 1).split(b"\n")
    return lines[1 if begin else 0 : -1]


def read_row(run: Run) -> RunRow | None:
    """Return a run's row without curve, incidents and cost, or None if the folder is not a run."""
    entries = run.storage.list(run.key(FOLDER))
    entry = newest_status(entries)
    status = load_usable_status(run.storage, entry) if entry else None
    now = time.time()
    for part in _other_parts(status, now):
        entries += run.storage.list(run.key(part))
    summary = summarize_run(run.name, entries)
    if summary is None:
        return None
    status = with_newest_checkpoint(status, summary, now)
    state, reason = state_from_storage(status, summary, now)
    seen = status.seen if status else summary.last_active
    return RunRow(run.name, state, reason, status, max(seen, summary.submitted))


def _other_parts(status: Status | None, now: float) -> Iterator[str]:
    """Yield the other folders that a run's state depends on."""
    yield STOP
    if status is None or status.state.terminal or now - status.seen > SILENT_AFTER_S:
        yield from ("submissions", DELETION)
    if status and not status.state.terminal and now - status.seen > SILENT_AFTER_S:
        yield "checkpoints"
    if status is None:
        yield "run.json"
