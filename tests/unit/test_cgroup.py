"""Tests of reading a process's CPU quota and memory limit from both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from sunspot.machine.cgroup import Throttling, memory_left, read_throttling, resident_memory

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
    """Return folders that replace /sys/fs/cgroup and /proc/self."""
    groups, process = tmp_path / "groups", tmp_path / "proc" / "self"
    groups.mkdir()
    process.mkdir(parents=True)
    (process.parent / "meminfo").write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    return groups, process


def fill(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_limits_are_read_from_cgroup_version_2(kernel: tuple[Path, Path]) -> None:
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


def test_limits_are_read_from_cgroup_version_1(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    (process / "cgroup").write_text("4:memory:/pod\n1:cpu,cpuacct:/pod\n0::/\n")
    fill(groups / "cpu,cpuacct/pod", **{"cpu.stat": CPU_STAT["v1"]})
    fill(groups / "memory/pod", **MEMORY["v1"])
    assert read_throttling(groups, process) == Throttling(40, 10, 2.5)
    assert memory_left(groups, process) == 500_000


def test_limits_are_read_if_a_container_sees_only_its_own_cgroup(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    (process / "cgroup").write_text("1:cpu:/kubepods/pod7/abc\n")
    fill(groups / "cpu", **{"cpu.stat": CPU_STAT["v1"]})
    assert read_throttling(groups, process).periods == 40


def test_without_cgroups_the_memory_of_the_machine_is_the_limit(kernel: tuple[Path, Path]) -> None:
    groups, process = kernel
    assert read_throttling(groups, process) == Throttling()
    assert Throttling().share == 0
    assert memory_left(groups, process) == 4000 * 1024
    assert resident_memory(process) is None
    (process / "status").write_text("VmRSS:\t 900 kB\nRssAnon:\t 300 kB\n")
    assert resident_memory(process) == 300 * 1024
    (process.parent / "meminfo").unlink()
    assert memory_left(groups, process) is None


def test_a_process_name_can_contain_any_bytes(kernel: tuple[Path, Path]) -> None:
    _, process = kernel
    cut = "training-f\u00fcr-\u00e4".encode()[:15]  # truncated like on Linux, within a character
    (process / "status").write_bytes(b"Name:\t" + cut + b"\nRssAnon:\t 300 kB\n")
    assert resident_memory(process) == 300 * 1024
