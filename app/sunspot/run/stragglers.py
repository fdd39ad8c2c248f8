"""Decides whether a worker or a node is so much slower than the others that it delays them all."""

RECENT_S = 300.0
"""Seconds of recent metric history that are examined to find out whether a run is slow."""

LAG_RATIO = 1.3
"""Minimum ratio between a straggler's own time in a step and the time of the others."""

LAG_FRACTION = 0.1
"""Minimum fraction of a step that a straggler costs."""

MIN_LAG_S = 0.002
"""Minimum number of seconds per step that a straggler costs. Processes on one machine delay each other by less time."""

STEADY_FRACTION = 0.75
"""Minimum fraction of the windows in which a straggler is the slowest. One bad minute does not make a straggler."""


def lags(own_s: float, others_s: float, step_s: float, ratio: float = LAG_RATIO) -> bool:
    """Return True if a worker is a straggler.

    The worker computes for `own_s` seconds per step, and the other workers for `others_s`. Neither time includes
    waiting for other workers. The whole step takes `step_s` seconds. A straggler computes for at least `ratio` times as
    long as the others. Its lag is at least MIN_LAG_S seconds and at least LAG_FRACTION of the step.
    """
    lag_s = own_s - others_s
    return lag_s >= max(MIN_LAG_S, LAG_FRACTION * step_s) and own_s >= ratio * others_s
