"""Creates process groups that consist of this process alone or of several forked processes."""

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
"""Seconds that forked ranks may take, which is half of a test's limit. Hung ranks print their stacks and end."""

ON_FIRST_USE = (
    "torch._dynamo",
    "torch.distributed.checkpoint.default_planner",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""Modules that torch imports on first use, which takes seconds. They are imported once, before a fork."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[object]:
    import torch.distributed as dist  # imported here, because most tests need no torch

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    assert dist.group.WORLD
    yield dist.group.WORLD
    dist.destroy_process_group()


def in_processes(folder: Path, count: int, act: Callable[[Any], Any]) -> list[Any]:
    """Return the results of `act(group)` in `count` forked processes, which are the ranks of a group.

    Fails with the stacks of a rank that has not returned after LIMIT_S.
    """
    import torch
    import torch.distributed as dist

    def work(rank: int, sender: Any) -> None:
        gc.freeze()  # destroying an earlier test's group would wait for its threads, which do not exist in this process
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=stacks[rank])
        torch.set_num_threads(1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(number) for name, number in place.items()}  # like Ray Train and torchrun
        store = dist.FileStore(str(folder / "ranks"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=30))
        sender.send(act(dist.group.WORLD))

    import_before_fork()
    context = multiprocessing.get_context("fork")
    stacks = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115  # closed with the last process
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    ranks = [context.Process(target=work, args=(rank, sender)) for rank, (_, sender) in enumerate(pipes)]
    for rank in ranks:
        rank.start()
    for _, sender in pipes:
        sender.close()
    found = []
    with contextlib.suppress(EOFError):  # the rank ended without a result
        found.extend(receiver.recv() for receiver, _ in pipes)
    for rank in ranks[len(found) + 1 :]:
        rank.kill()
    for rank in ranks:
        rank.join()
    missing = stacks[len(found) :]
    if missing:
        missing[0].seek(0)
        reason = missing[0].read().decode() or "it raised an error, which is on stderr"
        pytest.fail(f"rank {len(found)} of {count} has returned nothing: {reason}", pytrace=False)
    return found


def import_before_fork() -> None:
    for name in ON_FIRST_USE:
        importlib.import_module(name)


def fork_ranks(count: int, act: Callable[[int], None], exit_code: int = 0) -> None:
    """Call `act` for each rank in a forked process, which must end with `exit_code`."""
    import torch

    import_before_fork()
    children = []
    for rank in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        # PyTorch replaces the forked thread pool at its next use, and aborts if two threads use it first.
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        act(rank)
        os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [exit_code] * count, act
