"""Tests of runs as storage shows them: the list, the states, the events and the logs."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sunspot.errors import DamageError, NotFoundError
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, Metadata, checkpoint_name, claim, record_error
from sunspot.run.history import Journal
from sunspot.run.incidents import Cause
from sunspot.run.logs import SEGMENT_BYTES, LogWriter, rank_stream, read_stream
from sunspot.run.overview import LOST_AFTER_S, RunSummary, list_runs, state_from_storage
from sunspot.run.requests import SubmissionRecord, mark_deletion, record_submission, request_stop
from sunspot.run.seen import look, read_details, read_listed
from sunspot.run.status import SILENT_AFTER_S, RunState, Status, read_status, write_status, write_status_as_is
from sunspot.storage.local import LocalStorage
from sunspot.submitter.commands import logs
from sunspot.submitter.commands import status as status_command
from sunspot.submitter.runs import find_run
from tests.harness.commands import Answer, StorageCommand
from tests.harness.constants import SetConstants
from tests.harness.runs import age, begin, commit, report, set_status, start, write_receipt
from tests.harness.s3 import FaultProxy
from tests.harness.waiting import wait_until

RUNNING = Status(RunState.RUNNING, "job", attempt=1, world_size=2, step=40, epoch=2, total_steps=100, loss=0.5)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


@pytest.fixture
def sunspot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> StorageCommand:
    return StorageCommand(str(tmp_path), capsys)


# -------------------------------------------------------------------------------------------------------------- summary


def test_runs_are_summarized_from_a_listing_alone(tmp_path: Path) -> None:
    storage = open_run(str(tmp_path), "a").storage
    trained = begin(Run(storage, "trained"))
    first = start(trained, "job")
    origin = commit(trained, first, 10)
    commit(trained, first, 30)
    second = start(trained, "job", origin.name)
    newest = commit(trained, second, 20)
    storage.write(trained.key("checkpoints", "step-00000040-attempt-0002", "model.pt"), b"no manifest yet")
    record_error(trained, 1, DamageError("lost"))
    submitted = Run(storage, "submitted")
    record_submission(submitted, SubmissionRecord("submitted-1234"))
    record_submission(submitted, SubmissionRecord("submitted-5678"))
    request_stop(submitted, "me")
    storage.write("data/train/part.parquet", b"")
    storage.write("file", b"")
    age(trained, 100)

    found = list_runs(storage)
    assert list(found) == ["submitted", "trained"], "the run that was written last comes first"
    one, other = found["trained"], found["submitted"]
    assert (one.checkpoint, one.stop_requested) == (newest.name, False)
    assert one.checkpoint_time == pytest.approx(time.time() - 100, abs=20)
    assert one.bytes == sum(entry.size for entry in storage.list("trained"))
    assert (one.last_active, one.submitted) == (one.modified, 0)
    assert (other.checkpoint, other.stop_requested) == (None, True)
    assert (other.last_active, other.submitted > 0) == (0, True), "writes of the submitter are no sign of life"


def test_a_submitted_run_is_found_before_its_driver_starts(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="it contains no runs"):
        find_run("run", str(tmp_path))
    record_submission(open_run(str(tmp_path), "run"), SubmissionRecord("run-1234"))
    assert find_run("run", str(tmp_path)).name == "run"
    with pytest.raises(NotFoundError, match=r"it contains run$"):
        find_run("another", str(tmp_path))


def test_runs_are_listed_even_if_one_run_has_a_damaged_status(run: Run) -> None:
    other = Run(run.storage, "other")
    write_status(run, RUNNING)
    run.storage.write(other.key("status/attempt-0000-00000000.json"), b'{"state": "dancing", "owner": "x"}')
    begin(Run(run.storage, "third"))
    statuses = {seen.run.name: seen.status for seen in read_listed(run.storage, list_runs(run.storage))}
    assert (statuses["other"], statuses["third"]) == (None, None)
    assert statuses["run"]
    assert statuses["run"].step == 40


# ---------------------------------------------------------------------------------------------------------------- state

NOW = 1_000_000.0


def status(state: RunState, ago: float, **fields: Any) -> Status:
    return replace(RUNNING, state=state, time=NOW - ago, **fields)


@pytest.mark.parametrize(
    ("given", "stop", "heard_ago", "submitted_ago", "state", "words"),
    [
        (None, False, None, None, "pending", "its driver has not started"),
        (None, False, None, 60, "pending", "submitted at "),
        (None, True, None, 60, "stopped", "before its driver started"),
        (None, False, 5, 60, "starting", "its driver has started"),
        (None, False, LOST_AFTER_S + 1, None, "lost", "no sign of life since"),
        (status(RunState.STARTING, LOST_AFTER_S + 1), False, None, None, "lost", "nothing is training it"),
        (status(RunState.RUNNING, 10), False, 10, None, "running", "2 workers train"),
        (status(RunState.RUNNING, 10), False, None, None, "running", ""),
        (status(RunState.RUNNING, 10), True, 10, None, "stopping", "told to stop"),
        (status(RunState.RUNNING, SILENT_AFTER_S - 1), False, None, None, "running", ""),
        (status(RunState.RUNNING, 30), False, 5, None, "silent", "no sign of life since 1970-01-12 13:46:10 UTC, 30 s"),
        (status(RunState.STARTING, 30), False, None, None, "silent", "it is frozen, cut off from storage, or gone"),
        (status(RunState.RUNNING, 30), True, None, None, "stopping", "told to stop; no sign of life since"),
        (status(RunState.RUNNING, LOST_AFTER_S + 1), False, 20, None, "lost", ""),
        (
            status(RunState.RUNNING, LOST_AFTER_S + 1),
            False,
            LOST_AFTER_S + 1,
            None,
            "lost",
            "no sign of life since 1970-01-12",
        ),
        (
            status(RunState.RUNNING, 5, heartbeat=NOW - 305),
            False,
            None,
            None,
            "running",
            "no step since 1970-01-12 13:41",
        ),
        (status(RunState.RUNNING, 5, heartbeat=NOW - 24), False, None, None, "running", "2 workers train"),
        (status(RunState.RUNNING, 5, heartbeat=NOW - 305, step_time_s=60), False, None, None, "running", "2 workers"),
        (status(RunState.RUNNING, 9999, stored=NOW - 5), False, None, None, "running", ""),
        (status(RunState.RUNNING, -9999, stored=NOW - 40), False, None, None, "silent", "40 s ago"),
        (status(RunState.RUNNING, 3 * 3600), False, 3 * 3600, None, "lost", "3 h ago"),
        (
            status(RunState.RUNNING, LOST_AFTER_S + 1),
            True,
            LOST_AFTER_S + 1,
            None,
            "stopped",
            "told to stop; no sign of life",
        ),
        (status(RunState.RUNNING, 3600), False, 3600, 30, "pending", "its driver has not started"),
        (status(RunState.SUCCEEDED, 9999), False, 9999, 10000, "succeeded", "succeeded at step 40"),
        (status(RunState.FAILED, 9999, reason="no luck"), True, 9999, None, "failed", "no luck"),
        (status(RunState.STOPPED, 9999), True, 9999, None, "stopped", ""),
        (status(RunState.LOST, 1, reason="interrupted"), False, 1, None, "lost", "interrupted"),
        (status(RunState.FAILED, 9999, reason="no luck"), False, 9999, 30, "pending", "its driver has not started"),
    ],
)
def test_the_state_of_a_run_can_be_determined_from_storage_alone(
    given: Status | None, stop: bool, heard_ago: float | None, submitted_ago: float | None, state: str, words: str
) -> None:
    def moment(ago: float | None) -> float:
        return 0 if ago is None else NOW - ago

    summary = RunSummary(last_active=moment(heard_ago), submitted=moment(submitted_ago), stop_requested=stop)
    found, reason = state_from_storage(given, summary, NOW)
    assert found == state
    assert words in reason
    assert reason


@pytest.mark.parametrize(
    ("ago", "known", "shown"),
    [(LOST_AFTER_S + 1, 0, (12, 3)), (LOST_AFTER_S + 1, 17, (17, 4)), (5, 0, (0, 0))],
    ids=["lost", "lost after more steps", "alive"],
)
def test_a_lost_run_is_listed_with_the_step_of_its_newest_checkpoint(
    ago: float, known: int, shown: tuple[int, int], run: Run, sunspot: StorageCommand
) -> None:
    kept = commit(run, start(run, "job"), 12)
    set_status(run, RunState.STARTING, step=known, epoch=(known + 4) // 5, steps_per_epoch=5)
    age(run, ago)
    [listed] = json.loads(sunspot("list", "--json").out)
    on_page = look(run).progress
    assert on_page
    assert (listed["step"], listed["epoch"]) == (on_page.step, on_page.epoch) == shown
    assert on_page.checkpoint == (kept.name if ago > 5 else None)


def test_a_recent_status_is_enough_to_determine_the_state_of_a_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(run, replace(RUNNING, driver="0123abcd"))
    with monkeypatch.context() as patch:
        listed: list[str] = []
        usual = LocalStorage.list
        patch.setattr(LocalStorage, "list", lambda self, prefix: [listed.append(prefix), *usual(self, prefix)][1:])
        assert look(run).state is RunState.RUNNING
        assert listed == ["run/status"]
        age(run, SILENT_AFTER_S + 1)
        listed.clear()
        assert look(run).state is RunState.SILENT
        assert "run/submissions" in listed
        assert "run" not in listed, "a long run has thousands of objects"
    report(run, Attempt(1, "job", None, 0), {"step": 1})
    assert look(run).state is RunState.SILENT, "only its status is a sign of life"
    age(run, LOST_AFTER_S)
    assert look(run).state is RunState.LOST
    record_submission(run, SubmissionRecord("run-1234"))
    assert look(run).state is RunState.PENDING
    request_stop(run, "me")
    assert look(run).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("ask", "state"),
    [
        (lambda run: request_stop(run, "me"), "stopping"),
        (lambda run: mark_deletion(run, "me"), "deleting"),
        (lambda run: record_submission(run, SubmissionRecord("run-1234")), "running"),
    ],
    ids=["asked to stop", "being deleted", "submitted again"],
)
def test_status_and_list_show_the_same_state_of_a_live_run_without_a_rayjob(
    ask: Callable[[Run], Any], state: str, run: Run, sunspot: StorageCommand
) -> None:
    write_status(run, replace(RUNNING, driver="0123abcd"))
    age(run, 2)
    ask(run)
    shown = sunspot("status", "run", "--json").json
    [listed] = sunspot("list", "--json").json
    assert (shown["state"], shown["reason"]) == (listed["state"], listed["reason"])
    assert shown["state"] == state


# -------------------------------------------------------------------------------------------------------------- details


def test_run_details_contain_everything_in_storage(run: Run) -> None:
    """Two workers train for 100 s, of which 5 s at the start and 10 s between two attempts are lost."""
    began = time.time() - 100
    first = Attempt(1, "job", None, 0, time=began, metadata=Metadata(tier="beginning", world_size=2))
    claim(run, [], first)
    write_receipt(run, first, 0, Cause.BEGIN)
    report(run, first, *({"step": step, "seconds": 5.0, "time": began + step, "loss": 1.0} for step in (2, 4)))
    origin = commit(run, first, 2)
    second = Attempt(2, "job", origin.name, 2, time=began + 50, metadata=Metadata(tier="storage", world_size=2))
    claim(run, [first], second)
    write_receipt(run, second, 1, last_step=4)
    report(run, second, *({"step": step, "seconds": 5.0, "time": began + 50, "loss": 0.1} for step in (4, 6)))
    newest, damaged = commit(run, second, 4), commit(run, second, 6)
    run.storage.delete(run.key("checkpoints", damaged.name, "model.pt"))
    write_status(run, replace(RUNNING, step=6, step_time_s=2.0, total_steps=10, rows_per_s=9.5))

    view = read_details(look(run))
    assert (view.state, view.step, view.total_steps, view.epoch, view.loss) == (RunState.RUNNING, 6, 10, 2, 0.5)
    assert (view.rows_per_s, view.seconds_left, view.restarts) == (9.5, 8.0, 1)
    in_place = replace(second, number=3, metadata=Metadata(tier="in place"))
    assert replace(view, attempts=[*view.attempts, in_place]).restarts == 1
    assert view.checkpoint == newest
    assert [each.name for each in view.passed_over] == [damaged.name]
    assert view.checkpoint_age_s == pytest.approx(0, abs=20)
    assert view.goodput == pytest.approx(0.85, abs=0.03)
    assert [(receipt.cause, receipt.replayed) for receipt in view.receipts] == [("begin", 0), ("node lost", 2)]
    assert [receipt.attempt for receipt in view.incidents] == [2]
    assert view.identity
    assert view.identity.rows
    assert view.identity.rows.rows == 22

    write_status(run, replace(RUNNING, state=RunState.FAILED, reason="no luck"))
    view = read_details(look(run))
    assert (view.state, view.reason, view.seconds_left) == (RunState.FAILED, "no luck", None)
    write_status_as_is(run, replace(RUNNING, state=RunState.FAILED, time=began + 60))
    assert read_details(look(run)).goodput == pytest.approx(1 - 15 / 60, abs=0.01), "time after its end is not lost"


def test_a_silent_run_shows_no_running_workers(run: Run, sunspot: StorageCommand) -> None:
    attempt = start(run, "job")
    write_status(run, replace(RUNNING, attempt=1, driver="0123abcd", rows_per_s=9.5, step_time_s=2.0, world_size=2))
    live = sunspot("status", "run", "--json").json
    assert (live["state"], live["workers_running"], live["rows_per_s"], live["seconds_left"]) == (
        "running",
        2,
        9.5,
        120,
    )
    age(run, 28, "status")
    report(
        run, attempt, {"step": 41, "epoch": 1, "time": time.time(), "loss": 0.5}
    )  # written before, but arriving late
    silent = sunspot("status", "run", "--json").json
    assert list(silent) == list(live)
    assert (silent["state"], silent["step"], silent["loss"]) == ("silent", 41, 0.5)
    assert (silent["workers_running"], silent["rows_per_s"], silent["seconds_left"]) == (None, None, None)
    assert re.fullmatch(
        r"no sign of life since 2.* UTC, \d\d s ago: it is frozen, cut off from storage, or gone", silent["reason"]
    )
    assert "run: silent\n" in sunspot("status", "run").out
    [listed] = sunspot("list", "--json").json
    assert (listed["state"], listed["reason"].partition(" since")[0]) == ("silent", "no sign of life")


def test_status_can_watch_a_run_until_it_ends(
    run: Run, sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(seconds: float) -> None:
        """Take a step between two reads, and end after the second."""
        state = RunState.RUNNING if read_status(run).step == 40 else RunState.SUCCEEDED
        write_status(run, replace(trains, state=state, step=41))

    start(run, "job")
    trains = replace(RUNNING, attempt=1, driver="0123abcd", step=40)
    monkeypatch.setattr(status_command, "time", SimpleNamespace(sleep=go_on))
    for words in ((), ("--json",)):
        write_status(run, trains)
        answer = sunspot("status", "run", "--watch", *words)
        assert answer.code == 0
        if words:
            looks = [json.loads(line) for line in answer.out.splitlines()]
            assert [(each["state"], each["step"]) for each in looks] == [
                ("running", 40),
                ("running", 41),
                ("succeeded", 41),
            ]
        else:
            assert re.findall(r"run: \w+|\d+ of 100", answer.out) == [
                "run: running",
                "40 of 100",
                "run: running",
                "41 of 100",
                "run: succeeded",
                "41 of 100",
            ]


def test_the_status_command_shows_only_the_newest_recorded_step(run: Run, sunspot: StorageCommand) -> None:
    """The history can be ahead of the status."""
    attempt = start(run, "job")
    write_status(run, replace(RUNNING, attempt=1, driver="0123abcd"))
    report(run, attempt, {"step": 46, "epoch": 1, "time": time.time(), "loss": 0.5})
    assert re.findall(r"\d+ of 100", sunspot("status", "run").out) == ["46 of 100"]
    [line] = sunspot("wait", "run", "--timeout", "0").out.splitlines()
    assert re.findall(r"\d+ of 100", line) == ["40 of 100"]


def test_a_submitted_run_without_a_driver_is_pending(tmp_path: Path) -> None:
    run = open_run(str(tmp_path), "run")
    with pytest.raises(NotFoundError):
        read_details(look(run))
    record_submission(run, SubmissionRecord("run-1234"))
    view = read_details(look(run))
    assert (view.state, view.step, view.total_steps, view.epoch, view.goodput) == (RunState.PENDING, 0, 0, 0, None)
    assert (view.checkpoint, view.loss, view.seconds_left, view.restarts) == (None, None, None, 0)


# ----------------------------------------------------------------------------------------------------------------- list


def test_runs_are_listed_newest_first(run: Run, sunspot: StorageCommand) -> None:
    commit(run, start(run, "job"), 30)
    write_status(run, RUNNING)
    old = begin(Run(run.storage, "old"))
    age(old, 7200)
    listed = sunspot.process("list", "--json")
    assert (listed.code, listed.err) == (0, "")
    assert [(line["run"], line["state"]) for line in listed.json] == [("run", "running"), ("old", "lost")]
    one = listed.json[0]
    assert (one["step"], one["total_steps"], one["epoch"], one["loss"]) == (40, 100, 2, 0.5)
    assert one["checkpoint"] == "step-00000030-attempt-0001"
    table = sunspot("list").out.splitlines()
    assert table[0].split() == [
        "run",
        "state",
        "step",
        "epoch",
        "loss",
        "test",
        "loss",
        "checkpoint",
        "where",
        "last",
        "change",
    ]
    assert re.fullmatch(r"run +running +40/100 +2 +0.5 +30, \d+ s ago +\d+ s ago", table[1])
    assert re.fullmatch(r"old +lost +0/\? +120 min ago|old +lost +0/\? +2 h ago", table[2])

    limited = sunspot("list", "--limit", "1", "--json")
    assert [line["run"] for line in limited.json] == ["run"]
    assert limited.err == "--all also lists 1 older run\n"
    assert len(sunspot("list", "--all", "--json").json) == 2
    assert sunspot("list", "--limit", "0").code == 2


def test_an_unreadable_run_is_reported_and_the_other_runs_are_listed(run: Run, sunspot: StorageCommand) -> None:
    begin(run)
    begin(open_run(sunspot.storage, "closed"))
    for name in ("closed/checkpoints", "lost+found"):
        folder = Path(sunspot.storage, name)
        folder.symlink_to(folder)  # a loop, which is an error even for the superuser
    listed = sunspot("list", "--json")
    assert (listed.code, [row["run"] for row in listed.json]) == (0, ["run"])
    assert f"closed: {Path(sunspot.storage, 'closed/checkpoints')}: {os.strerror(errno.ELOOP)}" in listed.err
    assert "lost+found" not in listed.err, "it belongs to the disk"


def test_listing_empty_storage_returns_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = StorageCommand(str(tmp_path / "nowhere"), capsys)("list", "--json")
    assert (listed.code, listed.json, listed.err) == (0, [], "")


def test_fifty_runs_are_listed_with_fifty_read_requests(
    s3_proxy: FaultProxy, s3_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sunspot = StorageCommand(f"s3://{s3_bucket}/team", capsys)
    for number in range(60):
        run = begin(open_run(sunspot.storage, f"run-{number}"))
        write_status(run, RUNNING)
    s3_proxy.requests.clear()
    assert len(sunspot("list", "--json").json) == 50
    assert {operation: len(s3_proxy.seen(operation)) for operation in ("ListObjects", "GetObject")} == {
        "ListObjects": 1,
        "GetObject": 50,
    }
    assert len(s3_proxy.requests) == 51


# --------------------------------------------------------------------------------------------------------------- events


def test_events_of_all_attempts_are_sorted_by_time(run: Run, sunspot: StorageCommand) -> None:
    first = Attempt(1, "job", None, 0, time=10.0, metadata=Metadata(world_size=2))
    claim(run, [], first)
    origin = commit(run, first, 4)
    journal = Journal(run, "events", 1)
    journal.append({"step": 9, "time": 30.0, "event": "commit failed", "detail": "no answer"})
    journal.flush()
    claim(run, [first], Attempt(2, "job", origin.name, 4, time=20.0))
    journal = Journal(run, "events", 2)
    journal.append({"step": 4, "time": 21.0, "event": "checkpoint skipped", "detail": "damaged"})
    journal.flush()
    record_error(run, 2, DamageError("lost"))
    run.storage.write(run.key("attempts", "0001-error.json"), b"{")

    shown = sunspot.process("events", "run", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert [(e["attempt"], e["step"], e["event"]) for e in shown.json] == [
        (1, 0, "attempt began"),
        (2, 4, "attempt began"),
        (2, 4, "checkpoint skipped"),
        (1, 9, "commit failed"),
        (2, 4, "failed for good"),
        (1, 0, "failed for good"),
    ]
    assert shown.json[0]["detail"] == "2 workers of job, from the beginning"
    assert shown.json[1]["detail"] == f"job, from {origin.name}"
    assert shown.json[4]["detail"] == "DamageError: lost"
    lines = sunspot("events", "run").out.splitlines()
    assert lines[0].split() == ["time", "attempt", "step", "event", "detail"]
    assert re.fullmatch(r"1970-01-01 00:00:21 UTC +2 +4 +checkpoint skipped +damaged", lines[3])


def test_the_events_command_prints_readable_receipts_and_stacks(run: Run, sunspot: StorageCommand) -> None:
    first = Attempt(1, "job", None, 0, time=10.0, metadata=Metadata(tier="beginning", world_size=2))
    second = Attempt(2, "job", checkpoint_name(12, 1), 12, time=60.0, metadata=Metadata(tier="memory", world_size=1))
    assert claim(run, [], first)
    assert claim(run, [first], second)
    write_receipt(run, first, 0, Cause.BEGIN)
    receipt = write_receipt(run, second, 1, Cause.PREEMPTED, noticed=second.time - 4.1, detail="node a goes")
    journal = Journal(run, "events", 2)
    journal.append(
        {
            "step": 20,
            "time": time.time() + 60,
            "event": "hung",
            "rank": 1,
            "waiting": False,
            "detail": "rank 1: no step for 300 s; stands in load at task.py:7",
            "stacks": 'Training thread (most recent call first):\n  File "task.py", line 7 in load\n',
        }
    )
    journal.flush()

    shown = sunspot.process("events", "run", "--json")
    assert (shown.code, shown.err) == (0, "")
    recovered = next(event for event in shown.json if event["event"] == "recovered" and event["attempt"] == 2)
    assert recovered == json.loads(json.dumps(receipt.record()))
    assert shown.json[-1]["stacks"].startswith("Training thread")

    table = sunspot("events", "run")
    began, line, hung = table.out.splitlines()[3:]
    assert began.endswith("1 worker of job, from step-00000012-attempt-0001 in memory")
    assert line.endswith(
        "    12  recovered      preempted (node a goes): first step 9.1 s after the notice, 0 steps replayed, "
        "2 workers, 0 worker-seconds lost, from memory"
    )
    assert hung.endswith("hung           rank 1: no step for 300 s; stands in load at task.py:7")
    assert "--stacks" in table.err

    told = sunspot("events", "run", "--stacks")
    assert told.out == table.out + (
        "\nattempt 2, step 20: rank 1: no step for 300 s; stands in load at task.py:7\n"
        '    Training thread (most recent call first):\n      File "task.py", line 7 in load\n'
    )
    assert told.err == ""


# ----------------------------------------------------------------------------------------------------------------- logs


def say(run: Run, stream: str, text: str) -> LogWriter:
    writer = LogWriter(run, stream)
    writer.append(text.encode())
    writer.flush()
    return writer


def test_the_logs_command_prints_the_newest_output_of_a_process(run: Run, sunspot: StorageCommand) -> None:
    say(run, "driver-20260101T000000000Z", "old driver\n")
    say(run, "driver-20260102T000000000Z", "new driver\nits last words")
    say(run, rank_stream(1, 1), "old rank\n")
    say(run, rank_stream(2, 1), "new rank ünd\n")
    say(run, rank_stream(2, 0), "another rank\n")
    shown = sunspot.process("logs", "run")
    assert (shown.code, shown.out) == (0, "new driver\nits last words\n")
    assert shown.err.startswith("driver-20260102T000000000Z, in ")
    assert sunspot("logs", "run", "--previous").out == "old driver\n"
    assert sunspot("logs", "run", "--rank", "1").out == "new rank ünd\n"
    assert sunspot("logs", "run", "--rank", "1", "--previous").out == "old rank\n"
    lines = sunspot("logs", "run", "--json").out.splitlines()
    assert [json.loads(line)["line"] for line in lines] == ["new driver", "its last words"]
    assert json.loads(lines[0])["stream"] == "driver-20260102T000000000Z"


def test_the_logs_command_reports_missing_output(run: Run, sunspot: StorageCommand) -> None:
    answer = sunspot("logs", "run")
    assert (answer.code, answer.out) == (3, "")
    assert "no output of the driver, because no process has written any output yet" in answer.err
    say(run, rank_stream(1, 0), "text")
    answer = sunspot("logs", "run", "--rank", "7", "-f")
    assert answer.code == 3
    assert "no output of rank 7; there are attempt-0001-rank-0000" in answer.err
    answer = sunspot("logs", "run", "--rank", "0", "--previous")
    assert (answer.code, "rank 0 started only once" in answer.err) == (3, True)
    assert sunspot("logs", "run", "-f", "--previous").code == 2


def test_a_long_output_stream_is_read_in_segments_from_any_offset(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = os.urandom(2 * SEGMENT_BYTES + 1000)
    writer = LogWriter(run, "driver-1")
    for begin_at in (0, SEGMENT_BYTES, 2 * SEGMENT_BYTES):
        writer.append(text[begin_at : begin_at + SEGMENT_BYTES])
        writer.flush()
    read = run.storage.read
    asked: list[str] = []
    monkeypatch.setattr(run.storage, "read", lambda key: asked.append(key) or read(key))
    for offset, reads in [(0, 3), (SEGMENT_BYTES, 2), (2 * SEGMENT_BYTES + 999, 1), (len(text), 0)]:
        asked.clear()
        assert read_stream(run, "driver-1", offset) == text[offset:]
        assert len(asked) == reads


@pytest.fixture
def quick(set_constants: SetConstants) -> None:
    set_constants(logs, POLL_S=0.02)


class Following:
    """`sunspot logs -f` in a thread of this process, and its output so far."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.out, self.err = "", ""
        monkeypatch.setattr(logs, "warn", lambda text: setattr(self, "err", f"{self.err}{text}\n"))
        monkeypatch.setattr(logs.sys, "stdout", self)
        self._thread = threading.Thread(target=logs.follow, args=(run,), kwargs=options, daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        self.out += text

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def ended(self) -> bool:
        self._thread.join(0.01)
        return not self._thread.is_alive()


@pytest.mark.usefixtures("quick")
def test_following_logs_continues_across_a_restart_until_the_run_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_status(run, RUNNING)
    following = Following(run, monkeypatch)
    wait_until(lambda: "waiting for the first output" in following.err)
    first = say(run, "driver-1", "one\nhalf ü")
    wait_until(lambda: following.out == "one\nhalf ü")
    first.append(b"more\ncut")
    first.flush()
    wait_until(lambda: following.out == "one\nhalf ümore\ncut")
    say(run, rank_stream(1, 0), "not asked for\n")
    second = say(run, "driver-2", "two\n")
    wait_until(lambda: following.out == "one\nhalf ümore\ncut\ntwo\n")
    assert not following.ended()
    write_status(run, replace(RUNNING, state=RunState.SUCCEEDED))
    second.append(b"the last words\n")
    second.flush()
    wait_until(following.ended)
    assert following.out.endswith("two\nthe last words\n")
    assert re.findall(r"driver-\d", following.err) == ["driver-1", "driver-1", "driver-2", "driver-2"]
    assert following.err.endswith("run: succeeded, succeeded at step 40\n")


@pytest.mark.usefixtures("quick")
def test_following_the_logs_of_an_ended_run_prints_its_output_and_exits(run: Run, sunspot: StorageCommand) -> None:
    say(run, "driver-1", "one\n")
    write_status(run, replace(RUNNING, state=RunState.FAILED, reason="no luck"))
    answer: Answer = sunspot("logs", "run", "-f")
    assert (answer.code, answer.out) == (0, "one\n")
    assert "failed, no luck" in answer.err


def test_following_logs_exits_quietly_on_an_interrupt(
    run: Run, sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    say(run, "driver-1", "one\n")
    write_status(run, RUNNING)
    monkeypatch.setattr(logs, "time", Mock(wraps=time, sleep=interrupt))  # without affecting the threads of other tests
    answer = sunspot("logs", "run", "-f")
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (130, "one\n", 1)


@pytest.mark.usefixtures("quick")
def test_a_character_split_between_two_writes_is_printed_intact(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(run, RUNNING)
    writer = LogWriter(run, "driver-1")
    writer.append("ü".encode()[:1])
    writer.flush()
    following = Following(run, monkeypatch)
    wait_until(lambda: "driver-1" in following.err)
    writer.append("ü".encode()[1:])
    writer.flush()
    wait_until(lambda: following.out == "ü")
    write_status(run, replace(RUNNING, state=RunState.STOPPED))
    wait_until(following.ended)
    assert following.out == "ü\n"
