"""Tests of a driver's records in storage, its signals and its output."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sunspot.background import TokenBucket
from sunspot.elastic.claim import begin_attempt
from sunspot.elastic.copies import NodeInventory
from sunspot.elastic.supervisor import supervised
from sunspot.errors import (
    ConflictError,
    DamageError,
    EndAtOnceError,
    SettingsError,
    StorageError,
    SunspotError,
    SupersededError,
    TerminatedError,
    run_and_exit,
)
from sunspot.formatting import as_bytes
from sunspot.run import Claimant, Run, open_run
from sunspot.run import outcome as outcomes
from sunspot.run.attempts import fatal_error, record_error
from sunspot.run.failures import read_failures
from sunspot.run.logs import (
    BURST,
    MAX_WAITING,
    RANK_EVERY_S,
    SEGMENT_BYTES,
    LogWriter,
    driver_stream,
    list_streams,
    rank_stream,
    read_stream,
    shipped_driver_output,
)
from sunspot.run.outcome import RecordLimit, recorded_outcome
from sunspot.run.overview import list_runs
from sunspot.run.requests import (
    StopRequest,
    SubmissionRecord,
    clear_stop,
    newest_submission,
    record_submission,
    request_stop,
    stop_requested,
)
from sunspot.run.status import RunState, Status, StatusKind, new_driver, read_status, write_status
from sunspot.settings import Settings
from sunspot.train.driver import has_failed_for_good, report_result
from tests.harness import REPOSITORY, s3
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl
from tests.harness.runs import BATCH, begin, commit, start
from tests.harness.s3 import FaultProxy
from tests.harness.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


def may_claim(run: Run, owner: str, driver: str) -> bool:
    machine = NodeInventory("host", "node", None, [])
    return begin_attempt(Claimant(run, owner, driver), Settings(global_batch_size=BATCH), [machine]) is not None


def state(run: Run) -> tuple[RunState, str]:
    status = read_status(run)
    return status.state, status.reason


def test_a_driver_records_its_outcome(run: Run) -> None:
    assert read_status(run) is None
    with recorded_outcome(Claimant(run, "job", new_driver()), None, 10) as outcome:
        assert state(run)[0] is RunState.STARTING
        outcome.finishing()
        assert state(run) == (RunState.FINISHING, "all steps are taken; the driver predicts and writes the report")
        outcome.expect(RunState.STOPPED)
    assert state(run)[0] is RunState.STOPPED
    with pytest.raises(SunspotError, match="no luck"), recorded_outcome(Claimant(run, "job", new_driver()), None, 10):
        raise SunspotError("no luck")
    assert state(run) == (RunState.FAILED, "no luck")
    with pytest.raises(ZeroDivisionError), recorded_outcome(Claimant(run, "job", new_driver()), None, 10):
        raise ZeroDivisionError("a defect")
    assert state(run) == (RunState.FAILED, "a defect")
    [failure] = read_failures(run)
    assert (failure.rank, failure.type, failure.message) == (None, "ZeroDivisionError", "a defect")
    assert (failure.file, failure.function) == (os.path.relpath(__file__), "test_a_driver_records_its_outcome")
    with pytest.raises(KeyboardInterrupt), recorded_outcome(Claimant(run, "job", new_driver()), None, 10):
        raise KeyboardInterrupt
    assert state(run)[0] is RunState.STOPPED


@pytest.mark.parametrize("error", [ConflictError("other settings"), SettingsError("a typo"), ZeroDivisionError()])
@pytest.mark.parametrize("found", [RunState.RUNNING, RunState.STOPPED, RunState.FAILED, RunState.SUCCEEDED])
def test_a_driver_that_fails_before_its_claim_does_not_change_the_run(
    run: Run, found: RunState, error: Exception
) -> None:
    attempt = start(run, "job")
    before = Status(found, "job", "because", attempt=attempt.number, driver=new_driver(), step=7)
    write_status(run, before)
    run.storage.write(run.key("report.html"), b"of the run")
    driver = new_driver()
    claimant = Claimant(run, "another", driver)
    with pytest.raises(type(error)), report_result(run, driver, RecordLimit()), recorded_outcome(claimant, None, 10):  # noqa: PT012
        shown = state(run)[0]
        raise error
    assert shown is (RunState.RUNNING if found is RunState.RUNNING else RunState.STARTING)
    status = read_status(run)
    assert (status.state, status.owner, status.reason, status.step) == (found, "job", "because", 7)
    assert run.storage.read(run.key("report.html")) == b"of the run"
    assert not read_failures(run)


def test_the_run_fails_if_its_driver_fails_after_claiming_an_attempt(run: Run) -> None:
    write_status(run, Status(RunState.RUNNING, "job", attempt=start(run, "job").number, driver=new_driver()))
    driver = new_driver()
    with pytest.raises(SettingsError), recorded_outcome(Claimant(run, "another", driver), None, 10):  # noqa: PT012
        status = read_status(run, driver)
        assert status
        claimed = replace(status, attempt=start(run, "another").number, state=RunState.RUNNING)
        write_status(run, claimed, StatusKind.WORKERS)
        raise SettingsError("no good")
    assert state(run) == (RunState.FAILED, "no good")


def test_a_run_that_fails_again_shows_the_reason_for_the_newest_failure(run: Run) -> None:
    start(run, "job")
    for reason in ("first", "second"):
        with pytest.raises(SunspotError), recorded_outcome(Claimant(run, "job", new_driver()), None, 10):
            raise SunspotError(reason)
        assert state(run) == (RunState.FAILED, reason)


def test_a_failure_of_the_first_driver_is_recorded_only_if_the_run_was_submitted(tmp_path: Path) -> None:
    run = open_run(str(tmp_path), "typo")
    for submitted in (False, True):
        if submitted:
            record_submission(run, SubmissionRecord("typo-1"))
        with pytest.raises(SettingsError), recorded_outcome(Claimant(run, "typo-1#1", new_driver()), None, 10):
            raise SettingsError("a typo")
        assert (read_status(run) is not None) == bool(list_runs(run.storage)) == submitted


def test_the_status_of_a_second_driver_is_used_after_the_first_driver_is_gone(
    run: Run, set_constants: SetConstants
) -> None:
    write_status(run, Status(RunState.RUNNING, "job", attempt=start(run, "job").number, driver=new_driver()))
    with recorded_outcome(Claimant(run, "another", new_driver()), None, 10):
        assert state(run)[0] is RunState.RUNNING
        set_constants("sunspot.run.status", SILENT_AFTER_S=-1.0)
    assert state(run)[0] is RunState.SUCCEEDED


def test_a_driver_that_claims_no_attempt_keeps_the_record_that_the_last_step_was_saved(
    run: Run, set_constants: SetConstants
) -> None:
    trains = Status(RunState.RUNNING, "job", attempt=start(run, "job").number, driver=new_driver())
    write_status(run, trains)
    second = new_driver()
    with recorded_outcome(Claimant(run, "another", second), None, 10):
        write_status(run, replace(trains, saved=True))
        set_constants("sunspot.run.status", SILENT_AFTER_S=-1.0)
    with recorded_outcome(Claimant(run, "job", new_driver()), None, 10):
        assert read_status(run, second).saved
        assert read_status(run).saved
    start(run, "job")
    with recorded_outcome(Claimant(run, "job", new_driver()), None, 10):
        assert not read_status(run).saved, "the attempt may have taken steps"


@pytest.mark.parametrize("owner", ["job", "another"])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_frozen_driver_does_not_take_the_run_back_from_a_newer_driver(claimed: bool, owner: str, run: Run) -> None:
    """The older driver was frozen after its first claim if `claimed`. `owner` is the newer driver's owner."""
    older, newer, newest = (new_driver() for _ in range(3))
    with ExitStack() as stack:
        stack.enter_context(recorded_outcome(Claimant(run, "job", older), None, 10))
        if claimed:
            assert may_claim(run, "job", older)
        stack.enter_context(recorded_outcome(Claimant(run, owner, newer), None, 10))
        assert may_claim(run, owner, newer)
        assert not may_claim(run, "job", older)
        assert isinstance(fatal_error(Claimant(run, "job", older)), SupersededError)
        stack.enter_context(recorded_outcome(Claimant(run, owner, newest), None, 10))
        assert may_claim(run, owner, newer), "the newer driver owns the run until the newest one claims it"
        assert may_claim(run, owner, newest)
        assert not may_claim(run, owner, newer)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_driver_does_not_restart_a_run_that_was_deleted(claimed: bool, run: Run, tmp_path: Path) -> None:
    """The driver is starting its second group if `claimed`."""
    driver = new_driver()
    with pytest.raises(SupersededError, match="was deleted"), recorded_outcome(Claimant(run, "job", driver), None, 10):  # noqa: PT012
        if claimed:
            assert may_claim(run, "job", driver)
        shutil.rmtree(tmp_path / "run")
        assert not may_claim(run, "job", driver)
        raise fatal_error(Claimant(run, "job", driver))
    assert list(tmp_path.iterdir()) == []


