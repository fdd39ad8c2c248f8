"""What a run leaves in storage about itself: its status, its submissions, and its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.driver import recorded_outcome
from app.errors import ConflictError, SunspotError, SupersededError
from app.run import Run, open_run
from app.run.attempts import newest_submission, owner_of, read_attempts, record_submission, refuse_if_superseded
from app.run.failures import read_failures
from app.run.logs import LEFT_OUT, MOST_WAITING, SEGMENT_BYTES, LogWriter, driver_stream, list_streams, read_stream
from app.run.status import RunState, Status, clear_stop, read_status, request_stop, stop_requested, write_status
from tests.harness.runs import begin, commit, start


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


def state(run: Run) -> tuple[RunState, str]:
    status = read_status(run)
    assert status
    return status.state, status.reason


def test_a_driver_leaves_how_it_ended(run: Run) -> None:
    assert read_status(run) is None
    with recorded_outcome(run, "job", None, 10) as outcome:
        assert state(run)[0] is RunState.STARTING
        outcome.state = RunState.STOPPED
    assert state(run)[0] is RunState.STOPPED
    with pytest.raises(SunspotError, match="no luck"), recorded_outcome(run, "job", None, 10):
        raise SunspotError("no luck")
    assert state(run) == (RunState.FAILED, "no luck")
    with pytest.raises(ZeroDivisionError), recorded_outcome(run, "job", None, 10):
        raise ZeroDivisionError("a defect")
    assert state(run) == (RunState.FAILED, "a defect")
    [failure] = read_failures(run)
    assert (failure.rank, failure.type, failure.message) == (None, "ZeroDivisionError", "a defect")
    assert (failure.file, failure.function) == (__file__, "test_a_driver_leaves_how_it_ended")
    with pytest.raises(KeyboardInterrupt), recorded_outcome(run, "job", None, 10):
        raise KeyboardInterrupt
    assert state(run)[0] is RunState.LOST


def test_a_start_with_other_settings_leaves_the_status_of_a_finished_run(run: Run) -> None:
    with recorded_outcome(run, "job", None, 10):
        pass
    with pytest.raises(ConflictError), recorded_outcome(run, "another", None, 10):
        raise ConflictError("begun with other settings")
    assert state(run)[0] is RunState.SUCCEEDED


def test_a_start_with_other_settings_leaves_the_status_of_a_live_run(run: Run) -> None:
    live = Status(RunState.RUNNING, "job", step=7)
    write_status(run, live)
    with pytest.raises(ConflictError), recorded_outcome(run, "another", None, 10):
        raise ConflictError("begun with other settings")
    status = read_status(run)
    assert status
    assert (status.state, status.owner, status.step) == (RunState.RUNNING, "job", 7)


def test_a_superseded_driver_leaves_the_status_to_its_successor(run: Run) -> None:
    with pytest.raises(SupersededError), recorded_outcome(run, "old", None, 10):  # noqa: PT012
        write_status(run, Status(RunState.RUNNING, "new"))
        raise SupersededError("taken over")
    assert state(run)[0] is RunState.RUNNING
    with recorded_outcome(run, "old", None, 10):
        write_status(run, Status(RunState.RUNNING, "new"))
    assert state(run)[0] is RunState.RUNNING


def test_starts_without_a_new_checkpoint_are_bounded(run: Run) -> None:
    attempt = start(run, "job")
    for _ in range(2):
        with recorded_outcome(run, "job", None, 2):
            pass
    with (
        pytest.raises(SunspotError, match="started 2 times without a new checkpoint"),
        recorded_outcome(run, "job", None, 2),
    ):
        raise AssertionError("it trained")
    with recorded_outcome(run, "job", commit(run, attempt, 5), 2):
        pass  # a checkpoint later, the count begins anew
    status = read_status(run)
    assert status
    assert status.starts == 1
    assert status.step == 5


def test_a_stop_stays_until_it_is_cleared(run: Run) -> None:
    assert not stop_requested(run)
    request_stop(run, "me")
    request_stop(run, "me again")
    assert stop_requested(run)
    clear_stop(run)
    clear_stop(run)
    assert not stop_requested(run)


def test_only_a_new_submission_takes_a_run_back(run: Run) -> None:
    assert newest_submission(run) is None
    assert owner_of(run, "first") == "first"  # a GitOps controller submits without a word in storage
    record_submission(run, "first", "a: 1")
    first = owner_of(run, "first")
    start(run, first)
    record_submission(run, "second", "a: 2")
    start(run, owner_of(run, "second"))
    with pytest.raises(SupersededError):
        refuse_if_superseded(read_attempts(run), first)
    record_submission(run, "first", "a: 1")
    refuse_if_superseded(read_attempts(run), owner_of(run, "first"))
    assert newest_submission(run) == ("first", "a: 1")


def test_two_submissions_at_once_get_numbers_of_their_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    record_submission(run, "a", "1")
    monkeypatch.setattr("app.run.attempts._submissions", lambda run: [])  # the other one was not listed yet
    record_submission(run, "a", "2")
    monkeypatch.undo()
    assert newest_submission(run) == ("a", "2")


def test_a_log_of_several_segments_reads_as_it_was_written(run: Run) -> None:
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
    assert all(size == SEGMENT_BYTES for size in sizes[:-1])
    assert len(sizes) == -(-len(text) // SEGMENT_BYTES)
    for offset in (1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, len(text)):
        assert read_stream(run, stream, offset) == text[offset:]
    assert read_stream(run, "attempt-0001-rank-0000") == b""


def test_output_that_storage_does_not_take_is_bounded(run: Run) -> None:
    stream = driver_stream()
    log = LogWriter(run, stream)
    log.append(b"first line\n")
    log.flush()
    for number in range(3 * MOST_WAITING // 10_000):
        log.append(f"{number:09}\n".encode() * 1000)
    log.append(b"last line\n")
    log.flush()
    text = read_stream(run, stream)
    assert text.startswith(b"first line\n")
    assert text.endswith(b"last line\n")
    assert LEFT_OUT in text
    assert len(text) <= MOST_WAITING + 10_000
