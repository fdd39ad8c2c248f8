"""A report of the metric history: how the numbers of all ranks get to rank 0.

A gather is measured among RANKS processes on this machine; of 1,000 ranks only what rank 0 does is, as their messages
lie in its memory already.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.scale import Figure, timed
from sunspot.observe.metrics import MetricWindow, RecentMeans, Reducer, Sums
from sunspot.observe.ranks import to_column
from sunspot.parallel.collectives import gather_objects
from sunspot.run.ranks import Columns

RANKS, ROUNDS = 16, 30


def measure() -> Iterator[Figure]:
    """Measure its figures, one after the other."""
    yield from measure_gather()
    yield from measure_report(1000)


def one_window() -> MetricWindow:
    """A worker's window of a report."""
    group = dist.group.WORLD
    assert group
    window = MetricWindow(group, torch.device("cpu"), RecentMeans(1, {}))
    rows = {name: torch.rand(128) for name in ("loss", "accuracy")}
    for _ in range(100):
        window.add_step([rows], 0.1 * random.random(), 0.01 * random.random())
    return window


def measure_report(ranks: int) -> Iterator[Figure]:
    """What a report of so many ranks costs rank 0, and the network."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        window = one_window()
        record = window.close(100, 1, 0.1)
        dist.destroy_process_group()
    sums = Sums()
    sums.add({"loss": torch.rand(128), "accuracy": torch.rand(128)})
    numbers = [random.random() * 100 for _ in window.own]
    message = torch.tensor([0.0, *numbers, *(value for pair in sums.totals().values() for value in pair)])
    message = message.double()
    messages = [message.clone() for _ in range(ranks)]
    before = pickle.dumps((sums.totals(), {"rows": 128}, dict(zip(window.own, numbers, strict=True)), {}))

    def reduce() -> Columns:
        everyone = torch.stack(messages).numpy()
        torch.tensor([*everyone.max(0), *map(sum, everyone.T.tolist())])
        return {name: to_column(name, everyone[:, at]) for at, name in enumerate(window.own, 1) if name != "time"}

    def reduce_before() -> str:
        parts = [pickle.loads(before) for _ in range(ranks)]
        return json.dumps({**record, "ranks": [{**part[1], **part[2]} for part in parts]})

    line, line_before = json.dumps({"ranks": reduce()}), reduce_before()
    at = f"{ranks:,} ranks"
    yield Figure("bytes of a record on the curve", at, len(json.dumps(record)), "B", len(line_before))
    yield Figure("bytes of a record's ranks, apart", at, len(line), "B")
    size = message.numel() * message.element_size()
    yield Figure("bytes sent for a report, by all", at, 3 * size * ranks / 1e6, "MB", len(before) * ranks**2 / 1e6)
    yield Figure("rank 0's thread for a report (simulated)", at, 1e3 * timed(reduce), "ms", 1e3 * timed(reduce_before))


def measure_gather() -> Iterator[Figure]:
    """A report among processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        ranks = [context.Process(target=gather, args=(rank, folder, results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        now, before = results.get()
        for process in ranks:
            process.join()
    yield Figure("gather of a report, gloo", f"{RANKS} processes", 1e3 * now, "ms", 1e3 * before)


def gather(rank: int, folder: str, results: Any) -> None:
    """One of the processes; rank 0 tells the median seconds of a gather, and of the way of before."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group
    sums, reducer, numbers = Sums(), Reducer(group), [random.random() for _ in range(14)]
    sums.add({"loss": torch.rand(128), "accuracy": torch.rand(128)})
    names = [f"a_number_of_a_rank_{number}" for number in range(len(numbers))]
    times: dict[str, list[float]] = {"now": [], "before": []}
    ways: dict[str, Callable[[], Any]] = {
        "now": lambda: reducer.reduce(sums, numbers),
        "before": lambda: gather_objects((sums.totals(), {"rows": 1}, dict(zip(names, numbers, strict=True))), group),
    }
    for _ in range(ROUNDS):
        for way, act in ways.items():
            dist.barrier(group)
            began = time.perf_counter()
            act()
            dist.barrier(group)
            times[way].append(time.perf_counter() - began)
    if rank == 0:
        results.put([median(times[way][1:]) for way in ways])
    dist.destroy_process_group()
