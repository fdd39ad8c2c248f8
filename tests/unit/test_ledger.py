"""The rows that were consumed and are not in storage yet: kept, written once, and handed on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.checkpoint.ledger import Ledger
from app.run import Run, open_run
from app.run.attempts import Span
from app.run.history import read_audit


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(str(tmp_path / "runs"), "run")


def take(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ledger.add_step(step, torch.tensor([10 * step, 10 * step + 1]))


def recorded(run: Run, attempt: int) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for table in read_audit(run, [Span(attempt, 0, None)]):
        for step, row in zip(table["step"].to_pylist(), table["row"].to_pylist(), strict=True):
            rows.setdefault(step, []).append(row)
    return rows


def test_what_storage_has_is_forgotten_and_nothing_else(group: dist.ProcessGroup, run: Run) -> None:
    ledger = Ledger(group, "attempt-0001", 0, [], True)
    take(ledger, 1, 3)
    assert [window[:3] for window in ledger.gather(3)] == [("attempt-0001", 1, 3)]
    ledger.write(run)
    take(ledger, 4, 5)
    assert [window[:3] for window in ledger.gather(5)] == [("attempt-0001", 4, 5)], "the first window is in storage"
    assert sorted(recorded(run, 1)) == [1, 2, 3]
    ledger.write(run)
    ledger.write(run)
    assert recorded(run, 1) == {step: [10 * step, 10 * step + 1] for step in range(1, 6)}


def test_the_next_attempt_writes_what_the_one_before_could_not(group: dist.ProcessGroup, run: Run) -> None:
    before = Ledger(group, "attempt-0001", 0, [], True)
    take(before, 1, 4)
    kept = before.gather(4)
    after = Ledger(group, "attempt-0002", 4, kept, True)
    take(after, 5, 6)
    assert [window[:3] for window in after.gather(6)] == [("attempt-0001", 1, 4), ("attempt-0002", 5, 6)]
    after.write(run)
    assert sorted(recorded(run, 1)) == [1, 2, 3, 4]
    assert sorted(recorded(run, 2)) == [5, 6]


def test_without_audit_nothing_is_kept(group: dist.ProcessGroup, run: Run) -> None:
    ledger = Ledger(group, 1, 0, [], False)
    take(ledger, 1, 3)
    assert ledger.gather(3) == []
    ledger.write(run)
    assert not run.storage.list(run.key("audit"))
