"""Helpers that write small runs to storage like the training program, but without training."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from sunspot.observe.ranks import RankHistory
from sunspot.run import Run
from sunspot.run.attempts import (
    Attempt,
    Metadata,
    attempt_of,
    checkpoint_name,
    claim,
    newest_number,
    read_attempts,
    step_of,
)
from sunspot.run.audit import AuditWriter
from sunspot.run.checkpoints import Checkpoint, write_manifest
from sunspot.run.history import Columns, Journal, Kind, list_journal
from sunspot.run.identity import Identity, Rows
from sunspot.run.incidents import Cause, Receipt
from sunspot.run.objects import with_checksum
from sunspot.run.seen import RunSeen, look
from sunspot.run.status import RunState, Status, write_status
from sunspot.storage.local import LocalStorage

ROWS, BATCH = 22, 5

STEPS_PER_EPOCH = 5
"""Number of steps per epoch. Four steps have 5 rows, and the last step has 2."""


def begin(run: Run, rows: int = ROWS, batch: int = BATCH, steps_per_epoch: int = STEPS_PER_EPOCH) -> Run:
    """Write the identity of a run."""
    settings = {"SUNSPOT_GLOBAL_BATCH_SIZE": str(batch)}
    identity = Identity(settings, Rows("", rows, steps_per_epoch, "order", "NumPy"))
    run.storage.write(run.key("run.json"), with_checksum(asdict(identity)))
    return run


def start(run: Run, owner: str, starts_from: str | None = None, *, at: float | None = None, **metadata: Any) -> Attempt:
    """Start the next attempt, now or at time `at`."""
    attempts = read_attempts(run)
    number = attempts[-1].number + 1 if attempts else 1
    begun = {} if at is None else {"time": at}
    metadata = {"driver": f"{number:08x}", **metadata}
    attempt = Attempt(
        number, owner, starts_from, step_of(starts_from) if starts_from else 0, metadata=Metadata(**metadata), **begun
    )
    assert claim(run, attempts, attempt)
    return attempt


def commit(run: Run, attempt: Attempt, step: int, **metrics: Any) -> Checkpoint:
    """Write a complete checkpoint."""
    name = checkpoint_name(step, attempt.number, attempt.nonce)
    files = {}
    for file in ("model.pt", "optimizer.pt"):
        with run.storage.writer(run.key("checkpoints", name, file)) as writer:
            writer.write(f"{file} of {name}".encode())
        [entry] = run.storage.list(run.key("checkpoints", name, file))
        files[file] = {"size": writer.size, "sha256": writer.sha256, "version": entry.version}
    epoch = (step - 1) // STEPS_PER_EPOCH + 1
    checkpoint = Checkpoint(name, step, epoch, STEPS_PER_EPOCH, 100, attempt_of(name), metrics, files=files)
    write_manifest(run, checkpoint)
    return checkpoint


def to_columns(ranks: Sequence[Mapping[str, Any]]) -> Columns:
    """Return a mapping from names to the values of all ranks, given one dictionary per rank."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [rank.get(name) for rank in ranks] for name in names}


def report(run: Run, attempt: Attempt, *records: dict[str, Any]) -> None:
    """Write an attempt's metric history. A record's `ranks` is a list with one dictionary per rank."""
    journal, ranks = Journal(run, "metrics", attempt.number), RankHistory(run, attempt.number)
    for record in records:
        journal.append({name: value for name, value in record.items() if name != "ranks"})
        if "ranks" in record:
            columns = to_columns(record["ranks"])
            ranks.append(record, {name: np.array(values, np.float64) for name, values in columns.items()})
    journal.flush()
    ranks.flush()


def journal_keys(run: Run, kind: Kind, attempt: int) -> list[str]:
    """Return the storage keys of an attempt's journal segments, oldest first."""
    return [segment.entry.key for segment in list_journal(run, kind) if segment.attempt == attempt]


def write_receipt(run: Run, attempt: Attempt, since: int, cause: Cause = Cause.NODE_LOST, **fields: Any) -> Receipt:
    """Write the receipt of an attempt that completed its first step 10 s after the last step that counts."""
    times = {"noticed": None, "save_began": None, "committed": None, "restarted": attempt.time}
    times |= {"left": attempt.time - 5, "first_step": attempt.time + 5}
    tier = attempt.metadata.tier or "beginning"
    state = {"step": attempt.step, "last_step": attempt.step, "tier": tier, "detail": ""}
    world = {"world_before": 2 if since else 0, "world_after": 2}
    receipt = Receipt(attempt=attempt.number, since=since, cause=cause, **{**times, **state, **world, **fields})
    journal = Journal(run, "events", attempt.number)
    journal.append(receipt.record())
    journal.flush()
    return receipt


def rows_of(step: int) -> list[int]:
    """Return the rows that a step consumes. Each epoch visits every row once, in its own order."""
    epoch, place = divmod(step - 1, STEPS_PER_EPOCH)
    order = random.Random(epoch).sample(range(ROWS), ROWS)
    return order[place * BATCH : (place + 1) * BATCH]


def consumed(first: int, last: int) -> dict[int, list[int]]:
    """Return the rows that steps `first` to `last` consume."""
    return {step: rows_of(step) for step in range(first, last + 1)}


def record_audit(run: Run, attempt: Attempt, steps: dict[int, list[int]]) -> None:
    """Write an audit file for steps in which rank 0 consumed the even rows, and rank 1 the odd ones."""
    lines = [(step, row % 2, row) for step, rows in steps.items() for row in rows]
    table = pa.table(
        {
            "step": pa.array([step for step, _, _ in lines], pa.int32()),
            "rank": pa.array([rank for _, rank, _ in lines], pa.int32()),
            "row": pa.array([row for _, _, row in lines], pa.int64()),
        }
    )
    AuditWriter(run, attempt.label).write(min(steps), max(steps), table)


def set_status(run: Run, state: RunState, **more: Any) -> None:
    """Write a run's status like its own processes."""
    usual = {"owner": "run-1", "total_steps": 10, "attempt": newest_number(run)}
    write_status(run, Status(state, **{**usual, **more}))


def seen_as(run: Run, state: RunState, reason: str = "") -> RunSeen:
    """Return the run as seen in storage, as if its processes had just reported this state."""
    seen = look(run)
    status = seen.status or Status(state, "job", time=seen.summary.last_active)
    return replace(seen, status=replace(status, state=state, reason=reason, stored=seen.time))


def age(run: Run, seconds: float, *parts: str) -> None:
    """Make the run's files in the folder `parts` older by this many seconds."""
    assert isinstance(run.storage, LocalStorage)
    for entry in run.storage.list(run.key(*parts)):
        moment = entry.modified - seconds
        os.utime(run.storage.root / entry.key, (moment, moment))


def damage(run: Run, checkpoint: Checkpoint) -> None:
    run.storage.write(run.key("checkpoints", checkpoint.name, "model.pt"), b"other bytes")
