"""The rows each optimizer step consumed (AUDIT), gathered from all workers and kept until they are in storage.

Each node keeps them beside its copy of the state, so a group that resumes from the copy writes what the one before had
not. All nodes have the same windows, as they gather and drop them together.
"""

import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import torch
import torch.distributed as dist

from sunspot.parallel.collectives import gather_objects
from sunspot.run import Run
from sunspot.run.audit import AuditWriter


class LedgerWindow(NamedTuple):
    """The rows that the steps `first` .. `last` of an attempt consumed."""

    attempt: str
    "Its label (`Attempt.label`)."
    first: int
    last: int
    rows: torch.Tensor
    "int64 [N, 3]: step, rank, row id."


class Ledger:
    """Consumed rows that are not in storage yet; empty without AUDIT."""

    def __init__(
        self, group: dist.ProcessGroup | None, attempt: str, start: int, inherited: Sequence[Any], on: bool
    ) -> None:
        """`group` None: one worker alone. `attempt` is its label; `inherited` are windows of earlier attempts that were
        not in storage.
        """
        self._group, self._attempt, self._on = group, attempt, on
        self._after = start
        self._mine: list[tuple[int, torch.Tensor]] = []
        self._windows = [LedgerWindow(*window) for window in inherited]
        self._dropped = 0
        self._written = 0
        self._writers: dict[str, AuditWriter] = {}
        self._lock = threading.Lock()

    def add_step(self, step: int, rows: torch.Tensor | None) -> None:
        """Note one optimizer step, with the ids of this worker's `rows`, int64 [B]."""
        if self._on and rows is not None:
            self._mine.append((step, rows))

    def gather(self, step: int) -> list[tuple[Any, ...]]:
        """Close a window at `step`, on all workers together; returns the windows that are not in storage yet."""
        if not self._on:
            return []
        rank = dist.get_rank(self._group) if self._group else 0
        mine = [
            torch.stack([torch.full_like(rows, taken), torch.full_like(rows, rank), rows], dim=1)
            for taken, rows in ((taken, rows.cpu()) for taken, rows in self._mine)
        ]
        numbers = torch.cat(mine).numpy() if mine else np.empty((0, 3), np.int64)
        everyone = gather_objects((numbers, self._written), self._group)
        rows = torch.from_numpy(np.concatenate([numbers for numbers, _ in everyone]))
        written = everyone[0][1]  # by rank 0, which alone writes
        with self._lock:
            if step > self._after:
                self._windows.append(LedgerWindow(self._attempt, self._after + 1, step, rows))
            del self._windows[: written - self._dropped]
            self._dropped = written
            self._after, self._mine = step, []
            return [tuple(window) for window in self._windows]

    def write(self, run: Run) -> None:
        """Write the gathered windows to storage, on rank 0; can be called again after a `StorageError`."""
        with self._lock:
            windows = self._windows[self._written - self._dropped :]
        for attempt, of_attempt in groupby(windows, lambda window: window.attempt):
            part = list(of_attempt)
            numbers = torch.cat([window.rows for window in part]).numpy()
            columns = {
                "step": numbers[:, 0].astype(np.int32),
                "rank": numbers[:, 1].astype(np.int32),
                "row": numbers[:, 2],
            }
            writer = self._writers.setdefault(attempt, AuditWriter(run, attempt))
            writer.write(part[0].first, part[-1].last, pyarrow.table(columns))
            self._written += len(part)
        for writer in self._writers.values():
            writer.merge()