def test_a_superseded_driver_does_not_change_the_status_of_its_successor(run: Run) -> None:
    new = Status(RunState.RUNNING, "new", attempt=1, driver=new_driver())
    with pytest.raises(SupersededError), recorded_outcome(Claimant(run, "old", new_driver()), None, 10):  # noqa: PT012
        write_status(run, new)
        raise SupersededError("taken over")
    assert state(run)[0] is RunState.RUNNING
    write_status(run, replace(new, state=RunState.SUCCEEDED, attempt=2))
    with recorded_outcome(Claimant(run, "old", new_driver()), None, 10):
        write_status(run, replace(new, attempt=3))
    assert state(run)[0] is RunState.RUNNING


def test_the_number_of_starts_without_a_new_checkpoint_is_limited(run: Run) -> None:
    attempt = start(run, "job")
    for _ in range(2):
        with recorded_outcome(Claimant(run, "job", new_driver()), None, 2):
            pass
    with (
        pytest.raises(SunspotError, match="started 2 times without a new checkpoint"),
        recorded_outcome(Claimant(run, "job", new_driver()), None, 2),
    ):
        raise AssertionError("it trained")
    with recorded_outcome(Claimant(run, "job", new_driver()), commit(run, attempt, 5), 2):
        pass  # a new checkpoint resets the count
    status = read_status(run)
    assert status.starts == 1
    assert status.step == 5


