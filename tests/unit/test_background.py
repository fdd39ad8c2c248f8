"""Tests of background work: a task that hangs or fails does not affect anything else."""

from __future__ import annotations

import threading
import time

import pytest

import sunspot.background
from sunspot.background import Background, map_parallel
from tests.harness.constants import SetConstants


def test_closing_a_background_thread_waits_only_once_for_a_task_that_hangs(set_constants: SetConstants) -> None:
    set_constants(sunspot.background, CLOSE_TIMEOUT_S=0.5)
    let_go, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(30)

    began = time.monotonic()
    with Background(0.01, hang):
        assert begun.wait(10)
        time.sleep(0.6)
        ends = time.monotonic()
    assert time.monotonic() - ends < 0.3, "it has had its time already"
    with Background(60, hang):
        ends = time.monotonic()
    assert 0.4 < time.monotonic() - ends < 5, "the last round, which begins now, has it all"
    let_go.set()
    assert time.monotonic() - began < 20


def test_a_task_with_an_unexpected_error_is_logged_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error must not permanently end status updates or notices."""
    calls: list[int] = []
    enough = threading.Event()

    def task() -> None:
        calls.append(len(calls))
        if len(calls) >= 20:
            enough.set()
        if 3 <= len(calls) < 15:
            raise OSError(24, "Too many open files")

    with Background(0.001, task):
        assert enough.wait(10)
    [logged] = caplog.records
    assert "task failed; it is retried" in logged.message
    assert logged.exc_info
    assert "Too many open files" in str(logged.exc_info[1])


def test_parallel_calls_use_the_thread_of_the_caller_if_only_one_call_runs_at_a_time() -> None:
    """A task's own function to decode values may depend on its thread."""
    assert set(map_parallel(lambda _: threading.get_ident(), range(3), at_once=1)) == {threading.get_ident()}
    assert threading.get_ident() not in map_parallel(lambda _: threading.get_ident(), range(3), at_once=2)
