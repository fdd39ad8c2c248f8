"""The process groups of a generation: formed without Ray, and broken when a member is gone.

A collective of gloo waits for whoever is gone, or has left, until its time limit, and no public call ends it. What does
at once is to shut down the sockets that it waits on; they are known as those that appeared while the group formed.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

FORM_LIMIT_S = 20
"""How long a group may take to form; the loss of a member ends that sooner."""


class GroupSockets:
    """The sockets of this process's newest groups."""

    def __init__(self) -> None:
        self._before: set[str] | None = None
        "Those there were before the group began to form; None: no group."
        self._of_group: set[str] | None = None
        "Known once it has formed."

    def begin(self) -> None:
        """Take all sockets that appear from here on for those of the group."""
        self._of_group, self._before = None, {name for _, name in _sockets()}

    def end(self) -> None:
        """Take none that appears from here on for one of the group."""
        self._of_group = {name for _, name in _sockets()} - (self._before or set())

    def cut(self) -> None:
        """End all collectives of the group, in this process, with an error."""
        for descriptor, name in list(_sockets()):
            if self._before is None or name in self._before or name not in (self._of_group or {name}):
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                    found.shutdown(socket.SHUT_RDWR)  # not of one that listens: gloo ends the process for it


def form_group(store: Any, rank: int, world_size: int, limit_s: float) -> dist.ProcessGroup:
    """Form the default group, for gradients, and return another for what workers agree on.

    No collective waits for longer than `limit_s`. Raises `RuntimeError` when a member is lost meanwhile.
    """
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))


def leave_group() -> None:
    """Forget the groups of the generation that has ended."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # that of a lost member
            dist.destroy_process_group()


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and the name of each socket of this process."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{entry}")).startswith("socket:"):
                yield int(entry), name
