"""The results of a search: `search.json` in its run, and the state of its trials by their own runs."""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import NotFoundError
from app.run import Run, to_json
from app.run.checkpoints import Checkpoint, best_first, classify, list_directories, read_manifest, read_spans
from app.run.status import STOP, RunState, read_status

FILE = "search.json"


@dataclass(frozen=True)
class Trial:
    """One run of a search."""

    run: str
    settings: dict[str, Any]
    "Its value for each dimension of the search space."
    state: RunState
    reason: str = ""
    step: int = 0
    total_steps: int = 0
    best: float | None = None
    "The metric of its best checkpoint; None: no checkpoint has it as a number."
    checkpoint: str | None = None
    "The name of that checkpoint."

    @property
    def eligible(self) -> bool:
        """Whether its best checkpoint may be the search's: failed trials are not trusted."""
        return self.best is not None and self.state in (RunState.SUCCEEDED, RunState.STOPPED)


@dataclass(frozen=True)
class Results:
    """All trials of a search, by number."""

    metric: str
    order: str
    "`min` or `max`."
    space: dict[str, str]
    "Each dimension's expression."
    trials: tuple[Trial, ...]
    promoted: str | None = None
    "The run whose best checkpoint is the search's; None: not yet."
    time: float = field(default_factory=time.time)

    @property
    def ranking(self) -> list[Trial]:
        """Trials from best to worst, those without the metric last."""
        sign = 1 if self.order == "min" else -1
        return sorted(self.trials, key=lambda t: (not t.eligible, t.best is None, sign * (t.best or 0.0)))


def write_results(run: Run, results: Results) -> None:
    """Replace the results of a search; raises `StorageError`."""
    run.storage.write(run.key(FILE), to_json(asdict(results)))


def read_results(run: Run) -> Results | None:
    """The results of a search as last written; None when missing or of another version. Raises `StorageError`."""
    try:
        record = run.read_json(FILE)
        trials = tuple(Trial(**{**trial, "state": RunState(trial["state"])}) for trial in record["trials"])
        return Results(**{**record, "trials": trials})
    except (NotFoundError, ValueError, KeyError, TypeError):
        return None


def read_trial(run: Run, settings: Mapping[str, Any], metric: str, order: str, error: str = "") -> Trial:
    """A trial as its run shows it; `error` is what ended its driver, if anything. Raises `StorageError`."""
    status = read_status(run)
    if status is None:
        state = RunState.FAILED if error else RunState.PENDING
        return Trial(run.name, dict(settings), state, error)
    state, reason = status.state, status.reason
    if error and state is not RunState.FAILED:
        state, reason = RunState.FAILED, error  # the status is another start's, or stale
    if state is RunState.STOPPED:
        with contextlib.suppress(NotFoundError):
            reason = f"by {run.read_json(STOP)['by']}"
    best = best_of(run, metric, order)
    return Trial(
        run=run.name,
        settings=dict(settings),
        state=state,
        reason=reason,
        step=status.step if best is None else max(status.step, best.step),
        total_steps=status.total_steps,
        best=float(best.metrics[metric]) if best else None,
        checkpoint=best.name if best else None,
    )


def best_of(run: Run, metric: str, order: str) -> Checkpoint | None:
    """The best checkpoint with the metric as a number; nothing is verified."""
    names, _, _ = classify(list_directories(run), read_spans(run))
    found = [checkpoint for name in names if (checkpoint := read_manifest(run, name)) and not checkpoint.damage]
    measured = [c for c in found if isinstance(c.metrics.get(metric), int | float) and math.isfinite(c.metrics[metric])]
    return best_first(measured, metric, order)[0] if measured else None
