"""Keeps signals to the driver away from Ray's own processes, and keeps the driver's SIGTERM handler.

ray._private.services.ConsolePopen       starts Ray's processes in the driver's process group. The public API cannot
                                         choose another group.
ray._private.utils.set_sigterm_handler   is how `ray.init` replaces the driver's SIGTERM handler with one that exits
                                         with code 15. The public API cannot prevent that.
"""

import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ray_apart_from_signals() -> Iterator[None]:
    """Make Ray start its processes in separate sessions, and keep the driver's SIGTERM handler if it has one.

    Service managers, batch systems and terminals signal the driver's whole process group, so Ray's processes would exit
    before the workers have saved. On Linux, Ray's processes can be in other sessions, because Ray makes the kernel kill
    them when the driver exits (PR_SET_PDEATHSIG). On other systems, Ray's processes stay in the driver's group,
    because one of Ray's helpers kills this whole group when the driver exits.
    """
    from ray._private import services, utils

    popen, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    if sys.platform.startswith("linux"):
        services.ConsolePopen = functools.partial(popen, start_new_session=True)
    if callable(signal.getsignal(signal.SIGTERM)):
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = popen, set_handler
