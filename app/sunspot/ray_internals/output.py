"""What Ray prints in the driver and in the workers.

ray._private.worker.print_to_stdstream   prints messages of Ray's own processes in the driver, up to pages of logs,
                                         whatever the public log_to_driver is
core_worker.cc                           prints a line when a pool of Ray Data makes its first actor
the names of Ray Train's loggers         some are those of files, which the public LoggingConfig does not reach: it sets
                                         the level of "ray.train"
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sunspot.formatting import brief

log = logging.getLogger(__name__)

TOLD_BY_US = re.compile(
    r"A worker died or was killed while executing a task"
    r"|\d+ worker\(s\) were killed due to the node running low on memory"
    r"|WARNING: \d+ \w+ worker processes have been started on node"
)
"""Matches the beginning of Ray's messages (2.60) on lost workers, which the run's own lines tell, and on many workers,
which SUNSPOT_ACCEPT allows."""

MAX_MESSAGE = 200
"""Characters shown of any other message of Ray's own processes; all of it is in the logs of Ray's session."""

NO_NODE = "sunspot-no-node"
"""A resource that no node has."""


@contextmanager
def brief_ray() -> Iterator[None]:
    """Show at most one line of each kind of message of Ray's own processes while the context lasts."""
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
            if kind not in shown and not TOLD_BY_US.match(text):
                shown.add(kind)
                log.warning("Ray: %s", first)

    module.print_to_stdstream = print_briefly
    try:
        yield
    finally:
        module.print_to_stdstream = usual


def hide_warning_of_restarts() -> None:
    """Keep Ray from printing that an actor may not start again, which its pools of Ray Data cause themselves.

    Ray prints this once in a process, to file descriptor 2, when it first makes an actor that has an argument in the
    object store and may start again. Here that is an actor which no node takes, while the descriptor leads nowhere.
    """
    import ray

    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
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
    """Keep Ray's line for every report out of the rank's log."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        if "/ray/train/" in name:
            logging.getLogger(name).setLevel(logging.WARNING)
