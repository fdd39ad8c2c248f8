"""The command line with which Ray started a worker's process.

sys.argv of a worker   contains the time at which Ray launched it. The public API provides only a later time, when
                       the process has already imported Ray.
"""

import sys

LAUNCHED_AT = "--worker-launch-time-ms="
"""Prefix of the argument that contains the launch time."""


def launch_time() -> float | None:
    """Return the time at which Ray launched this worker, in seconds since the epoch, or None if unknown."""
    given = [argument.removeprefix(LAUNCHED_AT) for argument in sys.argv if argument.startswith(LAUNCHED_AT)]
    return int(given[-1]) / 1000 if given and given[-1].isdigit() else None
