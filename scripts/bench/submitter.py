"""What the command `sunspot` costs: its start, and its listings of many checkpoints and of many runs in S3."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench.checkpoint import BUCKET
from sunspot.run import Run, to_json
from sunspot.run.attempts import Attempt, checkpoint_name, claim, step_of
from sunspot.run.checkpoints import Checkpoint, list_directories, write_manifest
from sunspot.run.status import RunState, Status, write_status
from sunspot.storage.base import map_parallel
from sunspot.storage.s3 import S3Storage
from sunspot.submitter.commands.checkpoints.ls import list_all as list_checkpoints
from sunspot.submitter.commands.list import list_all as list_runs

STARTS, LISTINGS = 15, 5
"""Pairs of each measurement."""

CHECKPOINTS, RUNS = (10_000, 1_000) if os.environ.get("AWS_ENDPOINT_URL") else (1_000, 300)
"""Fewer without a real server: the one in Python takes time for each page by the objects of the whole bucket."""

ROWS = 50
"""Rows that are shown, as by default."""

REPOSITORY = Path(__file__).parents[2]


def measure_help() -> list[tuple[float, float]]:
    """Milliseconds of (`python -c pass`, `sunspot --help`)."""
    return _start_in_turns("--help")


def measure_render() -> list[tuple[float, float]]:
    """Milliseconds of (`python -c pass`, `sunspot render`)."""
    return _start_in_turns("render", "--run", "bench", "--storage", "s3://bucket/runs")


def measure_checkpoints() -> list[tuple[float, float]]:
    """Milliseconds of (the pages of the listing alone, `sunspot checkpoints ls`) of one run with CHECKPOINTS."""
    with _s3_folder() as storage:
        run = Run(storage, "run")
        attempt = Attempt(1, "bench", None, 0)
        claim(run, [], attempt)
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
        return _list_in_turns(
            storage, run.key("checkpoints"), "checkpoints ls", lambda: list_checkpoints(run, ROWS, False)
        )


def measure_runs() -> list[tuple[float, float]]:
    """Milliseconds of (the pages of the listing alone, `sunspot list`) of RUNS runs."""
    with _s3_folder() as storage:

        def make(number: int) -> None:
            run = Run(storage, f"run-{number}")
            storage.write(run.key("run.json"), to_json({"settings": {}, "rows": 10, "steps_per_epoch": 5}))
            claim(run, [], Attempt(1, "bench", None, 0))
            write_status(run, Status(RunState.SUCCEEDED, "bench", step=10, total_steps=10, epoch=2, loss=0.5))
            write_manifest(run, Checkpoint(checkpoint_name(10, 1), 10, 2, 5, 10, 1, {}, {}))

        map_parallel(make, range(RUNS))
        return _list_in_turns(storage, "", "list", lambda: list_runs(storage, ROWS, False))


def _start_in_turns(*words: str) -> list[tuple[float, float]]:
    def milliseconds(*command: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        return 1000 * (time.perf_counter() - began)

    def pair() -> tuple[float, float]:
        return milliseconds("-c", "pass"), milliseconds("-m", "sunspot.cli", *words)

    pair()  # compiles what is not compiled yet
    return [pair() for _ in range(STARTS)]


def _list_in_turns(storage: S3Storage, prefix: str, what: str, show: Callable[[], None]) -> list[tuple[float, float]]:
    """Time a bare listing of `prefix` and `show` in turns; says which requests `show` makes."""
    requests: Counter[str] = Counter()
    storage._client.meta.events.register(
        "before-send.s3", lambda event_name, **_: requests.update([event_name.rpartition(".")[2]])
    )

    def milliseconds(act: Callable[[], object]) -> float:
        requests.clear()
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            act()
        return 1000 * (time.perf_counter() - began)

    def bare() -> None:
        pages = storage._client.get_paginator("list_objects_v2")
        for _ in pages.paginate(Bucket=storage.bucket, Prefix=storage._full(prefix)):
            pass

    pairs = [(milliseconds(bare), milliseconds(show)) for _ in range(1 + LISTINGS)]
    print(f"  {what}, {ROWS} rows: " + ", ".join(f"{count} {name}" for name, count in requests.items()), flush=True)
    return pairs[1:]


@contextmanager
def _s3_folder() -> Iterator[S3Storage]:
    """An empty place in the bucket; nothing of it is left afterwards."""
    storage = S3Storage(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    try:
        yield storage
    finally:
        keys = [{"Key": storage._full(entry.key)} for entry in storage.list("")]
        for first in range(0, len(keys), 1000):
            storage._client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys[first : first + 1000], "Quiet": True})
