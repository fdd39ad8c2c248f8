"""Tests of `sunspot demo`: its description of a loss, and the processes and runs that it can end or remove."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sunspot.errors import ConflictError, GaveUpError, SunspotError
from sunspot.run import Run, open_run
from sunspot.run.incidents import Cause
from sunspot.run.seen import look
from sunspot.run.status import RunState
from sunspot.submitter import demonstration
from sunspot.submitter.demonstration import JOB, Trainer, ancestors, describe, list_processes, reached_kill_step
from tests.harness.constants import SetConstants
from tests.harness.runs import begin, commit, set_status, start, write_receipt

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "demo"))


@contextmanager
def trainer(program: str) -> Iterator[Trainer]:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=subprocess.STDOUT)
        yield Trainer(process, output)
        process.kill()
        process.wait()


def test_the_events_after_losing_a_worker_are_described_in_order(run: Run) -> None:
    first = start(run, "job")
    saved = commit(run, first, 3)
    second = start(run, "job", saved.name, tier="memory")
    times = {"noticed": 10.0, "formed": 12.0, "first_step": 14.0}
    loss = write_receipt(run, second, first.number, Cause.WORKER_LOST, last_step=5, **times)
    told = list(describe(loss))
    assert [moment for moment, _ in told] == [10.0, 12.0, 14.0]
    assert told[2][1] == "step 4: training continues 4.0 s after the loss (2 steps repeated)"


def test_the_demonstration_kills_a_worker_after_enough_steps(run: Run) -> None:
    set_status(run, RunState.RUNNING, step=3)
    assert not reached_kill_step(run)
    set_status(run, RunState.RUNNING, step=4)
    assert reached_kill_step(run) == 4


def test_only_workers_of_the_demonstration_are_killed(
    monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    with trainer(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])") as training:
        pid = training.wait("a process below", lambda: below(training))
        processes = list_processes()
        assert processes[pid][1].endswith(SLEEP + "\0") or processes[pid][1].endswith(SLEEP)
        assert os.getpid() in ancestors(pid, processes)
        assert not training.kill_worker()
        set_constants(demonstration, WORKER=sys.executable)
        assert training.kill_worker() == pid
        training.finish()
        monkeypatch.setattr(demonstration, "list_processes", lambda: processes)
        assert not training.kill_worker(), "it has already ended"


def below(training: Trainer) -> int | None:
    own = training.process.pid
    return next((pid for pid, (parent, title) in list_processes().items() if parent == own and "time" in title), None)


def test_processes_are_listed_even_if_their_names_are_not_utf_8(tmp_path: Path) -> None:
    program = tmp_path / os.fsdecode(b"sleep-\xff")
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        try:
            assert list_processes()[process.pid][0] == os.getpid()
        finally:
            process.kill()


def test_the_error_for_failed_training_includes_the_training_output() -> None:
    with trainer("print('no space left'); raise SystemExit(4)") as training:
        with pytest.raises(SunspotError, match=r"the training ended before the first step:\nno space left$"):
            training.wait("the first step", lambda: None)
        with pytest.raises(SunspotError, match=r"the training failed:\nno space left$"):
            training.finish()


def test_the_demonstration_lists_ignored_settings(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    set_constants(demonstration, COMMAND=(sys.executable, "-c", "import os; print(os.environ)"))
    for name in ("SUNSPOT_EPOCHS", "SUNSPOT_STORAGE_PATH"):
        monkeypatch.setenv(name, "777777777")
    with demonstration.training(run) as training:
        training.finish()
        training.output.seek(0)
        assert b"777777777" not in training.output.read()
    assert capsys.readouterr().err == "the demonstration ignores SUNSPOT_EPOCHS, because it has its own settings\n"


def test_an_event_just_before_the_training_ends_is_seen() -> None:
    with trainer("") as training:

        def look() -> bool:
            ended = training.process.poll() is not None
            training.process.wait()
            return ended

        assert training.wait("its end", look)


def test_every_wait_in_a_demonstration_has_a_time_limit(set_constants: SetConstants) -> None:
    set_constants(demonstration, MAX_WAIT_S=0.1)
    with trainer(SLEEP) as training:
        with pytest.raises(GaveUpError, match=r"waiting .* for the first step"):
            training.wait("the first step", lambda: None)
        with pytest.raises(GaveUpError, match=r"waiting .* for the training to end"):
            training.finish()


def test_a_demonstration_deletes_the_run_of_an_earlier_demonstration(run: Run) -> None:
    owner = f"{JOB}1a2b3c4d"
    start(run, owner)
    set_status(run, RunState.SUCCEEDED, owner=owner)
    demonstration.remove_earlier(run)
    assert not look(run).exists


@pytest.mark.parametrize(
    ("owners", "state", "said"),
    [
        (["somebody", f"{JOB}1"], RunState.SUCCEEDED, "was not created by `sunspot demo`"),
        ([f"{JOB}1"], RunState.RUNNING, "running"),
        ([], RunState.FAILED, "was not created by `sunspot demo`"),
    ],
)
def test_a_demonstration_never_deletes_live_runs_or_runs_that_no_demonstration_created(
    owners: list[str], state: RunState, said: str, run: Run
) -> None:
    for owner in owners:
        start(run, owner)
    set_status(run, state, owner=owners[-1] if owners else "somebody")
    before = [entry.key for entry in run.storage.list("demo")]
    with pytest.raises(ConflictError, match=said):
        demonstration.remove_earlier(run)
    assert [entry.key for entry in run.storage.list("demo")] == before
