"""Reserves metric names for Sunspot, and checks the names of a task's metrics."""

import functools
from collections.abc import Iterable
from typing import Any

from sunspot.errors import SettingsError

HELD_OUT = "test_"
"""Prefix of metrics of held-out rows."""

RECORD_NAMES = frozenset(
    {
        *("attempt", "step", "epoch", "steps", "rows", "recent_rows", "learning_rate", "world_size", "time", "seconds"),
        *("best_evaluation", "evaluations_since_best", "rows_per_s", "step_time_median_s", "step_time_p95_s"),
        *("data_wait_s", "memory_mib", "gpu_memory_mib", "nan_accepted", "nan_since", "nan_windows", "nan_weights"),
        "ranks",
    }
)
"""Names in a record or a checkpoint that are not metrics of the model. `sunspot metrics --json` adds `ranks`."""

MetricRecord = dict[str, Any]
"""A record of the metric history, which is one flat object: Sunspot's own numbers, whose names are in RECORD_NAMES, and
the model's metrics. All its numbers describe the `steps` steps up to `step`."""

LOSS = "loss"
"""Name of the loss, which is also a metric."""

MAX_LENGTH = 200
"""Maximum number of characters in a name. MLflow allows 250, including the prefix HELD_OUT."""


def refuse_names(names: Iterable[object], who: str) -> None:
    """Raise `SettingsError` if one of the names is not allowed for a task's metric.

    `who` is the start of the message, such as "self.log('x') records"."""
    for name in names:
        fault = find_fault(name)
        if fault:
            raise SettingsError(
                f"{who} a metric with the name {shown(name)}: {fault}. Choose another name; the reserved "
                f"names are {', '.join(sorted({LOSS, *RECORD_NAMES}))}, and all names that begin with {HELD_OUT}"
            )


@functools.lru_cache(1000)
def find_fault(name: object) -> str:
    """Return why a task's metric cannot have this name, or an empty string if it can."""
    if not isinstance(name, str):
        return f"it is of type {type(name).__name__}, but a name must be text"
    if not name.strip():
        return "it is empty"
    if not name.isprintable():
        return "it contains line breaks or other unprintable characters"
    if len(name) > MAX_LENGTH:
        return f"it has {len(name)} characters, but at most {MAX_LENGTH} are allowed"
    if name == LOSS:
        return "it is reserved for the loss itself"
    if name in RECORD_NAMES:
        return f"every record of the metric history has its own {name}"
    if name.startswith(HELD_OUT):
        return f"the prefix {HELD_OUT} is reserved for metrics of held-out rows"
    return ""


def shown(name: object) -> str:
    """Shorten a name to one line, for use in a message."""
    text = repr(name)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."
