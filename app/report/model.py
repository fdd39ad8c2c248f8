"""What a report shows of a run, read from storage; a part that cannot be read is reported, and hides no other."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from app.errors import DamageError, NotFoundError
from app.run import Run
from app.run.attempts import Span, lineage, read_attempts
from app.run.checkpoints import Checkpoint, best_first, classify, list_directories, retention, verify
from app.run.failures import Failure, read_failures
from app.run.history import HELD_OUT, each_record, read_journal
from app.run.identity import read_identity
from app.run.incidents import find_gaps, read_receipts
from app.run.overview import RunView
from app.run.predictions import Predictions, read_predictions
from app.run.status import RunState, read_status

MOST_CHECKPOINTS = 50
"""Only the newest are verified and shown: each costs a request."""

Part = TypeVar("Part")


class Spread(NamedTuple):
    """The lowest, the mean and the highest value of several ranks."""

    low: float
    mean: float
    high: float


@dataclass
class RankTotal:
    """One rank's part in the whole run, over all attempts; seconds, rows and MiB."""

    rows: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    "Sum over its windows of steps x the median step."
    fastest: float = math.inf
    "The lowest median of a window."
    slowest: float = -math.inf
    "The highest median of a window."
    p95: float = -math.inf
    "The highest 95th percentile of a window."
    data_wait: float = 0.0
    forward: float = 0.0
    "Seconds in forward passes; in the rest of a step, ranks wait for each other."
    memory_mib: float = 0.0

    @property
    def rows_per_s(self) -> float | None:
        return self.rows / self.seconds if self.seconds else None

    @property
    def step_time(self) -> float | None:
        """Mean over all windows, by their steps, of the median step time."""
        return self.step_seconds / self.steps if self.steps else None

    @property
    def forward_time(self) -> float | None:
        """Seconds of a step in the forward pass; None when not measured."""
        return self.forward / self.steps if self.steps and self.forward else None


@dataclass
class History:
    """The metric history of the steps that count, by column; None where a record lacks the value."""

    attempt: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    epoch: list[int | None] = field(default_factory=list)
    time: list[float | None] = field(default_factory=list)
    "Seconds since the epoch."
    results: dict[str, list[float | None]] = field(default_factory=dict)
    "Model quality by name: losses, accuracies, and everything measured on held-out rows."
    rows_per_s: list[float | None] = field(default_factory=list)
    "All ranks together."
    rank_rows_per_s: list[Spread | None] = field(default_factory=list)
    rank_step_time: list[Spread | None] = field(default_factory=list)
    "Of the ranks' median steps in seconds."
    ranks: dict[int, RankTotal] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def latest(self, name: str) -> tuple[float, int] | None:
        """The newest value of a result, and its step."""
        column = self.results.get(name, [])
        return next(
            ((v, step) for v, step in zip(reversed(column), reversed(self.step), strict=False) if v is not None), None
        )

    def add(self, record: dict[str, Any], best_by: str) -> None:
        """Add a record, in the form that `each_record` checks."""
        ranks = record.get("ranks") or []
        for name in record:
            if name not in self.results and is_result(name, record, best_by) and _number(record, name) is not None:
                self.results[name] = [None] * len(self)
        for name, column in self.results.items():
            column.append(_number(record, name))
        self.attempt.append(record["attempt"])
        self.step.append(record["step"])
        self.epoch.append(record.get("epoch"))
        self.time.append(_number(record, "time"))
        # An evaluation by itself, after a restart, took no step.
        self.rows_per_s.append(_number(record, "rows_per_s") if record.get("steps") != 0 else None)
        self.rank_rows_per_s.append(_spread([_ratio(_number(r, "rows"), _number(r, "seconds")) for r in ranks]))
        self.rank_step_time.append(_spread([_number(rank, "step_time_median_s") for rank in ranks]))
        for number, rank in enumerate(ranks):
            _add(self.ranks.setdefault(number, RankTotal()), rank, record.get("steps") or 1)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint directory and its state."""

    name: str
    checkpoint: Checkpoint | None
    "None: incomplete, without a manifest."
    faults: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """`verified`, `damaged` or `incomplete`."""
        return "incomplete" if self.checkpoint is None else "damaged" if self.faults else "verified"


@dataclass(frozen=True, kw_only=True)
class Report(RunView):
    """A `RunView` and what only a report shows besides."""

    failures: list[Failure]
    "The errors that ended processes, oldest first."
    history: History
    gaps: list[str]
    "Receipts that are missing."
    checkpoints: list[KeptCheckpoint]
    "By step: those that lead to the newest attempt, and incomplete ones."
    checkpoints_left_out: dict[str, int]
    "Number of checkpoints not among them, by reason."
    predictions: Predictions | None
    troubles: list[str]
    "Parts of the run that could not be read."

    @property
    def last(self) -> dict[str, Any]:
        """Step and time of the newest record of the metric history."""
        return {"step": self.history.step[-1], "time": self.history.time[-1]} if self.history else {}

    @property
    def other_events(self) -> list[dict[str, Any]]:
        """All events but the receipts, by time."""
        receipts = {(receipt.attempt, receipt.first_step) for receipt in self.receipts}
        others = [event for event in self.events if (event.get("attempt"), event.get("first_step")) not in receipts]
        return sorted(others, key=lambda event: float(event.get("time") or 0))

    @property
    def seconds(self) -> float | None:
        """From the beginning to the end, pauses included."""
        return max(0.0, self.ended - self.begun) if self.begun is not None else None

    @property
    def paused_s(self) -> float:
        """Seconds in which nothing was there to train."""
        return sum(receipt.paused_s for receipt in self.receipts)

    @property
    def whole(self) -> list[Checkpoint]:
        """The verified checkpoints, by step."""
        return [kept.checkpoint for kept in self.checkpoints if kept.checkpoint and kept.state == "verified"]

    @property
    def best(self) -> Checkpoint | None:
        """The best verified checkpoint by the run's own metric; None when none has it."""
        _, metric, order = self.retention
        having = [checkpoint for checkpoint in self.whole if metric in checkpoint.metrics]
        return best_first(having, metric, order)[0] if having else None

    def result(self, name: str) -> tuple[float, int] | None:
        """The newest value of a result and its step, from the history or else from the newest checkpoint."""
        if (found := self.history.latest(name)) is not None:
            return found
        if not self.checkpoint or not isinstance(value := self.checkpoint.metrics.get(name), int | float):
            return None
        return float(value), self.checkpoint.step


