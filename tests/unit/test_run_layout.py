"""Tests of a run's owner, the steps that count, and intact checkpoints."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sunspot.run as layout
from sunspot.errors import DamageError, StorageError, SupersededError
from sunspot.run import Run, open_run, to_json
from sunspot.run.attempts import (
    Attempt,
    Metadata,
    attempt_of,
    checkpoint_name,
    claim,
    ensure_owner,
    lineage,
    read_attempts,
    read_error,
    record_error,
    refuse_if_superseded,
    step_of,
)
from sunspot.run.audit import read_audit
from sunspot.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    best_first,
    delete_checkpoint,
    expired,
    find_faults,
    find_newest_good,
    in_lineage,
    list_checkpoints,
    list_directories,
    verify,
)
from sunspot.run.objects import with_checksum
from tests.harness.runs import commit, consumed, record_audit, start


def list_incomplete(run: Run) -> list[str]:
    """Return the names of the checkpoint directories without a manifest."""
    return [name for name, files in list_directories(run).items() if MANIFEST not in files]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(str(tmp_path), "run")


def test_the_package_docstring_lists_all_files_of_a_run() -> None:
    documented = {
        name.rstrip("/") for name in re.findall(r"^ {8}([a-z-]+(?:\.[a-z]+|/|-[0-9a-f]+))", str(layout.__doc__), re.M)
    }
    names = {*layout.RECORDS, *layout.FILES, *layout.FOLDERS}
    assert {name for name in documented if not name.startswith("probe-")} == names
    assert all(layout.is_name_of_run(f"{name}/below") for name in names)
    assert layout.is_name_of_run(f"probe-{'0' * 32}")
    assert not any(
        map(layout.is_name_of_run, ("data/part.parquet", "run.json.bak", "Logs/x", "probe-x", "", ".status"))
    )


# --------------------------------------------------------------------------------------------------------- attempts


def test_a_claimed_attempt_can_be_read_back(run: Run) -> None:
    assert read_attempts(run) == []
    first = Attempt(1, "job", None, 0, metadata=Metadata(host="a"))
    second = Attempt(2, "job", checkpoint_name(7, 1), 7, skipped=("one", "two"))
    assert claim(run, [], first)
    assert claim(run, [first], second)
    record_error(run, 2, DamageError("lost"))
    assert read_attempts(run) == [first, second], "the record of an error is not an attempt"


def test_an_attempt_is_read_only_once_unless_its_file_changes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit needs all attempts, and a run on spot nodes can have hundreds."""
    opened, open_object = [], type(run.storage).open
    monkeypatch.setattr(type(run.storage), "open", lambda *words: (opened.append(words[1]), open_object(*words))[1])
    for number in (1, 2, 3):
        start(run, f"job-{number}")
        assert [attempt.number for attempt in read_attempts(run)] == list(range(1, number + 1))
    opened.clear()
    assert len(read_attempts(run)) == 3
    assert opened == []
    run.storage.write(run.key("attempts", "0002.json"), b"{}")
    with pytest.raises(DamageError, match=r"0002\.json"):
        read_attempts(run)


def test_a_superseded_owner_cannot_claim_the_run_again(run: Run) -> None:
    old = start(run, "old")
    ensure_owner(run, old)
    new = start(run, "new")
    with pytest.raises(SupersededError, match="attempt 2 of new"):
        ensure_owner(run, old)
    with pytest.raises(SupersededError):
        refuse_if_superseded(read_attempts(run), "old")
    with pytest.raises(SupersededError):
        claim(run, read_attempts(run), replace(old, number=3))
    assert [attempt.owner for attempt in read_attempts(run)] == ["old", "new"]
    ensure_owner(run, new)
    refuse_if_superseded(read_attempts(run), "new")
    refuse_if_superseded(read_attempts(run), "third")


def test_a_driver_is_superseded_by_a_later_start_of_its_job(run: Run) -> None:
    for driver in ("first", "second"):
        start(run, "job", driver=driver)
    with pytest.raises(SupersededError, match="attempt 2 of job has owned the run since"):
        refuse_if_superseded(read_attempts(run), "job", "first")
    refuse_if_superseded(read_attempts(run), "job", "second")
    refuse_if_superseded(read_attempts(run), "job", "third")


def test_an_attempt_superseded_twice_reports_the_newest_owner(run: Run) -> None:
    old = start(run, "job")
    start(run, "job")
    start(run, "other")
    with pytest.raises(SupersededError, match="attempt 3 of other"):
        ensure_owner(run, old)


