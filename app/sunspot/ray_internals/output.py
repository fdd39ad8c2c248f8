"""What Ray prints in the driver and in the workers.

ray._private.worker.print_to_stdstream   prints a page for each lost worker, which we tell on a line, whatever the
                                         public log_to_driver is
core_worker.cc                           prints a line when a pool of Ray Data makes its first actor
the names of Ray Train's loggers         some are those of files, which the public LoggingConfig does not reach: it sets
                                         the level of "ray.train"
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_NODE = "sunspot-no-node"
"""A resource that no node has."""

LOST_WORKER = "A worker died or was killed while executing a task"
"""How the page begins that Ray prints in the driver for each lost worker."""


@contextmanager
def quiet_losses() -> Iterator[None]:
    """Keep Ray from printing a page for each lost worker: what ended which rank is said on one line."""
    import ray._private.worker as module

    if not (usual := getattr(module, "print_to_stdstream", None)):
        yield
        return

    def print_others(data: dict[str, Any], *options: Any, **named: Any) -> None:
        if not any(line.startswith(LOST_WORKER) for line in data.get("lines", ())):
            usual(data, *options, **named)

    module.print_to_stdstream = print_others
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
