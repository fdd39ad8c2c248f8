"""What happened to a run besides training, and each start of its workers, by time."""

from collections.abc import Iterator
from typing import Any

from sunspot.errors import DamageError, NotFoundError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.attempts import Attempt, Ended, read_attempts
from sunspot.run.history import read_journal
from sunspot.run.objects import read_verified


def read_events(run: Run) -> list[dict[str, Any]]:
    """Read every event by time, each with `time`, `attempt`, `step`, `event` and mostly `detail`."""
    attempts = read_attempts(run)
    found = [*map(_began, attempts), *read_journal(run, "events"), *_errors(run, attempts)]
    return sorted(found, key=lambda event: (event["time"], event["attempt"]))


def _began(attempt: Attempt) -> dict[str, Any]:
    workers = attempt.metadata.world_size
    by = f"{plural(workers, 'worker')} of {attempt.owner}" if workers else attempt.owner
    where = " in memory" if attempt.metadata.tier == "memory" else ""
    return {
        "time": attempt.time,
        "attempt": attempt.number,
        "step": attempt.step,
        "event": "attempt began",
        "detail": f"{by}, from {attempt.starts_from or 'the beginning'}{where}"
        if attempt.chosen
        else f"{by}; where it starts has not been chosen",
    }


def _errors(run: Run, attempts: list[Attempt]) -> Iterator[dict[str, Any]]:
    """Read the errors that ended attempts for good, including those whose record cannot be read."""
    steps = {f"{attempt.number:04d}": attempt.step for attempt in attempts}
    for entry in run.storage.list(run.key("attempts")):
        file = entry.key.removeprefix(run.key("attempts") + "/")
        number = file.removesuffix("-error.json")
        if number not in steps:
            continue
        event = {"attempt": int(number), "step": steps[number], "event": "failed for good"}
        try:
            ended = read_verified(run, Ended, "attempts", file)
            yield {**event, "time": ended.time, "detail": f"{ended.type}: {ended.message}"}
        except (NotFoundError, DamageError):
            yield {**event, "time": entry.modified, "detail": "what it said cannot be read"}
