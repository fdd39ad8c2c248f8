"""Tests of searches: real trials on Ray workers, ASHA's decisions, and the promoted checkpoint."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import sunspot.tune.promotion
import sunspot.tune.trials
from sunspot.cli import main as command
from sunspot.errors import ConflictError, DamageError, StorageError, SupersededError
from sunspot.report.search import render_search
from sunspot.run import Run, open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import find_newest_good, list_checkpoints, list_directories
from sunspot.run.requests import clear_stop, request_stop, stop_requested
from sunspot.run.search import SearchResults, Trial, find_best_checkpoint, read_results, read_trial
from sunspot.run.status import RunState, Status, read_status, write_status_as_is
from sunspot.settings import JobContext, Settings
from sunspot.tune.promotion import begin_attempt, promote
from sunspot.tune.trials import (
    FULL_RUN,
    PROGRESS,
    SCORE,
    HistoryReplay,
    StoppingAsha,
    StopWhenIdle,
    allocate,
    await_nodes,
    has_ended,
)
from tests.harness import REPOSITORY
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.program import Program
from tests.harness.runs import begin, commit, report, start
from tests.harness.training import consumed, newest, wait_for_step

MakeData = Any

SEARCH = {
    "LEARNING_RATE": "loguniform(0.005,0.5)",
    "TRIALS": 3,
    "NUM_WORKERS": 1,
    "GLOBAL_BATCH_SIZE": 50,
    "EPOCHS": 1,
    "CHECKPOINT_EVERY_STEPS": 20,
    "CHECKPOINTS_TO_KEEP": 100,
    "CONCURRENT_TRIALS": 1,
    "MAX_FAILURES": 0,
    "REPORT_EVERY_S": 0.5,
}


class Search:
    """Runs `python -m sunspot.tune` with a test's settings."""

    def __init__(self, program: Program, **settings: Any) -> None:
        self._program = program
        self._settings = {**SEARCH, **settings}
        self.run = self.trial(0)

    def trial(self, number: int) -> Run:
        """Return a trial's run, or the search's own run for 0."""
        return open_run(self._program.settings["STORAGE_PATH"], f"run-{number:02d}" if number else "run")

    def start(self) -> subprocess.Popen[str]:
        """Start the program in a process group of its own."""
        environment = {**os.environ, **self._program.environment(**self._settings)}
        return subprocess.Popen(
            [sys.executable, "-m", "sunspot.tune"],
            env={**environment, "RAY_ADDRESS": self._program.ray_address},
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def main(self, **settings: Any) -> int:
        """Run the program in this process. Raises its errors."""
        from sunspot.tune.search import main

        with self._program.monkeypatch.context() as patch:
            for name, value in self._program.environment(**{**self._settings, **settings}).items():
                patch.setenv(name, value)
            return main()

    def states(self) -> list[RunState]:
        """Return the states of the trials."""
        found = [read_status(self.trial(number)) for number in range(1, self._settings["TRIALS"] + 1)]
        return [status.state if status else RunState.PENDING for status in found]


def test_the_best_of_two_trials_is_promoted(
    program: Program, make_data: MakeData, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(1000, test_rows=100)
    search = Search(program, DATASET=data, TRIALS=2, CONCURRENT_TRIALS=2, CHECKPOINT_METRIC="test_loss")
    assert search.main() == 0
    assert search.states() == [RunState.SUCCEEDED, RunState.SUCCEEDED]
    results = read_results(search.run)
    best = min(results.trials, key=lambda trial: trial.best or 99)
    assert results.promoted == best.run
    assert best.state is RunState.SUCCEEDED
    [checkpoint] = list_checkpoints(search.run)
    origin = newest(open_run(program.settings["STORAGE_PATH"], best.run))
    assert checkpoint.files["model.pt"]["sha256"] == origin.files["model.pt"]["sha256"]
    assert checkpoint.metrics["test_loss"] == best.best
    status = read_status(search.run)
    assert (status.state, status.step, status.checkpoint) == (RunState.SUCCEEDED, 20, checkpoint.name)
    assert status.test_loss == best.best
    assert f"the best of {best.run}" in capsys.readouterr().out
    assert b"run-02" in search.run.storage.read(search.run.key("report.html"))

    for words in (["checkpoints", "verify", "run"], ["status", "run"]):
        with pytest.raises(SystemExit) as ended:
            command([*words, "--storage", program.settings["STORAGE_PATH"]])
        assert ended.value.code == 0
    from sunspot.predict.classifier import Classifier

    model = Classifier("run", storage=program.settings["STORAGE_PATH"], task=program.settings["TASK"])
    labels, _ = model.predict(torch.zeros(1, 1, 8, 8).byte())
    assert labels.shape == (1,)

    with pytest.raises(ConflictError, match=r"SUNSPOT_LEARNING_RATE: loguniform\(0.005,0.5\) -> uniform\(0.01,0.5\)"):
        search.main(LEARNING_RATE="uniform(0.01,0.5)")
    assert read_status(search.run) == status, "a search with another space changes nothing"


@pytest.mark.slow
def test_a_killed_search_resumes_without_repeating_trials(
    program: Program, make_data: MakeData, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Search(program, DATASET=make_data(40_000, row_group=2000))
    begin(search.trial(3))  # another job's run: this trial fails without ending others
    process = search.start()
    wait_for_step(search.trial(2), 40, process, seconds=400)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not any(checkpoint.finished for checkpoint in list_checkpoints(search.trial(2)))
    attempts = read_attempts(search.trial(1))

    assert search.main() == 0
    assert search.states() == [RunState.SUCCEEDED, RunState.SUCCEEDED, RunState.PENDING]
    assert read_attempts(search.trial(1)) == attempts, "a finished trial is not trained again"
    first, second = read_attempts(search.trial(2))
    assert (first.step, second.step >= 40) == (0, True)
    for number in (1, 2):
        steps = consumed(search.trial(number))
        assert sorted(steps) == list(range(1, 801)), "every step once"
        assert sorted(row for rows in steps.values() for row in rows) == list(range(40_000))
    results = read_results(search.run)
    assert results.promoted in ("run-01", "run-02")
    assert "failed: ConflictError: " in capsys.readouterr().out
    assert b"run-03" in search.run.storage.read(search.run.key("report.html"))


@pytest.mark.slow
def test_a_stopped_search_stops_its_trials_and_can_be_resumed(program: Program, make_data: MakeData) -> None:
    search = Search(program, DATASET=make_data(2000), EPOCHS=40, TRIALS=2, TASK="tests.tasks.slow")
    process = search.start()
    wait_for_step(search.trial(1), 20, process)
    request_stop(search.run, "a test")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    status = read_status(search.run)
    assert status.state is RunState.STOPPED
    assert search.states() == [RunState.STOPPED, RunState.PENDING], "no further trial begins"
    assert not stop_requested(search.trial(1)), "it will resume with the search"
    clear_stop(search.run)
    assert search.main() == 0
    assert search.states()[0] is RunState.SUCCEEDED
    assert find_newest_good(search.run, read_attempts(search.run))[0]


def test_a_trial_that_has_ended_is_not_trained_again(run: Run) -> None:
    settings = Settings(epochs=2)
    assert not has_ended(run, settings)
    start(begin(run), "job", settings=settings.environment())
    for state in (RunState.FAILED, RunState.RUNNING, RunState.STOPPED):
        write_status_as_is(run, Status(state, "job"))
        assert not has_ended(run, settings), "a search that was stopped leaves no marker in its trials"
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job"))
    assert has_ended(run, settings)
    assert not has_ended(run, Settings(epochs=3)), "more epochs are left to train"
    write_status_as_is(run, Status(RunState.STOPPED, "job"))
    request_stop(run, "ASHA")
    assert has_ended(run, Settings(epochs=3))


# ----------------------------------------------------------------------------------------------------------------- ASHA


class FakeTrial:
    """A fake of the Tune trial that a scheduler receives."""

    def __init__(self, number: int) -> None:
        self.trial_id = str(number)
        self.config = {"trial": number}


class Asha:
    """A scheduler without Tune, with a record of its decisions."""

    def __init__(self, trials: int, order: str = "min") -> None:
        self.stopped: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.refuses = False
        self.scheduler = StoppingAsha(order, self._stop, self.ended.__setitem__)
        self._trials = {number: FakeTrial(number) for number in range(1, trials + 1)}
        for trial in self._trials.values():
            self.scheduler.on_trial_add(None, trial)

    def _stop(self, number: int, why: str) -> None:
        if self.refuses:
            raise StorageError("refused")
        self.stopped[number] = why

    def report(self, number: int, part: float, score: float) -> None:
        """Report a trial's result, and check that Tune is never asked to end a trial."""
        result = {PROGRESS: part * FULL_RUN, SCORE: score, "error": ""}
        assert self.scheduler.on_trial_result(None, self._trials[number], result) == "CONTINUE"

    def end(self, number: int, error: str = "") -> None:
        self.scheduler.on_trial_complete(None, self._trials[number], {"error": error})


@pytest.mark.parametrize("order", ["min", "max"])
def test_asha_keeps_a_stopped_trial_until_its_run_ends(order: str) -> None:
    asha, sign = Asha(4, order), 1 if order == "min" else -1
    for number, score in enumerate((0.2, 0.3, 0.1, 0.4), start=1):
        asha.report(number, 0.05, sign * 9.0)  # before the first comparison, nothing counts
        asha.report(number, 0.12, sign * score)
    assert asha.stopped.keys() == {2, 4}
    assert asha.stopped[4] == "ASHA after 12% of its steps, because other trials were better by then"
    asha.report(1, 1.0, sign * 0.1)
    asha.report(3, 1.0, sign * 0.2)
    assert asha.stopped.keys() == {2, 4, 3}, "only its run knows if it is already finished"
    for number in range(1, 5):
        assert number in asha.scheduler.running
        asha.end(number, "broke" if number == 1 else "")
    assert asha.ended == {1: "broke", 2: "", 3: "", 4: ""}
    assert not asha.scheduler.running


def test_a_metric_that_is_not_finite_ends_a_trial() -> None:
    asha = Asha(2)
    asha.report(1, 0.01, float("nan"))
    asha.report(2, 0.01, float("inf"))
    assert asha.stopped == {
        1: "the search, because its metric was nan",
        2: "the search, because its metric was inf",
    }


def test_a_stop_request_is_repeated_after_a_storage_error() -> None:
    asha = Asha(2)
    asha.refuses = True
    asha.report(1, 0.01, float("nan"))
    asha.refuses = False
    asha.report(2, 0.01, 1.0)
    assert asha.stopped.keys() == {1}


def test_tune_ends_once_a_stopped_search_has_no_running_trials() -> None:
    asha, stop = Asha(2), [False]
    stopper = StopWhenIdle(asha.scheduler, lambda: stop[0])
    asha.report(1, 0.5, 1.0)
    assert not stopper.stop_all()
    stop[0] = True
    assert not stopper.stop_all(), "Tune would kill the trial"
    asha.end(1)
    assert stopper.stop_all()


def test_a_trial_reports_each_record_of_its_history_once(run: Run) -> None:
    attempt = start(begin(run), "job")
    history = HistoryReplay(run, "loss")
    assert history.new() == [], "nothing has begun"
    report(run, attempt, *({"step": n, "loss": 1 / n, "time": 0.0} for n in (1, 50)), {"step": 60, "time": 0.0})
    write_status_as_is(run, Status(RunState.RUNNING, "job", step=60, total_steps=1000, time=1.0))
    assert history.new() == [{PROGRESS: FULL_RUN * 0.05, SCORE: 0.02}], "one step is too short, and one has no loss"
    assert history.new() == []
    report(run, attempt, *({"step": n, "loss": 1 / n, "time": 0.0} for n in (50, 995, 1000)))
    assert history.new() == [], "the status has not changed, so the history was not read"
    write_status_as_is(run, Status(RunState.RUNNING, "job", step=1000, total_steps=1000, time=2.0))
    assert [result[PROGRESS] / FULL_RUN for result in history.new()] == [0.995, 1.0], "the end always counts"


@pytest.mark.parametrize(("metric", "score"), [("loss", 2.9), ("test_loss", 1.0)])
def test_a_trial_is_judged_by_its_mean_score_rather_than_the_score_of_one_step(
    run: Run, metric: str, score: float
) -> None:
    attempt = start(begin(run), "job")
    report(
        run,
        attempt,
        {"step": 5, metric: 3.0, "rows": 190, "time": 0.0},
        {"step": 10, metric: 1.0, "rows": 10, "time": 0.0},
    )
    write_status_as_is(run, Status(RunState.RUNNING, "job", step=10, total_steps=1000, time=1.0))
    assert HistoryReplay(run, metric).new() == [{PROGRESS: FULL_RUN * 0.01, SCORE: pytest.approx(score)}]


# ------------------------------------------------------------------------------------------------------------ promotion


@pytest.fixture
def trial(run: Run) -> Run:
    """Return a run with two checkpoints, the first of which is better."""
    trial = Run(run.storage, "run-01")
    attempt = start(begin(trial), "search")
    commit(trial, attempt, 5, loss=0.25)
    commit(trial, attempt, 10, loss=0.5)
    write_status_as_is(trial, Status(RunState.SUCCEEDED, "search", step=10, total_steps=10))
    return trial


def test_a_promoted_checkpoint_becomes_a_checkpoint_of_the_search(run: Run, trial: Run, sunspot: Command) -> None:
    best = find_best_checkpoint(trial, "loss", "min")
    assert best
    begin(run)
    begin_attempt(run, "search", {}, None)
    promoted = promote(run, "search", {}, trial, best.name)
    assert (promoted.name, promoted.step) == (f"step-00000005-{read_attempts(run)[-1].label}", 5)
    assert find_newest_good(run, read_attempts(run))[0] == promoted
    assert sunspot("checkpoints", "verify", "run") == 0
    assert promote(run, "search", {}, trial, best.name) == promoted, "nothing is copied again"
    later = promote(run, "search", {}, trial, "step-00000010-attempt-0001")
    earlier = promote(run, "search", {}, trial, best.name)
    assert (later.step, earlier.step) == (10, 5), "a better checkpoint may have fewer steps"
    assert list(list_directories(run)) == [earlier.name], "the others were deleted"


def test_a_damaged_checkpoint_is_not_promoted(run: Run, trial: Run) -> None:
    trial.storage.write(trial.key("checkpoints", "step-00000005-attempt-0001", "model.pt"), b"other bytes")
    with pytest.raises(DamageError, match=r"model.pt does not match its manifest"):
        promote(run, "search", {}, trial, "step-00000005-attempt-0001")
    assert find_newest_good(run, read_attempts(run))[0] is None


def test_a_superseded_search_promotes_nothing(run: Run, trial: Run) -> None:
    begin_attempt(run, "old", {}, None)
    begin_attempt(run, "new", {}, None)
    with pytest.raises(SupersededError):
        promote(run, "old", {}, trial, "step-00000005-attempt-0001")
    assert not list_checkpoints(run)


def test_a_search_superseded_during_promotion_keeps_the_previous_checkpoint(
    run: Run, trial: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = promote(run, "old", {}, trial, "step-00000010-attempt-0001")
    copy, taken = sunspot.tune.promotion.upload, list[int]()

    def copy_and_lose(*words: Any) -> Any:
        if not taken:
            taken.append(begin_attempt(run, "new", {}, first).number)
        return copy(*words)

    monkeypatch.setattr("sunspot.tune.promotion.upload", copy_and_lose)
    with pytest.raises(SupersededError):
        promote(run, "old", {}, trial, "step-00000005-attempt-0001")
    assert list_checkpoints(run) == [first], "the new attempt keeps it"


# -------------------------------------------------------------------------------------------------------------- results


def test_the_results_of_a_trial_are_read_from_its_run(trial: Run) -> None:
    found = read_trial(trial, {"SEED": 1}, "loss", "min")
    assert (found.state, found.step, found.best, found.checkpoint) == (
        RunState.SUCCEEDED,
        10,
        0.25,
        "step-00000005-attempt-0001",
    )
    assert read_trial(trial, {}, "test_loss", "min").best is None
    assert read_trial(trial, {}, "loss", "min", "ConflictError: no").state is RunState.FAILED
    write_status_as_is(trial, Status(RunState.STOPPED, "search", step=10))
    request_stop(trial, "ASHA")
    assert read_trial(trial, {}, "loss", "min").reason == "by ASHA"


def results() -> SearchResults:
    """Return the results of four trials in different states."""
    drawn = [(0.01, "relu"), (0.1, "gelu"), (0.001, "relu"), (0.5, "gelu")]
    states = [RunState.SUCCEEDED, RunState.STOPPED, RunState.FAILED, RunState.SUCCEEDED]
    best = [0.9, 0.5, 0.95, None]
    trials = tuple(
        Trial(f"s-{n:02d}", {"LEARNING_RATE": rate, "TASK_ARGS.act": act}, state, "<why>", 10 * n, 40, value, "step-x")
        for n, ((rate, act), state, value) in enumerate(zip(drawn, states, best, strict=True), start=1)
    )
    space = {"LEARNING_RATE": "loguniform(1e-3,1)", "TASK_ARGS.act": "choice(relu,gelu)"}
    return SearchResults("test_accuracy", "max", space, trials, "s-01")


def test_the_best_trial_comes_first_and_failed_trials_are_not_eligible() -> None:
    assert [trial.run for trial in results().ranking] == ["s-01", "s-02", "s-03", "s-04"]
    assert [trial.eligible for trial in results().trials] == [True, True, False, False]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"trials": []}', b'{"trials": [{"state": "asleep"}]}'])
def test_search_results_written_by_a_different_version_are_ignored(run: Run, content: bytes) -> None:
    run.storage.write(run.key("search.json"), content)
    assert read_results(run) is None


def test_the_report_of_a_search_shows_its_trials(run: Run) -> None:
    curves = {f"s-{n:02d}": [(step, 0.1 * n * step / 40) for step in (10, 20, 40)] for n in (1, 2, 3)}
    page = render_search(run, results(), curves, "../{}/report.html").decode()
    assert '<strong><a href="../s-01/report.html">s-01</a> (best)</strong>' in page
    assert "<a" not in render_search(run, results(), curves).decode(), "a saved file has no reports of trials beside it"
    assert "highest test_accuracy" in page
    assert "&lt;why&gt;" in page
    assert page.count("<svg viewBox") == 3, "charts over steps, over the rate, and over the activation"
    assert "http" not in page.replace("http-equiv", ""), "nothing is fetched"
    assert render_search(run, replace(results(), trials=(), promoted=None), {})


# ------------------------------------------------------------------------------------------------------------ resources


def trials(**settings: Any) -> tuple[Settings, ...]:
    return (Settings(**{"num_workers": "2", **settings}),) * 8


@pytest.mark.parametrize(
    ("settings", "there", "nodes", "at_once", "each"),
    [
        ({}, {"CPU": 2}, 1, 1, {"CPU": 1}),
        ({}, {"CPU": 16}, 1, 8, {"CPU": 1}),
        ({}, {"CPU": 64}, 1, 8, {"CPU": 4}),
        ({"concurrent_trials": 4}, {"CPU": 2}, 1, 4, {"CPU": 0.25}),
        ({"concurrent_trials": 4}, {"CPU": 64, "GPU": 4}, 1, 2, {"CPU": 16, "GPU": 1}),
        ({"resources_per_worker": {"CPU": 2}}, {"CPU": 16}, 1, 4, {"CPU": 2}),
        ({"resources_per_worker": {"CPU": 1, "slot": 1}}, {"CPU": 99, "slot": 4}, 5, 2, {"CPU": 1, "slot": 1}),
        ({"concurrent_trials": 3}, {"CPU": 4}, 3, 2, {"CPU": 1}),
        ({}, {"CPU": 1}, 2, 1, {"CPU": 1}),
    ],
)
def test_trials_share_the_resources_of_the_cluster(
    settings: dict[str, Any], there: dict[str, float], nodes: int, at_once: int, each: dict[str, float]
) -> None:
    found, given, reason = allocate(trials(**settings), there, nodes)
    assert (found, given[0].resources_per_worker) == (at_once, each)
    assert given[0].use_gpu == ("true" if "GPU" in each else "false")
    assert ("no room" in reason) == (0 < at_once < settings.get("concurrent_trials", 0))


def test_a_search_waits_for_the_nodes_of_its_job(set_constants: SetConstants) -> None:
    set_constants(sunspot.tune.trials, NODES_POLL_EVERY_S=0.01, NODES_TIMEOUT_S=0.5)
    wanted = {"concurrent_trials": 2, "num_workers": "1", "resources_per_worker": {"CPU": 1, "slot": 1}}

    def at_once(nodes: Iterator[int], **settings: Any) -> int:
        def look() -> tuple[dict[str, float], int]:
            there = next(nodes)
            return {"CPU": there, "slot": there}, there + 1

        return await_nodes(trials(**wanted, **settings), look)[0]

    assert at_once(iter([0, 1, 1, 2]), job=JobContext(job_id="job")) == 2
    assert at_once(itertools.repeat(1), job=JobContext(job_id="job")) == 1, "the wait ends"
    assert at_once(iter([1])) == 1, "no nodes are added to a laptop"


@pytest.mark.slow
def test_a_search_in_s3_fails_if_every_trial_fails(program: Program, s3_bucket: str) -> None:
    """No trial can train, because its run already exists with other settings."""
    program.ray_address = ""  # workers get their AWS environment from the process that starts Ray
    program.settings["STORAGE_PATH"] = f"s3://{s3_bucket}/runs"
    search = Search(program, TRIALS=1, RESOURCES_PER_WORKER="")
    begin(search.trial(1))
    process = search.start()
    output = process.communicate(timeout=250)[0]
    assert process.returncode == 1, output
    assert re.search(r"no trial succeeded:\n  run-01: failed: ConflictError: .* different settings", output), output
    status = read_status(search.run)
    assert status.state is RunState.FAILED
