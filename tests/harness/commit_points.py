"""Kills a process that commits checkpoints, at each operation of its storage in turn.

`python -m tests.harness.commit_points FOLDER` prints a JSON list with the point of each kill and the files that were
left. It is a separate process because forking is only safe without the threads of the test suite.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import sunspot.checkpoint.files
from sunspot.background import map_parallel
from sunspot.checkpoint import CheckpointManager, SavedObjects, versions
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.plan import Plan
from sunspot.run import Run
from sunspot.run.attempts import Attempt, claim, read_attempts
from sunspot.run.checkpoints import find_faults, find_newest_good, list_checkpoints
from sunspot.run.history import Journals
from sunspot.settings import Settings
from sunspot.storage.base import Entry, Writer
from sunspot.storage.local import LocalStorage

SAVES = 3


class DyingStorage(LocalStorage):
    """A storage that kills its process before or during operation number `dies_at`."""

    def __init__(self, root: str, dies_at: int, diary: Path) -> None:
        super().__init__(root)
        self._left, self._diary = dies_at, diary
        self._lock = threading.Lock()

    def _point(self, name: str) -> None:
        with self._lock:  # files are uploaded concurrently
            self._left -= 1
            if self._left == 0:
                self._diary.write_text(name)
                os.kill(os.getpid(), signal.SIGKILL)

    def write(self, key: str, data: bytes) -> None:
        self._point(f"before write {key}")
        super().write(key, data)
        self._point(f"after write {key}")

    def delete(self, key: str, version: str = "") -> None:
        self._point(f"before delete {key}")
        super().delete(key, version)

    def list(self, prefix: str) -> list[Entry]:
        self._point(f"before list {prefix}")
        return super().list(prefix)

    def digest(self, key: str) -> tuple[int, str]:
        self._point(f"before reading back {key}")
        return super().digest(key)

    @contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        self._point(f"before upload {key}")
        with super().writer(key) as writer:
            store = writer._store
            pieces = itertools.count()

            def store_half(view: memoryview) -> None:
                store(view[: len(view) // 2])
                if next(pieces) % 50 == 0:  # each file is written in a hundred small pieces
                    self._point(f"in the middle of upload {key}")
                store(view[len(view) // 2 :])

            writer._store = store_half
            yield writer
        self._point(f"after upload {key}")


def commit(root: str, dies_at: int, diary: Path) -> None:
    """Save steps 1 .. SAVES of a run that keeps one checkpoint. The process is killed during the last save, which
    deletes the previous checkpoint."""
    run = Run(DyingStorage(root, 0, diary), "run")
    attempt = Attempt(1, "me", None, 0)
    claim(run, read_attempts(run), attempt)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    plan = Plan(Settings(checkpoints_to_keep=1), EmptySource((4,), 4), None, Steps(20, 2), 10)
    journals = Journals(run, 1)
    checkpoints = CheckpointManager(run, attempt, plan, SavedObjects(model, optimizer), journals=journals)
    for step in range(1, 1 + SAVES):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        journals.metrics.append({"step": step, "loss": float(step)})
        checkpoints.save(step, {"loss": float(step)})
        checkpoints.drain()  # commit each checkpoint before saving the next, so that none is skipped
        if step == SAVES - 1:
            run.storage._left = dies_at


def judge(root: str) -> dict[str, Any]:
    """Return the run's state after the kill."""
    run = Run(LocalStorage(root), "run")
    checkpoints = list_checkpoints(run)
    newest, skipped = find_newest_good(run, read_attempts(run))
    return {
        "committed": [checkpoint.step for checkpoint in checkpoints],
        "bad": [checkpoint.name for checkpoint in checkpoints if find_faults(run, checkpoint)],
        "newest": newest.step if newest else None,
        "skipped": [str(each) for each in skipped],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Both import slow modules on first use, so do that once, before the children are forked.
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).step()
    versions()
    # Upload the files one after the other. Otherwise the order of operations would vary, and some would never be hit.
    sunspot.checkpoint.files.map_parallel = functools.partial(map_parallel, at_once=1)
    points = []
    for dies_at in range(1, 1000):
        root, diary = str(folder / str(dies_at)), folder / f"{dies_at}.txt"
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # before two threads use torch, as in `fork_ranks`
            commit(root, dies_at, diary)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        points.append({"died": diary.read_text() if diary.exists() else None, **judge(root)})
        if status == 0:
            break
    print(json.dumps(points))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
