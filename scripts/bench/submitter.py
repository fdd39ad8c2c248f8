"""Measures the command `sunspot`: its start, and its listings of many checkpoints and of many runs in S3."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from scripts.bench import Figures, in_turns
from scripts.bench.checkpoint import BUCKET
from sunspot.background import map_parallel
from sunspot.run import Run, to_json
from sunspot.run.attempts import Attempt, checkpoint_name, claim, step_of
from sunspot.run.checkpoints import Checkpoint, list_directories, write_manifest
from sunspot.run.status import RunState, Status, write_status
from sunspot.storage.s3 import S3Storage
from sunspot.submitter.commands.checkpoints.ls import list_all as list_checkpoints
from sunspot.submitter.commands.list import list_all as list_runs

STARTS, LISTINGS = 15, 5
"""Number of turns of each measurement."""

CHECKPOINTS, RUNS = (10_000, 1_000) if os.environ.get("AWS_ENDPOINT_URL") else (1_000, 300)
"""Number of objects to list. It is smaller without a real server, because moto reads the whole bucket for each page."""

ROWS = 50
"""Number of rows that a listing shows, which is the default."""


def measure_help(most: int) -> Figures:
    """Return the milliseconds of `sunspot --help`."""
    return _start_in_turns("--help")


def measure_render(most: int) -> Figures:
    """Return the milliseconds of `sunspot render`."""
    return _start_in_turns("render", "--run", "bench", "--storage", "s3://bucket/runs")


def measure_checkpoints(most: int) -> Figures:
    """Return the milliseconds of `sunspot checkpoints ls` for a run with CHECKPOINTS."""
    with _s3_folder() as storage:
        run = Run(storage, "run")
        claim(run, [], Attempt(1, "bench", None, 0))
        names = [checkpoint_name(step, 1) for step in range(1, CHECKPOINTS + 1)]
        map_parallel(lambda name: storage.write(run.key("checkpoints", name, "model.pt"), name.encode()), names)
        files = list_directories(run)

        def commit(name: str) -> None:
            step, entry = step_of(name), files[name]["model.pt"]
            sha256 = hashlib.sha256(name.encode()).hexdigest()
            file = {"size": entry.size, "sha256": sha256, "version": entry.version}
            write_manifest(
                run, Checkpoint(name, step, 1, CHECKPOINTS, CHECKPOINTS, 1, {"loss": 1 / step}, {"model.pt": file})
            )

        map_parallel(commit, names)
        return _list_in_turns(storage, run.key("checkpoints"), lambda: list_checkpoints(run, ROWS, False))


def measure_runs(most: int) -> Figures:
    """Return the milliseconds of `sunspot list` with RUNS runs."""
    with _s3_folder() as storage:

        def make(number: int) -> None:
            run = Run(storage, f"run-{number}")
            storage.write(run.key("run.json"), to_json({"settings": {}, "rows": 10, "steps_per_epoch": 5}))
            claim(run, [], Attempt(1, "bench", None, 0))
            write_status(run, Status(RunState.SUCCEEDED, "bench", step=10, total_steps=10, epoch=2, loss=0.5))
            write_manifest(run, Checkpoint(checkpoint_name(10, 1), 10, 2, 5, 10, 1, {}, {}))

        map_parallel(make, range(RUNS))
        return _list_in_turns(storage, "", lambda: list_runs(storage, ROWS, False))


def _milliseconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - began)


def _start_in_turns(*words: str) -> Figures:
    def start(*command: str) -> None:
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)

    ways = {"Sunspot": ("-m", "sunspot.cli", *words), "`python -c pass`": ("-c", "pass")}
    start(*ways["Sunspot"])  # compiles the modules
    return in_turns({name: partial(_milliseconds, partial(start, *way)) for name, way in ways.items()}, STARTS)


def _list_in_turns(storage: S3Storage, prefix: str, show: Callable[[], None]) -> Figures:
    """Measure `show` and a bare listing of `prefix` in turns."""

    def bare() -> None:
        pages = storage._client.get_paginator("list_objects_v2")
        for _ in pages.paginate(Bucket=storage.bucket, Prefix=storage._full(prefix)):
            pass

    ways = {"Sunspot": partial(_milliseconds, show), "the pages of the listing alone": partial(_milliseconds, bare)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        in_turns(ways, 1)  # opens the connections, and is not measured
        return in_turns(ways, LISTINGS)


@contextmanager
def _s3_folder() -> Iterator[S3Storage]:
    """Yield an empty folder in the bucket, which is deleted at the end."""
    storage = S3Storage(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    try:
        yield storage
    finally:
        storage.delete_many([entry.key for entry in storage.list("")])
