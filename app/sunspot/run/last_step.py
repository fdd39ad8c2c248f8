"""Finds the last step that a run has taken, according to storage. This step might have no complete checkpoint."""

from collections.abc import Sequence
from typing import Any

from sunspot.run import Run
from sunspot.run.attempts import Attempt, Span, label_of, step_of
from sunspot.run.audit import list_audit
from sunspot.run.checkpoints import list_directories
from sunspot.run.history import list_journal, newest_record


def find_last_step(run: Run, attempts: Sequence[Attempt]) -> int:
    """Return the last step that these attempts are known to have taken, or 0.

    A step was taken if an object in storage belongs to it: a file of a checkpoint, even an incomplete one, a record of
    the metric history, or an audit file. A step was also taken if an attempt started from it. Raises `StorageError`.
    """
    labels = {attempt.label for attempt in attempts}
    segments = list_journal(run, "metrics", [_all_steps(attempt) for attempt in attempts])
    steps = [attempt.step for attempt in attempts]
    steps += [step_of(name) for name in list_directories(run) if label_of(name) in labels]
    steps += [segment.last for segment in list_audit(run) if segment.stream in labels]
    for attempt in attempts:
        newest: dict[str, Any] | None = newest_record(run, [_all_steps(attempt)], segments)
        steps.append(newest["step"] if newest else 0)
    return max(steps, default=0)


def _all_steps(attempt: Attempt) -> Span:
    return Span(attempt.number, attempt.step, None, attempt.nonce)
