"""Reads the states of all runs with few requests. For the runs on the page, also reads curves, incidents and costs.

A refresh lists the runs' names, a thousand per request. It then reads every live run with three to five small
requests. Each refresh reads only a few of the runs that have ended, because such a run changes only if it is submitted
again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from sunspot.background import map_parallel
from sunspot.errors import DamageError, StorageError, TooLargeError
from sunspot.metric_names import HELD_OUT
from sunspot.report.charts import Point
from sunspot.report.history import can_draw
from sunspot.run import Run
from sunspot.run.attempts import attempts_with_start, read_attempts
from sunspot.run.cost import Spending, compute_spending
from sunspot.run.history import read_journal
from sunspot.run.incidents import read_receipts
from sunspot.run.objects import RUN, is_count
from sunspot.run.seen import RunSeen, find_end_of_nodes, look
from sunspot.run.size_limits import budget
from sunspot.run.streams import Segment, list_segments
from sunspot.storage.base import Entry, Storage
from sunspot.storage.limits import refuse_if_given_up

MAX_ENDED = 10
"""Largest number of runs that a refresh reads although they have ended."""

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


class AllRuns:
    """All runs in a storage location."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.seen: dict[str, RunSeen] = {}
        "Each folder as last seen, keyed by name, even if it is not a run."
        self.total = 0
        "The number of folders, including unread ones."
        self.curves: dict[str, Curve] = {}
        "The curves, incidents and costs of the runs that were on a page, keyed by name."

    @property
    def known(self) -> list[RunSeen]:
        """All runs that have been read. If the latest attempt to read a run failed, its `trouble` is set."""
        return [seen for seen in list(self.seen.values()) if seen.exists or seen.trouble]

    def refresh(self) -> "AllRuns":
        """Read the runs that might have changed, and return this object. Raises `StorageError` if storage fails."""
        names = dict.fromkeys(name for name in self._storage.list_folders() if RUN.fullmatch(name))
        known = {name: seen for name, seen in self.seen.items() if name in names}
        live = [name for name, seen in known.items() if can_change(seen)]
        in_turn = [name for name, seen in known.items() if not can_change(seen)][:MAX_ENDED]
        for name in in_turn:
            known[name] = known.pop(name)  # to the end of the queue
        self.seen = known
        self.total = len(names)
        map_parallel(self._look, [*live, *(name for name in names if name not in known), *in_turn])
        return self

    def _look(self, name: str) -> None:
        run = Run(self._storage, name)
        try:
            self.seen[name] = look(run)
        except StorageError as error:
            refuse_if_given_up(name)
            self.seen[name] = replace(self.seen.get(name, RunSeen(run)), trouble=str(error))

    def read_curves(self, names: Sequence[str]) -> bool:
        """Read the curves, incidents and costs of these runs if they might have changed.

        Always returns True, because None would mean that nothing has been read (`Reading.value`). Raises `StorageError`
        if the read has been aborted.
        """
        self.curves = {name: curve for name, curve in self.curves.items() if name in self.seen}
        map_parallel(self._read_curve, [self.seen[name] for name in names if name in self.seen])
        return True

    def _read_curve(self, seen: RunSeen) -> None:
        curve = self.curves.setdefault(seen.run.name, Curve())
        try:
            if not seen.trouble and curve.is_due(seen):
                with budget(MAX_LISTED_BYTES, seen.run.name):
                    curve.refresh(seen)
        except (StorageError, DamageError, TooLargeError):
            refuse_if_given_up(seen.run.name)  # the next refresh tries again


def can_change(seen: RunSeen) -> bool:
    """Return True if the run can change even if nobody submits it again."""
    return bool(seen.trouble) or not seen.state.terminal


class Curve:
    """A run's loss curve, incidents and cost.

    The curve is first sampled from the whole history. Each later read adds only new records.
    """

    def __init__(self) -> None:
        self.points: Sequence[Point] = ()
        "The losses without superseded steps. An attempt supersedes earlier attempts' later steps."
        self.held_out: tuple[str, float] | None = None
        "The name and value of the newest result on held-out rows."
        self.incidents: int | None = None
        "The number of incidents, or None if they have not been read."
        self.spending: Spending | None = None
        "The run's cost, or None if it has not been read."
        self._losses: dict[tuple[int, int], float] = {}
        "Losses, keyed by attempt and step."
        self._lines: dict[str, int] = {}
        "The number of the last line read from each stream."
        self._active = -1.0
        "The run's last sign of life at the time of the last read."
        self._read = 0.0
        "The time of the last read on the monotonic clock, or 0 before the first read."

    def is_due(self, seen: RunSeen) -> bool:
        """Return True if there might be new records and it is time to read them."""
        waits = can_change(seen) and self._read and time.monotonic() - self._read < CURVE_EVERY_S
        return seen.last_active != self._active and not waits

    def refresh(self, seen: RunSeen) -> None:
        """Read the new part of the curve, and read the incidents and the cost again.

        Raises `StorageError` if storage fails, and `DamageError` if an object is damaged.
        """
        storage = seen.run.storage
        segments = list_segments(storage, seen.run.key("metrics"))
        new = [segment for segment in segments if segment.last > self._lines.get(segment.stream, -1)]
        for lines in map_parallel(lambda place: _read_lines(storage, *place), _choose_places(new)):
            for line in lines:
                self._add(line)
        self._lines = {segment.stream: segment.last for segment in segments}
        while len(self._losses) > MAX_POINTS:
            self._losses = dict(sorted(self._losses.items())[::-2])
        self.points = _join(self._losses)
        attempts = attempts_with_start(read_attempts(seen.run))
        receipts = read_receipts(read_journal(seen.run, "events"))
        self.incidents = sum(receipt.cause.incident for receipt in receipts)
        self.spending = compute_spending(attempts, receipts, find_end_of_nodes(seen, attempts, written=0.0))
        self._active = seen.last_active
        self._read = time.monotonic()

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


def _join(losses: Mapping[tuple[int, int], float]) -> list[Point]:
    points: list[Point] = []
    for (_, step), loss in sorted(losses.items()):
        while points and points[-1].x >= step:
            points.pop()
        points.append(Point(step, loss))
    return points


def _is_drawn(value: Any) -> bool:
    return type(value) in (int, float) and can_draw(value)


def _choose_places(segments: Sequence[Segment]) -> list[tuple[Entry, int]]:
    """Choose evenly spaced windows of a run's history, including the last window.

    Return the object that contains each window, and the window's offset in this object.
    """
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
    """Return the complete lines in the window that begins at offset `begin` of an object of the history."""
    with storage.open(entry.key, max(0, begin - 1)) as stream:  # including the previous newline
        lines = stream.read(WINDOW + 1).split(b"\n")
    return lines[1 if begin else 0 : -1]
