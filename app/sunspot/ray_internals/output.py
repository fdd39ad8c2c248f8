"""What Ray prints in the driver and in the workers.

ray._private.worker.print_to_stdstream   prints a page for each lost worker, which we tell on a line, whatever the
                                         public log_to_driver is
the names of Ray Train's loggers         some are those of files, which the public LoggingConfig does not reach: it sets
                                         the level of "ray.train"
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def quiet_ray_train() -> None:
    """Keep Ray's line for every report out of the rank's log."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        if "/ray/train/" in name:
            logging.getLogger(name).setLevel(logging.WARNING)
