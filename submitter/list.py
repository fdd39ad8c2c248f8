"""`sunspot list`: every run below a storage path, and where each stands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from app.layout.attempts import step_of
from app.layout.status import RunState, Status
from app.layout.storage import Storage
from submitter.output import in_words, print_json, print_table, warn
from submitter.runs import RunSummary, list_runs, read_statuses, state_from_storage


def list_all(
    storage: Storage, limit: int | None, as_json: bool, live: Mapping[str, tuple[RunState, str]] | None = None
) -> None:
    """Print the `limit` (None: all) runs that were written last; `live` has the state of those a cluster knows."""
    runs = list_runs(storage)
    shown = runs[:limit]
    statuses = read_statuses(storage, [run.name for run in shown])
    now = time.time()
    rows = [_describe(run, statuses[run.name], (live or {}).get(run.name), now) for run in shown]
    if as_json:
        print_json(rows)
    else:
        print_table(
            ["run", "state", "step", "epoch", "loss", "checkpoint", "last change"], [_cells(row, now) for row in rows]
        )
    if len(runs) > len(shown):
        warn(f"left out: {len(runs) - len(shown)} older; --all lists them")


def _describe(run: RunSummary, status: Status | None, live: tuple[RunState, str] | None, now: float) -> dict[str, Any]:
    state, reason = live or state_from_storage(status, run.stop_wanted, now, run.heard, run.submitted)
    return {
        "run": run.name,
        "state": state,
        "reason": reason,
        "step": status.step if status else step_of(run.checkpoint) if run.checkpoint else 0,
        "total_steps": status.total_steps if status else 0,
        "epoch": status.epoch if status else 0,
        "loss": status.loss if status else None,
        "checkpoint": run.checkpoint,
        "checkpoint_time": run.checkpoint_time or None,
        "modified": run.modified,
        "bytes": run.bytes,
    }


def _cells(row: dict[str, Any], now: float) -> list[Any]:
    checkpoint = ""
    if row["checkpoint"]:
        checkpoint = f"{step_of(row['checkpoint'])}, {in_words(now - row['checkpoint_time'])} ago"
    return [
        row["run"],
        row["state"],
        f"{row['step']}/{row['total_steps'] or '?'}",
        row["epoch"] or None,
        row["loss"],
        checkpoint,
        f"{in_words(now - row['modified'])} ago",
    ]