def test_attempt_numbers_can_exceed_9999(run: Run) -> None:
    nines = Attempt(9999, "job", None, 0)
    assert claim(run, [], nines)
    more = [start(run, "job"), start(run, "job")]
    assert [attempt.number for attempt in more] == [10_000, 10_001]
    assert read_attempts(run) == [nines, *more]


def test_checking_for_a_newer_owner_bypasses_the_nfs_cache(run: Run) -> None:
    """Changing the directory makes the NFS client drop its outdated cache."""
    attempt = start(run, "job")
    folder = Path(run.storage.locate(run.key("attempts")))
    os.utime(folder, (0, 0))
    ensure_owner(run, attempt)
    assert folder.stat().st_mtime > 0
    assert [file.name for file in folder.iterdir()] == ["0001.json"], "nothing else is left there"


def test_a_recorded_error_keeps_its_class(run: Run) -> None:
    assert read_error(run, 1) is None
    record_error(run, 1, DamageError("optimizer.pt lost"))
    error = read_error(run, 1)
    assert isinstance(error, DamageError)
    assert str(error) == "optimizer.pt lost"


@given(st.integers(0, 10**10), st.integers(1, 10**6))
def test_the_name_of_a_checkpoint_contains_its_step_and_attempt(step: int, attempt: int) -> None:
    assert (step_of(checkpoint_name(step, attempt)), attempt_of(checkpoint_name(step, attempt))) == (step, attempt)


# ---------------------------------------------------------------------------------------------------------- lineage


def make_history(draw: Any) -> tuple[list[Attempt], list[Checkpoint], list[int]]:
    """Return attempts, their checkpoints, and the attempt that took each step of the newest attempt's model.

    Attempts start from any checkpoint that leads to the newest one. They continue and commit after they are superseded.
    """
    attempts: list[Attempt] = []
    checkpoints: list[Checkpoint] = []
    taken: dict[int, list[int]] = {0: []}
    for _ in range(draw(st.integers(1, 25))):
        if not attempts or draw(st.booleans()):
            mine = taken[attempts[-1].number] if attempts else []
            good = [c for c in checkpoints if c.step <= len(mine) and mine[c.step - 1] == c.attempt]
            origin = draw(st.sampled_from([None, *good]))
            number = len(attempts) + 1
            attempts.append(Attempt(number, "job", origin.name if origin else None, origin.step if origin else 0))
            taken[number] = taken[origin.attempt][: origin.step] if origin else []
        else:
            number = draw(st.sampled_from(attempts)).number
            taken[number] += [number] * draw(st.integers(1, 5))
            step = len(taken[number])
            checkpoints.append(Checkpoint(checkpoint_name(step, number), step, 1, 10, 100, number))
    return attempts, checkpoints, taken[len(attempts)]


@given(st.data())
def test_the_lineage_contains_each_step_once(data: st.DataObject) -> None:
    attempts, checkpoints, taken = make_history(data.draw)
    spans = lineage(attempts)
    for step, attempt in enumerate(taken, 1):
        assert [span.attempt for span in spans if any(span.holds(a.number, step) for a in attempts)] == [attempt]
    oldest_first = spans[::-1]
    assert oldest_first[0].after == 0
    assert [span.upto for span in oldest_first] == [*(span.after for span in oldest_first[1:]), None]

    counted = in_lineage(checkpoints, spans)
    assert counted == [c for c in checkpoints if c.step <= len(taken) and taken[c.step - 1] == c.attempt]
    assert len({c.step for c in counted}) == len(counted)


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_the_newest_intact_checkpoint_is_found(run: Run) -> None:
    assert find_newest_good(run, []) == (None, ())
    attempt = start(run, "job")
    assert find_newest_good(run, [attempt]) == (None, ())
    checkpoints = [commit(run, attempt, step, loss=1 / step) for step in (2, 10, 7)]
    assert list_checkpoints(run) == sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    assert find_newest_good(run, [attempt]) == (checkpoints[1], ())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "model.pt is missing"),
        (b"", "model.pt has 0 bytes"),
        (b"model.pt of step-00000006-attempt-00", "model.pt has 36 bytes"),
        (b"model.pt of step-00000006-attempt-0002", "model.pt has SHA-256"),
    ],
)
def test_a_checkpoint_with_a_changed_file_is_skipped(run: Run, content: bytes | None, fault: str) -> None:
    attempt = start(run, "job")
    good, bad = commit(run, attempt, 3), commit(run, attempt, 6)
    key = run.key("checkpoints", bad.name, "model.pt")
    if content is None:
        run.storage.delete(key)
    else:
        run.storage.write(key, content)
    [found] = find_faults(run, bad)
    assert found.startswith(fault)
    newest, [skipped] = find_newest_good(run, [attempt])
    assert (newest, str(skipped)) == (good, f"{bad.name}: damaged, {found}")


