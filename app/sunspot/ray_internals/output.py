"""Limits what Ray prints in the driver and in the workers.

ray._private.worker.print_to_stdstream   prints messages from Ray's own processes in the driver, even with the public
                                         log_to_driver=False. Some messages are pages of logs.
core_worker.cc                           prints a line when a pool of Ray Data creates its first actor
loggers that are named after a file      log some of Ray Train's messages. The public LoggingConfig does not affect
                                         these loggers, because it only sets the level of "ray.train".
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sunspot.formatting import brief

log = logging.getLogger(__name__)

ALREADY_REPORTED = re.compile(
    r"A worker died or was killed while executing a task"
    r"|\d+ worker\(s\) were killed due to the node running low on memory"
    r"|WARNING: \d+ \w+ worker processes have been started on node"
)
"""Matches the beginning of messages of Ray 2.60 that need not be shown. The run itself reports lost workers, and
SUNSPOT_ACCEPT allows many workers."""

MAX_MESSAGE = 200
"""Maximum number of characters shown of any other message from Ray's own processes. The Ray session's logs contain the
full message."""

NO_NODE = "sunspot-no-node"
"""Resource that no node has."""


@contextmanager
def brief_ray() -> Iterator[None]:
    """Context manager that shortens messages from Ray's own processes to one line, and shows each kind only once."""
    import ray._private.worker as module

    usual = getattr(module, "print_to_stdstream", None)
    if usual is None:
        yield
        return
    shown: set[str] = set()

    def print_briefly(data: dict[str, Any], *options: Any, **named: Any) -> None:
        if data.get("pid") != "raylet":
            usual(data, *options, **named)
            return
        for text in data.get("lines", ()):
            first = brief(text.strip().partition("\n")[0], MAX_MESSAGE)
            kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", first)
            if kind not in shown and not ALREADY_REPORTED.match(text):
                shown.add(kind)
                log.warning("Ray: %s", first)

    module.print_to_stdstream = print_briefly
    try:
        yield
    finally:
        module.print_to_stdstream = usual


def hide_warning_of_restarts() -> None:
    """Suppress Ray's warning that an actor's restart might fail. Ray Data's own actor pools cause this warning.

    Ray prints the warning once per process, to file descriptor 2, when the process first creates an actor that can be
    restarted and has an argument in the object store. This function creates such an actor while the descriptor points
    to /dev/null. The actor never starts, because no node has the resource that it requests.
    """
    import ray

    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        actor = ray.remote(max_restarts=1, resources={NO_NODE: 1})(_Unused).remote(ray.put(None))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    ray.kill(actor)


class _Unused:
    def __init__(self, argument: object) -> None:
        pass


def quiet_ray_train() -> None:
    """Suppress the line that Ray Train logs for each report."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        if "/ray/train/" in name:
            logging.getLogger(name).setLevel(logging.WARNING)
