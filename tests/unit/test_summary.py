"""Tests of a driver's end: the table of results that it prints, and the report that it stores."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sunspot.errors import ConflictError, StorageError, SunspotError, SupersededError
from sunspot.run import Run
from sunspot.run.checkpoints import delete_checkpoint
from sunspot.run.outcome import RecordLimit
from sunspot.run.status import RunState, Status, read_status, write_status_as_is
from sunspot.train.driver import report_result
from tests.harness.runs import begin, commit, start
from tests.harness.trained import attempt_metadata, trained

STATUS = Status(RunState.SUCCEEDED, "job", step=10, total_steps=10)


def output_of_end(run: Run, capsys: pytest.CaptureFixture[str], error: BaseException | None = None) -> str:
    """Return what a driver prints when it ends, because of `error` if given. The same error is raised."""
    capsys.readouterr()
    if error is None:
        with report_result(run, "00000000", RecordLimit()):
            pass
    else:
        with pytest.raises(type(error)) as raised, report_result(run, "00000000", RecordLimit()):
            raise error
        assert raised.value is error
    return capsys.readouterr().out


def test_the_newest_and_the_best_checkpoint_are_shown_side_by_side(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status_as_is(run, STATUS)
    first = start(begin(run), "job", **attempt_metadata(checkpoint_metric="test_loss"))
    commit(run, first, 5, test_loss=0.25, accuracy=0.9, top2=0.99, rows=5)
    commit(run, first, 10, test_loss=0.5, accuracy=0.95, mae=2e-5, rows=5)
    lines = output_of_end(run, capsys).splitlines()
    table = [re.split(r"\s{2,}", line.strip()) for line in lines[1:8]]
    assert table == [
        ["newest", "best: lowest test_loss"],
        ["checkpoint", "step-00000010-attempt-0001", "step-00000005-attempt-0001"],
        ["epoch", "2", "1"],
        ["accuracy", "0.9500", "0.9000"],
        ["mae", "2e-05"],
        ["test_loss", "0.5000", "0.2500"],
        ["top2", "0.9900"],
    ]
    assert lines[8] == f"  weights: {run.location}/checkpoints/step-00000010-attempt-0001/model.pt"
    assert lines[9] == f"  report: {run.location}/report.html"


def test_a_checkpoint_that_is_newest_and_best_is_shown_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of_end(trained(run), capsys)
    assert out.startswith("succeeded at step 188 of 188\n")
    assert "newest, and best: lowest test_loss\n" in out
    assert out.count("step-00000188-attempt-0002") == 2, "it is in the table and in the path of the weights"
    assert b"Succeeded" in run.storage.read(run.key("report.html"))


def test_a_misspelled_metric_is_reported(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_status_as_is(run, STATUS)
    commit(run, start(begin(run), "job", **attempt_metadata(checkpoint_metric="lots")), 5, loss=0.5)
    assert (
        "warning: SUNSPOT_CHECKPOINT_METRIC=lots is not among loss; the newest checkpoints were kept"
        in output_of_end(run, capsys)
    )


def test_the_summary_of_a_failed_run_shows_its_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    trained(run)
    status = read_status(run)
    assert status
    write_status_as_is(run, replace(status, state=RunState.FAILED, reason="no good"))
    out = output_of_end(run, capsys, SunspotError("no good"))
    assert out.startswith("failed at step 188 of 188\n")
    assert "no good" not in out, "the entry point prints the error afterwards"
    assert "weights: " in out
    assert b"no good" in run.storage.read(run.key("report.html"))


def test_the_summary_says_that_a_run_has_no_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    trained(run)
    for name in ("step-00000094-attempt-0001", "step-00000188-attempt-0002"):
        delete_checkpoint(run, name)
    out = output_of_end(run, capsys, RuntimeError("a defect"))
    assert out.startswith("succeeded at step 188 of 188\n  no checkpoint is intact\n")
    assert "report: " in out


@pytest.mark.parametrize("error", [ConflictError("other settings"), SupersededError("another"), KeyboardInterrupt()])
def test_a_process_that_does_not_own_the_run_prints_no_summary(
    run: Run, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    assert output_of_end(trained(run), capsys, error) == ""
    assert not run.storage.exists(run.key("report.html"))


def test_the_report_does_not_recreate_a_deleted_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of_end(run, capsys, SunspotError("no good")) == ""
    assert not run.storage.list(run.name)


@pytest.mark.parametrize("error", [None, SunspotError("no good")])
def test_a_report_that_cannot_be_written_does_not_change_the_outcome(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    def refuse(key: str, data: bytes) -> None:
        raise StorageError(f"{key}: no space left")

    trained(run)
    monkeypatch.setattr(run.storage, "write", refuse)
    out = output_of_end(run, capsys, error)
    assert "weights: " in out
    assert "warning: the report could not be written: run/report.html: no space left" in out


def test_a_bug_in_the_report_does_not_change_the_outcome(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sunspot.train.driver.read_report", lambda *about: 1 / 0)
    assert output_of_end(trained(run), capsys) == "warning: the report could not be written: division by zero\n"
