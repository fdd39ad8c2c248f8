"""The process groups of a generation: formed without Ray, and broken when a member is gone.

A collective of gloo waits for whoever is gone, or has left, until its time limit, and no public call ends it. What does
at once is to shut down the sockets that it waits on; they are known as those that appeared while the group formed. One
of NCCL waits on the GPU for ever. It can be aborted, and then leaves a wrong sum and no error: nothing may come of what
it has summed before `await_device` has returned and the group is found to be whole.
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
"""Seconds that NCCL's first collective may take, which finds all paths between the GPUs and connects them."""

LOOPBACK = "127.0.0.1"

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make gloo and NCCL listen on the loopback interface alone, unless they are set already."""

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # or torch ends the process when a member is gone
    "NCCL_NVLS_ENABLE": "0",  # as its multicast memory can outlive an abort (NVIDIA, nvidia-resiliency-ext, in-process)
}
"""What NCCL is told if the environment says nothing else."""


class ProcessGroups:
    """Those of this process's newest generation: the default one, for gradients, and another for agreements."""

    def __init__(self, device: torch.device, limit_s: float, decider: tuple[str, int] = ("", 0)) -> None:
        """Gradients are summed on `device`; no collective on the CPU waits for longer than `limit_s`.

        Connections to the address of the `decider`, which may open while a group forms, are never cut.
        """
        self._device = device
        self._limit = timedelta(seconds=limit_s)
        self._decider = decider
        self._ending = threading.Lock()
        self._before: set[str] | None = None
        "The sockets there were before a group began to form; None: none does."
        self._own: set[str] = set()
        "The sockets of those that have formed."
        self._of_gloo: set[str] = set()
        "The sockets among them that belong to gloo."
        self._form_by = math.inf
        "Deadline of the groups that are forming (`monotonic`)."

    @property
    def overdue(self) -> bool:
        """True if groups have been forming for too long."""
        return time.monotonic() > self._form_by

    def form(
        self, open_store: Callable[[], Any], rank: int, world_size: int, limit_s: float = FORM_LIMIT_S
    ) -> dist.ProcessGroup:
        """Form both in a store, and return that for agreements. Raises `RuntimeError` when a member is lost meanwhile.

        Call it in the context of `forming`. The store is opened here, so that `cut` closes its connection, too. torch's
        own limits are those of later collectives. So after `limit_s` the groups are `overdue`, and the caller cuts
        them.
        """
        self._form_by = time.monotonic() + limit_s
        if self._decider[0] == LOOPBACK:
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
        """Form groups in this context: all sockets that appear in it are taken for theirs."""
        self._before = {name for _, name in _sockets()}
        try:
            yield
        finally:
            self._own |= {name for _, name in _sockets()} - self._before
            self._before, self._form_by = None, math.inf

    def cut(self) -> None:
        """End all collectives in this process, those of gloo with an error; may be called in any thread."""
        with self._ending:
            before = self._before  # another thread may set it
            appeared = {name for _, name in _sockets()} - before if before is not None else set()
            _shut_down(self._own | appeared, self._decider)
            if self._device.type == "cuda" and dist.group.WORLD:
                dist.group.WORLD._get_backend(self._device).abort()  # torch has no public name for it (2.15)

    def leave(self) -> None:
        """Forget them, as their generation has ended."""
        with self._ending:
            # Otherwise the destructor would wait for a collective that is under way, as long as a peer stands still.
            _shut_down(self._of_gloo, self._decider)
            self._own, self._of_gloo = set(), set()
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # that of a lost member
                    dist.destroy_process_group()


def await_device(device: torch.device) -> None:
    """Return once a GPU has done all that its current stream was given."""
    torch.cuda.current_stream(device).synchronize()


def _shut_down(names: set[str], spared: tuple[str, int]) -> None:
    """Shut down the connections among these sockets, which ends what waits for them; `spared` is an address to keep."""
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
            if (name := os.readlink(f"/proc/self/fd/{entry}")).startswith("socket:"):
                yield int(entry), name
