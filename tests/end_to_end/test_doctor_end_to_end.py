"""Ailments that are caused for real, in runs on real workers, and what the doctor calls them."""

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

from app.cgroup import GROUPS, Throttling, memory_left, read_throttling, resident_memory
from app.run.history import read_journal
from submitter.doctor.diagnose import examine
from submitter.findings import Diagnosis, Finding
from tests.harness import REPOSITORY
from tests.harness.program import Program
from tests.harness.training import the_run

MakeData = Callable[..., str]

STEPS = 120


def train(program: Program, data: str, **ailments: object) -> dict[Diagnosis, list[Finding]]:
    """A run with these ailments (tests/tasks/degraded.py), and what is found of it."""
    program.run(
        TASK="tests.tasks.degraded",
        TASK_ARGS=json.dumps(ailments),
        DATASET=data,
        GLOBAL_BATCH_SIZE=20,
        EPOCHS=1,
        REPORT_EVERY_S=0.3,
        AUDIT="false",
    )
    found: dict[Diagnosis, list[Finding]] = {}
    for finding in examine(None, the_run(program), "none is asked").findings:
        found.setdefault(finding.finding, []).append(finding)
    return found


def test_slow_rows_a_slow_rank_and_a_leak_are_told_apart(program: Program, make_data: MakeData) -> None:
    found = train(program, make_data(20 * STEPS), read_s=0.02, lag_s=0.015, leak_mib=2)
    assert set(found) == {Diagnosis.DATA_BOUND, Diagnosis.STRAGGLER, Diagnosis.MEMORY}
    [rows] = found[Diagnosis.DATA_BOUND]
    assert rows.about["data_wait_s"] == pytest.approx(0.02, abs=0.01)
    [straggler] = found[Diagnosis.STRAGGLER]
    assert (straggler.about["rank"], straggler.about["part"]) == (1, "forward")
    assert straggler.about["own_s"] - straggler.about["others_s"] == pytest.approx(0.015, abs=0.01)
    assert sorted(climb.about["rank"] for climb in found[Diagnosis.MEMORY]) == [0, 1]
    for climb in found[Diagnosis.MEMORY]:
        grown = climb.about["to_mib"] - climb.about["from_mib"]
        assert grown == pytest.approx(2 * STEPS, rel=0.25), "two MiB a step, but for the first window"
        assert climb.about["limit_in_s"] > 0


@pytest.mark.slow
def test_a_run_without_ailments_is_healthy(program: Program, make_data: MakeData) -> None:
    found = train(program, make_data(20 * STEPS))
    assert set(found) == {Diagnosis.HEALTHY}
    [record, *_] = read_journal(the_run(program), "metrics")
    for rank in record["ranks"]:
        assert 0 < rank["forward_s"] <= rank["steps_s"] <= rank["seconds"] * 1.1
        assert 50 < rank["resident_mib"] < rank["memory_mib"]
        assert rank["memory_left_mib"] > 0
        assert rank["throttled_share"] == rank["throttled_s"] == 0


# ----------------------------------------------------------------------------------------------------------- throttling


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may use a fifth of one processor."""
    version_1 = GROUPS / "cpu"
    folder = (version_1 if version_1.is_dir() else GROUPS) / f"sunspot-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if version_1.is_dir():
            (folder / "cpu.cfs_quota_us").write_text("20000")
        else:
            (folder / "cpu.max").write_text("20000 100000")
        yield folder
    except OSError as error:
        pytest.skip(f"no quota can be set here: {error}")
    finally:
        deadline = time.monotonic() + 30
        while folder.is_dir() and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError):  # a process in it is about to end
                folder.rmdir()


def test_a_quota_is_seen_to_hold_a_process_back(group: Path) -> None:
    program = """
import os, pathlib, sys, time
from app.cgroup import read_throttling
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
def test_a_rank_that_its_quota_holds_back(program: Program, make_data: MakeData, group: Path) -> None:
    found = train(program, make_data(20 * STEPS), busy_s=0.01, group=str(group))
    assert {Diagnosis.THROTTLED, Diagnosis.STRAGGLER} <= set(found)
    [throttled] = found[Diagnosis.THROTTLED]
    assert throttled.about["rank"] == 1
    assert throttled.about["throttled_share"] > 0.5
    assert [finding.about["rank"] for finding in found[Diagnosis.STRAGGLER]] == [1]
    assert next(iter(found)) is Diagnosis.THROTTLED, "it explains the other"


# --------------------------------------------------------------------------------------------------- the kernel's files


CPU_STAT = {
    "v1": "nr_periods 40\nnr_throttled 10\nthrottled_time 2500000000\n",
    "v2": "usage_usec 9\nuser_usec 5\nnr_periods 40\nnr_throttled 10\nthrottled_usec 2500000\nnr_bursts 0\n",
}
MEMORY = {
    "v1": {
        "memory.limit_in_bytes": "1000000\n",
        "memory.usage_in_bytes": "700000\n",
        "memory.stat": "inactive_file 1\ntotal_inactive_file 200000\n",
    },
    "v2": {"memory.max": "1000000\n", "memory.current": "700000\n", "memory.stat": "anon 5\ninactive_file 200000\n"},
}


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """The folders that stand for /sys/fs/cgroup and /proc/self."""
    groups, process = tmp_path / "groups", tmp_path / "proc" / "self"
    groups.mkdir()
    process.mkdir(parents=True)
    (process.parent / "meminfo").write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    return groups, process


def fill(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_groups_of_version_2(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    (process / "cgroup").write_text("0::/pod/container\n")
    fill(groups, **{"cpu.stat": "usage_usec 9\n"})
    fill(groups / "pod", **{"cpu.stat": CPU_STAT["v2"], **MEMORY["v2"]})
    fill(
        groups / "pod/container",
        **{"cpu.stat": CPU_STAT["v2"].replace("40", "0"), **MEMORY["v2"], "memory.max": "max\n"},
    )
    assert read_throttling(groups, process) == Throttling(40, 10, 2.5), "the quota of the group around it holds too"
    assert memory_left(groups, process) == 500_000


def test_the_groups_of_version_1(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    (process / "cgroup").write_text("4:memory:/pod\n1:cpu,cpuacct:/pod\n0::/\n")
    fill(groups / "cpu,cpuacct/pod", **{"cpu.stat": CPU_STAT["v1"]})
    fill(groups / "memory/pod", **MEMORY["v1"])
    assert read_throttling(groups, process) == Throttling(40, 10, 2.5)
    assert memory_left(groups, process) == 500_000


def test_a_container_that_sees_its_own_group_only(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    (process / "cgroup").write_text("1:cpu:/kubepods/pod7/abc\n")
    fill(groups / "cpu", **{"cpu.stat": CPU_STAT["v1"]})
    assert read_throttling(groups, process).periods == 40


def test_without_any_group_the_machine_is_the_limit(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    assert read_throttling(groups, process) == Throttling()
    assert Throttling().share == 0
    assert memory_left(groups, process) == 4000 * 1024
    assert resident_memory(process) is None
    (process / "status").write_text("VmRSS:\t 900 kB\nRssAnon:\t 300 kB\n")
    assert resident_memory(process) == 300 * 1024
    (process.parent / "meminfo").unlink()
    assert memory_left(groups, process) is None