def broken_manifests() -> dict[str, Any]:
    files = {"model.pt": {"size": 1, "sha256": "0"}}
    good = {
        "name": checkpoint_name(6, 1),
        "step": 6,
        "epoch": 2,
        "steps_per_epoch": 5,
        "total_steps": 100,
        "attempt": 1,
    }
    whole = {**good, "files": files, "metrics": {}, "time": 0.0}
    records: dict[str, Any] = {
        "list": [],
        "null": None,
        "no field": {},
        "another name": {**whole, "name": checkpoint_name(7, 1)},
        "another step": {**whole, "step": 60},
        "step is text": {**whole, "step": "6"},
        "no file": {**whole, "files": {}},
        "files is a list": {**whole, "files": ["model.pt"]},
        "file without hash": {**whole, "files": {"model.pt": {"size": 1}}},
        "file is a number": {**whole, "files": {"model.pt": 1}},
        "file of another run": {**whole, "files": {"../../../run/model.pt": files["model.pt"]}},
        "file of the machine": {**whole, "files": {"/etc/hostname": files["model.pt"]}},
        "metrics is a list": {**whole, "metrics": [1]},
    }
    for name in (".", "./model.pt", "a/./b", "a//b", "", "a/", "a\0b"):
        record = {**whole, "files": {name: files["model.pt"]}}
        records[f"file is called {name!r}"] = json.loads(with_checksum(record))
    broken = {"empty": b"", "cut": to_json(whole)[:-20], "binary": b"\xff\xfe\x00", "text": b"manifest"}
    return broken | {name: json.dumps(record).encode() for name, record in records.items()}


@pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in broken_manifests().items()])
def test_an_invalid_manifest_counts_as_damaged(run: Run, content: bytes) -> None:
    attempt = start(run, "job")
    good, bad = commit(run, attempt, 3), commit(run, attempt, 6)
    run.storage.write(run.key("checkpoints", bad.name, "manifest.json"), content)
    assert [(c.name, bool(c.damage), c.bytes > 0) for c in list_checkpoints(run)] == [
        (good.name, False, True),
        (bad.name, True, False),
    ]
    newest, [skipped] = find_newest_good(run, [attempt])
    assert newest == good
    assert str(skipped).startswith(f"{bad.name}: damaged, manifest.json cannot be used: ")


def test_a_manifest_with_unknown_fields_is_intact(run: Run) -> None:
    checkpoint = commit(run, start(run, "job"), 3, loss=0.1)
    key = run.key("checkpoints", checkpoint.name, MANIFEST)
    record = json.loads(run.storage.read(key))
    del record["sha256"]
    run.storage.write(key, with_checksum({**record, "color": {"red": [1]}}))
    assert list_checkpoints(run) == [checkpoint]
    run.storage.write(
        key, with_checksum(record).replace(b"sha256", b"sha257", 1).replace(b'"sha256": "', b'"sha257": "')
    )
    assert list_checkpoints(run)[0].damage
    run.storage.write(key, with_checksum({**record, "color": "red"}).replace(b"red", b"rot"))
    assert [found.damage for found in list_checkpoints(run)] == [
        "manifest.json cannot be used: it was changed after it was written"
    ]


def test_unrelated_files_among_checkpoints_are_ignored(run: Run) -> None:
    attempt = start(run, "job")
    good = commit(run, attempt, 3)
    for name in (".DS_Store", "copy/manifest.json", "step-00000009/manifest.json", f"{good.name}-old/model.pt"):
        run.storage.write(run.key("checkpoints", name), b"{}")
    assert list_checkpoints(run) == [good]
    assert list_incomplete(run) == []
    assert find_newest_good(run, [attempt]) == (good, ())


def test_the_search_for_an_intact_checkpoint_lists_skipped_checkpoints_newest_first(run: Run) -> None:
    attempt = start(run, "job")
    for step in (2, 4, 6, 8):
        commit(run, attempt, step)
    for step in (2, 6):
        run.storage.delete(run.key("checkpoints", checkpoint_name(step, 1), "manifest.json"))
    run.storage.delete(run.key("checkpoints", checkpoint_name(8, 1), "model.pt"))
    newest, skipped = find_newest_good(run, [attempt])
    assert newest.step == 4
    assert [step_of(each.name) for each in skipped] == [8, 6]


