"""Tests of damaged, foreign and outdated objects in a run, which are left out or rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.errors import ConflictError, DamageError, NotFoundError
from sunspot.report import read_report, render
from sunspot.run import Run, to_json
from sunspot.run.attempts import lineage, newest_number, read_attempts
from sunspot.run.audit import AuditWriter, read_audit
from sunspot.run.history import Journal, read_journal
from sunspot.run.identity import Identity, Rows, read_identity, record_identity
from sunspot.run.objects import parse_verified, read_content, with_checksum
from sunspot.run.overview import list_runs
from sunspot.run.requests import SubmissionRecord, newest_submission, record_submission
from sunspot.run.search import read_trial
from sunspot.run.seen import look
from sunspot.run.size_limits import MAX_OBJECT_BYTES, MAX_STATUS_BYTES
from sunspot.run.status import RunState, Status, list_statuses, read_status, write_status
from tests.harness.commands import Command
from tests.harness.runs import (
    begin,
    commit,
    consumed,
    journal_keys,
    record_audit,
    report,
    set_status,
    start,
    write_receipt,
)

UNUSABLE = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "text": b"news",
    "binary": b"\xff\xfe\x00",
    "cut": b'{"state": "running", "own',
    "deep": b"[" * 100_000,
    "too many digits": b'{"state": "running", "owner": "a", "step": ' + b"9" * 5000 + b"}",
    "a huge number": b'{"state": "running", "owner": "a", "step": 1' + b"0" * 30 + b"}",
    "no number": b'{"state": "running", "owner": "a", "time": NaN}',
    "an endless time": b'{"state": "running", "owner": "a", "time": 1e999}',
    "a negative step": b'{"state": "running", "owner": "a", "step": -1}',
    "a step in words": b'{"state": "running", "owner": "a", "step": "1"}',
    "a state of another version": b'{"state": "dancing", "owner": "a"}',
    "no owner": b'{"state": "running"}',
    "half a surrogate": b'{"state": "running", "owner": "\\ud800"}',
}


@pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in UNUSABLE.items()])
def test_a_damaged_status_is_ignored_with_a_single_warning(
    run: Run, sunspot: Command, content: bytes, warned: list[str]
) -> None:
    begin(run)
    run.storage.write(run.key("status/attempt-0000-00000000.json"), content)
    assert [read_status(run), read_status(run)] == [None, None]
    [warning] = warned
    assert "00000000.json cannot be used: " in warning
    other = Run(run.storage, "other")
    set_status(begin(other), RunState.SUCCEEDED)
    assert sunspot("list", "--json") == 0
    assert {row["run"]: row["state"] for row in sunspot.json} == {"other": "succeeded", "run": "starting"}
    assert render(read_report(look(run)))


def test_unknown_fields_of_a_stored_object_are_ignored(run: Run) -> None:
    write_status(run, Status(RunState.RUNNING, "job", step=3, heartbeat=5.0, driver="aaaaaaaa"))
    [entry] = list_statuses(run)
    record = json.loads(run.storage.read(entry.key))
    run.storage.write(entry.key, to_json({**record, "color": ["red"]}))
    status = read_status(run)
    assert (status.step, status.heartbeat) == (3, 5.0)


def test_reading_an_oversized_object_raises_an_error(run: Run) -> None:
    run.storage.write("run/object.json", b" " * (MAX_OBJECT_BYTES + 1))
    with pytest.raises(DamageError, match=r"object.json cannot be used: it is larger than 16 MiB"):
        read_content(run.storage, "run/object.json")
    write_status(run, Status(RunState.RUNNING, "job", driver="aaaaaaaa", reason="x" * MAX_STATUS_BYTES))
    assert read_status(run) is None, "the list of runs reads the status of each run"


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.text() | st.none() | st.booleans()))
def test_parsing_a_record_that_does_not_match_its_checksum_raises_a_damage_error(record: dict[str, Any]) -> None:
    record.pop("sha256", None)
    content = with_checksum(record)
    parse_verified(dict[str, Any], content, "it")
    with pytest.raises(DamageError):
        parse_verified(dict[str, Any], with_checksum({**record, "step": 41}).replace(b"41", b"40"), "it")


def test_a_modified_identity_is_rejected(run: Run) -> None:
    environment = {"SUNSPOT_SEED": "0", "SUNSPOT_DATASET": "sample"}
    rows = Rows("data", 22, 5, "1a2b", "NumPy")
    record_identity(run, environment, ["seed"], rows)
    assert read_identity(run) == Identity({"SUNSPOT_SEED": "0"}, rows)
    record_identity(run, environment, ["seed"], rows)
    with pytest.raises(ConflictError):
        record_identity(run, {**environment, "SUNSPOT_SEED": "1"}, ["seed"], rows)
    content = run.storage.read(run.key("run.json"))
    run.storage.write(run.key("run.json"), content.replace(b'"0"', b'"1"'))
    with pytest.raises(DamageError, match=r"run\.json cannot be used: it was changed"):
        record_identity(run, environment, ["seed"], rows)


def test_damaged_lines_of_a_journal_are_skipped_and_counted(run: Run) -> None:
    attempt = start(begin(run), "job")
    report(run, attempt, *({"step": step, "time": 1.0, "loss": math.nan} for step in (1, 2, 3)))
    [key] = journal_keys(run, "metrics", 1)
    first, _, third = run.storage.read(key).splitlines()
    bad = [b"", b"null", b'{"attempt": 1}', first.replace(b'"step": 1', b'"step": 1.5'), first[:-3]]
    bad += [first.replace(b'"loss": NaN', odd) for odd in (b'"loss": [{}]',)]
    run.storage.write(key, b"\n".join([first, *bad, third]))
    damaged: list[str] = []
    assert [record["step"] for record in read_journal(run, "metrics", damaged=damaged)] == [1, 3]
    assert damaged == [f"{run.storage.locate(key)}: 6 of 8 lines cannot be used"]


# ------------------------------------------------------------------------------------------------------------- attempts


@pytest.mark.parametrize(
    "change",
    [
        {"starts_from": "step-00000003-attempt-0002"},
        {"starts_from": "step-00000003-attempt-0003"},
        {"starts_from": "step-00000002-attempt-0001"},
        {"starts_from": None},
        {"starts_from": "../../other/checkpoints/step-00000003-attempt-0001"},
        {"number": 1},
        {"number": "2"},
        {"step": 3.0},
        {"time": math.nan},
        {"skipped": "none"},
        {"owner": None},
        {"metadata": {"world_size": 10**12}},
        {"metadata": {"settings": {"SUNSPOT_SEED": 0}}},
        {"metadata": None},
        {"nonce": "../.."},
    ],
    ids=str,
)
def test_an_attempt_that_starts_from_itself_or_from_a_later_attempt_is_rejected(
    run: Run, sunspot: Command, change: dict[str, Any]
) -> None:
    """Readers of the lineage would otherwise loop forever."""
    first = start(begin(run), "job")
    start(run, "job", commit(run, first, 3).name)
    key = run.key("attempts", "0002.json")
    record = {**json.loads(run.storage.read(key)), **change}
    del record["sha256"]
    run.storage.write(key, with_checksum(record))
    with pytest.raises(DamageError, match=r"0002\.json"):
        read_attempts(run)
    for verb in ("status", "metrics", "events", "audit"):
        assert sunspot(verb, "run") == 7
        assert "0002.json" in sunspot.err
        assert "Traceback" not in sunspot.err


def test_a_damaged_trial_does_not_end_a_search(run: Run) -> None:
    commit(run, start(begin(run), "job"), 3, loss=0.5)
    set_status(run, RunState.SUCCEEDED)
    assert read_trial(run, {}, "loss", "min").best == 0.5
    run.storage.write(run.key("attempts", "0001.json"), b"{}")
    trial = read_trial(run, {}, "loss", "min")
    assert (trial.state, trial.best, trial.eligible) == (RunState.SUCCEEDED, None, False)


def test_a_modified_attempt_is_rejected(run: Run) -> None:
    start(begin(run), "job")
    key = run.key("attempts", "0001.json")
    run.storage.write(key, run.storage.read(key).replace(b"job", b"jab"))
    with pytest.raises(DamageError, match="it was changed after it was written"):
        read_attempts(run)


def test_lone_surrogates_in_a_stored_object_are_replaced(run: Run) -> None:
    """Python produces lone surrogates from file names that are not UTF-8."""
    write_status(begin(run), Status(RunState.FAILED, "job", reason="a\udcffb \N{WRENCH}"))
    status = read_status(run)
    assert status.reason == "a\N{REPLACEMENT CHARACTER}b \N{WRENCH}"
    journal = Journal(run, "events", 1)
    journal.append({"step": 1, "time": 1.0, "event": "told", "detail": "a\udcffb"})
    journal.flush()
    assert [event["detail"] for event in read_journal(run, "events")] == ["a\N{REPLACEMENT CHARACTER}b"]


def test_the_job_name_is_known_even_if_the_submission_record_is_damaged(run: Run) -> None:
    record_submission(begin(run), SubmissionRecord("run-1234", "sunspot"))
    [entry] = run.storage.list(run.key("submissions"))
    content = run.storage.read(entry.key)
    assert newest_submission(run) == SubmissionRecord("run-1234", "sunspot")
    for changed in (content[:-3], b"\xff", b"[" * 9999, b"[]", content.replace(b'"sunspot"', b"3")):
        run.storage.write(entry.key, changed)
        assert newest_submission(run) == SubmissionRecord("run-1234")


# ------------------------------------------------------------------------------------------------------------- listings


def test_unrelated_files_in_a_run_are_ignored(run: Run, sunspot: Command) -> None:
    attempt = start(begin(run), "job")
    write_receipt(run, attempt, 0)
    record_submission(run, SubmissionRecord("run-1234"))
    record_audit(run, attempt, consumed(1, 5))
    commit(run, attempt, 5)
    report(run, attempt, {"step": 5, "time": 1.0})
    set_status(run, RunState.SUCCEEDED, owner="job", step=5)
    folders = ("", "submissions", "attempts", "audit", "audit/attempt-0001", "checkpoints", "metrics", "events", "logs")
    folders += ("failures", "logs/driver-20261121T141013679Z", "tracking")
    names = (".DS_Store", "Icon\r", "9" * 200, "9" * 200 + ".json", "0001.yaml", "²²².json", "a\nb.jsonl", "-.parquet")
    for folder in folders:
        for name in (*names, "folder/0001.json", "folder/0009-x.yaml", "folder/attempt-0001-00000.jsonl"):
            run.storage.write(run.key(*([folder] if folder else []), name), b"{")
    assert look(run).state is RunState.SUCCEEDED
    assert newest_number(run) == 1
    for words in (
        ["status"],
        ["list"],
        ["audit"],
        ["metrics"],
        ["events"],
        ["checkpoints ls"],
        ["checkpoints verify"],
        ["checkpoints gc"],
        ["report"],
        ["doctor"],
    ):
        verb = words[0].split()
        output = ["--output", str(run.storage.locate("page.html"))] if verb == ["report"] else []
        assert sunspot(*verb, *([] if verb == ["list"] else ["run"]), *output) == 0, (words, sunspot.err)
    assert sunspot("logs", "run") == 3
    assert sunspot("delete", "run", "--yes") == 0, sunspot.err
    left = {entry.key.split("/")[1] for entry in run.storage.list("run")}
    assert left == {*names, "folder"}, "files of a user beside the run's own stay"


@pytest.mark.parametrize("name", ["..", "a\nb", "RUN", "x" * 64, "", "a b"])
def test_folders_without_valid_run_names_are_not_listed(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    begin(run)
    entries = run.storage.list("")
    hostile = [entry._replace(key=f"{name}/run.json") for entry in entries]
    monkeypatch.setattr(run.storage, "list", lambda prefix: [*hostile, *entries])
    assert list(list_runs(run.storage)) == ["run"]


# ---------------------------------------------------------------------------------------------------------------- audit


def test_a_corrupted_audit_file_is_rejected(run: Run) -> None:
    attempt = start(begin(run), "job")
    record_audit(run, attempt, consumed(1, 3))
    [entry] = run.storage.list(run.key("audit"))
    content = run.storage.read(entry.key)
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1
        run.storage.write(entry.key, bytes(flipped))
        with pytest.raises(DamageError, match="it was changed after it was written"):
            read_audit(run, lineage(read_attempts(run)))


def rename_audit(run: Run, new_key: Callable[[str], str]) -> None:
    """Move the run's only audit file to another key."""
    [entry] = run.storage.list(run.key("audit"))
    run.storage.write(new_key(entry.key), run.storage.read(entry.key))
    run.storage.delete(entry.key)


def test_a_renamed_audit_file_is_rejected(run: Run) -> None:
    attempt = start(begin(run), "job")
    record_audit(run, attempt, consumed(1, 3))
    rename_audit(run, lambda key: key.replace("00000003", "00000004"))
    with pytest.raises(DamageError, match="it was changed after it was written"):
        read_audit(run, lineage(read_attempts(run)))


def test_an_audit_file_with_invalid_columns_is_rejected(run: Run) -> None:
    import pyarrow

    start(begin(run), "job")
    for columns in (
        {"step": [1], "row": [1]},
        {"step": [1], "rank": [None], "row": [1]},
        {"step": [9], "rank": [0], "row": [1]},
    ):
        AuditWriter(run, "attempt-0001").write(1, 3, pyarrow.table(columns))
        with pytest.raises(DamageError):
            read_audit(run, lineage(read_attempts(run)))
        [entry] = run.storage.list(run.key("audit"))
        run.storage.delete(entry.key)


def test_reading_the_identity_of_a_run_that_has_not_begun_raises_an_error(run: Run) -> None:
    with pytest.raises(NotFoundError):
        read_identity(run)
