"""Tests of `sunspot profile`: which steps are recorded, the traces in storage, and the output of the command."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sunspot.parallel.collectives import WorkerPlace
from sunspot.run import Run, open_run
from sunspot.run.profiles import ProfileRequest, read_rank_profile, read_request, request_profile
from sunspot.run.status import RunState, Status, write_status
from sunspot.submitter.commands import profile
from sunspot.train.profiler import StepProfiler, find_first_step
from tests.harness.commands import Answer, StorageCommand
from tests.harness.constants import SetConstants
from tests.harness.runs import begin
from tests.harness.waiting import wait_until

PER_EPOCH = 10

RUNNING = Status(RunState.RUNNING, "job", attempt=1, world_size=2, steps_per_epoch=PER_EPOCH, step_time_s=0.25)


@pytest.fixture
def run(tmp_path: Path, set_constants: SetConstants) -> Run:
    set_constants(profile, POLL_S=0.01)
    run = begin(open_run(str(tmp_path), "run"))
    write_status(run, RUNNING)
    return run


@pytest.fixture
def sunspot(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> StorageCommand:
    return StorageCommand(str(tmp_path), capsys)


def make_profiler(run: Run, rank: int = 0) -> StepProfiler:
    settings = SimpleNamespace(storage_path=run.storage.locate(""), run_name=run.name, storage_timeout_s=5.0)
    plan: Any = SimpleNamespace(settings=settings, steps=SimpleNamespace(per_epoch=PER_EPOCH))
    return StepProfiler(plan, WorkerPlace(None, rank, 2))


def take_step(profiler: StepProfiler, run: Run, step: int, attempt: int = 1) -> None:
    """Take a step that multiplies two matrices, as the training loop does."""
    with torch.profiler.record_function(f"train step {step}"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    profiler.end_step(step)
    profiler.look_for_request(run, attempt)
    if profiler.is_due(step):
        profiler.begin(step)


@contextmanager
def training(run: Run, rank: int = 0) -> Iterator[None]:
    """Take steps in a thread."""
    stopped = threading.Event()

    def work() -> None:
        profiler = make_profiler(run, rank)
        step = 0
        while not stopped.wait(0.002):
            step += 1
            take_step(profiler, run, step)
        profiler.drop()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def read_trace(path: str) -> dict[str, Any]:
    with gzip.open(path) as file:
        found: dict[str, Any] = json.load(file)
    return found


# ------------------------------------------------------------------------------------------------------- recorded steps


@given(step=st.integers(1, 500), steps=st.integers(1, 50), more=st.integers(1, 100))
def test_all_recorded_steps_of_a_profile_belong_to_one_epoch(step: int, steps: int, more: int) -> None:
    per_epoch = steps + more
    first = find_first_step(step, steps, per_epoch)
    warm_up, last = first - 1, first + steps - 1
    assert warm_up > step + steps, "as many steps are timed before, without the profiler"
    assert (warm_up - 1) // per_epoch == (last - 1) // per_epoch
    assert first <= step + steps + 2 + per_epoch


def test_only_the_requested_steps_are_in_the_trace(run: Run, sunspot: StorageCommand) -> None:
    with training(run):
        answer = sunspot("profile", "run", "--steps", "3", "--json")
    assert answer.code == 0, answer.err
    [rank] = answer.json["ranks"]
    first = rank["first_step"]
    events = read_trace(rank["trace"])["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{step}" for step in (first, first + 1, first + 2)]
    taken = [event["name"] for event in events if event["name"].startswith("train step")]
    assert taken == [f"train step {step}" for step in (first, first + 1, first + 2)], "steps have the run's numbers"
    [process, *_] = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert process.startswith("rank 0 of 2 on ")
    assert rank["recorded_s"] > 0
    assert rank["usual_s"] > 0
    assert rank["cost_s"] >= rank["overhead_s"] > 0
    assert read_request(run) is None, "the request is withdrawn once it is fulfilled"


def test_a_group_that_ends_during_a_profile_stops_the_profiler(run: Run) -> None:
    request_profile(run, 1, 3, (0,))
    profiler = make_profiler(run)
    for step in (1, 2, 3, 4, 5, 6, 7):  # begins after step 1, warms up in step 5, and records steps 6 to 8
        take_step(profiler, run, step)
    assert torch.autograd.profiler._is_profiler_enabled
    profiler.drop()
    assert not torch.autograd.profiler._is_profiler_enabled
    profiler.end_step(8)
    later = make_profiler(run)  # the next group does not continue the profile, but can make another
    request = request_profile(run, 2, 1, (0,))
    for step in range(8, 20):
        take_step(later, run, step, attempt=2)
    wait_until(lambda: read_rank_profile(run, request, 0), seconds=10)


def test_a_profiler_error_ends_only_the_profile(
    run: Run, sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUPTI is missing")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    with training(run):
        answer = sunspot("profile", "run")
    assert answer.code == 5
    assert "rank 0 could not record the steps: CUPTI is missing; the run continues" in answer.err


def test_a_profile_request_does_not_stop_a_profiler_of_the_task(run: Run) -> None:
    request = request_profile(run, 1, 1, (0,))
    profiler = make_profiler(run)
    with torch.profiler.profile():
        for step in range(1, 7):
            take_step(profiler, run, step)
        assert torch.autograd.profiler._is_profiler_enabled
    wait_until(lambda: read_rank_profile(run, request, 0), seconds=10)
    report = read_rank_profile(run, request, 0)
    assert report
    assert report.error == "the task runs a profiler of its own"


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_profile_command_prints_the_cost_of_profiling_and_the_location_of_the_trace_in_a_bucket(
    s3_bucket: str, set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    set_constants(profile, POLL_S=0.01)
    storage = f"s3://{s3_bucket}/runs"
    run = begin(open_run(storage, "run"))
    write_status(run, RUNNING)
    with training(run, rank=1):
        answer = StorageCommand(storage, capsys)("profile", "run", "--steps", "1", "--ranks", "1")
    assert answer.code == 0, answer.err
    assert "waiting until run has recorded 1 step of about 0.25 s on rank 1" in answer.err
    assert "rank 1, steps " in answer.out
    assert f"/{s3_bucket}/runs/run/profiles/" in answer.out
    assert "s with the profiler, and" in answer.out
    assert "https://ui.perfetto.dev" in answer.out


@pytest.mark.parametrize(
    ("words", "state", "code", "said"),
    [
        ("--ranks 0,2", RunState.RUNNING, 2, "--ranks 2: the run has 2 workers, and ranks count from 0"),
        ("--ranks all", RunState.RUNNING, 2, "all: must be ranks, such as 0 or 0,1"),
        (
            "--steps 10",
            RunState.RUNNING,
            2,
            "the limit for this run is 9, because a profile has at most 50 steps, and fewer than an epoch (10)",
        ),
        ("", RunState.STARTING, 6, "run is starting: why; a profile needs a run that is training"),
        ("", RunState.FINISHING, 6, "run is finishing: why"),
        ("", RunState.STOPPED, 3, "a profile needs a live run, but the state of run is stopped: why"),
        ("--timeout 0", RunState.RUNNING, 5, "rank 0 wrote no trace in time (the run is running)"),
    ],
)
def test_a_request_for_a_profile_that_cannot_be_recorded_is_refused(
    run: Run, sunspot: StorageCommand, words: str, state: RunState, code: int, said: str
) -> None:
    write_status(run, replace(RUNNING, state=state, reason="why"))
    answer = sunspot("profile", "run", *words.split())
    assert answer.code == code
    assert said in answer.err
    assert read_request(run) is None


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda run: write_status(run, replace(RUNNING, attempt=2)), 5, "the run's workers changed or restarted"),
        (lambda run: write_status(run, replace(RUNNING, state=RunState.FAILED)), 5, "dropped, because run is failed"),
        (lambda run: request_profile(run, 1, 5, (1,)), 6, "another profile request for run has replaced this one"),
    ],
    ids=["a new group", "the end of the run", "another request"],
)
def test_a_dropped_profile_is_reported_immediately(
    run: Run, sunspot: StorageCommand, change: Any, code: int, said: str
) -> None:
    def act() -> None:
        wait_until(lambda: read_request(run), seconds=10)
        change(run)

    thread = threading.Thread(target=act)
    thread.start()
    answer = sunspot("profile", "run")
    thread.join()
    assert answer.code == code
    assert said in answer.err
    left = read_request(run)
    assert (left.ranks if isinstance(left, ProfileRequest) else None) == ((1,) if code == 6 else None)


def test_the_profile_command_needs_neither_torch_nor_ray(run: Run, sunspot: StorageCommand) -> None:
    with training(run):
        answer: Answer = sunspot.process("profile", "run", "--steps", "1")
    assert answer.code == 0, answer.err