def test_an_interrupted_deletion_leaves_an_incomplete_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = start(run, "job")
    good, old = commit(run, attempt, 3), commit(run, attempt, 6)
    run.storage.write(run.key("checkpoints", old.name, "extra_state.pt"), b"first by name")
    deleted: list[str] = []
    delete = run.storage.delete

    def fail_after_one(key: str) -> None:
        if deleted:
            raise StorageError("gone")
        deleted.append(key)
        delete(key)

    with monkeypatch.context() as patch:
        patch.setattr(run.storage, "delete", fail_after_one)
        with pytest.raises(StorageError):
            delete_checkpoint(run, old.name)
    assert list_incomplete(run) == [old.name]
    assert list_checkpoints(run) == [good]
    newest, [skipped] = find_newest_good(run, [attempt])
    assert (newest, str(skipped)) == (good, f"{old.name}: incomplete, it has no manifest")
    delete_checkpoint(run, old.name)
    delete_checkpoint(run, old.name)
    assert list_incomplete(run) == []
    assert run.storage.list(run.key("checkpoints", old.name)) == []


def test_a_checkpoint_deleted_during_verification_is_not_reported_as_damaged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = start(run, "job")
    gone, damaged = commit(run, attempt, 3), commit(run, attempt, 6)
    run.storage.delete(run.key("checkpoints", damaged.name, "model.pt"))
    digest = run.storage.digest

    def late(key: str, *arguments: Any) -> tuple[int, str]:
        if gone.name in key:
            delete_checkpoint(run, gone.name)
        return digest(key, *arguments)

    monkeypatch.setattr(run.storage, "digest", late)
    assert verify(run, [gone.name, damaged.name]) == [(damaged, ["model.pt is missing"])]


@pytest.mark.parametrize(("order", "steps"), [("min", [5, 4, 2, 6, 3, 1]), ("max", [4, 2, 5, 6, 3, 1])])
def test_checkpoints_are_ranked_by_metric_and_then_by_step(order: str, steps: list[int]) -> None:
    """A checkpoint without a finite metric ranks below all others."""
    losses = {1: None, 2: 1.0, 3: float("nan"), 4: 1.0, 5: 0.5, 6: None}
    checkpoints = [
        Checkpoint(str(step), step, 1, 9, 9, 1, {} if loss is None else {"loss": loss}) for step, loss in losses.items()
    ]
    assert [checkpoint.step for checkpoint in best_first(checkpoints, "loss", order)] == steps


def test_checkpoints_are_ranked_by_a_held_out_metric_if_one_exists() -> None:
    """Until the first evaluation, the metric of training rows ranks checkpoints."""
    metrics = [{"loss": 0.1}, {"loss": 0.4, "test_loss": 0.3}, {"loss": 0.3}, {"loss": 0.2, "test_loss": 0.5}]
    checkpoints = [Checkpoint(str(step), step, 1, 9, 9, 1, each) for step, each in enumerate(metrics)]
    assert [each.step for each in expired(checkpoints, 1, "loss", "min")] == [0, 2]
    assert [each.step for each in expired(checkpoints[::2], 1, "loss", "min")] == []
    assert [each.step for each in expired(checkpoints, 1, "test_loss", "max")] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------ audit


def audited(run: Run, *attempts: Attempt) -> list[tuple[int, int]]:
    """Return the step and the row of each audit record."""
    tables = read_audit(run, lineage(list(attempts)))
    return sorted((line["step"], line["row"]) for table in tables for line in table.to_pylist())


def expected(first: int, last: int) -> list[tuple[int, int]]:
    return sorted((step, row) for step, rows in consumed(first, last).items() for row in rows)


def test_superseded_steps_in_an_audit_file_are_ignored(run: Run) -> None:
    """The audit file was written so late in the commit of step 4 that it includes steps up to 7."""
    first, second = Attempt(1, "job", None, 0), Attempt(2, "job", checkpoint_name(4, 1), 4)
    record_audit(run, first, consumed(1, 7))
    record_audit(run, second, consumed(5, 9))
    assert audited(run, first) == expected(1, 7)
    assert audited(run, first, second) == expected(1, 9)


def test_steps_repeated_in_two_audit_files_are_counted_once(run: Run) -> None:
    """Storage wrote the first file but reported an error, so the next commit wrote the same steps again."""
    attempt = Attempt(1, "job", None, 0)
    record_audit(run, attempt, consumed(1, 5))
    record_audit(run, attempt, consumed(1, 8))
    record_audit(run, attempt, consumed(9, 10))
    assert audited(run, attempt) == expected(1, 10)
