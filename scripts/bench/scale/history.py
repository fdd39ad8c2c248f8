"""The metric history: a month of 64 ranks that report every 10 s, and what it takes to look at it.

It is written by the run's own code, with a clock of its own, to a directory, and looked at on the way.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from scripts.bench.scale import Figure, timed
from sunspot.background import TokenBucket
from sunspot.observe.output import SHIP_EVERY_S
from sunspot.observe.ranks import FLUSH_BURST, FLUSH_EVERY_S, RankHistory, to_column
from sunspot.run import Run
from sunspot.run.attempts import Attempt, attempt_label, claim, new_nonce, record_start
from sunspot.run.audit import AuditWriter
from sunspot.run.history import Journal
from sunspot.run.logs import BURST, RANK_EVERY_S, SEGMENT_BYTES, LogWriter, rank_stream
from sunspot.run.overview import list_runs, read_statuses
from sunspot.run.ranks import Columns, to_rows
from sunspot.run.status import RunState, Status, new_driver, write_status
from sunspot.storage.base import Entry
from sunspot.storage.local import LocalStorage
from sunspot.submitter.cluster.run_record import gather
from sunspot.submitter.cluster.snapshot import RunAccess

RANKS = 64

EVERY_S, HOUR_S, DAY_S, DAYS = 10, 3_600, 86_400, 30

LENGTHS = {HOUR_S: "an hour", DAY_S: "a day", DAYS * DAY_S: f"{DAYS} days"}
"""Seconds after which the run is looked at."""

LOOKS = 5

AUDIT_STEPS, AUDIT_BATCH = 50, 128
"""Of a minute, in an audited run."""

PUT_USD = 0.005 / 1000
"""Published price of S3 Standard in us-east-1 for a PUT or a listing (a GET is 0.0004 / 1000); a DELETE is free."""

PAGE = 1000
"""Objects in an answer of S3 to a listing."""

OLDER_LINES = 1000
"""Lines of a file of the way of before, the last of which was written whole at each flush."""


def measure() -> Iterator[Figure]:
    """Measure its figures, one after the other."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield from measure_month(CountingStorage(f"{folder}/history"))
        yield from measure_audit(CountingStorage(f"{folder}/audit"))
        yield from measure_output(CountingStorage(f"{folder}/output"))


class CountingStorage(LocalStorage):
    """A directory that counts what S3 would be asked for in its place, and does not wait for the disk."""

    is_bucket = True

    def __init__(self, storage_path: str) -> None:
        super().__init__(storage_path)
        self.writes = self.written = self.requests = self.bytes_read = 0

    def write(self, key: str, data: bytes) -> None:
        self.writes += 1
        self.written += len(data)
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    @contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        self.requests += 1
        self.bytes_read += sum(entry.size for entry in super().list(key)) - offset
        with super().open(key, offset) as stream:
            yield stream

    def list(self, prefix: str) -> list[Entry]:
        found = super().list(prefix)
        self.requests += len(found) // PAGE + 1
        return found

    def exists(self, key: str) -> bool:
        self.requests += 1
        return super().exists(key)


class Written(NamedTuple):
    """What a run of a month has written up to a moment."""

    seconds: int
    writes: int
    bytes: int
    line: str
    "A record in the way of before."


def measure_month(storage: CountingStorage) -> Iterator[Figure]:
    """What a month of a run leaves in storage and costs there; what it takes to look at it, also on the way."""
    run = Run(storage, "month")
    for written in write_month(run):
        at, records = f"{RANKS} ranks, {LENGTHS[written.seconds]}", written.seconds // EVERY_S
        objects, before = storage.list(""), records * len(written.line)
        yield Figure("history", at, sum(entry.size for entry in objects) / 1e6, "MB", before / 1e6)
        yield Figure("objects of it", at, len(objects), "", 2 + records / OLDER_LINES)
        if written.seconds == DAY_S:
            yield Figure("written in a day", at, written.bytes / 1e6, "MB", before * OLDER_LINES / 2e6)
            yield Figure("writes in a day", at, written.writes, "", records)
            yield Figure("price of these", at, written.writes * PUT_USD, "USD", records * PUT_USD)
        yield from measure_requests(storage, run, at, before)
        parse_s = timed(lambda: json.loads(written.line)) * records  # noqa: B023
        processor_s, whole_s, memory = zip(*(look(storage) for _ in range(1 + LOOKS)), strict=True)
        yield Figure("status, processor time (before: of parsing alone)", at, median(processor_s[1:]), "s", parse_s)
        yield Figure("status, from start to end", at, median(whole_s[1:]), "s")
        yield Figure("status, peak memory", at, median(memory[1:]), "MB")


