"""Tests of a run's status: which status counts, late writes, and silence despite clock skew."""

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
from sunspot.run.outcome import DriverStatusWriter, RecordLimit
from sunspot.run.overview import RunSummary, list_runs, state_from_storage
from sunspot.run.predictions import Predictions, read_shown
from sunspot.run.seen import look as look_at
from sunspot.run.seen import read_listed
from sunspot.run.status import (
    SILENT_AFTER_S,
    STATUS_EVERY_S,
    WORKERS_SILENT_AFTER_S,
    RunState,
    Status,
    StatusKind,
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
from sunspot.train.reporter import show_claim
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


# --------------------------------------------------------------------------------------------------- which status count


def freeze_in_write(monkeypatch: pytest.MonkeyPatch, run: Run, act: Any, meanwhile: Any) -> None:
    """Call `act`, and call `meanwhile` just before the first write of `act` reaches storage."""
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


def test_a_write_delayed_until_after_a_takeover_is_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check before the write does not help if the process is frozen in the middle of the write."""
    write_status(run, OLD)
    ended = replace(NEW, state=RunState.SUCCEEDED, reason="done")
    freeze_in_write(monkeypatch, run, lambda: write_status(run, OLD), lambda: write_status(run, ended))
    found = read_status(run)
    assert (found.state, found.driver, found.reason) == (RunState.SUCCEEDED, "bbbbbbbb", "done")
    assert look_at(run).judge() == (RunState.SUCCEEDED, "done")


def test_a_frozen_driver_writes_nothing_after_a_takeover(run: Run, clock: Clock) -> None:
    driver = DriverStatusWriter(run, replace(OLD, state=RunState.STARTING))
    driver.refresh()
    write_status(run, NEW)
    before = [(entry.key, entry.version) for entry in list_statuses(run)]
    clock.pass_by(3600)
    driver.refresh()
    driver.end(RunState.FAILED, "its workers are gone")
    assert [(entry.key, entry.version) for entry in list_statuses(run)] == before


def test_each_driver_of_a_restarted_job_has_its_own_status(run: Run) -> None:
    """The operator restarts the job's driver if the head does not answer, but the old head can come back."""
    frozen = DriverStatusWriter(run, OLD)
    write_status(run, replace(NEW, owner=OLD.owner))
    frozen.end(RunState.FAILED, "no good")
    found = read_status(run)
    assert found.state is RunState.RUNNING


def test_the_workers_of_a_replaced_driver_cannot_claim_the_run(run: Run) -> None:
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


def test_late_status_writes_do_not_recreate_a_deleted_run(run: Run, clock: Clock) -> None:
    driver = DriverStatusWriter(run, OLD)
    for entry in run.storage.list("run"):
        run.storage.delete(entry.key)
    clock.pass_by(60)
    driver.refresh()
    driver.end(RunState.SUCCEEDED, "")
    assert run.storage.list("run") == []


def test_rank_0_stops_writing_once_its_driver_has_recorded_the_outcome(run: Run) -> None:
    refuse_if_ended(run, OLD)
    show_claim(run, OLD)
    refuse_if_ended(run, OLD)
    DriverStatusWriter(run, OLD).end(RunState.FAILED, "MAX_FAILURES")
    with pytest.raises(SupersededError, match="the driver of attempt 7 has ended"):
        refuse_if_ended(run, OLD)
    refuse_if_ended(run, NEW)


def test_a_late_write_does_not_hide_the_final_status(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has checked that its driver has not ended, and is then frozen before its write reaches storage."""
    driver = DriverStatusWriter(run, OLD)
    freeze_in_write(monkeypatch, run, lambda: show_claim(run, OLD), lambda: driver.end(RunState.FAILED, "MAX_FAILURES"))
    assert look_at(run).judge() == (RunState.FAILED, "MAX_FAILURES")


def test_the_driver_and_rank_0_write_separate_objects(run: Run) -> None:
    driver = DriverStatusWriter(run, OLD)
    show_claim(run, OLD)
    driver.finishing()
    driver.end(RunState.SUCCEEDED, "")
    names = {f"attempt-0007-aaaaaaaa{kind}.json" for kind in ("", "-workers", "-ended")}
    assert {entry.key.rpartition("/")[2] for entry in list_statuses(run)} == names


def test_the_driver_of_a_search_writes_its_status_once_it_has_claimed_an_attempt(run: Run) -> None:
    """A search's driver writes its own progress. Its attempt is 0, because another start trained when it began."""
    write_status(run, OLD)
    driver = DriverStatusWriter(run, replace(NEW, attempt=0))
    assert not driver.replace(step=1), "the other start still owns the run"
    assert driver.replace(step=2, attempt=8)
    shown = read_status(run)
    assert (shown.driver, shown.attempt, shown.step) == (NEW.driver, 8, 2)
    write_status(run, replace(OLD, attempt=9))
    assert not driver.replace(step=3, attempt=8), "the other start owns the run again"
    assert not driver.end(RunState.FAILED, "")


def test_a_status_written_by_an_older_version_is_read(run: Run) -> None:
    """The driver and rank 0 wrote the same object in older versions."""
    written = b"""{
        "state": "succeeded", "owner": "job", "reason": "", "began": 1.0, "starts": 1, "attempt": 3, "after": [],
        "driver": "9f3c21ab", "world_size": 2, "step": 40, "heartbeat": 2.0, "epoch": 1, "total_steps": 40,
        "steps_per_epoch": 40, "checkpoint": null, "checkpoint_time": null, "loss": 0.5, "test_loss": null,
        "rows_per_s": 9.5, "step_time_s": 2.0, "save_s": null, "notice_s": null, "memory_every": 0, "warning": "",
        "nan_since": 0, "time": 3.0
    }"""
    run.storage.write(run.key("status/attempt-0003-9f3c21ab.json"), written)
    status = read_status(run)
    assert (status.state, status.step, status.loss) == (RunState.SUCCEEDED, 40, 0.5)
    assert look_at(run).judge() == (RunState.SUCCEEDED, "succeeded at step 40")
    assert find_own_status(run, "9f3c21ab")
    DriverStatusWriter(run, replace(OLD, attempt=3))
    assert read_status(run).driver == OLD.driver, "the next driver's status counts"


def test_the_status_of_a_second_driver_is_used_until_that_status_is_withdrawn(run: Run) -> None:
    write_status(run, OLD)
    second = replace(OLD, state=RunState.STARTING, driver="cccccccc")
    write_status(run, second)
    assert read_status(run, "aaaaaaaa") != read_status(run) == read_status(run, "cccccccc")
    assert find_own_status(run, "aaaaaaaa"), "the first start owns the run until the second claims it"
    withdraw_status(run, "cccccccc")
    assert read_status(run) == read_status(run, "aaaaaaaa")


def test_status_objects_of_older_attempts_are_deleted(run: Run) -> None:
    for status in (OLD, replace(OLD, attempt=8), NEW):
        write_status(run, status)
    delete_older_statuses(run, 8)
    assert {entry.key.rpartition("/")[2] for entry in list_statuses(run)} == {
        "attempt-0008-aaaaaaaa.json",
        "attempt-0008-bbbbbbbb.json",
    }


A, B = "aaaaaaaa", "bbbbbbbb"


@pytest.mark.parametrize(
    ("written", "counts"),
    [
        pytest.param([], None, id="nothing was written"),
        pytest.param([f"0000-{A}"], f"0000-{A}", id="a driver begins"),
        pytest.param([f"0000-{A}", f"0001-{A}-workers"], f"0001-{A}-workers", id="its workers claim an attempt"),
        pytest.param([f"0001-{A}-workers", f"0001-{A}"], f"0001-{A}", id="the driver stands in for silent workers"),
        pytest.param([f"0001-{A}", f"0001-{A}-workers"], f"0001-{A}-workers", id="the workers write again"),
        pytest.param([f"0001-{A}-workers", f"0001-{A}", f"0001-{A}-ended"], f"0001-{A}-ended", id="the driver ends"),
        pytest.param([f"0001-{A}-ended", f"0001-{A}-workers"], f"0001-{A}-ended", id="rank 0 wakes up after the end"),
        pytest.param([f"0001-{A}-ended", f"0002-{A}-workers"], f"0001-{A}-ended", id="a group claims after the end"),
        pytest.param([f"0001-{A}-ended", f"0001-{B}"], f"0001-{B}", id="the next driver begins"),
        pytest.param(
            [f"0001-{A}-ended", f"0001-{B}", f"0001-{A}-workers"],
            f"0001-{B}",
            id="workers of the previous driver wake up",
        ),
        pytest.param([f"0001-{A}-workers", f"0001-{B}"], f"0001-{B}", id="the next driver begins after a loss"),
        pytest.param([f"0002-{B}-workers", f"0001-{A}"], f"0002-{B}-workers", id="the older driver wakes up"),
        pytest.param([f"0002-{B}-workers", f"0001-{A}-ended"], f"0002-{B}-workers", id="the older driver ends late"),
        pytest.param([f"0002-{B}-workers", f"0000-{A}"], f"0002-{B}-workers", id="a second start gives precedence"),
        pytest.param([f"9999-{A}", f"10000-{B}"], f"10000-{B}", id="the attempt has one more digit"),
        pytest.param([f"0001-{A}-ended", f"0003-{A}-other", ".DS_Store"], f"0001-{A}-ended", id="other files exist"),
    ],
)
def test_the_same_status_object_is_selected_in_any_listing_order(written: list[str], counts: str | None) -> None:
    """`written` lists the objects in the order of their last writes, and `counts` is the one that counts."""
    listed = [entry_of(name, time=100.0 + place) for place, name in enumerate(written)]
    for order in (listed, listed[::-1], sorted(listed)):
        newest = newest_status(order)
        assert (newest.key if newest else None) == (entry_of(counts).key if counts else None)


def entry_of(name: str, time: float = 0.0) -> Entry:
    return Entry(f"run/status/attempt-{name}.json" if name[0].isdigit() else f"run/status/{name}", 1, time, "")


def test_only_objects_in_the_status_folder_are_read_as_statuses() -> None:
    keys = (f"run/metrics/attempt-9999-{A}.json", f"run/logs/status/attempt-9999-{A}.json", "run/status.json")
    assert newest_status([Entry(key, 1, 0.0, "") for key in keys]) is None


def test_the_drivers_status_is_preferred_if_rank_0s_status_has_the_same_timestamp() -> None:
    """Buckets report modification times in whole seconds."""
    listed = [entry_of(f"0001-{A}-workers"), entry_of(f"0001-{A}")]
    assert [newest_status(order) for order in (listed, listed[::-1])] == [listed[1], listed[1]]


def test_the_search_for_the_newest_status_can_include_or_exclude_a_single_driver() -> None:
    """A driver's end only hides the driver's own objects."""
    listed = [entry_of(f"0001-{A}-ended", 1.0), entry_of(f"0002-{B}", 2.0), entry_of(f"0001-{A}-workers", 3.0)]
    assert newest_status(listed, driver=A) == newest_status(listed, other_than=B) == listed[0]
    assert newest_status(listed, driver=B) == newest_status(listed, other_than=A) == listed[1]
    assert newest_status(listed, driver="cccccccc") is None


def test_a_late_report_does_not_replace_the_report_of_the_new_owner(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = replace(OLD, state=RunState.FAILED, reason="the old one")
    write_status(run, ended)
    page = run.key("report.html")
    with report_result(run, OLD.driver, RecordLimit()):
        pass
    assert b"the old one" in run.storage.read(page)

    def take_over() -> None:
        write_status(run, replace(NEW, state=RunState.FAILED, reason="the new one"))
        run.storage.write(page, b"page of the new one")

    def report_late() -> None:
        with report_result(run, OLD.driver, RecordLimit()):
            pass

    freeze_in_write(monkeypatch, run, report_late, take_over)
    assert b"the new one" in run.storage.read(page), "a driver that was frozen during the write makes the page again"
    run.storage.write(page, b"untouched")
    report_late()
    assert run.storage.read(page) == b"untouched"


def test_late_predictions_do_not_replace_the_predictions_of_the_new_owner(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions take up to two minutes, during which another owner can take the run over."""
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


def test_unreadable_predictions_only_cause_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: Run, schema: type) -> None:
        raise StorageError("away")

    for name, act in (("rows_in", lambda source: 1), ("load_predict", str), ("read_shown", fail)):
        monkeypatch.setattr(f"sunspot.predict.for_report.{name}", act)
    plan: Any = SimpleNamespace(settings=Settings(), test=object(), source=SimpleNamespace(classes=1))
    checkpoint: Any = SimpleNamespace(finished=True, step=1, name="step-00000001-attempt-0001")
    save_predictions(plan, run, checkpoint, NEW.driver)
    assert "the report has no predictions: away" in caplog.text


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


def test_the_driver_writes_the_status_while_workers_are_silent(run: Run, clock: Clock) -> None:
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
    show_claim(run, replace(OLD, attempt=8, step=5))  # its workers claim the next attempt and train
    assert (look(1).state, look(STATUS_EVERY_S + 1).state) == (RunState.RUNNING, RunState.RUNNING)
    write_status(run, replace(OLD, attempt=8, step=6, world_size=2), StatusKind.WORKERS)
    assert (look(1).step, look(STATUS_EVERY_S + 1).state) == (6, RunState.RUNNING)
    silent = look(WORKERS_SILENT_AFTER_S - STATUS_EVERY_S)
    assert (silent.state, silent.attempt, silent.step, silent.world_size) == (RunState.STARTING, 8, 6, 0)
    assert silent.reason.startswith("no sign of life from its workers since 2")
    later = look(1), look(STATUS_EVERY_S + 1)
    assert later[1].time > later[0].time
    assert later[1].reason == silent.reason, "the reason still has the time of the workers' last write"
    write_status(run, replace(OLD, attempt=8, step=6, world_size=2), StatusKind.WORKERS)
    driver.note_end("rank 0: KeyError: 'x', in loss at evil.py:37; starting again")
    look(1)
    why = "its workers ended and will restart: rank 0: KeyError: 'x', in loss at evil.py:37; starting again"
    assert look(WORKERS_SILENT_AFTER_S + 1).reason == why
    finished = replace(OLD, state=RunState.FINISHING, attempt=8, step=7, reason="all steps are taken")
    write_status(run, finished, StatusKind.WORKERS)
    finishing = look(1), look(WORKERS_SILENT_AFTER_S + 1)
    assert [(status.state, status.reason) for status in finishing] == 2 * [(RunState.FINISHING, "all steps are taken")]
    assert finishing[1].time > finishing[0].time
    driver.end(RunState.FAILED, "no good")
    assert (look(0).state, look(0).step) == (RunState.FAILED, 7), "the end has the numbers of the workers"


def test_clock_skew_on_the_writer_has_no_effect(run: Run) -> None:
    for wrong_by in (-86400, 86400):
        write_status_as_is(run, replace(OLD, time=time.time() + wrong_by))
        assert look_at(run).state is RunState.RUNNING


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_clock_skew_on_the_reader_does_not_make_a_live_run_silent(
    s3_bucket: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(open_run(f"s3://{s3_bucket}/clocks", "run"))
    assert isinstance(run.storage, S3Storage)
    write_status(run, OLD)
    wrong = SimpleNamespace(time=lambda: time.time() + ahead_s)
    for module in ("sunspot.storage.bucket", "sunspot.run.seen"):
        monkeypatch.setattr(f"{module}.time", wrong)
    status = read_status(run)
    assert abs(wrong.time() - status.seen) < 5
    assert abs(run.storage.ahead_s + ahead_s) < 5
    assert look_at(run).state is RunState.RUNNING
    wrong.time = lambda: time.time() + ahead_s + SILENT_AFTER_S + 2  # time has passed on the reader's own clock
    assert state_from_storage(status, RunSummary(), wrong.time())[0] is RunState.SILENT


def test_a_stale_nfs_cache_does_not_make_a_run_silent(run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NFS client returns outdated names and times until this machine changes the directory."""
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
    assert look_at(run).state is RunState.RUNNING
    assert asked == ["run/status"]
    asked.clear()
    [listed] = read_listed(run.storage, list_runs(run.storage))
    assert listed.state is RunState.RUNNING


def test_a_status_can_be_read_from_a_read_only_directory(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(storage: LocalStorage, prefix: str) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(LocalStorage, "refresh", refuse)
    write_status(run, OLD)
    clock.pass_by(SILENT_AFTER_S + 1)
    assert look_at(run).state is RunState.SILENT
