"""Tests that a process can leave its groups at once, even if other members are stopped."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sunspot.parallel.process_group import ProcessGroups

LIMIT_S = 60.0


def test_a_process_leaves_its_group_immediately_even_if_a_peer_is_suspended() -> None:
    """A broadcast is running, which would end only when the peer resumes."""

    def take_part(rank: int) -> None:
        gc.freeze()  # earlier stores cannot be destroyed in a forked process, where they have no threads
        torch.set_num_threads(1)
        groups = ProcessGroups(torch.device("cpu"), LIMIT_S)
        with groups.forming(lambda: False):
            client = lambda: dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=LIMIT_S))  # type: ignore[attr-defined]  # noqa: E731
            group = groups.form(client, rank, 2, LIMIT_S)
        dist.barrier(group=group)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        pending: Any = dist.broadcast(torch.zeros(4), group=group, group_src=0, async_op=True)
        began = time.monotonic()
        del pending, group
        groups.discard()
        took.send(time.monotonic() - began)
        os._exit(0)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("fork")
    received, took = context.Pipe(duplex=False)
    ranks = [context.Process(target=take_part, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    took.close()
    try:
        assert received.poll(LIMIT_S), "the broadcast waits for the peer"
        assert received.recv() < LIMIT_S / 4
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
