"""The names of metrics: those that the records of a run have taken, and what the name of a task's own may be.

A record of the metric history is one flat object, in which the task's metrics lie beside the numbers of the record.
"""

import functools
from collections.abc import Iterable

from sunspot.errors import SettingsError

HELD_OUT = "test_"
"""Metrics of held-out rows have this prefix."""

RECORD_NAMES = frozenset(
    {
        *("attempt", "step", "epoch", "steps", "rows", "recent_rows", "learning_rate", "world_size", "time", "seconds"),
        *("best_evaluation", "evaluations_since_best", "rows_per_s", "step_time_median_s", "step_time_p95_s"),
        *("data_wait_s", "memory_mib", "gpu_memory_mib", "nan_since", "nan_windows", "nan_weights", "ranks"),
    }
)
"""Names in a record or a checkpoint of what does not measure the model; `sunspot metrics --json` adds `ranks`."""

LOSS = "loss"
"""The loss of each row, which is a metric, too."""

MAX_LENGTH = 200
"""Characters of a name: MLflow takes 250, with the prefix of held-out rows."""


def refuse_names(names: Iterable[object], who: str) -> None:
    """Raise `SettingsError` if a task's metrics may not have one of these names; `who` begins the message."""
    for name in names:
        fault = find_fault(name)
        if fault:
            raise SettingsError(
                f"{who} a metric with the name {shown(name)}: {fault}. Choose another name; taken are "
                f"{', '.join(sorted({LOSS, *RECORD_NAMES}))}, and all that begin with {HELD_OUT}"
            )


@functools.lru_cache(1000)
def find_fault(name: object) -> str:
    """Return why a metric of a task may not have this name; empty if it may."""
    if not isinstance(name, str):
        return f"it is of type {type(name).__name__}, and a name is text"
    if not name.strip():
        return "it is empty"
    if not name.isprintable():
        return "it has line breaks or other characters that cannot be printed"
    if len(name) > MAX_LENGTH:
        return f"it has {len(name)} characters, and {MAX_LENGTH} is the limit"
    if name == LOSS:
        return "that is the name of the loss itself"
    if name in RECORD_NAMES:
        return f"every record of the metric history has its own {name}"
    if name.startswith(HELD_OUT):
        return f"{HELD_OUT} is put before the names of metrics of held-out rows"
    return ""


def shown(name: object) -> str:
    """Return a name for messages, on one line and cut."""
    text = repr(name)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."