def measure_requests(storage: CountingStorage, run: Run, at: str, before: int) -> Iterator[Figure]:
    """What `status` and `list` ask of storage; before, `status` read the whole history."""
    for name, act in {"status": lambda: gather(RunAccess(run)), "list": lambda: list_all(storage)}.items():
        storage.requests = storage.bytes_read = 0
        act()
        yield Figure(f"requests of {name}", at, storage.requests, "")
        yield Figure(f"read by {name}", at, storage.bytes_read / 1e6, "MB", before / 1e6 if name == "status" else None)


def list_all(storage: CountingStorage) -> None:
    """What the verb `list` reads."""
    read_statuses(storage, list_runs(storage))


def measure_audit(storage: CountingStorage) -> Iterator[Figure]:
    """What a day of commits, one a minute, leaves of the rows consumed in between; before, nothing was merged."""
    writer, random_rows = AuditWriter(Run(storage, "audit"), attempt_label(1, new_nonce())), np.random.default_rng(0)
    commits, first_bytes = DAY_S // 60, 0
    for commit in range(commits):
        steps = np.arange(commit * AUDIT_STEPS, (commit + 1) * AUDIT_STEPS, dtype=np.int32) + 1
        step, rows = np.repeat(steps, AUDIT_BATCH), random_rows.integers(0, 10**6, AUDIT_STEPS * AUDIT_BATCH)
        writer.write(steps[0], steps[-1], pa.table({"step": step, "rank": step % RANKS, "row": rows}))
        first_bytes = first_bytes or storage.written
        writer.merge()
    objects, at = storage.list("audit"), f"{AUDIT_STEPS * AUDIT_BATCH:,} rows a minute, a day"
    yield Figure("files of an audit", at, len(objects), "", commits)
    yield Figure("written for it", at, storage.written / 1e6, "MB", commits * first_bytes / 1e6)
    yield Figure("writes", at, storage.writes, "", commits)


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


def write_month(run: Run) -> Iterator[Written]:
    """Write the history of a month, and a status; yields at each of LENGTHS.

    After the first day it is flushed every ten minutes, to take less time here: the same is there in the end.
    """
    assert isinstance(run.storage, CountingStorage)
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
            writes, size = run.storage.writes, run.storage.written
            status = Status(RunState.RUNNING, "job", attempt=1, driver=new_driver(), step=record["step"])
            write_status(run, replace(status, loss=record["loss"], total_steps=10**9, world_size=RANKS))
            yield Written(seconds, writes, size, json.dumps({**record, "ranks": to_rows(pool[0])}))


def make_record(number: int, now: float) -> dict[str, Any]:
    """A record of the curve."""
    draw = random.Random(number)
    speeds = ("step_time_median_s", "step_time_p95_s", "data_wait_s", "rows_per_s", "memory_mib", "gpu_memory_mib")
    return {
        **{"step": 100 * number, "epoch": 1, "steps": 100, "rows": 12_800, "loss": draw.random()},
        **{"accuracy": draw.random(), "learning_rate": 0.001, "seconds": 9.9 + draw.random() / 10, "time": now},
        **{name: draw.random() * 100 for name in speeds},
        "world_size": RANKS,
    }


def make_ranks(draw: random.Random) -> Columns:
    """Numbers of each rank, as widely spread as real ones."""
    times = ("seconds", "step_time_median_s", "step_time_p95_s", "data_wait_s", "steps_s", "forward_s")
    sizes = ("memory_mib", "gpu_memory_mib", "resident_mib", "memory_left_mib")
    columns = {name: np.array([draw.random() * 10 for _ in range(RANKS)]) for name in times}
    columns |= {name: np.array([round(draw.random() * 50_000, 3) for _ in range(RANKS)]) for name in sizes}
    columns |= {name: np.zeros(RANKS) for name in ("throttled_s", "throttled_share")}
    return {"rows": [200] * RANKS, **{name: to_column(name, values) for name, values in columns.items()}}


LOOK = """
import sys, time
from pathlib import Path
from sunspot.cli import main
try:
    main(["status", "month", "--storage", sys.argv[1], "--json"])
finally:
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(time.process_time(), peak.split()[1], file=sys.stderr)
"""


def look(storage: CountingStorage) -> tuple[float, float, float]:
    """Processor time of a whole process that shows the status, its seconds from start to end, and peak memory, in MB.

    All but the first have their modules compiled, as installed ones are.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    cache = str(storage.root.with_suffix(".cache"))
    environment |= {"KUBECONFIG": os.devnull, "PYTHONPATH": str(Path("app").absolute()), "PYTHONPYCACHEPREFIX": cache}
    began = time.perf_counter()
    command = [sys.executable, "-c", LOOK, str(storage.root)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    processor_s, peak = shown.stderr.split()[-2:]
    return float(processor_s), time.perf_counter() - began, int(peak) * 1024 / 1e6
