"""The status of a run: whose status counts, late writes, and silence in spite of wrong clocks."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sunspot.elastic.claim import begin_attempt
from sunspot.elastic.copies import NodeInventory
from sunspot.errors import StorageError, SupersededError, TrackingError
from sunspot.predict.for_report import save_predictions
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import fatal_error, read_attempts, refuse_if_superseded
from sunspot.run.outcome import DriverStatusWriter
from sunspot.run.overview import RunSummary, list_runs, read_state, read_statuses, state_from_storage
from sunspot.run.predictions import Predictions, read_shown
from sunspot.run.status import (
    SILENT_AFTER_S,
    STATUS_EVERY_S,
    WORKERS_SILENT_AFTER_S,
    RunState,
    Status,
    delete_older_statuses,
    find_own_status,
    list_statuses,
    newest_status,
    read_status,
    refuse_if_ended,
    withdraw_status,
    write_status,
    write_status_as_is,
)
from sunspot.settings import Settings
from sunspot.storage.base import Entry
from sunspot.storage.local import LocalStorage
from sunspot.storage.s3 import S3Storage
from sunspot.tracking.delivery import Delivery
from sunspot.train.driver import report_result
from tests.harness.runs import begin, start

OLD, NEW = (
    Status(RunState.RUNNING, "job", attempt=7, driver="aaaaaaaa"),
    Status(RunState.RUNNING, "job", attempt=8, driver="bbbbbbbb", step=40),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


class Clock:
    """A clock that a test can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passed = 0.0
        clock, monotonic = time.time(), time.monotonic()
        monkeypatch.setattr(time, "time", lambda: clock + self._passed)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic + self._passed)

    def pass_by(self, seconds: float) -> None:
        self._passed += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# ---------------------------------------------------------------------------------------------------- whose word counts


