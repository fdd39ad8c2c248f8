"""Tests of raising the limit on open files. Each test lowers the limits of its own process, which is irreversible."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest

from sunspot.errors import SettingsError
from sunspot.machine.open_files import OWN_FILES, allow_open_files

SOFT, HARD = 512, 4000


@pytest.fixture
def limited() -> Iterator[Executor]:
    """Yield an executor with a process that may open SOFT files, and HARD files if it raises its limit."""
    fork = multiprocessing.get_context("fork")
    limits = (resource.RLIMIT_NOFILE, (SOFT, HARD))
    with ProcessPoolExecutor(1, fork, initializer=resource.setrlimit, initargs=limits) as executor:
        yield executor


def limits_with(workers: int) -> tuple[int, int]:
    """Allow enough open files for a driver of this many workers, and return the limits."""
    allow_open_files("the driver", 3, workers)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_the_soft_limit_on_open_files_is_raised_only_if_a_group_needs_more_files(limited: Executor) -> None:
    enough = (SOFT - OWN_FILES) // 3
    assert limited.submit(limits_with, enough).result() == (SOFT, HARD)
    assert limited.submit(limits_with, enough + 1).result() == (HARD, HARD)


def test_the_error_about_a_low_limit_on_open_files_says_how_many_workers_are_possible(limited: Executor) -> None:
    with pytest.raises(SettingsError, match="1,249 workers, the driver needs 4,003 open files") as refused:
        limited.submit(limits_with, 1249).result()
    assert "is 4,000 (`ulimit -Hn`)" in str(refused.value)
    assert "at most 1,248 workers" in str(refused.value)
    assert limited.submit(limits_with, 1248).result() == (HARD, HARD)
