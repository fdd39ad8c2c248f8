"""Measures the metric history of 64 ranks that report every 10 s for a month: its size, and the time to show a status.

Sunspot's own code writes the history to a directory, with a simulated clock. The status is shown after each of LENGTHS.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from scripts.bench import Figure
from sunspot.background import TokenBucket
from sunspot.observe.ranks import FLUSH_BURST, FLUSH_EVERY_S, RankHistory, RankTable
from sunspot.run import Run
from sunspot.run.attempts import Attempt, claim, new_nonce, record_start
from sunspot.run.history import Journal
from sunspot.run.status import RunState, Status, new_driver, write_status
from sunspot.storage.local import LocalStorage

RANKS = 64

EVERY_S = 10
HOUR_S = 3_600
DAY_S = 86_400
DAYS = 30

LENGTHS = {HOUR_S: "an hour", DAY_S: "a day", DAYS * DAY_S: f"{DAYS} days"}
"""Times at which the status is measured, in seconds, with their names."""

LOOKS = 5


def measure() -> Iterator[Figure]:
    """Yield the size of the history and the time to show a status, after each of LENGTHS."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        storage = LocalStorage(folder)
        for seconds in write_month(Run(storage, "month")):
            at = f"{RANKS} ranks, {LENGTHS[seconds]}"
            yield Figure("history", at, sum(entry.size for entry in storage.list("")) / 1e6, "MB")
            look(folder)  # compiles the modules
            yield Figure("status, from start to end", at, median(look(folder) for _ in range(LOOKS)), "s")


def write_month(run: Run) -> Iterator[int]:
    """Write the history of a month and a status, and yield each of LENGTHS when the history is that long.

    After the first day, the history is flushed every ten minutes, which saves time and gives the same result.
    """
    began = now = float(round(time.time()) - DAYS * DAY_S)
    attempt = Attempt(1, "job", None, 0, time=began, nonce=new_nonce(), chosen=False)
    assert claim(run, [], attempt)
    record_start(run, replace(attempt, chosen=True))
    curve, apart = Journal(run, "metrics", 1), RankHistory(run, 1)
    apart._pace = TokenBucket(FLUSH_BURST, FLUSH_EVERY_S, clock=lambda: now)
    pool = [make_ranks(random.Random(seed)) for seed in range(20)]
    for number in range(1, DAYS * DAY_S // EVERY_S + 1):
        seconds = number * EVERY_S
        now, record = began + seconds, make_record(number, began + seconds)
        curve.append(record)
        apart.append(record, pool[number % len(pool)])
        if seconds <= DAY_S or number % 60 == 0:
            curve.flush()
            apart.flush()
        if seconds in LENGTHS:
            status = Status(RunState.RUNNING, "job", attempt=1, driver=new_driver(), step=record["step"])
            write_status(run, replace(status, loss=record["loss"], total_steps=10**9, world_size=RANKS))
            yield seconds


def make_record(number: int, now: float) -> dict[str, Any]:
    """Return a record of the metric history."""
    draw = random.Random(number)
    speeds = ("step_time_median_s", "step_time_p95_s", "data_wait_s", "rows_per_s", "memory_mib", "gpu_memory_mib")
    return {
        **{"step": 100 * number, "epoch": 1, "steps": 100, "rows": 12_800, "loss": draw.random()},
        **{"accuracy": draw.random(), "learning_rate": 0.001, "seconds": 9.9 + draw.random() / 10, "time": now},
        **{name: draw.random() * 100 for name in speeds},
        "world_size": RANKS,
    }


def make_ranks(draw: random.Random) -> RankTable:
    """Return numbers for each rank, with the spread of real numbers."""
    times = ("seconds", "step_time_median_s", "step_time_p95_s", "data_wait_s", "steps_s", "forward_s")
    sizes = ("memory_mib", "gpu_memory_mib", "resident_mib", "memory_left_mib")
    columns = {name: np.array([draw.random() * 10 for _ in range(RANKS)]) for name in times}
    columns |= {name: np.array([round(draw.random() * 50_000, 3) for _ in range(RANKS)]) for name in sizes}
    columns |= {name: np.zeros(RANKS) for name in ("throttled_s", "throttled_share")}
    return {"rows": np.full(RANKS, 200.0), **columns}


def look(storage: str) -> float:
    """Return the seconds of a process that shows the status, from its start to its end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "sunspot", "status", "month", "--storage", storage, "--json"]
    subprocess.run(command, capture_output=True, check=True, env={**os.environ, "KUBECONFIG": os.devnull})
    return time.perf_counter() - began