def gather(run: Run, state: RunState, reason: str) -> Report:
    """Read everything a report shows of a run in `state`. Raises `StorageError` when storage cannot be reached."""
    troubles: list[str] = []

    def tried(read: Callable[[], Part], otherwise: Part, what: str) -> Part:
        """A part of the run, or `otherwise` when it is missing or damaged."""
        try:
            return read()
        except NotFoundError:
            return otherwise
        except DamageError as error:
            troubles.append(f"{what} cannot be read: {error}")
            return otherwise

    def left_out(what: str) -> Callable[[str], Any]:
        return lambda text: troubles.append(f"{what} cannot be read: {text}")

    none: list[Any] = []
    attempts = [a for a in tried(lambda: read_attempts(run), none, "the list of its attempts") if a.chosen]
    spans = lineage(attempts)
    events = read_journal(run, "events", warn=left_out("an event"))
    receipts = read_receipts(events)
    history = History()
    _, best_by, _ = retention(attempts)
    for record in each_record(run, "metrics", spans, warn=left_out("a part of the metric history")):
        history.add(record, best_by)  # one by one: the records of many ranks would not fit into memory all at once
    no_checkpoints: tuple[list[KeptCheckpoint], dict[str, int]] = ([], {})
    checkpoints, not_shown = tried(lambda: _read_checkpoints(run, spans), no_checkpoints, "the list of its checkpoints")
    return Report(
        run=run,
        state=state,
        reason=reason,
        time=time.time(),
        status=read_status(run, warn=left_out("its status")),
        identity=tried(lambda: read_identity(run), None, "run.json"),
        attempts=attempts,
        events=events,
        receipts=receipts,
        checkpoint=next((kept.checkpoint for kept in reversed(checkpoints) if kept.state == "verified"), None),
        failures=read_failures(run, left_out("an error that ended a process")),
        history=history,
        gaps=find_gaps(attempts, receipts, set(history.attempt)),
        checkpoints=checkpoints,
        checkpoints_left_out=not_shown,
        predictions=read_predictions(run, left_out("the predictions")),
        troubles=troubles,
    )


def _read_checkpoints(run: Run, spans: list[Span]) -> tuple[list[KeptCheckpoint], dict[str, int]]:
    directories = list_directories(run)
    counted, superseded, incomplete = classify(directories, spans)
    shown = counted[-MOST_CHECKPOINTS:]
    found = [KeptCheckpoint(c.name, c, tuple(faults)) for c, faults in verify(run, shown, directories)]
    found += [KeptCheckpoint(name, None) for name in incomplete[-MOST_CHECKPOINTS:]]
    left_out = {
        "older": len(counted) - len(shown) + max(0, len(incomplete) - MOST_CHECKPOINTS),
        "of superseded attempts": len(superseded),
    }
    return sorted(found, key=lambda kept: kept.name), {why: number for why, number in left_out.items() if number}


def is_result(name: str, record: dict[str, Any], best_by: str) -> bool:
    """Whether a value of a record measures the model, and not the speed of training."""
    return (
        name.endswith(("loss", "accuracy")) or name.startswith(HELD_OUT) or HELD_OUT + name in record or name == best_by
    )


def _add(total: RankTotal, rank: dict[str, Any], steps: int) -> None:
    total.rows += _number(rank, "rows") or 0.0
    total.seconds += _number(rank, "seconds") or 0.0
    total.data_wait += _number(rank, "data_wait_s") or 0.0
    total.forward += _number(rank, "forward_s") or 0.0
    total.memory_mib = max(total.memory_mib, _number(rank, "memory_mib") or 0.0)
    median = _number(rank, "step_time_median_s")
    if median is not None:
        total.steps += steps
        total.step_seconds += steps * median
        total.fastest, total.slowest = min(total.fastest, median), max(total.slowest, median)
        total.p95 = max(total.p95, _number(rank, "step_time_p95_s") or median)


def _number(record: dict[str, Any], name: str) -> float | None:
    """A value that is a number, NaN and infinities included: a loss that became one has to be shown."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return Spread(min(known), sum(known) / len(known), max(known)) if known else None