def test_a_final_error_recorded_by_a_worker_prevents_further_retries(run: Run) -> None:
    claimant = Claimant(run, "job", start(run, "job").driver)
    assert not has_failed_for_good(claimant, RecordLimit())
    record_error(run, 1, DamageError("lost"))
    assert has_failed_for_good(claimant, RecordLimit()), "a retry of the job would not train"
    assert not has_failed_for_good(Claimant(Run(run.storage, "another"), "job", ""), RecordLimit())


def test_the_last_records_share_a_time_limit_if_storage_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def give_up(limit_s: float, what: str, work: object) -> None:
        limits.append(limit_s)
        time.sleep(0.1)
        raise StorageError(what)

    monkeypatch.setattr(outcomes, "with_deadline", give_up)
    monkeypatch.setattr(outcomes, "RECORD_S", 0.25)
    monkeypatch.setattr(outcomes, "LEAST_RECORD_S", 0.1)
    limit = RecordLimit()
    for _ in range(4):
        with pytest.raises(StorageError):
            limit.run("writing the status", lambda: None)
    monkeypatch.setattr(outcomes, "with_deadline", lambda limit_s, what, work: limits.append(limit_s))
    limit.run("writing the status", lambda: None)
    limit.run("writing the report", lambda: None)
    assert limits[0] == limits[-1] == 0.25
    assert limits[1] <= 0.15
    assert limits[2:5] == [0.1, 0.1, 0.1]


