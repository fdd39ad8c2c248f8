"""Tests of the metric history: merging its segments, and reading it completely or from the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from sunspot.errors import StorageError
from sunspot.run import Run, streams
from sunspot.run.attempts import Attempt, checkpoint_name, lineage
from sunspot.run.history import Journal, iter_records, list_journal, newest_record, read_journal, tidy_journals
from tests.harness.constants import SetConstants


def steps_in(run: Run, **options: Any) -> list[int]:
    return [record["step"] for record in read_journal(run, "metrics", **options)]


def written(run: Run, attempt: int, steps: Iterable[int], each: int = 1, size: int = 100) -> Journal:
    """Write records of about `size` bytes to a journal, and flush after every `each` records."""
    journal = Journal(run, "metrics", attempt)
    for number, step in enumerate(steps, 1):
        journal.append({"step": step, "time": 0.0, "text": "x" * (size - 60)})
        if number % each == 0:
            journal.flush()
    journal.flush()
    return journal


@pytest.fixture
def small(set_constants: SetConstants) -> None:
    """Lower the sizes at which segments are merged."""
    set_constants(streams, SIZES=(250, 2000, 8000))


def test_merging_segments_loses_no_records(run: Run, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few objects remain, all records are readable at any time, and each byte is written only a few times."""
    sizes: list[int] = []
    write, delete = run.storage.write, run.storage.delete_many
    monkeypatch.setattr(run.storage, "write", lambda key, data: (write(key, data), sizes.append(len(data))))
    monkeypatch.setattr(run.storage, "delete_many", lambda keys: (check(), delete(keys)))
    expected: list[int] = []

    def check() -> None:
        assert steps_in(run) == expected

    journal = Journal(run, "metrics", 1)
    for step in range(1, 401):
        journal.append({"step": step, "time": 0.0, "text": "x" * 50})
        expected.append(step)
        journal.flush()
    check()
    entries = run.storage.list(run.key("metrics"))
    content = sum(entry.size for entry in entries)
    assert content > 3 * 8000
    assert sum(sizes) <= (1 + len(streams.SIZES)) * content
    assert len(entries) <= 8 + 8 + 4 + content // 8000
    assert max(entry.size for entry in entries) < 2 * 8000
    assert sum(len(written.content) for written in journal._stream._segments.open) < 8000, (
        "the open segments stay in memory"
    )
    assert read_journal(run, "metrics")[0] == {"attempt": 1, "step": 1, "time": 0.0, "text": "x" * 50}
    assert read_journal(run, "events") == []


def test_records_in_merged_segments_are_read_once(run: Run, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer dies before it deletes the segments that it has merged. The next attempt deletes them."""
    with monkeypatch.context() as patch:
        patch.setattr(run.storage, "delete_many", lambda keys: None)
        written(run, 1, range(1, 76))
    assert steps_in(run) == list(range(1, 76))
    before = len(run.storage.list(run.key("metrics")))
    tidy_journals(run, 1)
    assert len(run.storage.list(run.key("metrics"))) == before, "its own attempt has not ended"
    tidy_journals(run, 2)
    assert len(run.storage.list(run.key("metrics"))) == 1 < before
    assert steps_in(run) == list(range(1, 76))


def test_records_merged_during_a_read_are_still_found(run: Run, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(run, 1, range(1, 109))
    listed, read = list_journal(run, "metrics"), run.storage.read
    given: list[int] = []

    def read_late(key: str) -> bytes:
        if len(given) == 0:
            given.append(1)
            for step in range(109, 250):
                journal.append({"step": step, "time": 0.0, "text": "x" * 40})
                journal.flush()
        return read(key)

    monkeypatch.setattr(run.storage, "read", read_late)
    assert steps_in(run)[:108] == list(range(1, 109))
    with pytest.raises(StorageError, match="keeps changing while it is being read"):
        list(iter_records(run, "metrics", None, listed))


def test_the_newest_record_is_found_without_reading_the_whole_history(
    run: Run, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Attempt(1, "job", None, 0), Attempt(2, "job", checkpoint_name(900, 1), 900)
    assert newest_record(run, lineage([first])) is None
    written(run, 1, range(1, 1001), each=7)
    asked: list[str] = []
    read = run.storage.read
    monkeypatch.setattr(run.storage, "read", lambda key: (asked.append(key), read(key))[1])
    for attempts, step in [([first], 1000), ([first, second], 900)]:
        found = newest_record(run, lineage(attempts))
        assert found["step"] == step
    written(run, 2, [901])
    found = newest_record(run, lineage([first, second]))
    assert (found["attempt"], found["step"]) == (2, 901)
    assert sum(len(read(key)) for key in asked) < 80_000


def test_a_failed_write_of_records_is_retried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(key: str, data: bytes) -> None:
        raise StorageError("full")

    journal = Journal(run, "events", 1)
    journal.append({"step": 1, "time": 0.0, "event": "told"})
    with monkeypatch.context() as patch:
        patch.setattr(run.storage, "write", refuse)
        with pytest.raises(StorageError):
            journal.flush()
    journal.append({"step": 2, "time": 0.0, "event": "told"})
    journal.flush()
    assert [record["step"] for record in read_journal(run, "events")] == [1, 2]


def test_only_records_in_the_lineage_are_read(run: Run) -> None:
    for number, steps in [(1, range(1, 9)), (2, range(5, 8))]:
        journal = Journal(run, "metrics", number)
        for step in steps:
            journal.append({"step": step, "time": 0.0})
        journal.flush()
    spans = lineage([Attempt(1, "job", None, 0), Attempt(2, "job", checkpoint_name(4, 1), 4)])
    found = [(record["attempt"], record["step"]) for record in read_journal(run, "metrics", spans)]
    assert found == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (2, 7)]
