"""Tests that consumed rows are kept until they are in storage, passed to the next group, and merged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sunspot.checkpoint.ledger import Ledger
from sunspot.errors import DamageError, StorageError
from sunspot.run import Run, streams
from sunspot.run.attempts import Span
from sunspot.run.audit import read_audit, tidy_audit
from tests.harness.constants import SetConstants


def take(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ledger.add_step(step, torch.tensor([10 * step, 10 * step + 1]))


def recorded(run: Run, attempt: int) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for table in read_audit(run, [Span(attempt, 0, None)]):
        for step, row in zip(table["step"].to_pylist(), table["row"].to_pylist(), strict=True):
            rows.setdefault(step, []).append(row)
    return rows


def test_the_ledger_keeps_rows_until_they_are_in_storage(group: dist.ProcessGroup, run: Run) -> None:
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


def test_the_next_attempt_writes_the_rows_that_the_previous_attempt_did_not_write(
    group: dist.ProcessGroup, run: Run
) -> None:
    before = Ledger(group, "attempt-0001", 0, [], True)
    take(before, 1, 4)
    kept = before.gather(4)
    after = Ledger(group, "attempt-0002", 4, kept, True)
    take(after, 5, 6)
    assert [window[:3] for window in after.gather(6)] == [("attempt-0001", 1, 4), ("attempt-0002", 5, 6)]
    after.write(run)
    assert sorted(recorded(run, 1)) == [1, 2, 3, 4]
    assert sorted(recorded(run, 2)) == [5, 6]


def test_the_next_group_gets_no_rows_of_a_discarded_step(group: dist.ProcessGroup) -> None:
    """The step was in doubt, and a copy in memory may already have gathered its rows."""
    for last_gathered in (2, 3):
        ledger = Ledger(group, "attempt-0002", 0, [("attempt-0001", 1, 9, torch.tensor([[9, 0, 90]]))], True)
        for step in (1, 2, 3):
            ledger.begin_exchange(step, torch.tensor([10 * step]), 1)
            ledger.add_step(step, None)
            if step == last_gathered:
                ledger.gather(step)
        windows = ledger.unwritten_windows(2)
        assert [window[:3] for window in windows] == [("attempt-0001", 1, 9), ("attempt-0002", 1, 2)]
        assert windows[1][3].tolist() == [[1, 0, 10], [2, 0, 20]]


def test_the_ledger_keeps_no_rows_if_the_audit_is_disabled(group: dist.ProcessGroup, run: Run) -> None:
    ledger = Ledger(group, 1, 0, [], False)
    take(ledger, 1, 3)
    assert ledger.gather(3) == []
    ledger.write(run)
    assert not run.storage.list(run.key("audit"))


# -------------------------------------------------------------------------------------------------------------- merging

SIZES = (4000, 10_000, 64_000)
"""A replacement for `streams.SIZES`, because a file of two steps has about 1,100 bytes."""


def rows_up_to(last: int) -> dict[int, list[int]]:
    return {step: [10 * step, 10 * step + 1] for step in range(1, last + 1)}


def write_windows(ledger: Ledger, run: Run, first: int, last: int) -> None:
    """Write windows of two steps each."""
    for begin in range(first, last, 2):
        take(ledger, begin, begin + 1)
        ledger.gather(begin + 1)
        ledger.write(run)


def test_files_are_merged_without_losing_or_repeating_a_row(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(streams, SIZES=SIZES)
    delete, merged = run.storage.delete_many, list[str]()

    def delete_and_check(keys: list[str]) -> None:
        delete(keys)
        merged.extend(keys)
        rows = recorded(run, 1)
        assert rows == rows_up_to(max(rows))

    monkeypatch.setattr(run.storage, "delete_many", delete_and_check)
    write_windows(Ledger(None, "attempt-0001", 0, [], True), run, 1, 120)
    assert len(run.storage.list(run.key("audit"))) < 12 < len(merged), "60 files were written"
    assert recorded(run, 1) == rows_up_to(120)


def test_row_windows_that_storage_accepted_are_not_written_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    """Storage accepts the previous attempt's windows and then fails, so the next commit writes the rest."""
    set_constants(streams, SIZES=(2000, 64_000))
    before = Ledger(None, "attempt-0001", 0, [], True)
    take(before, 1, 2)
    after = Ledger(None, "attempt-0002", 2, before.gather(2), True)
    take(after, 3, 4)
    after.gather(4)
    write, written = run.storage.write, list[str]()

    def write_one(key: str, data: bytes) -> None:
        if written:
            raise StorageError("full")
        written.append(key)
        write(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(run.storage, "write", write_one)
        with pytest.raises(StorageError):
            after.write(run)
    write_windows(after, run, 5, 10)
    assert recorded(run, 1) == rows_up_to(2)
    assert sorted(recorded(run, 2)) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert all(len(rows) == 2 for rows in recorded(run, 2).values())


def test_a_step_recorded_in_two_files_is_counted_once(run: Run) -> None:
    """Storage kept a write that it reported as failed, so the next commit wrote the same steps again."""
    refused = Ledger(None, "attempt-0001", 0, [], True)
    take(refused, 1, 5)
    refused.gather(5)
    refused.write(run)
    again = Ledger(None, "attempt-0001", 3, [], True)
    take(again, 4, 8)
    again.gather(8)
    again.write(run)
    assert len(run.storage.list(run.key("audit"))) == 2
    assert recorded(run, 1) == rows_up_to(8)


def test_merging_keeps_damaged_files_so_that_an_audit_finds_them(run: Run) -> None:
    write_windows(Ledger(None, "attempt-0001", 0, [], True), run, 1, 6)
    entry = run.storage.list(run.key("audit"))[1]
    content = bytearray(run.storage.read(entry.key))
    content[len(content) // 2] ^= 1
    run.storage.write(entry.key, bytes(content))
    tidy_audit(run, 2)
    with pytest.raises(DamageError, match="it was changed after it was written"):
        recorded(run, 1)