def freeze_in_write(monkeypatch: pytest.MonkeyPatch, run: Run, act: Any, meanwhile: Any) -> None:
    """Call `act`, and call `meanwhile` just before the write of `act` reaches storage."""
    usual, frozen = LocalStorage.write, []

    def write(self: LocalStorage, key: str, data: bytes) -> None:
        if not frozen:
            frozen.append(key)
            meanwhile()
        usual(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", write)
        act()
    assert frozen


def test_a_write_that_arrives_after_a_take_over_is_not_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check before a write helps if the process is frozen in the middle of the write."""
    write_status(run, OLD)
    ended = replace(NEW, state=RunState.SUCCEEDED, reason="done")
    freeze_in_write(monkeypatch, run, lambda: write_status(run, OLD), lambda: write_status(run, ended))
    found = read_status(run)
    assert (found.state, found.driver, found.reason) == (RunState.SUCCEEDED, "bbbbbbbb", "done")
    assert read_state(run) == (RunState.SUCCEEDED, "done")


def test_a_driver_that_wakes_up_after_a_take_over_writes_nothing(run: Run, clock: Clock) -> None:
    driver = DriverStatusWriter(run, replace(OLD, state=RunState.STARTING))
    driver.refresh()
    write_status(run, NEW)
    before = [(entry.key, entry.version) for entry in list_statuses(run)]
    clock.pass_by(3600)
    driver.refresh()
    driver.end(RunState.FAILED, "its workers are gone")
    assert [(entry.key, entry.version) for entry in list_statuses(run)] == before


def test_a_restarted_driver_of_the_same_job_has_its_own_status(run: Run) -> None:
    """The operator starts the job's driver again if the head does not answer, but the old head may come back."""
    frozen = DriverStatusWriter(run, OLD)
    write_status(run, replace(NEW, owner=OLD.owner))
    frozen.end(RunState.FAILED, "no good")
    found = read_status(run)
    assert found.state is RunState.RUNNING


def test_the_workers_of_a_frozen_driver_cannot_claim_the_run_again(run: Run) -> None:
    """Both drivers belong to one job, which owns all three attempts."""
    start(run, "job", driver="aaaaaaaa")
    start(run, "job", driver="aaaaaaaa")
    attempts = read_attempts(run)
    refuse_if_superseded(attempts, "job", "aaaaaaaa")
    settings = Settings(global_batch_size=5)
    begun = begin_attempt(Claimant(run, "job", "b" * 8), settings, [NodeInventory("b", "node-b", None, [])])
    assert (begun.attempt.number, begun.attempt.driver) == (3, "bbbbbbbb")
    assert begin_attempt(Claimant(run, "job", "a" * 8), settings, [NodeInventory("a", "node-a", None, [])]) is None
    assert isinstance(fatal_error(Claimant(run, "job", "aaaaaaaa")), SupersededError)
    assert fatal_error(Claimant(run, "job", "bbbbbbbb")) is None
    assert fatal_error(Claimant(run, "job")) is None, "the job continues in another start"
    with pytest.raises(SupersededError, match="attempt 3 of job has owned the run since"):
        start(run, "job", driver="aaaaaaaa")


def test_late_writes_do_not_restore_a_deleted_run(run: Run, clock: Clock) -> None:
    driver = DriverStatusWriter(run, OLD)
    for entry in run.storage.list("run"):
        run.storage.delete(entry.key)
    clock.pass_by(60)
    driver.refresh()
    driver.end(RunState.SUCCEEDED, "")
    assert run.storage.list("run") == []


def test_a_rank_that_wakes_up_does_not_overwrite_the_end(run: Run) -> None:
    refuse_if_ended(run, OLD)
    write_status(run, OLD)
    refuse_if_ended(run, OLD)
    write_status(run, replace(OLD, state=RunState.FAILED, reason="MAX_FAILURES"))
    with pytest.raises(SupersededError, match="the driver of attempt 7 has ended it"):
        refuse_if_ended(run, OLD)
    refuse_if_ended(run, NEW)


def test_a_second_start_is_shown_until_it_withdraws(run: Run) -> None:
    write_status(run, OLD)
    second = replace(OLD, state=RunState.STARTING, driver="cccccccc")
    write_status(run, second)
    assert read_status(run, "aaaaaaaa") != read_status(run) == read_status(run, "cccccccc")
    assert find_own_status(run, "aaaaaaaa"), "the second has claimed nothing, so the first still owns the run"
    withdraw_status(run, "cccccccc")
    assert read_status(run) == read_status(run, "aaaaaaaa")


def test_statuses_of_older_attempts_are_deleted(run: Run) -> None:
    for status in (OLD, replace(OLD, attempt=8), NEW):
        write_status(run, status)
    delete_older_statuses(run, 8)
    assert {entry.key.rpartition("/")[2] for entry in list_statuses(run)} == {
        "attempt-0008-aaaaaaaa.json",
        "attempt-0008-bbbbbbbb.json",
    }


def test_the_last_write_of_the_newest_attempt_counts() -> None:
    names = ["attempt-9999-aaaaaaaa", "attempt-10000-bbbbbbbb", "attempt-10000-cccccccc", ".DS_Store"]
    listed = [Entry(f"run/status/{name}.json", 1, 100.0 - place, "") for place, name in enumerate(names)]
    listed += [Entry("run/metrics/attempt-99999-aaaaaaaa.json", 1, 999.0, ""), Entry("run/status.json", 1, 999.0, "")]
    newest = newest_status(listed)
    assert newest.key == "run/status/attempt-10000-bbbbbbbb.json"
    assert newest_status(listed[:1]) == listed[0]
    assert newest_status(listed[3:4]) is None


def test_a_late_report_does_not_replace_the_new_owners_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = replace(OLD, state=RunState.FAILED, reason="the old one")
    write_status(run, ended)
    page = run.key("report.html")
    with report_result(run, OLD.driver):
        pass
    assert b"the old one" in run.storage.read(page)

    def take_over() -> None:
        write_status(run, replace(NEW, state=RunState.FAILED, reason="the new one"))
        run.storage.write(page, b"page of the new one")

    def report_late() -> None:
        with report_result(run, OLD.driver):
            pass

    freeze_in_write(monkeypatch, run, report_late, take_over)
    assert b"the new one" in run.storage.read(page), "if it was frozen during the write, it makes the page again"
    run.storage.write(page, b"untouched")
    report_late()
    assert run.storage.read(page) == b"untouched"


def test_late_predictions_do_not_replace_the_new_owners_predictions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions take up to two minutes, in which another owner may take the run over and continue."""
    write_status(run, OLD)
    made = Predictions("step-00000001-attempt-0001", 1, 1, 1.0, 1, [[1]])

    def predict(*_: Any) -> Predictions:
        if taken_over:
            write_status(run, NEW)
        return made

    for name, act in (("rows_in", lambda source: 1), ("load_predict", str), ("call_in_task", predict)):
        monkeypatch.setattr(f"sunspot.predict.for_report.{name}", act)
    plan: Any = SimpleNamespace(settings=Settings(), test=object(), total_steps=1, source=SimpleNamespace(classes=1))
    checkpoint: Any = SimpleNamespace(finished=True, step=1, name="step-00000001-attempt-0001")
    for taken_over, kept in ((True, None), (False, made)):
        save_predictions(plan, run, checkpoint, OLD.driver if taken_over else NEW.driver)
        assert read_shown(run, Predictions) == kept


def test_unreadable_predictions_only_log_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: Run, schema: type) -> None:
        raise StorageError("away")

    for name, act in (("rows_in", lambda source: 1), ("load_predict", str), ("read_shown", fail)):
        monkeypatch.setattr(f"sunspot.predict.for_report.{name}", act)
    plan: Any = SimpleNamespace(settings=Settings(), test=object(), source=SimpleNamespace(classes=1))
    checkpoint: Any = SimpleNamespace(finished=True, step=1, name="step-00000001-attempt-0001")
    save_predictions(plan, run, checkpoint, NEW.driver)
    assert "no predictions for the report: away" in caplog.text


def test_only_the_new_owner_delivers_to_the_tracking_service(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Delivery(run, "mlflow", "project", driver) for driver in (OLD.driver, NEW.driver))
    opened: list[Delivery] = []

    def refuse(delivery: Delivery, attempts: Any) -> None:
        opened.append(delivery)
        raise TrackingError("away")

    monkeypatch.setattr(Delivery, "_open", refuse)
    start(run, "job", driver=OLD.driver)
    start(run, "job", driver=NEW.driver)
    for act in (old.deliver, old.finish):
        with pytest.raises(SupersededError, match="attempt 2 of job has owned the run since"):
            act()
    assert not opened
    with pytest.raises(TrackingError):
        new.deliver()
    assert opened == [new]


# -------------------------------------------------------------------------------------------------------------- silence


def test_a_driver_writes_the_status_while_no_worker_does(run: Run, clock: Clock) -> None:
    driver = DriverStatusWriter(run, replace(OLD, state=RunState.STARTING, reason="no worker trains yet"))

    def look(seconds: float) -> Status:
        clock.pass_by(seconds)
        driver.refresh()
        found = read_status(run)
        assert found
        return found

    began = look(1).time
    assert look(STATUS_EVERY_S - 2).time == began
    assert look(3).time > began
    driver.refresh()
    write_status(run, replace(OLD, attempt=8, step=5))  # its workers claim the next attempt and train
    assert (look(1).state, look(STATUS_EVERY_S + 1).state) == (RunState.RUNNING, RunState.RUNNING)
    write_status(run, replace(OLD, attempt=8, step=6, world_size=2))
    assert (look(1).step, look(STATUS_EVERY_S + 1).state) == (6, RunState.RUNNING)
    silent = look(WORKERS_SILENT_AFTER_S - STATUS_EVERY_S)
    assert (silent.state, silent.attempt, silent.step, silent.world_size) == (RunState.STARTING, 8, 6, 0)
    assert silent.reason.startswith("no sign of life from its workers since 2")
    later = look(1), look(STATUS_EVERY_S + 1)
    assert later[1].time > later[0].time
    assert later[1].reason == silent.reason, "the reason still has the time of the last write"
    write_status(run, replace(OLD, attempt=8, step=6, world_size=2))
    driver.note_end("rank 0: KeyError: 'x', in loss at evil.py:37; starting again")
    look(1)
    why = "its workers ended and will start again: rank 0: KeyError: 'x', in loss at evil.py:37; starting again"
    assert look(WORKERS_SILENT_AFTER_S + 1).reason == why
    write_status(run, replace(OLD, state=RunState.FINISHING, attempt=8, step=7, reason="all steps are taken"))
    finishing = look(1), look(WORKERS_SILENT_AFTER_S + 1)
    assert [(status.state, status.reason) for status in finishing] == 2 * [(RunState.FINISHING, "all steps are taken")]
    assert finishing[1].time > finishing[0].time
    driver.end(RunState.FAILED, "no good")
    assert look(0).state is RunState.FAILED


def test_a_wrong_clock_of_the_writer_has_no_effect(run: Run) -> None:
    for wrong_by in (-86400, 86400):
        write_status_as_is(run, replace(OLD, time=time.time() + wrong_by))
        assert read_state(run)[0] is RunState.RUNNING


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_a_wrong_clock_of_the_reader_does_not_make_a_live_run_silent(
    s3_bucket: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(open_run(f"s3://{s3_bucket}/clocks", "run"))
    assert isinstance(run.storage, S3Storage)
    write_status(run, OLD)
    wrong = SimpleNamespace(time=lambda: time.time() + ahead_s)
    for module in ("sunspot.storage.bucket", "sunspot.run.overview"):
        monkeypatch.setattr(f"{module}.time", wrong)
    status = read_status(run)
    assert abs(wrong.time() - status.seen) < 5
    assert abs(run.storage.ahead_s + ahead_s) < 5
    assert read_state(run)[0] is RunState.RUNNING
    wrong.time = lambda: time.time() + ahead_s + SILENT_AFTER_S + 2  # time that has passed by its own clock
    assert state_from_storage(status, RunSummary("run"), wrong.time())[0] is RunState.SILENT


def test_the_cache_of_an_nfs_client_does_not_make_a_run_silent(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client shows the names and times that it saw first, until this machine changes the directory."""
    write_status(run, OLD)
    usual = LocalStorage.list
    seen = LocalStorage.list(run.storage, "run")
    asked: list[str] = []

    def cached(storage: LocalStorage, prefix: str) -> list[Entry]:
        if asked:
            return usual(storage, prefix)
        return [entry for entry in seen if entry.key.startswith(f"{prefix}/") or prefix == ""]

    monkeypatch.setattr(LocalStorage, "list", cached)
    monkeypatch.setattr(LocalStorage, "refresh", lambda storage, prefix: asked.append(prefix))
    clock.pass_by(SILENT_AFTER_S + 1)
    write_status(run, OLD)
    os.utime(run.storage.locate("run/status/attempt-0007-aaaaaaaa.json"), (time.time(), time.time()))
    assert read_state(run)[0] is RunState.RUNNING
    assert asked == ["run/status"]
    asked.clear()
    [listed] = list_runs(run.storage)
    [status] = read_statuses(run.storage, [listed])
    assert state_from_storage(status, listed, time.time())[0] is RunState.RUNNING


def test_a_read_only_directory_is_read_without_a_refresh(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(storage: LocalStorage, prefix: str) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(LocalStorage, "refresh", refuse)
    write_status(run, OLD)
    clock.pass_by(SILENT_AFTER_S + 1)
    assert read_state(run)[0] is RunState.SILENT
