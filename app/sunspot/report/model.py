"""Reads the content of a report from storage. If a part is unreadable, the report says so and shows the other parts."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sunspot.errors import DamageError, NotFoundError
from sunspot.report.history import History
from sunspot.run import Run
from sunspot.run.attempts import Span, attempts_with_start, lineage, read_attempts
from sunspot.run.checkpoints import (
    Checkpoint,
    best_first,
    classify,
    find_faults_in_listing,
    is_unchanged,
    list_directories,
    ranking_metric,
    retention,
    verify,
)
from sunspot.run.failures import Failure, read_failures
from sunspot.run.history import iter_rank_records, iter_records, read_journal
from sunspot.run.identity import read_identity
from sunspot.run.incidents import find_gaps
from sunspot.run.predictions import Predictions, TaskExhibit, load_shown
from sunspot.run.seen import RunDetails, RunSeen
from sunspot.run.status import load_newest_status

MAX_CHECKPOINTS = 50
"""Largest number of checkpoints to verify and show, newest first. Each checkpoint takes one request."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint directory and its state."""

    name: str
    checkpoint: Checkpoint | None
    "The checkpoint, or None if the directory is incomplete."
    faults: tuple[str, ...] = ()
    unread: bool = False
    "True if the files have the sizes in the manifest, but their bytes were not compared."

    @property
    def state(self) -> str:
        """One of `verified`, `unread`, `damaged` or `incomplete`."""
        if self.checkpoint is None:
            return "incomplete"
        return "damaged" if self.faults else "unread" if self.unread else "verified"

    @property
    def usable(self) -> bool:
        """True if no fault was found in the checkpoint."""
        return self.state in ("verified", "unread")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a run's report."""

    seen: RunDetails
    "The run, with the newest usable checkpoint and the newest record of its history."
    failures: list[Failure]
    "The errors that ended processes, oldest first."
    history: History
    gaps: list[str]
    "Messages about missing receipts."
    checkpoints: list[ListedCheckpoint]
    "The newest attempt's own and inherited checkpoints, and incomplete ones, sorted by step."
    checkpoints_left_out: dict[str, int]
    "The number of omitted checkpoints, keyed by reason."
    predictions: Predictions | None
    shown: TaskExhibit | None
    "The task's own exhibits."
    troubles: list[str]
    "Messages about unreadable parts of the run."

    @property
    def other_events(self) -> list[dict[str, Any]]:
        """All events except receipts, oldest first."""
        receipts = {(receipt.attempt, receipt.first_step) for receipt in self.seen.receipts}
        others = [each for each in self.seen.events if (each.get("attempt"), each.get("first_step")) not in receipts]
        return sorted(others, key=lambda event: event["time"])

    @property
    def seconds(self) -> float | None:
        """Seconds from the first start of workers to the run's end, including pauses."""
        return max(0.0, self.seen.ended - self.seen.begun) if self.seen.begun is not None else None

    @property
    def usable_checkpoints(self) -> list[Checkpoint]:
        """The usable checkpoints, sorted by step."""
        return [kept.checkpoint for kept in self.checkpoints if kept.checkpoint and kept.usable]

    @property
    def best(self) -> Checkpoint | None:
        """The best usable checkpoint by the metric `best_by`, or None if no checkpoint has that metric."""
        having = [checkpoint for checkpoint in self.usable_checkpoints if self.best_by in checkpoint.metrics]
        return best_first(having, self.best_by, self.seen.retention.order)[0] if having else None

    @property
    def best_by(self) -> str:
        """The metric that ranks the checkpoints."""
        return ranking_metric(self.usable_checkpoints, self.seen.retention.metric)

    def result(self, name: str) -> tuple[float, int] | None:
        """Return a metric's newest value and its step, or None if no value is recorded."""
        found = self.history.newest_values.get(name)
        checkpoint = self.seen.checkpoint
        if not checkpoint or (found and found[1] > checkpoint.step):
            return found
        value = checkpoint.metrics.get(name)
        return (float(value), checkpoint.step) if isinstance(value, int | float) else found


