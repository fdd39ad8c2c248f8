"""Tests of doctor's findings about real runs that are slowed down."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sunspot.machine.cgroup import GROUPS, Throttling
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.history import iter_rank_records, to_rows
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.doctor.diagnose import examine
from sunspot.submitter.findings import Diagnosis, Finding
from tests.harness import REPOSITORY
from tests.harness.program import Program
from tests.harness.training import the_run

MakeData = Callable[..., str]

STEPS = 120


def train(program: Program, data: str, **faults: object) -> dict[Diagnosis, list[Finding]]:
    """Train a run with these faults (tests/tasks/degraded.py), and return the findings."""
    program.run(
        TASK="tests.tasks.degraded",
        TASK_ARGS=json.dumps(faults),
        DATASET=data,
        GLOBAL_BATCH_SIZE=20,
        EPOCHS=1,
        REPORT_EVERY_S=0.3,
        AUDIT="false",
    )
    found: dict[Diagnosis, list[Finding]] = {}
    for finding in examine(RunAccess(the_run(program), cluster_error="none is asked")).findings:
        found.setdefault(finding.finding, []).append(finding)
    return found


@pytest.mark.slow
def test_doctor_distinguishes_three_problems_in_the_same_run(program: Program, make_data: MakeData) -> None:
    found = train(program, make_data(20 * STEPS), read_s=0.05, lag_s=0.05, leak_mib=2)
    assert set(found) == {Diagnosis.DATA_BOUND, Diagnosis.STRAGGLER, Diagnosis.MEMORY}
    [rows] = found[Diagnosis.DATA_BOUND]
    assert rows.details["data_wait_s"] == pytest.approx(0.05, abs=0.02)
    [straggler] = found[Diagnosis.STRAGGLER]
    assert (straggler.details["rank"], straggler.details["part"]) == (1, "forward")
    assert straggler.details["own_s"] - straggler.details["others_s"] == pytest.approx(0.05, abs=0.02)
    assert sorted(climb.details["rank"] for climb in found[Diagnosis.MEMORY]) == [0, 1]
    for climb in found[Diagnosis.MEMORY]:
        grown = climb.details["to_mib"] - climb.details["from_mib"]
        assert grown == pytest.approx(2 * STEPS, rel=0.25), "two MiB a step, but for the first window"
        assert climb.details["limit_in_s"] > 0


@pytest.mark.slow
def test_doctor_reports_a_run_without_problems_as_healthy(program: Program, make_data: MakeData) -> None:
    found = train(program, make_data(20 * STEPS))
    assert set(found) == {Diagnosis.HEALTHY}
    run = the_run(program)
    [record, *_] = iter_rank_records(run, lineage(read_attempts(run)))
    for rank in to_rows(record["ranks"]):
        assert 0 < rank["forward_s"] <= rank["steps_s"] <= rank["seconds"] * 1.1
        assert 50 < rank["resident_mib"] < rank["memory_mib"]
        assert rank["memory_left_mib"] > 0
        assert rank["throttled_share"] == rank["throttled_s"] == 0


# ----------------------------------------------------------------------------------------------------------- throttling


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that can use a fifth of a CPU."""
    version_1 = GROUPS / "cpu"
    folder = (version_1 if version_1.is_dir() else GROUPS) / f"sunspot-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if version_1.is_dir():
            (folder / "cpu.cfs_quota_us").write_text("5000")
        else:
            (folder / "cpu.max").write_text("5000 100000")
        yield folder
    except OSError as error:
        pytest.skip(f"no quota can be set here: {error}")
    finally:
        deadline = time.monotonic() + 30
        while folder.is_dir() and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError):  # a process in it is about to end
                folder.rmdir()


def test_throttling_by_a_cpu_quota_is_measured(group: Path) -> None:
    program = """
import os, pathlib, sys, time
from sunspot.machine.cgroup import read_throttling
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = read_throttling()
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
held = read_throttling().since(before)
print(held.periods, held.throttled, held.seconds)
"""
    words = subprocess.check_output([sys.executable, "-c", program, str(group)], cwd=REPOSITORY, text=True).split()
    held = Throttling(int(words[0]), int(words[1]), float(words[2]))
    assert 7 <= held.periods <= 15
    assert held.share > 0.7
    assert 0.4 < held.seconds < 1.5


@pytest.mark.slow
def test_doctor_reports_a_rank_throttled_by_its_cpu_quota(program: Program, make_data: MakeData, group: Path) -> None:
    found = train(program, make_data(20 * STEPS), busy_s=0.01, group=str(group))
    assert {Diagnosis.THROTTLED, Diagnosis.STRAGGLER} <= set(found)
    [throttled] = found[Diagnosis.THROTTLED]
    assert throttled.details["rank"] == 1
    assert throttled.details["throttled_share"] > 0.5
    assert [finding.details["rank"] for finding in found[Diagnosis.STRAGGLER]] == [1]
    assert next(iter(found)) is Diagnosis.THROTTLED, "it explains the other"