def test_the_first_interrupt_saves_the_run_and_the_second_exits_immediately(
    run: Run, capsys: pytest.CaptureFixture[str], set_constants: SetConstants
) -> None:
    control, request = LocalControl(), StopRequest()
    set_constants("sunspot.elastic.supervisor", NODE_CHECK_EVERY_S=0.01)
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(EndAtOnceError), supervised(control, request):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: control.channel.command().stop, seconds=20)
        assert (request.signal, request.marked) == (signal.SIGINT, False)
        signal.raise_signal(signal.SIGINT)
    out = capsys.readouterr().out
    assert out.startswith(
        "interrupted: saving and ending; the same command continues from there. Press Ctrl-C again to end"
    )
    assert out.count("\n") == 1
    assert signal.getsignal(signal.SIGINT) is usual


@pytest.mark.parametrize(
    ("number", "job", "error", "code"),
    [
        (signal.SIGTERM, "job", SunspotError, 1),
        (signal.SIGTERM, "", TerminatedError, 143),
        (signal.SIGHUP, "", TerminatedError, 129),
        (signal.SIGINT, "job", KeyboardInterrupt, 130),
    ],
)
def test_sigterm_stops_a_run_like_ctrl_c_except_on_a_cluster(
    run: Run, set_constants: SetConstants, number: signal.Signals, job: str, error: type[BaseException], code: int
) -> None:
    """SIGTERM on a cluster means that the head is lost, and the operator replaces it."""
    set_constants("sunspot.elastic.supervisor", NODE_CHECK_EVERY_S=0.01)

    def train() -> int:
        control, request = LocalControl(), StopRequest()
        with recorded_outcome(Claimant(run, "me", new_driver()), None, 10):
            with supervised(control, request):
                signal.raise_signal(number)
                wait_until(lambda: control.channel.command().stop, seconds=20)
            request.raise_signal("step 5 of 10 is kept", job)
        return 0

    with pytest.raises(error, match="step 5 of 10 is kept"):
        train()
    with pytest.raises(SystemExit) as ended:
        run_and_exit(train)
    assert ended.value.code == code
    status = read_status(run)
    assert status.state is (RunState.FAILED if error is SunspotError else RunState.STOPPED)


def test_a_signal_reaches_the_workers_while_storage_hangs(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    hangs, answers = threading.Event(), threading.Event()

    def exists(key: str) -> bool:
        hangs.set()
        answers.wait(60)
        return False

    set_constants("sunspot.elastic.supervisor", NODE_CHECK_EVERY_S=0.01)
    set_constants("sunspot.run.outcome", DRIVER_CHECK_EVERY_S=0.01)
    monkeypatch.setattr(run.storage, "exists", exists)
    control, request = LocalControl(), StopRequest()
    with recorded_outcome(Claimant(run, "me", new_driver()), None, 10, request), supervised(control, request):
        assert hangs.wait(20), "no thread reads the stop marker"
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: control.channel.command().stop, seconds=20)
        answers.set()


def test_the_stop_marker_reaches_the_workers(run: Run, set_constants: SetConstants) -> None:
    set_constants("sunspot.elastic.supervisor", NODE_CHECK_EVERY_S=0.01)
    set_constants("sunspot.run.outcome", DRIVER_CHECK_EVERY_S=0.01)
    control, request = LocalControl(), StopRequest()
    with recorded_outcome(Claimant(run, "me", new_driver()), None, 10, request), supervised(control, request):
        request_stop(run, "me")
        wait_until(lambda: control.channel.command().stop, seconds=20)
        clear_stop(run)  # a start that has stopped stays stopped
    assert request.marked


def test_a_stop_request_stays_in_force_until_it_is_cleared(run: Run) -> None:
    assert not stop_requested(run)
    request_stop(run, "me")
    request_stop(run, "me again")
    assert stop_requested(run)
    clear_stop(run)
    clear_stop(run)
    assert not stop_requested(run)


def test_simultaneous_submissions_of_a_run_get_different_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    record_submission(run, SubmissionRecord("a", server="1"))
    monkeypatch.setattr(
        "sunspot.run.requests.list_submissions", lambda run: []
    )  # the other submission is not listed yet
    record_submission(run, SubmissionRecord("a", server="2"))
    monkeypatch.undo()
    assert newest_submission(run) == SubmissionRecord("a", server="2")


