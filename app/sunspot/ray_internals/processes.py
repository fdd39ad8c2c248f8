"""Signals to the driver: they must reach neither Ray's own processes nor a handler that Ray has installed.

ray._private.services.ConsolePopen       starts Ray's processes in the driver's process group: the public API sets no
                                         other
ray._private.utils.set_sigterm_handler   with it, `ray.init` replaces the driver's handler of SIGTERM by one that exits
                                         with 15, and the public API cannot prevent that
"""

import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ray_apart_from_signals() -> Iterator[None]:
    """Have Ray start its processes in sessions of their own, and keep the driver's handler of SIGTERM if it has one.

    Service managers, batch systems and terminals signal the driver's whole process group. Ray's processes would end at
    once, before the workers have saved. The kernel still ends them with the driver, whatever ends that, because Ray
    asks for it on Linux (PR_SET_PDEATHSIG). On other systems, they stay in the group, because a helper of Ray ends it.
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
