"""Deciding together what to do after a step: time of a step that does nothing else, all ranks on this machine."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.bench.scale import Figure
from sunspot.parallel.decisions import StepActions, StepDecisionBroadcast

RANKS = (2, 16, 64)

STEPS, WARM_UP = 400, 50

TIMEOUT = timedelta(minutes=2)


def measure() -> Iterator[Figure]:
    """Microseconds a step."""
    for ranks in RANKS:
        yield Figure("deciding what to do after a step", f"{ranks} ranks", 1e6 * seconds_of_step(ranks), "us")


def seconds_of_step(ranks: int) -> float:
    """Of the slowest rank; each is a forked process."""
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def run(rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=TIMEOUT)
        assert dist.group.WORLD
        decisions = StepDecisionBroadcast(dist.group.WORLD)
        for number in range(STEPS):
            if number == WARM_UP:
                began = time.perf_counter()
            decisions.agree(StepActions)
        seconds = time.perf_counter() - began
        dist.barrier()  # no rank may end while another has messages for it
        answers.put(seconds / (STEPS - WARM_UP))

    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        processes = [fork.Process(target=run, args=(rank, meeting)) for rank in range(ranks)]
        for process in processes:
            process.start()
        seconds = [answers.get() for _ in processes]
        for process in processes:
            process.join()
    return max(seconds)
