"""Forms the process groups of a generation without Ray, and breaks them when a member is gone.

A collective of gloo waits for a lost member until its time limit, and no public call ends it. Shutting down its sockets
ends it at once; they are the sockets that appeared while the group formed. A collective of NCCL waits on the GPU
forever. It can be aborted, but then it leaves a wrong sum and raises no error. Its sums must therefore not be used
until `await_device` has returned and the group is found to be intact.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

FORM_LIMIT_S = 20
"""Seconds in which the members of a group must meet and connect. The loss of a member ends their wait sooner."""

NCCL_LIMIT_S = 120
"""Seconds that NCCL's first collective may take. It finds all paths between the GPUs and connects them."""

LOOPBACK = "127.0.0.1"

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make gloo and NCCL listen on the loopback interface alone, unless they are already set."""

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch ends the process when a member is gone
    "NCCL_NVLS_ENABLE": "0",  # its multicast memory can outlive an abort (NVIDIA, nvidia-resiliency-ext, in-process)
}
"""Environment variables for NCCL, unless they are already set."""


class ProcessGroups:
    """Process groups of this process's newest generation: the default one for gradients, and another for agreements."""

    def __init__(self, device: torch.device, limit_s: float, server: tuple[str, int] = ("", 0)) -> None:
        """Create the state of the groups. Gradients are summed on `device`. Collectives on the CPU wait at most
        `limit_s`.

        Connections to `server`, the address of the membership server, may open while a group forms, and are never cut.
        """
        self._device = device
        self._limit = timedelta(seconds=limit_s)
        self._server = server
        self._ending = threading.Lock()
        self._before: set[str] | None = None
        "Sockets that existed before a group began to form; None while no group forms."
        self._own: set[str] = set()
        "Sockets of the groups that have formed."
        self._of_gloo: set[str] = set()
        "Sockets among them that belong to gloo."
        self._form_by = math.inf
        "Deadline of the groups that are forming (`monotonic`)."

    @property
    def overdue(self) -> bool:
        """True if groups have been forming for too long."""
        return time.monotonic() > self._form_by

    def form(
        self, open_store: Callable[[], Any], rank: int, world_size: int, limit_s: float = FORM_LIMIT_S
    ) -> dist.ProcessGroup:
        """Form both groups in a store, and return the one for agreements.

        Call it in the context of `forming`. The store is opened here so that `cut` closes its connection, too. torch's
        own limits are those of later collectives, so after `limit_s` the groups are `overdue`, and the caller cuts
        them. Raises `RuntimeError` if a member is lost before the groups have formed.
        """
        self._form_by = time.monotonic() + limit_s
        if self._server[0] == LOOPBACK:
            os.environ |= {name: os.environ.get(name, value) for name, value in ON_LOOPBACK.items()}
        backend = "gloo"
        if self._device.type == "cuda":
            os.environ |= {name: os.environ.get(name, value) for name, value in NCCL_SETTINGS.items()}
            torch.cuda.set_device(self._device)
            backend = "cpu:gloo,cuda:nccl"
        store = open_store()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=self._limit)
        agreements = dist.new_group(backend="gloo", timeout=self._limit)
        self._of_gloo = {name for _, name in _sockets()} - (self._before or set())
        if self._device.type == "cuda":  # NCCL connects in its first collective
            self._form_by = time.monotonic() + NCCL_LIMIT_S
            dist.all_reduce(torch.zeros(1, device=self._device))
            await_device(self._device)
            if self.overdue:  # an aborted collective raises nothing
                raise RuntimeError(f"NCCL did not connect within {NCCL_LIMIT_S} s")
        self._form_by = math.inf
        return cast(dist.ProcessGroup, agreements)

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Take all sockets that appear in this context for those of the groups that form in it."""
        self._before = {name for _, name in _sockets()}
        try:
            yield
        finally:
            self._own |= {name for _, name in _sockets()} - self._before
            self._before, self._form_by = None, math.inf

    def cut(self) -> None:
        """End all collectives in this process; those of gloo raise an error. This may be called in any thread."""
        with self._ending:
            before = self._before  # read once, because another thread may set it
            appeared = {name for _, name in _sockets()} - before if before is not None else set()
            _shut_down(self._own | appeared, self._server)
            if self._device.type == "cuda" and dist.group.WORLD:
                dist.group.WORLD._get_backend(self._device).abort()  # torch has no public name for it (2.15)

    def leave(self) -> None:
        """Forget the groups, because their generation has ended."""
        with self._ending:
            # Otherwise the destructor would wait for a running collective until a stopped peer continues.
            _shut_down(self._of_gloo, self._server)
            self._own, self._of_gloo = set(), set()
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # a member is lost
                    dist.destroy_process_group()


def await_device(device: torch.device) -> None:
    """Wait until a GPU has completed everything in its current stream."""
    torch.cuda.current_stream(device).synchronize()


def _shut_down(names: set[str], spared: tuple[str, int]) -> None:
    """Shut down the connections among these sockets, which ends all waits for them. `spared` is an address to keep."""
    for descriptor, name in list(_sockets()):
        if name not in names:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            # A listening socket has no peer, and stays: gloo ends the process if it is shut down.
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[:2] != spared:
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and the name of each socket of this process."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                yield int(entry), name
