"""Forms a generation's process groups without Ray, and aborts them if a member is lost.

A gloo collective usually raises an error at once if it waits for a process that exits. If it waits for a lost node, a
stopped process or a blocked member, it does not end until it times out. No public API ends such a collective earlier,
but shutting down the sockets that were opened while the group formed ends it at once.

An NCCL collective waits on the GPU forever. It can be aborted, but then it leaves a wrong sum without raising an error.
`SumGuard` keeps such sums out of the parameters.
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

from sunspot.background import Background
from sunspot.machine.open_files import allow_open_files
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sum_guard import SumGuard

FORM_LIMIT_S = 20
"""Seconds within which the members of a group must connect. The loss of a member ends the wait earlier."""

FILES_PER_MEMBER = 2
"""Number of files that a member has open for each other member: a connection in each of the two groups, if both use
gloo."""

NCCL_LIMIT_S = 120
"""Time limit in seconds for NCCL's first collective, which finds all paths between the GPUs and connects them."""

CHECK_EVERY_S = 0.1
"""Seconds between two checks for a lost member while groups form."""

LOOPBACK = "127.0.0.1"

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make gloo and NCCL listen only on the loopback interface, unless they are already set."""

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch ends the process after the loss of a member
    "NCCL_NVLS_ENABLE": "0",  # its multicast memory can outlive an abort (NVIDIA, nvidia-resiliency-ext, in-process)
}
"""Environment variables for NCCL, which are set unless they already are."""


class ProcessGroups:
    """The newest generation's process groups: those for gradients, and a gloo group for decisions."""

    def __init__(
        self,
        device: torch.device,
        limit_s: float,
        server: tuple[str, int] = ("", 0),
        replicas: ReplicaGroups | None = None,
    ) -> None:
        """Prepare groups that sum gradients on `device`. CPU collectives time out after `limit_s` seconds.

        Connections to `server`, the membership server's address, are never closed, even if they were opened while a
        group formed. `replicas` are formed and aborted together with the default group.
        """
        self._device = device
        self._limit = timedelta(seconds=limit_s)
        self._server = server
        self.replicas = replicas
        self._ending = threading.Lock()
        self._before: set[str] | None = None
        "The sockets that existed before a group started forming, or None while no group is forming."
        self._own: set[str] = set()
        "The sockets of the groups that have formed."
        self._of_gloo: set[str] = set()
        "The sockets of the groups that belong to gloo."
        self._form_by = math.inf
        "The deadline of the groups that are forming, in `time.monotonic` seconds."
        self.sums = SumGuard()
        "The guard of the newest group's sums. It is off on CPUs and in a group of one."

    @property
    def _overdue(self) -> bool:
        """True if groups have been forming for longer than their time limit."""
        return time.monotonic() > self._form_by

    def form(
        self, open_store: Callable[[], Any], rank: int, world_size: int, limit_s: float = FORM_LIMIT_S
    ) -> dist.ProcessGroup:
        """Form the groups for gradients and the group for decisions. Return the group for decisions.

        Call this inside `forming`, which aborts groups that need longer than `limit_s`. The store is opened here, so
        that `abort_collectives` also closes its connection. Raises `RuntimeError` if a member is lost before the groups
        have formed, and `SettingsError` if this process cannot open enough files.
        """
        allow_open_files("a worker", FILES_PER_MEMBER, world_size)
        self._form_by = time.monotonic() + limit_s
        with self._ending:  # so that a running `abort_collectives` trips the guard of the group that it aborts
            self.sums = SumGuard(self._device if self._device.type == "cuda" and world_size > 1 else None)
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
        if self.replicas:
            self.replicas.form(self._limit)
        self._of_gloo = {name for _, name in _sockets()} - (self._before or set())
        if self._device.type == "cuda":  # NCCL connects during its first collective
            self._form_by = time.monotonic() + NCCL_LIMIT_S
            for group in self._gradient_groups():
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
            await_device(self._device)
            if self._overdue:  # an aborted collective raises no error
                raise RuntimeError(f"NCCL did not connect within {NCCL_LIMIT_S} s")
        self._form_by = math.inf
        return cast(dist.ProcessGroup, agreements)

    @contextlib.contextmanager
    def forming(self, is_closed: Callable[[], bool]) -> Iterator[None]:
        """Context manager for forming groups. All sockets that are opened inside it belong to the groups.

        The groups are aborted once their generation `is_closed`, or after their time limit. The limit is needed because
        torch's timeouts apply only to collectives of groups that have formed.
        """

        def check() -> None:
            if is_closed() or self._overdue:
                self.abort_collectives()

        self._before = {name for _, name in _sockets()}
        try:
            # The process may hear of a loss before it has a socket to close, so one check would not be enough.
            with Background(CHECK_EVERY_S, check):
                yield
        finally:
            self._own |= {name for _, name in _sockets()} - self._before
            self._before, self._form_by = None, math.inf

    def abort_collectives(self) -> None:
        """Abort all collectives in this process, from any thread.

        Calls `SumGuard.trip` before aborting anything. Gloo's collectives then raise an error. NCCL's collectives end
        without an error but with wrong sums, which the guard keeps out of the parameters.
        """
        with self._ending:
            self.sums.trip()
            before = self._before  # read once, because another thread can change it
            appeared = {name for _, name in _sockets()} - before if before is not None else set()
            _shut_down(self._own | appeared, self._server)
            if self.replicas:
                self.replicas.end_if_stuck()
            for group in self._gradient_groups() if self._device.type == "cuda" else ():
                cast(Any, group)._get_backend(self._device).abort()  # torch has no public API for this (2.15)

    def _gradient_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups whose collectives run on the device."""
        world = dist.group.WORLD
        return [world, *(self.replicas.all if self.replicas else ())] if world else []

    def discard(self) -> None:
        """Discard the groups after the end of their generation."""
        with self._ending:
            # Otherwise the destructor would wait for a running collective until a stopped peer resumed.
            _shut_down(self._of_gloo, self._server)
            self._own, self._of_gloo = set(), set()
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # a member is lost
                    dist.destroy_process_group()


def await_device(device: torch.device) -> None:
    """Wait until a GPU has completed all work in its current stream."""
    torch.cuda.current_stream(device).synchronize()


def _shut_down(names: set[str], spared: tuple[str, int]) -> None:
    """End all waits for the named sockets by shutting down their connections. Keep connections to `spared`."""
    for descriptor, name in list(_sockets()):
        if name not in names:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            # A listening socket has no peer and is kept, because gloo ends the process if it is shut down.
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[:2] != spared:
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and name of each of this process's sockets."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                yield int(entry), name