def test_colors_are_removed_from_logs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with shipped_driver_output(run):
        print("\x1b[33m(raylet)\x1b[0m a node died")
    [stream] = list_streams(run)
    assert read_stream(run, stream) == b"(raylet) a node died\n"
    assert capsys.readouterr().out == "(raylet) a node died\n"


def test_a_log_with_several_segments_is_read_completely(run: Run) -> None:
    stream = driver_stream()
    log = LogWriter(run, stream)
    text = bytes(range(256)) * 3000
    for begin_at in range(0, len(text), 70_000):
        log.append(text[begin_at : begin_at + 70_000])
        log.flush()
        log.flush()
        assert read_stream(run, stream) == text[: begin_at + 70_000]
    assert list_streams(run) == {stream: len(text)}
    sizes = [entry.size for entry in run.storage.list(run.key("logs"))]
    assert all(SEGMENT_BYTES <= size < SEGMENT_BYTES + 70_000 for size in sizes[:-1])
    for offset in (1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 140_000, 140_001, len(text)):
        assert read_stream(run, stream, offset) == text[offset:]
    assert read_stream(run, "attempt-0001-rank-0000") == b""


def test_buffered_output_is_limited_while_storage_fails(run: Run) -> None:
    stream = driver_stream()
    log = LogWriter(run, stream)
    log.append(b"first line\n")
    log.flush()
    chunks = [f"{number:09}\n".encode() * 10_000 for number in range(3 * MAX_WAITING // 100_000)]
    for chunk in chunks:
        log.append(chunk)
    log.append(b"last line\n")
    log.flush()
    text = read_stream(run, stream)
    assert text.startswith(b"first line\n")
    assert text.endswith(b"last line\n")
    [gap] = re.finditer(
        rb"\n\.\.\. (.*) of output left out: the process printed faster than storage could take it \.\.\.\n", text
    )
    assert len(text) <= MAX_WAITING + SEGMENT_BYTES
    lost = len(b"first line\nlast line\n") + sum(map(len, chunks)) - (len(text) - len(gap[0]))
    assert gap[1].decode() == as_bytes(lost)


def test_only_the_first_and_newest_parts_of_endless_output_are_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    """A rank prints 5 kB per second for an hour, and its output is shipped every 5 s."""
    now, writes = 0.0, 0
    write = run.storage.write

    def count(key: str, data: bytes) -> None:
        nonlocal writes
        writes += 1
        write(key, data)

    monkeypatch.setattr(run.storage, "write", count)
    set_constants("sunspot.run.logs", SEGMENT_BYTES=8000, FIRST_BYTES=20_000, NEWEST_BYTES=100_000, MAX_WAITING=200_000)
    monkeypatch.setattr("sunspot.run.logs.TokenBucket", partial(TokenBucket, clock=lambda: now))
    stream = rank_stream(1, 0)
    log = LogWriter(run, stream)
    for second in range(0, 3600, 5):
        now = float(second)
        log.append(f"{second:09}\n".encode() * 2500)
        log.flush()
    log.append(b"the end\n")
    log.end()
    log.flush()
    assert writes <= BURST + 3600 / RANK_EVERY_S + 1
    sizes = list_streams(run)
    assert sizes[stream] <= 20_000 + 25_000 + 100_000 + 2 * 208_000
    text = read_stream(run, stream)
    assert text.startswith(b"000000000\n")
    assert text.endswith(b"000003595\nthe end\n")
    assert re.search(
        rb"\n\.\.\. [0-9.]+ MB of output left out: only the first and the newest part of long output are kept", text
    )


def test_the_driver_exits_at_its_time_limit_if_storage_hangs(s3_proxy: FaultProxy, s3_bucket: str) -> None:
    s3_proxy.on(lambda request: request.method == "GET", s3.trickle)
    settings = {"SUNSPOT_STORAGE_PATH": f"s3://{s3_bucket}/runs", "SUNSPOT_STORAGE_TIMEOUT_S": "1"}
    command = [sys.executable, "-m", "sunspot.train"]
    ended = subprocess.run(
        command, env={**os.environ, **settings}, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 4, ended.stderr
    assert f"error: s3://{s3_bucket}/runs/mnist" in ended.stderr
    assert "no answer from storage for 1 s" in ended.stderr
