"""A worker's process as Ray starts it: its command line, its environment.

sys.argv of a worker                       when Ray launched it, and on which node: the public API tells of actors and
                                           tasks, when the process has begun and imported Ray
RAY_RAYLET_PID in a worker's environment   Ray's process on the node, without which there are no workers
"""

import os
import sys

LAUNCHED_AT = "--worker-launch-time-ms="
"""Begins the argument in which Ray tells a worker when it was launched."""

NODE = "--node-id="
"""Begins the argument in which Ray tells a worker its node."""


def launch_time() -> float | None:
    """When Ray launched this worker, in seconds since the epoch; None: it does not tell."""
    given = [argument.removeprefix(LAUNCHED_AT) for argument in sys.argv if argument.startswith(LAUNCHED_AT)]
    return int(given[-1]) / 1000 if given and given[-1].isdigit() else None


def raylet_process() -> int:
    """The process without which this node has no workers."""
    return int(os.environ.get("RAY_RAYLET_PID", os.getppid()))
