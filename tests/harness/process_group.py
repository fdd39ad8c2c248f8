"""Process groups: of this process alone, where collectives work and nobody waits, or of some forked ones."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 300.0
"""The longest that forked ranks may take, half of a test's limit: those that hang tell where, and end."""

ON_FIRST_USE = (
    "torch._dynamo",
    "torch.distributed.checkpoint.default_planner",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""What torch imports when it is needed, which takes seconds: before a fork, once for all its children."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[object]:
    import torch.distributed as dist  # here, as most tests need no torch

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    assert dist.group.WORLD
    yield dist.group.WORLD
    dist.destroy_process_group()


def in_processes(folder: Path, count: int, act: Callable[[Any], Any]) -> list[Any]:
    """What `act(group)` returns in each of `count` forked processes, the ranks of a group.

    Fails with the stacks of a rank that has returned nothing after LIMIT_S.
    """
    import torch
    import torch.distributed as dist

    def work(rank: int, sender: Any) -> None:
        gc.freeze()  # a group that an earlier test has left waits for its threads as it goes, and has none here
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=stacks[rank])
        torch.set_num_threads(1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(number) for name, number in place.items()}  # as Ray Train and torchrun do
        store = dist.FileStore(str(folder / "ranks"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=30))
        sender.send(act(dist.group.WORLD))

    import_before_fork()
    context = multiprocessing.get_context("fork")
    stacks = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115  # gone with the last process
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    ranks = [context.Process(target=work, args=(rank, sender)) for rank, (_, sender) in enumerate(pipes)]
    for rank in ranks:
        rank.start()
    for _, sender in pipes:
        sender.close()
    found = []
    with contextlib.suppress(EOFError):  # that one has ended, and sent nothing
        found.extend(receiver.recv() for receiver, _ in pipes)
    for rank in ranks[len(found) + 1 :]:
        rank.kill()
    for rank in ranks:
        rank.join()
    if missing := stacks[len(found) :]:
        missing[0].seek(0)
        told = missing[0].read().decode() or "it raised what stderr tells"
        pytest.fail(f"rank {len(found)} of {count} has returned nothing: {told}", pytrace=False)
    return found


def import_before_fork() -> None:
    for name in ON_FIRST_USE:
        importlib.import_module(name)


def fork_ranks(count: int, act: Callable[[int], None], exit_code: int = 0) -> None:
    """Let each rank act in a forked process of its own, which must end with `exit_code`."""
    import torch

    import_before_fork()
    children = []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        # PyTorch replaces the forked pool of threads at its next use, and aborts if two threads are the next.
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        act(rank)
        os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [exit_code] * count, act
