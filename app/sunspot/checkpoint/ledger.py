"""The rows each optimizer step consumed (AUDIT), gathered from all workers and kept until they are in storage.

Each node keeps them beside its copy of the state, so a group that resumes from the copy writes what the one before had
not. All nodes have the same windows, as they gather and drop them together. Where workers outlive each other, they tell
each other the rows of a step before they change a parameter by it: whoever has taken the step knows all of its rows.
"""

from __future__ import annotations

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


class Exchange:
    """The rows of one step, on their way between the workers."""

    def __init__(self, group: dist.ProcessGroup, step: int, rows: torch.Tensor | None, most: int) -> None:
        """Begin the exchange; every worker's message has the same size, with -1 in the place of no row."""
        mine = torch.full((most,), -1, dtype=torch.int64)
        if rows is not None:
            mine[: len(rows)] = rows
        self._step, self._parts = step, [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._parts, mine, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the rows of all workers, as a window has them."""
        self._work.wait()
        return torch.cat([label_rows(self._step, rank, part[part >= 0]) for rank, part in enumerate(self._parts)])


def label_rows(step: int, rank: int, rows: torch.Tensor) -> torch.Tensor:
    """Return row ids as a window has them, with their step and rank: int64 [N, 3]."""
    return torch.stack([torch.full_like(rows, step), torch.full_like(rows, rank), rows], dim=1)


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
        self._everyones: list[torch.Tensor] = []
        "Of the steps since the last window, those that were exchanged: int64 [N, 3]."
        self._exchange: Exchange | None = None
        self._windows = [LedgerWindow(*window) for window in inherited]
        self._dropped = 0
        self._written = 0
        self._writers: dict[str, AuditWriter] = {}
        self._lock = threading.Lock()

    def begin_exchange(self, step: int, rows: torch.Tensor | None, most: int) -> None:
        """Begin to tell the other workers this one's rows of the step to take: at most `most` ids, int64 [B]."""
        if self._on and self._group:
            self._exchange = Exchange(self._group, step, rows, most)

    def wait_for_exchange(self) -> None:
        """Return once the rows of all workers are known, if an exchange has begun; call it before parameters change."""
        if self._exchange:
            self._exchange.wait()

    def add_step(self, step: int, rows: torch.Tensor | None) -> None:
        """Note one optimizer step, with the ids of this worker's `rows`, int64 [B]."""
        if self._exchange:
            self._everyones.append(self._exchange.wait())
            self._exchange = None
        elif self._on and rows is not None:
            self._mine.append((step, rows))

    def hand_on(self, step: int) -> list[tuple[Any, ...]]:
        """Return, without the other workers, the windows that may not be in storage yet, up to `step`."""
        with self._lock:
            windows = [tuple(window) for window in self._windows[max(0, self._written - self._dropped) :]]
            if self._everyones and step > self._after:
                windows.append((self._attempt, self._after + 1, step, torch.cat(self._everyones)))
            return windows

    def gather(self, step: int) -> list[tuple[Any, ...]]:
        """Close a window at `step`, on all workers together; returns the windows that are not in storage yet."""
        if not self._on:
            return []
        rank = dist.get_rank(self._group) if self._group else 0
        mine = [label_rows(taken, rank, rows.cpu()) for taken, rows in self._mine]
        numbers = torch.cat(mine).numpy() if mine else np.empty((0, 3), np.int64)
        everyone = gather_objects((numbers, self._written), self._group)
        rows = torch.cat([*self._everyones, *(torch.from_numpy(numbers) for numbers, _ in everyone)])
        written = everyone[0][1]  # by rank 0, which alone writes
        with self._lock:
            if step > self._after:
                self._windows.append(LedgerWindow(self._attempt, self._after + 1, step, rows))
            del self._windows[: written - self._dropped]
            self._dropped = written
            self._after, self._mine, self._everyones = step, [], []
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
