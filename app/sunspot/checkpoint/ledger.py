"""Gathers the IDs of the rows that each optimizer step consumed (AUDIT), and keeps them until they are in storage.

Each node stores these IDs with its copy of the state. A group that resumes from the copy writes the IDs that are not in
storage yet. The IDs are the same on all nodes, because all nodes gather and drop them at the same steps. If workers
can outlive each other (`plan.can_outlive`), they exchange a step's IDs before the step changes parameters. Every worker
that completes the step therefore knows the IDs of all rows in the step.
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
    """The rows that steps `first` to `last` of an attempt consumed."""

    attempt: str
    "The attempt's label (`Attempt.label`)."
    first: int
    last: int
    rows: torch.Tensor
    "The step, rank and ID of each row, int64 [N, 3]."

    def up_to(self, step: int) -> LedgerWindow:
        """Return the window without the steps after `step`."""
        return self._replace(last=min(self.last, step), rows=self.rows[self.rows[:, 0] <= step])


class RowExchange:
    """Exchanges the rows of one step between all workers."""

    def __init__(self, group: dist.ProcessGroup, step: int, rows: torch.Tensor | None, most: int) -> None:
        """Start the exchange. Each worker sends `most` row IDs, int64 [most], padded with -1."""
        mine = torch.full((most,), -1, dtype=torch.int64)
        if rows is not None:
            mine[: len(rows)] = rows
        self._step = step
        self._parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._parts, mine, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the rows of all workers, in the format of `LedgerWindow.rows`."""
        self._work.wait()
        return torch.cat([label_rows(self._step, rank, part[part >= 0]) for rank, part in enumerate(self._parts)])


def label_rows(step: int, rank: int, rows: torch.Tensor) -> torch.Tensor:
    """Return row IDs with their step and rank, in the format of `LedgerWindow.rows`."""
    return torch.stack([torch.full_like(rows, step), torch.full_like(rows, rank), rows], dim=1)


class Ledger:
    """The consumed rows that are not in storage yet. Without AUDIT, it is always empty."""

    def __init__(
        self, group: dist.ProcessGroup | None, attempt: str, start: int, inherited: Sequence[Any], on: bool
    ) -> None:
        """Create an attempt's ledger. `attempt` is the attempt's label, and `start` is the step from which it starts.

        `group` is None for a single worker. `inherited` contains the windows of earlier attempts that are not in
        storage yet. If `on` is False, no rows are recorded.
        """
        self._group = group
        self._attempt = attempt
        self._on = on
        self._after = start
        self._mine: list[tuple[int, torch.Tensor]] = []
        self._everyones: list[torch.Tensor] = []
        "The exchanged rows of each step since the last window, int64 [N, 3]."
        self._exchange: RowExchange | None = None
        self._windows = [LedgerWindow(*window) for window in inherited]
        self._dropped = 0
        self._written = 0
        self._writers: dict[str, AuditWriter] = {}
        self._lock = threading.Lock()

    def begin_exchange(self, step: int, rows: torch.Tensor | None, most: int) -> None:
        """Start exchanging the rows of the next step.

        `rows` are this worker's row IDs, int64 [B], and `most` is the largest number of rows of any worker.
        """
        if self._on and self._group:
            self._exchange = RowExchange(self._group, step, rows, most)

    def wait_for_exchange(self) -> None:
        """Wait for the exchange, if one is in progress. Call this before parameters change."""
        if self._exchange:
            self._exchange.wait()

    def add_step(self, step: int, rows: torch.Tensor | None) -> None:
        """Add an optimizer step with this worker's row IDs, int64 [B]."""
        if self._exchange:
            self._everyones.append(self._exchange.wait())
            self._exchange = None
        elif self._on and rows is not None:
            self._mine.append((step, rows))

    def unwritten_windows(self, step: int) -> list[tuple[Any, ...]]:
        """Return the windows up to `step` that might not be in storage yet. Does not contact other workers.

        If the ledger contains a step after `step`, that step was cancelled, and its rows are omitted.
        """
        with self._lock:
            windows = self._windows[max(0, self._written - self._dropped) :]
            if self._everyones:
                windows.append(LedgerWindow(self._attempt, self._after + 1, step, torch.cat(self._everyones)))
            kept = [window.up_to(step) if window.attempt == self._attempt else window for window in windows]
            return [tuple(window) for window in kept if window.first <= window.last]

    def gather(self, step: int) -> list[tuple[Any, ...]]:
        """Gather all workers' new rows up to `step` as a window, and return all windows that are not in storage yet.

        All workers must call this together.
        """
        if not self._on:
            return []
        rank = dist.get_rank(self._group) if self._group else 0
        mine = [label_rows(taken, rank, rows.cpu()) for taken, rows in self._mine]
        numbers = torch.cat(mine).numpy() if mine else np.empty((0, 3), np.int64)
        everyone = gather_objects((numbers, self._written), self._group)
        rows = torch.cat([*self._everyones, *(torch.from_numpy(numbers) for numbers, _ in everyone)])
        written = everyone[0][1]  # only rank 0 writes
        with self._lock:
            if step > self._after:
                self._windows.append(LedgerWindow(self._attempt, self._after + 1, step, rows))
            del self._windows[: written - self._dropped]
            self._dropped = written
            self._after = step
            self._mine = []
            self._everyones = []
            return [tuple(window) for window in self._windows]

    def write(self, run: Run) -> None:
        """Write the gathered windows to storage. Only rank 0 calls this. After a `StorageError`, call it again."""
        with self._lock:
            windows = self._windows[self._written - self._dropped :]
        for attempt, group in groupby(windows, lambda window: window.attempt):
            part = list(group)
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
