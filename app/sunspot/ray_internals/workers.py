"""A worker's process as Ray starts it: its command line.

sys.argv of a worker   when Ray launched it: the public API tells of actors and tasks, when the process has begun and
                       imported Ray
"""

import sys

LAUNCHED_AT = "--worker-launch-time-ms="
"""Begins the argument in which Ray tells a worker when it was launched."""


def launch_time() -> float | None:
    """When Ray launched this worker, in seconds since the epoch; None: it does not tell."""
    given = [argument.removeprefix(LAUNCHED_AT) for argument in sys.argv if argument.startswith(LAUNCHED_AT)]
    return int(given[-1]) / 1000 if given and given[-1].isdigit() else None
