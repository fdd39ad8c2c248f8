"""The results of a search: `search.json` in the search's run, computed from the runs of its trials."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from sunspot.run import Run, to_json
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import Checkpoint, best_first, in_lineage, list_checkpoints
from sunspot.run.objects import CheckpointName, Count, RunName, Timestamp, read, read_if_usable, read_or_default
from sunspot.run.requests import read_stop
from sunspot.run.status import RunState, read_status

FILE = "search.json"


@dataclass(frozen=True)
class Trial:
    """One of the runs of a search."""

    run: RunName
    settings: dict[str, Any]
    "The trial's value for each dimension of the search space."
    state: RunState
    reason: str = ""
    step: Count = 0
    total_steps: Count = 0
    best: float | None = None
    "The metric of the best checkpoint, or None if no checkpoint has a numeric value of it."
    checkpoint: CheckpointName | None = None
    "The name of the best checkpoint."

    @property
    def eligible(self) -> bool:
        """True if the trial's best checkpoint can be promoted. Checkpoints of failed trials are never promoted."""
        return self.best is not None and self.state in (RunState.SUCCEEDED, RunState.STOPPED)


@dataclass(frozen=True)
class SearchResults:
    """All trials of a search, sorted by number."""

    metric: str
    order: Literal["min", "max"]
    space: dict[str, str]
    "The expression of each dimension."
    trials: tuple[Trial, ...]
    promoted: RunName | None = None
    "The run with the promoted checkpoint, or None before the promotion."
    time: Timestamp = field(default_factory=time.time)

    def __post_init__(self) -> None:
        for trial in self.trials:
            missing = self.space.keys() - trial.settings.keys()
            if missing:
                raise ValueError(f"{trial.run} has no {', '.join(sorted(missing))}")

    @property
    def ranking(self) -> list[Trial]:
        """The eligible trials from best to worst, followed by the other trials."""
        sign = 1 if self.order == "min" else -1
        return sorted(self.trials, key=lambda t: (not t.eligible, t.best is None, sign * (t.best or 0.0)))


def write_results(run: Run, results: SearchResults) -> None:
    """Write the results of a search, replacing earlier ones. Raises `StorageError`."""
    run.storage.write(run.key(FILE), to_json(asdict(results)))


def read_results(run: Run) -> SearchResults | None:
    """Return the results of a search, or None if the results are missing or damaged. Raises `StorageError`."""
    return read_if_usable(lambda: read(run, SearchResults, FILE))


def read_trial(run: Run, settings: Mapping[str, Any], metric: str, order: str, error: str = "") -> Trial:
    """Return a trial's results from its run. `error` is the error that ended the trial's driver, if any.

    Raises `StorageError` if storage fails.
    """
    status = read_status(run)
    if status is None:
        state = RunState.FAILED if error else RunState.PENDING
        return Trial(run.name, dict(settings), state, error)
    state, reason = status.state, status.reason
    if error and state is not RunState.FAILED:
        state, reason = RunState.FAILED, error  # the status is outdated, or belongs to another start
    if state is RunState.STOPPED:
        stop = read_stop(run)
        reason = f"by {stop.by}" if stop and stop.by else reason
    # One damaged trial must not end a search.
    best = read_or_default(lambda: find_best_checkpoint(run, metric, order), None)
    trial = Trial(run.name, dict(settings), state, reason, status.step, status.total_steps)
    if best is None:
        return trial
    return replace(trial, step=max(trial.step, best.step), best=_number(best, metric), checkpoint=best.name)


def find_best_checkpoint(run: Run, metric: str, order: str) -> Checkpoint | None:
    """Return the best checkpoint, or None if no checkpoint has a finite value of the metric.

    The checkpoint's files are not verified.
    """
    found = in_lineage(list_checkpoints(run), lineage(read_attempts(run)))
    comparable = [checkpoint for checkpoint in found if math.isfinite(_number(checkpoint, metric))]
    return best_first(comparable, metric, order)[0] if comparable else None


def _number(checkpoint: Checkpoint, metric: str) -> float:
    value = checkpoint.metrics.get(metric)
    return math.nan if value is None else float(value)
