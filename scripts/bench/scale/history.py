"""The metric history: a report of 1,000 ranks, and a month of 64 ranks that report every 10 s.

A gather is measured among RANKS processes on this machine; of 1,000 ranks only what rank 0 does is, as their messages
lie in its memory already. The month is written by the run's own code, with a clock of its own, to a directory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from app.background import TokenBucket
from app.observe.metrics import MetricWindow, RecentMeans, Reducer, Sums
from app.observe.output import SHIP_EVERY_S
from app.observe.ranks import FLUSH_BURST, FLUSH_EVERY_S, RankHistory, to_column
from app.parallel import gather_objects
from app.run import Run
from app.run.history import Journal
from app.run.logs import BURST, RANK_EVERY_S, SEGMENT_BYTES, LogWriter, rank_stream
from app.run.ranks import Columns, to_rows
from app.run.status import RunState, Status, write_status
from app.storage.local import LocalStorage
from scripts.bench.scale import Figure

RANKS, ROUNDS = 16, 30

EVERY_S, DAY_S, DAYS = 10, 86_400, 30

PUT_USD = 0.005 / 1000
"""Published price of S3 Standard in us-east-1 for a PUT or a listing (a GET is 0.0004 / 1000); a DELETE is free."""

OLDER_LINES = 1000
"""Lines of a file of the way of before, the last of which was written whole at each flush."""


def measure() -> Iterator[Figure]:
    """Measure its figures, one after the other."""
    yield from measure_gather()
    yield from measure_report(1000)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield from measure_month(CountingStorage(folder), 64)
        yield from measure_output(CountingStorage(folder))


# --------------------------------------------------------------------------------------------------------- one report


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


def timed(act: Callable[[], Any]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return median(times)


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


# -------------------------------------------------------------------------------------------------------------- a month


class CountingStorage(LocalStorage):
    """A directory that counts what is asked of it, and does not wait for the disk."""

    def __init__(self, storage_path: str) -> None:
        super().__init__(storage_path)
        self.writes = self.written = 0

    def write(self, key: str, data: bytes) -> None:
        self.writes += 1
        self.written += len(data)
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def measure_month(storage: CountingStorage, ranks: int) -> Iterator[Figure]:
    """What a month of a run with so many ranks leaves in storage, costs there, and takes to look at."""
    run, began = Run(storage, "month"), float(round(time.time()) - DAYS * DAY_S)
    line, writes, written = write_month(run, ranks, began)
    at, records = f"{ranks} ranks, {DAYS} days", DAYS * DAY_S // EVERY_S
    objects = storage.list("")
    yield Figure("history", at, sum(entry.size for entry in objects) / 1e6, "MB", records * line / 1e6)
    yield Figure("objects of it", at, len(objects), "", 2 + records / OLDER_LINES)
    yield Figure("written in a day", at, written / 1e6, "MB", DAY_S / EVERY_S * OLDER_LINES * line / 2e6)
    yield Figure("writes in a day", at, writes, "", DAY_S / EVERY_S)
    yield Figure("price of these", at, writes * PUT_USD, "USD", DAY_S / EVERY_S * PUT_USD)
    seconds, memory = zip(*(look(str(storage.root)) for _ in range(5)), strict=True)
    yield Figure("status", at, median(seconds), "s")
    yield Figure("peak memory of status", at, median(memory), "MB")


def measure_output(storage: CountingStorage) -> Iterator[Figure]:
    """What a day of a rank that prints 20 kB a second costs.

    Before, each of its segments was written when it was complete, and the last one every 5 s.
    """
    now, stream, each = 0.0, rank_stream(1, 0), 20_000 * SHIP_EVERY_S
    log = LogWriter(Run(storage, "output"), stream)
    log._pace = TokenBucket(BURST, RANK_EVERY_S, clock=lambda: now)
    ships, printed = DAY_S // SHIP_EVERY_S, b"x" * each
    for number in range(ships):
        now = float(number * SHIP_EVERY_S)
        log.append(printed)
        log.flush()
    at, before = "a rank that prints 20 kB/s", ships + ships * each / SEGMENT_BYTES
    kept = sum(entry.size for entry in storage.list("output"))
    yield Figure("its output in storage after a day", at, kept / 1e6, "MB", ships * each / 1e6)
    yield Figure("writes a day", at, storage.writes, "", before)
    yield Figure("price of these a day", at, storage.writes * PUT_USD, "USD", before * PUT_USD)


def write_month(run: Run, ranks: int, began: float) -> tuple[int, int, int]:
    """Write the history of a month; returns the bytes of a record in the way of before, and a day's writes and bytes.

    After the first day it is flushed every ten minutes, to take less time here: the same is there in the end.
    """
    assert isinstance(run.storage, CountingStorage)
    now, day = began, (0, 0)
    curve, apart = Journal(run, "metrics", 1), RankHistory(run, 1)
    apart._pace = TokenBucket(FLUSH_BURST, FLUSH_EVERY_S, clock=lambda: now)
    pool = [make_ranks(ranks, random.Random(seed)) for seed in range(20)]
    record: dict[str, Any] = {}
    for number in range(1, DAYS * DAY_S // EVERY_S + 1):
        now = began + float(number * EVERY_S)
        record = make_record(number, now, ranks)
        curve.append(record)
        apart.append(record, pool[number % len(pool)])
        if now - began <= DAY_S or number % 60 == 0:
            curve.flush()
            apart.flush()
        if now - began == DAY_S:
            day = run.storage.writes, run.storage.written
    settings = {"total_steps": 10**7, "attempt": 1, "world_size": ranks, "step": record["step"]}
    write_status(run, Status(RunState.RUNNING, "job", loss=record["loss"], **settings))
    return len(json.dumps({**record, "ranks": to_rows(pool[0])})), *day


def make_record(number: int, now: float, ranks: int) -> dict[str, Any]:
    """A record of the curve."""
    draw = random.Random(number)
    speeds = ("step_time_median_s", "step_time_p95_s", "data_wait_s", "rows_per_s", "memory_mib", "gpu_memory_mib")
    return {
        **{"step": 100 * number, "epoch": 1, "steps": 100, "rows": 12_800, "loss": draw.random()},
        **{"accuracy": draw.random(), "learning_rate": 0.001, "seconds": 9.9 + draw.random() / 10, "time": now},
        **{name: draw.random() * 100 for name in speeds},
        "world_size": ranks,
    }


def make_ranks(ranks: int, draw: random.Random) -> Columns:
    """Numbers of each rank, as widely spread as real ones."""
    times = ("seconds", "step_time_median_s", "step_time_p95_s", "data_wait_s", "steps_s", "forward_s")
    sizes = ("memory_mib", "gpu_memory_mib", "resident_mib", "memory_left_mib")
    columns = {name: np.array([draw.random() * 10 for _ in range(ranks)]) for name in times}
    columns |= {name: np.array([round(draw.random() * 50_000, 3) for _ in range(ranks)]) for name in sizes}
    columns |= {name: np.zeros(ranks) for name in ("throttled_s", "throttled_share")}
    return {"rows": [200] * ranks, **{name: to_column(name, values) for name, values in columns.items()}}


LOOK = """
import sys
from pathlib import Path
from submitter.cli import main
try:
    main(["status", "month", "--storage", sys.argv[1], "--json"])
finally:
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(peak.split()[1], file=sys.stderr)
"""


def look(storage: str, python: Sequence[str] = (sys.executable,)) -> tuple[float, float]:
    """Seconds and peak memory, in MB, of a whole process that shows the status."""
    began = time.perf_counter()
    environment = {**os.environ, "KUBECONFIG": os.devnull, "PYTHONPATH": str(Path.cwd())}
    shown = subprocess.run([*python, "-c", LOOK, storage], capture_output=True, text=True, check=True, env=environment)
    return time.perf_counter() - began, int(shown.stderr.split()[-1]) * 1024 / 1e6