def read_report(seen: RunSeen, read_bytes: bool = True) -> Report:
    """Read the content of a run's report. Raises `StorageError` if storage cannot be reached.

    If `read_bytes` is False, only the manifest of each checkpoint is read. If the listing shows no fault in a
    checkpoint, the checkpoint is `unread` if one of its files has changed since the commit, and `verified` otherwise.
    """
    run = seen.run
    troubles: list[str] = []

    def read_part(read: Callable[[], Part], default: Part, what: str) -> Part:
        """Return a part of the run, or `default` if the part is missing or damaged."""
        try:
            return read()
        except NotFoundError:
            return default
        except DamageError as error:
            troubles.append(f"{what} cannot be read: {error}")
            return default

    none: list[Any] = []
    attempts = attempts_with_start(read_part(lambda: read_attempts(run), none, "the list of its attempts"))
    spans = lineage(attempts)
    damaged = defaultdict[str, list[str]](list)
    events = read_journal(run, "events", damaged=damaged["an event"])
    history = History()
    best_by = retention(attempts).metric
    for record in iter_records(run, "metrics", spans, damaged=damaged["a part of the metric history"]):
        history.add(record, best_by)
    for record in iter_rank_records(run, spans, damaged["a part of the numbers of each rank"]):
        history.add_ranks(record)
    no_checkpoints: tuple[list[ListedCheckpoint], dict[str, int]] = ([], {})
    checkpoints, not_shown = read_part(
        lambda: _read_checkpoints(run, spans, read_bytes), no_checkpoints, "the list of its checkpoints"
    )
    status = seen.status or read_part(lambda: load_newest_status(run), None, "its status")
    identity = read_part(lambda: read_identity(run), None, "run.json")
    details = replace(seen, status=status).with_details(
        identity, attempts, events, _newest_good(checkpoints), history.newest_record
    )
    return Report(
        seen=details,
        failures=read_failures(run, damaged["an error that ended a process"]),
        history=history,
        gaps=find_gaps(details.receipts, history.attempts),
        checkpoints=checkpoints,
        checkpoints_left_out=not_shown,
        predictions=read_part(lambda: load_shown(run, Predictions), None, "the predictions"),
        shown=read_part(lambda: load_shown(run, TaskExhibit), None, "what the task shows"),
        troubles=troubles + [f"{what} cannot be read: {text}" for what, texts in damaged.items() for text in texts],
    )


def _newest_good(checkpoints: list[ListedCheckpoint]) -> Checkpoint | None:
    """Return the newest usable checkpoint, preferably one with finite weights."""
    usable = [kept.checkpoint for kept in reversed(checkpoints) if kept.checkpoint and kept.usable]
    return next((checkpoint for checkpoint in usable if checkpoint.finite), usable[0] if usable else None)


def _read_checkpoints(run: Run, spans: list[Span], read_bytes: bool) -> tuple[list[ListedCheckpoint], dict[str, int]]:
    directories = list_directories(run)
    counted, superseded, incomplete = classify(directories, spans)
    shown = counted[-MAX_CHECKPOINTS:]
    checked = verify(run, shown, directories, None if read_bytes else find_faults_in_listing)
    found = [
        ListedCheckpoint(c.name, c, tuple(faults), not read_bytes and not is_unchanged(c, directories[c.name]))
        for c, faults in checked
    ]
    found += [ListedCheckpoint(name, None) for name in incomplete[-MAX_CHECKPOINTS:]]
    left_out = {
        "older": len(counted) - len(shown) + max(0, len(incomplete) - MAX_CHECKPOINTS),
        "of superseded attempts": len(superseded),
    }
    return sorted(found, key=lambda kept: kept.name), {why: number for why, number in left_out.items() if number}
